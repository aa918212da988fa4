"""Narrow floating-point formats: fp32 to bf16, fp16 and e4m3 as the H200's conversions round.

Rounding is to nearest, ties to even, in one step from fp32. The integers below are the formats'
definitions (IEEE 754 binary16; bfloat16; OCP FP8 E4M3); the NaN codes are those the H200 writes,
measured for quiet, signalling and negative NaN inputs. Widening is exact, so ``.to(torch.float32)``
is the decoder of all three.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A narrow format: ``top`` is the code of the largest magnitude a conversion gives (inf, or 448)."""

    name: str
    dtype: torch.dtype
    bias: int
    mantissa_bits: int
    top: int
    nan: int

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    @property
    def integer(self) -> torch.dtype:
        """The torch integer type of the same width."""
        return torch.int16 if self.bits == 16 else torch.uint8


BF16 = Format("bf16", torch.bfloat16, bias=127, mantissa_bits=7, top=0x7F80, nan=0x7FFF)
FP16 = Format("fp16", torch.float16, bias=15, mantissa_bits=10, top=0x7C00, nan=0x7FFF)
E4M3 = Format("e4m3", torch.float8_e4m3fn, bias=7, mantissa_bits=3, top=0x7E, nan=0x7F)
FP32_NAN = 0x7FFFFFFF


def encode(x: Tensor, form: Format) -> Tensor:
    """Round fp32 to a narrow format: ``cvt.rn`` (bf16, fp16), ``cvt.rn.satfinite`` (e4m3).

    Takes fp32 of any shape, returns ``form.dtype`` of the same shape. Overflow gives inf, in e4m3
    ±448; every NaN gives ``form.nan``; the sign of zero is kept. ValueError if ``x`` is not fp32.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"x: got {x.dtype}, a conversion to {form.name} takes torch.float32")
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    shift = 23 - form.mantissa_bits
    odd = (magnitude >> shift) & 1
    code = (magnitude - ((127 - form.bias) << 23) + ((1 << (shift - 1)) - 1) + odd) >> shift
    if form.bias < 127:
        # Adding 2^(23 + q) rounds to multiples of the subnormal quantum 2^q and leaves their count in the low bits.
        quantum = 1 - form.bias - form.mantissa_bits
        anchor = torch.tensor((127 + 23 + quantum) << 23, dtype=torch.int32, device=x.device)
        count = (magnitude.view(torch.float32) + anchor.view(torch.float32)).view(torch.int32) - anchor
        code = torch.where(magnitude < ((128 - form.bias) << 23), count, code)
    code = code.clamp(max=form.top) | ((bits >> 31) & (1 << (form.bits - 1)))
    code = torch.where(magnitude > 0x7F800000, form.nan, code)
    return code.to(form.integer).view(form.dtype)


def to_bf16(x: Tensor) -> Tensor:
    """fp32 to bf16, as ``cvt.rn.bf16.f32``."""
    return encode(x, BF16)


def to_fp16(x: Tensor) -> Tensor:
    """fp32 to fp16, as ``cvt.rn.f16.f32``."""
    return encode(x, FP16)


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 to e4m3, as ``cvt.rn.satfinite.e4m3x2.f32``."""
    return encode(x, E4M3)


def canonical_nan(x: Tensor) -> Tensor:
    """fp32 with every NaN replaced by 0x7fffffff, the one that the H200's arithmetic returns."""
    nan = torch.tensor(FP32_NAN, dtype=torch.int32, device=x.device)
    return torch.where(x != x, nan.view(torch.float32), x)


def fp32_number(name: str, value: Any) -> float:
    """The fp32 number nearest to the parameter ``name``, ties to even; its range is for the caller to check.

    ValueError, naming the parameter, if it is no int or float, not finite, or beyond fp32's largest number.
    """
    largest = torch.finfo(torch.float32).max
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= largest:
        raise ValueError(f"{name}: got {value!r}, allowed is a finite number of at most {largest} in magnitude")
    return torch.tensor(float(value), dtype=torch.float32).item()
