"""Distances in units in the last place, in 64-bit integers so that opposite signs do not overflow."""

import torch
from torch import Tensor

from reference.numerics.formats import BF16, E4M3, FP16

FINITE, INFINITE, NAN = 0, 1, 2
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Significand bits (the hidden one included) and exponent of the smallest normal number.
_PRECISION = {
    torch.float32: (24, -126),
    BF16.dtype: (8, -126),
    FP16.dtype: (11, -14),
    E4M3.dtype: (4, -6),
}


def bits(x: Tensor) -> Tensor:
    """The bit pattern of each element as a non-negative int64; fp32, bf16, fp16 or e4m3."""
    if x.dtype not in _PRECISION:
        raise ValueError(f"x: got {x.dtype}, allowed are {', '.join(str(d) for d in _PRECISION)}")
    width = x.dtype.itemsize
    return x.view(_INTEGER[width]).to(torch.int64) & ((1 << (8 * width)) - 1)


def key(x: Tensor) -> Tensor:
    """int64 that orders the reals of a format: neighbours are 1 apart, −0 and +0 both 0, inf one beyond the largest."""
    pattern = bits(x)
    sign = 1 << (8 * x.dtype.itemsize - 1)
    return torch.where(pattern >= sign, sign - pattern, pattern)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """|key(a) − key(b)|, int64; what a NaN yields means nothing: compare ``number_class`` first."""
    return (key(a) - key(b)).abs()


def number_class(x: Tensor) -> Tensor:
    """FINITE, INFINITE or NAN of each element, int64."""
    wide = x.to(torch.float32) if x.dtype.itemsize == 1 else x
    return wide.isnan().to(torch.int64) * NAN + wide.isinf().to(torch.int64) * INFINITE


def size(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of ``dtype`` at the magnitude of fp64 ``x``, as fp64.

    2^(max(⌊log2|x|⌋, e) − p + 1) with precision p and smallest normal exponent e of the format.
    """
    precision, smallest = _PRECISION[dtype]
    exponent = torch.frexp(x.to(torch.float64).abs().clamp(min=2.0**smallest)).exponent.to(torch.int64) - 1
    return ((exponent - (precision - 1) + 1023) << 52).view(torch.float64)
