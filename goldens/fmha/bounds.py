"""How far FMHA's outputs may be from the oracle's, for the model and for each schedule: derived, element by element."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.case import Tensors
from goldens.fmha.undecided import undecided
from reference import fmha as reference

_UNIT = 2.0**-24  # u: half an ULP of 1 in fp32
_TINY = 2.0**-126
_FUSED_SUM = 10.5  # see below
_BF16_OVER_FP32 = 2.0**16
_ROWS = 8
_LEAST_TILE = 64
_EXP2 = 2.0**11  # 2^-13 in units of u
FLASH = "flash"  # no schedule: what kernels that claim none may do


# Roundings, in units u = 2^-24 of fp32, by where they enter. With M the row's maximum, R = M − s the distance of a
# score below it, A = scale · Σ|q·k|, T the number of key tiles, and weights w that sum to 1:
#   score     (score · A): d products and sums and the scale, d + 1 roundings
#   shift     (shift · A of the row's largest): m · c is rounded before it is subtracted (wgmma alone)
#   weight    (range · R + weight): x · log2e is rounded, and log2e itself; each ex2 errs by at most 2^-22 = 4u. In k2
#             the weight is exp(s − m) times a factor α for each later tile; their exponents add up to R.
#   numerator (value): a chain over the keys of a tile and one rounding a tile
#   sum       (total): 16 adds, 2 shuffles, one rounding a tile
#   quotient  (last): reciprocal (1 ULP = 2u) and product, or one division
# so, with E = score·A + range·R + weight,
#   |error of o| ≤ u · [Σ w|v|(E + value) + |o| Σ w(E + total) + last·|o|],
# In wgmma a fused sum cuts its 17 terms at 2^-25 of the largest one's power of two, and their sum at 2^-23: at most
# 17/2 + 2 = 10.5 u of Σ|terms|. The weights that multiply V, not those that are summed, are rounded to bf16 (rounded):
# by half an ULP of its 8 bits, 2^-8 = 2^16 u; a row's largest, if it is that by more than scores err, is 1 and rounded
# by nothing. Its range R counts c, the FMA, and in α a difference and a product; in lse, lg2 errs by 2^-22 of the
# larger of 1 and itself.
# A kernel that claims no schedule may do what these do and public kernels too (flash): tiles of 64 keys or more; exp2
# of the weights by a polynomial of relative error 2^-13 (FlashAttention-4's cubic: 2^-13.4), of the rescalings as
# above; rescaling only when the maximum has grown by much, so that beyond one tile the largest weight need not be 1;
# and the row sum of the weights as they are rounded for the product with V. With δ for those roundings, |δ| ≤ 2^-8, o
# errs by Σ w·δ·v where the weights are summed before it, and by Σ w·δ·(v − o) where they are summed after it: at most
# 2^-8 of the larger of Σ w|v| and Σ w|v − o|. lse errs by 2^-8 · Σ w then.
# All this plus what underflow may drop: 2^-126 for each exponential, times the channel's largest |v|, and 2^-150 for
# each operation on subnormals, at most 2 a key and 4 a row. A factor 1.01 pays for products of errors.


def _roundings(d: int, n: int, schedule: str) -> dict[str, float]:
    if schedule == "k2":
        tiles = -(-n // 64)
        return {
            "score": d + 1,
            "shift": 0,
            "range": 3,
            "weight": 4.0 * tiles,
            "value": 64 + tiles,
            "total": 18 + tiles,
            "last": 3,
        }
    if schedule == "model":
        total = 1.0 * n.bit_length()
        return {
            "score": d + 2,
            "shift": 0,
            "range": 1,
            "weight": 2,
            "value": n + 1,
            "total": total,
            "last": 1,
            "log": 0,
        }
    if schedule.startswith("wgmma"):
        bc = int(schedule.removeprefix("wgmma"))
        tiles = -(-n // bc)
        return {
            "score": _FUSED_SUM * d / 16,
            "shift": 1,
            "range": 4,
            "weight": 4.0 * tiles,
            "value": _FUSED_SUM * tiles * bc / 16 + tiles,
            "rounded": _BF16_OVER_FP32,
            "total": bc / 4 + tiles + 2,
            "last": 3,
            "log": 4,
        }
    if schedule == FLASH:
        tiles = -(-n // 64)
        return {
            "score": _FUSED_SUM * d / 16,
            "shift": 1,
            "range": 4,
            "weight": _EXP2 + 4.0 * tiles,
            "value": _FUSED_SUM * n / 16 + tiles,
            "rounded": _BF16_OVER_FP32,
            "total": n + tiles,
            "last": 3,
            "log": 4,
        }
    raise ValueError(f"schedule: got {schedule!r}, a bound is derived for k2, wgmma, {FLASH} and model")


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |o − oracle| before o is rounded to its format, and on |lse − oracle| if the schedule has it;
    infinite where the oracle does not decide (``goldens.fmha.undecided``)."""
    return reference.by_sequence(lambda own: _bound(own, params, schedule), tensors)


