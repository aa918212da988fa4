"""How far AttnRes' outputs may be from the oracle's, for the model and for each schedule: derived."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.case import Tensors
from reference import attn_res as reference
from reference.numerics.formats import to_bf16

_UNIT = 2.0**-24  # u: half an ULP of 1 in fp32
_TINY = 2.0**-126
_LEAST = 2.0**-149
D = reference.D


# Roundings, in units u = 2^-24 of fp32. A sum's terms pass through
#   cluster7: 8 FMAs of a thread, 5 butterfly stages, 2 of the warps, 4 of the CTAs: 19
#   model:    1 product and 13 levels of halving 7168: 14
# and the weights' product norm · query adds one to the scores. With A = Σ|x·w|, ρ = 1 / sqrt(mean(x²) + eps), R the
# distance of a score below the largest:
#   score:    |δ logit| ≤ u · [(sum + 1) · A·ρ + |logit| · ((sum + 2) / 2 + root + 1)]
#             mean(x²) + eps has its sum's roundings and two more and is under a root; root is rsqrt.approx, at most
#             2.5 ULP = 5u (measured: 2 ULP from the correctly rounded), or a root and a division.
#   weight:   E = δ logit / u + range · R + exp, relative, of a weight before it is divided by their sum:
#             x · log2e and log2e itself round, ex2 errs by at most 2^-22 = 4u, and cluster7 takes a block's weight from
#             two of them, exp(logit − m) · exp(m − top), whose distances add up to R.
#   value, total: roundings of a term of the mixture and of the sum of weights, nb + 3 and nb + 1 FMAs and products (in
#             the model a division, a product and the halving of nb + 1).
# So, w being the weights of sum 1 and M = Σ w·x the mixture:
#   mixture:  |δM| ≤ u · Σ w|x|(E + value), before the division; δd = u · Σ w(E + total) of the divisor, relative;
#             |δr| ≤ δM + |M|(δd + u) after it. final rounds to bf16: δr is then the distance between the roundings of
#             M − δr and M + δr, nothing unless a tie lies between.
#   norm:     S = sqrt(mean(M²) + out_eps) is the length of a vector, so |δS| ≤ sqrt(mean(δr²)) (triangle inequality,
#             no linearisation). Where the division comes out of the norm, cluster7 not final, S is the length of
#             (M, den), |δS| ≤ sqrt(mean(δM²) + out_eps · δd²).
#   output:   |δ output| ≤ |gamma| · [(δr + |M|·δS/S) / (S − δS) · (1 + q) + |M|/S · (q + 2u)]
# where q holds the roundings of the norm itself:
#   direct, final, nb = 0, model:  u · ((sum + 2) / 2 + root)
#   cluster7's quad:  1/sqrt(1 − v) − 1 + u·root, v the relative error of mean square + eps: each of its terms is
#             a sum and at most 4 roundings more, relative to its terms, that is 23u · κ of quad, κ = (a²·mm +
#             2ae·Σ|mix·p| + e²·ss) / quad; 2 for the FMA with fp32(1/7168) and 2 for (out_eps · den) · den.
# At κ > 2^20, or when v reaches 1 and a NaN is possible, cluster7 has no bound: the oracle does not decide. Nor does
# it, for any schedule, where a sum of squares, of scores' terms, or of the mixture before its division (weights at most
# 1) may overflow in some order: the sum of magnitudes reaches 2^127.
# exp flushes below 2^-126, which drops at most that of a weight, twice; products and sums of the last steps lose 2^-149
# each. Sums of squares and scores that underflow vanish beside eps ≥ 2^-100. A factor 1.01 pays for products of errors.

_KAPPA_LIMIT = 2.0**20
_LARGE = 2.0**127  # half of fp32's range: what stays below overflows in no order


def _roundings(nb: int, schedule: str) -> dict[str, float]:
    if schedule in reference.SCHEDULES:
        return {"sum": 19, "root": 5, "range": 3, "exp": 8, "value": nb + 3, "total": nb + 1}
    if schedule == "model":
        halving = nb.bit_length() if nb else 0
        return {"sum": 14, "root": 2, "range": 1, "exp": 2, "value": halving + 2, "total": halving}
    names = ", ".join(reference.SCHEDULES)
    raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {names} and model")


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |output − oracle| before output is rounded to its format; infinite where the oracle does not
    decide.

    The other outputs are copies of the new prefix, which has no tolerance.
    """
    tokens = [_bound(tensors, params, schedule, t) for t in range(tensors["prefix"].shape[0])]
    return {"output": torch.stack(tokens)}


