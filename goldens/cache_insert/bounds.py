"""How far the cache insert's rows may be from the oracle's: derived; ``goldens.mla_query`` shares the pieces."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.case import Tensors
from reference import cache_insert as reference

LATENT, ROPE = reference.LATENT, reference.ROPE
UNIT = 2.0**-24  # u: half an ULP of 1 in fp32
LEAST = 2.0**-149
_LARGE = 2.0**127  # half of fp32's range
_FAINT = 2.0**-100


# Roundings, in units u = 2^-24 of fp32, from kv to the value that is rounded to bf16. The mean square has those of a
# sum of positive terms (sum) and two more, eps added and the division (the insert's product with 1/512 is exact, its
# fma one rounding); a root halves them. Then 1/√ itself, two products:
#   insert:  sum 14 = 8 FMAs, 5 butterfly stages, 1 of the warps;  root 5 = 2.5 ULP of rsqrt.approx (measured: 2 from
#            the correctly rounded)
#   model:   sum 1 + ⌈log2 n⌉, a product and halving;  root 2 = √ and the division
# so e = u · ((sum + 2) / 2 + root + 2) · |value|, and 2^-149 where a product is subnormal. Rounding to bf16 is
# monotone: what enters within e of the oracle's value v leaves within [bf16(v − e), bf16(v + e)], a single number
# unless a tie lies between. The product with the scale rounds once more. k_pe has only that product.
#
# The oracle does not decide on the normed values of a row of numbers whose squares add up to 2^127 or more, and may
# overflow in some order; nor of one whose mean square + eps is below 2^-100, where squares below the normal range lose
# bits: above, n · 2^-150 of them are nothing beside u. A row of zeros loses none.


def norm_error(value: Tensor, sum_roundings: float, root: float) -> Tensor:
    """fp64 bound on the error of x · rsqrt(mean(x²) + eps) · w before its rounding to bf16."""
    return 1.01 * UNIT * ((sum_roundings + 2) / 2 + root + 2) * _finite(value).abs() + 2 * LEAST


def in_range(x: Tensor, eps: float) -> Tensor:
    """bool [B, 1]: whether no sum of squares of x [B, n], fp64, can overflow in fp32 or lose bits to underflow."""
    square = (x * x).sum(1, keepdim=True)
    faint = (square > 0) & (square / x.shape[1] + eps < _FAINT)
    return ~((square >= _LARGE) & square.isfinite() | faint)


def _finite(value: Tensor) -> Tensor:
    """0 in place of infinities: those of the inputs have no error."""
    return torch.where(value.isinf(), 0.0, value)


def spread(value: Tensor, error: Tensor) -> Tensor:
    """The largest distance between roundings to bf16 of what lies within ``error`` of fp64 ``value``."""
    low, high = (reference.round_bf16(x) for x in (value - error, value + error))
    return torch.where(low == high, 0.0, high - low)


def scaled_error(value: Tensor, error: Tensor, scale: Tensor) -> Tensor:
    """The error after a product with ``scale``, from that of ``value``."""
    return (scale * error).abs() + 1.01 * UNIT * _finite(scale * value).abs() + LEAST


def rows_bound(tensors: Mapping[str, Tensor], eps: float, schedule: str) -> Tensor:
    """fp64 bounds [B, 576] on the rows before their conversion."""
    kv, k_pe, w, scale = (tensors[name].to(torch.float64) for name in ("kv", "k_pe", "w_kva", "k_scale_inv"))
    value = kv / torch.sqrt((kv * kv).mean(1, keepdim=True) + eps) * w
    error = norm_error(value, 1 + LATENT.bit_length() - 1, 2) if schedule == "model" else norm_error(value, 14, 5)
    latent = scaled_error(reference.round_bf16(value), spread(value, error), scale)
    latent = torch.where(in_range(kv, eps), latent, torch.inf)
    return torch.cat([latent, scaled_error(k_pe, torch.zeros_like(k_pe), scale)], dim=1)


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |cache − oracle| before conversion: 0 where no row is written, infinite where the oracle does not
    decide."""
    if schedule not in ("model", *reference.SCHEDULES):
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for insert and model")
    untouched = torch.zeros(tensors["cache"].shape, dtype=torch.float64, device=tensors["cache"].device)
    rows = rows_bound(tensors, reference.eps_of(params), schedule)
    return {"cache": reference.write(untouched, tensors["slots"], rows)}