def _bound(tensors: Tensors, params: Mapping[str, Any], schedule: str) -> Tensors:
    """``bound`` of one sequence length."""
    q, k, v = (tensors[name].to(torch.float64) for name in ("q", "k", "v"))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scale = reference.scale_of(q.shape[2], params)
    c = _roundings(q.shape[2], k.shape[1], schedule)
    keep = reference.visible(q.shape[1], k.shape[1], params.get("causal", False), q.device)
    s = torch.where(keep, q @ k.transpose(1, 2) * scale, -torch.inf)
    left_out = undecided(q, k, v, keep, scale)
    v = torch.where(v.isfinite(), v, 0.0)  # of others the class is all that counts
    weighed = keep & (s != -torch.inf)
    a = torch.where(weighed, q.abs() @ k.abs().transpose(1, 2) * scale, 0.0)
    largest = s.amax(-1, keepdim=True) if k.shape[1] else torch.full_like(q[..., :1], -torch.inf)
    empty = largest == -torch.inf
    distance = torch.where(weighed, largest - s, 0.0)
    w = torch.where(weighed & ~empty, torch.exp(-distance), 0.0)
    total = w.sum(-1, keepdim=True)
    w = w / torch.where(empty, 1.0, total)
    largest_a = a.amax(-1, keepdim=True) if k.shape[1] else torch.zeros_like(largest)
    relative = c["score"] * a + c["shift"] * largest_a + c["range"] * distance + c["weight"]
    o = w @ v
    sums = (w * (relative + c["total"])).sum(-1, keepdim=True)
    errors = (w * (relative + c["value"])) @ v.abs() + o.abs() * sums + c["last"] * o.abs()
    one = _certainly_one(s, relative) & (schedule != FLASH or k.shape[1] <= _LEAST_TILE)
    rounded = torch.where(one, 0.0, w) * c.get("rounded", 0.0)
    of_product = rounded @ v.abs()
    errors = errors + (torch.maximum(of_product, _deviation(rounded, v, o)) if schedule == FLASH else of_product)
    dropped = _TINY * 2 * k.shape[1] * v.abs().amax(1, keepdim=True) if k.shape[1] else 0.0
    dropped = dropped + (2 * k.shape[1] + 4) * 2.0**-150
    result = {"o": torch.where(left_out.o, torch.inf, 1.01 * _UNIT * errors + dropped)}
    if schedule != "k2":
        lse = torch.where(empty, 0.0, largest + torch.log(torch.where(empty, 1.0, total)))
        score = (c["score"] * w * a).sum(-1, keepdim=True) + c["score"] * largest_a
        logarithm = c["log"] * (1 + lse.abs() + largest.abs())
        parts = sums + score + logarithm + 3 * lse.abs() + 2 * largest.abs()
        parts = parts + (rounded.sum(-1, keepdim=True) if schedule == FLASH else 0.0)
        parts = torch.where(empty, 1.0, parts)  # −inf, whose class is all that counts
        limit = torch.where(left_out.rows, torch.inf, 1.01 * _UNIT * parts)
        result["lse"] = limit[..., 0]
    return result


def _certainly_one(s: Tensor, relative: Tensor) -> Tensor:
    """Which of scores [heads, rows, keys] is a row's largest, whatever they err by: ``relative``, in units u."""
    if s.shape[-1] < 2:
        return torch.ones_like(s, dtype=torch.bool)
    first, second = s.topk(2, dim=-1).values.split(1, -1)
    return (s == first) & (first - second > 4 * _UNIT * relative.amax(-1, keepdim=True))


def _deviation(w: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Σ w|v − o| over the keys, [heads, rows, d]; a few rows at a time, since each needs all keys' values."""
    pairs = zip(w.split(_ROWS, 1), o.split(_ROWS, 1), strict=True)
    return torch.cat([(w_[:, :, None] @ (v[:, None] - o_[:, :, None]).abs())[:, :, 0] for w_, o_ in pairs], 1)
