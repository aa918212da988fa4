"""How far the MLA query's outputs may be from the oracle's, for the model and for each schedule: derived."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.cache_insert import bounds as insert
from goldens.cache_insert.bounds import LEAST, UNIT, in_range, norm_error, scaled_error, spread
from goldens.case import Tensors
from reference import mla_query as reference
from reference.numerics.ulp import key

QUERY, LATENT, NOPE, HEAD = reference.QUERY, reference.LATENT, reference.NOPE, reference.HEAD


# The three roundings to bf16 are part of the mathematics, so a schedule differs from the oracle by its roundings in
# fp32, and by what these push over a tie between two bf16 (``spread``: nothing unless a tie is that close).
# Roundings, in units u = 2^-24, of
#   norm:    the sum of squares and the root, as in ``goldens.cache_insert``. small 8 FMAs + 5 butterfly stages + 6
#            warps; tiled 12 FMAs + 2 + 5; both divide by 1536, add eps, take rsqrt.approx
#   q_b:     relative to Σ|w·x̂|. small 24 FMAs + 1 + 5; tiled 12 MMAs and 8 partial sums; model a product, 11 halvings
#   absorb:  relative to Σ|q·w|. small at most 16 FMAs + 1 + 4 groups or 8 + 1 + 8; tiled 8 MMAs; model a product, 7
#            halvings
# One MMA cuts 17 terms to multiples of 2^(E − 25) and the sum to fp32, where 2^E is at most the largest term (or that
# of a subnormal operand, 2^-252): at most 17/2 + 2 units of Σ|terms|.
# With δ the distance before a step, error of q = |w|·δx̂ + c·u·|w|(|x̂| + δx̂), and so on; sums and products below the
# normal range lose 2^-149 a step. In the end the product with the scale.

_MMA = 17 / 2 + 2
_ROUNDINGS: dict[str, dict[str, float]] = {
    "small": {"sum": 19, "root": 5, "q_b": 30, "absorb": 21},
    "tiled": {"sum": 19, "root": 5, "q_b": 12 * _MMA + 8, "absorb": 8 * _MMA},
    "model": {"sum": 12, "root": 2, "q_b": 12, "absorb": 8},
}


def _product_bound(w: Tensor, x: Tensor, moved: Tensor, roundings: float) -> Tensor:
    """|error| of x · w before its rounding: x […, M, K] with errors ``moved``, w […, K, N]."""
    w = w.abs()
    return moved @ w + 1.01 * UNIT * roundings * ((x.abs() + moved) @ w) + w.shape[-2] * LEAST


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |output − oracle| and |cache − oracle| before their conversion to e4m3; infinite where the oracle
    does not decide (``goldens.cache_insert.bounds``), which of a row's output it does on all or nothing."""
    if schedule not in _ROUNDINGS:
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {', '.join(_ROUNDINGS)}")
    c, heads, eps = _ROUNDINGS[schedule], params["heads"], insert.reference.eps_of(params)
    qkv, w_qa, w_qb, w_uk, scale = (
        tensors[name].to(torch.float64) for name in ("qkv", "w_qa", "w_qb", "w_uk", "q_scale_inv")
    )
    x, rounded = qkv[:, :QUERY], insert.reference.round_bf16
    x_hat = x / torch.sqrt((x * x).mean(1, keepdim=True) + eps) * w_qa
    moved = spread(x_hat, norm_error(x_hat, c["sum"], c["root"]))
    x_hat = rounded(x_hat)

    q = x_hat @ w_qb.t()
    moved = spread(q, _product_bound(w_qb.t(), x_hat, moved, c["q_b"])).view(-1, heads, HEAD)
    q = rounded(q).view(-1, heads, HEAD)

    by_head, by_head_moved = (t[..., :NOPE].transpose(0, 1) for t in (q, moved))  # [heads, B, 128]
    latent = by_head @ w_uk
    error = spread(latent, _product_bound(w_uk, by_head, by_head_moved, c["absorb"])).transpose(0, 1)
    values = torch.cat([rounded(latent).transpose(0, 1), q[..., NOPE:]], dim=-1)
    limit = scaled_error(values, torch.cat([error, moved[..., NOPE:]], dim=-1), scale)
    result = {"output": torch.where(in_range(x, eps)[:, None], limit, torch.inf)}
    own = "model" if schedule == "model" else "insert"
    return result | insert.bound(reference.insert_inputs(tensors), {"eps": eps}, own)


def agreement(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensor:
    """How many e4m3 steps the outputs of ``small`` and ``tiled`` may be apart, int64 [B, heads, 576]: each rounds
    something within its own bound of the oracle, and rounding is monotone. Means nothing where the oracle is NaN."""
    oracle = reference.model(tensors, params, torch.float64)["output"]
    ends = []
    for schedule in ("small", "tiled"):
        limit = bound(tensors, params, schedule)["output"]
        ends.append([key(reference.to_e4m3(x.to(torch.float32))) for x in (oracle - limit, oracle + limit)])
    (low, high), (other_low, other_high) = ends
    return torch.maximum(high - other_low, other_high - low)