def _overflows(x: Tensor, w: Tensor) -> bool:
    """Whether some sum of the sources x [S, D] may; tokens with other than numbers have no more to lose."""
    largest = torch.maximum((x.shape[0] * x).square().sum(1), (x * w).abs().sum(1)).amax()
    return bool(x.isfinite().all()) and float(largest) >= _LARGE


def _bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str, token: int) -> Tensor:
    """The bound of one token, [D]."""
    nb, c = params["nb"], _roundings(params["nb"], schedule)
    eps, out_eps = reference.epsilons(params)
    one = {name: x[..., token : token + 1, :] for name, x in tensors.items() if name in ("delta", "prefix")}
    p = reference.new_prefix(one, params)
    x = torch.cat([tensors["blocks"][token, :nb], p]).to(torch.float64)  # [nb + 1, D]
    gamma = tensors["gamma"].to(torch.float64).abs()
    undecided = torch.full_like(x[0], torch.inf)
    if _overflows(x, tensors["norm"].to(torch.float64) * tensors["query"].to(torch.float64)):
        return undecided
    if nb == 0:
        m, moved, divisor = x[0], torch.zeros_like(x[0]), torch.zeros((), dtype=torch.float64)
    else:
        weights, errors = _weights(x, tensors, eps, c)
        m = weights @ x
        moved = 1.01 * _UNIT * ((weights * (errors + c["value"])) @ x.abs())
        moved = moved + 4 * (nb + 1) * _TINY * x.abs().amax() + c["value"] * _LEAST
        divisor = 1.01 * _UNIT * (weights @ (errors + c["total"]))
    square = (m * m).mean() + out_eps
    length = square.sqrt()
    if schedule == "cluster7" and nb and not params["final"]:
        kappa = _kappa(x, weights)
        relative = _UNIT * (23 * kappa * (m * m).mean() / square + 4)
        if kappa > _KAPPA_LIMIT or relative >= 1:
            return undecided
        stretched = ((moved * moved).mean() + out_eps * divisor**2).sqrt()
        norm = float(1 / (1 - relative).sqrt() - 1) + _UNIT * c["root"]
    else:
        if nb:
            moved = moved + m.abs() * (divisor + _UNIT)
        if nb and params["final"]:
            low, high = (to_bf16(y.to(torch.float32)).to(torch.float64) for y in (m - moved, m + moved))
            moved, m = high - low, torch.maximum(low.abs(), high.abs())
        stretched = (moved * moved).mean().sqrt()
        norm = _UNIT * ((c["sum"] + 2) / 2 + c["root"])
    # The length never falls below that of out_eps alone.
    shortest = torch.maximum(length - stretched, torch.tensor(0.99 * out_eps**0.5, dtype=torch.float64))
    error = (moved + m.abs() * stretched / length) / shortest * (1 + norm) + m.abs() / length * (norm + 2 * _UNIT)
    return 1.01 * gamma * error + 4 * _LEAST * (1 + gamma)


def _weights(x: Tensor, tensors: Mapping[str, Tensor], eps: float, c: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The softmax weights of the sources x [S, D], and E of each: [S], [S]."""
    w = tensors["norm"].to(torch.float64) * tensors["query"].to(torch.float64)
    rstd = 1 / ((x * x).mean(1) + eps).sqrt()
    logit = (x @ w) * rstd
    score = (c["sum"] + 1) * (x.abs() @ w.abs()) * rstd + logit.abs() * ((c["sum"] + 2) / 2 + c["root"] + 1)
    distance = logit.amax() - logit
    return torch.softmax(logit, 0), score + c["range"] * distance + c["exp"]


def _kappa(x: Tensor, weights: Tensor) -> Tensor:
    """κ of cluster7's quad; inf if that is 0 while its terms are not."""
    mix, last = weights[:-1] @ x[:-1], weights[-1] * x[-1]
    terms = (mix * mix).sum() + 2 * (mix * last).abs().sum() + (last * last).sum()
    quad = ((mix + last) ** 2).sum()
    return torch.where(terms == 0, 1.0, terms / quad)
