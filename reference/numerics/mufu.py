"""The special-function unit (MUFU) of Hopper, bit for bit, in closed form.

One datapath serves all functions: a piecewise quadratic whose coefficients sit in a small table (S. F.
Oberman and M. Y. Siu, "A High-Performance Area-Efficient Multifunction Interpolator", ARITH-17, 2005).
The high bits of the argument's significand select a segment, the others are the offset x in it, 17 bits:

    V = (C0 << shift) + bias + C1 · x + 4 · C2 · S(x)        in units of 2^-fraction_bits

The products and the sum are exact; V is then normalised and cut toward zero to 24 bits. S is a folded
squarer without its low columns: of x² = Σ_i x_i 4^i + Σ_{j<i} x_i x_j 2^(i+j+1) every term below 2^19
is left out, then the low 19 bits are dropped. The coefficients in ``data/mufu.json`` are those of an
H200, found by ``tools.mufu``, which states the method; with them every function here agrees with the
H200 on all 2^32 inputs (tests/hopper/test_numerics.py).

All functions take fp32 of any shape on any device and return fp32 of that shape; ValueError for another
dtype. A NaN gives the NaN 0x7fffffff. ``ftz`` means that subnormal inputs count as zeros of their sign
and that subnormal results become such zeros.

fp64 holds V exactly (53 ≥ 43 bits). Inside, choices are made by masks, int32 words of all ones or all
zeros: on a CPU they cost a third of what booleans do.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from reference.numerics.formats import FP32_NAN
from reference.numerics.ieee import CPU_BLOCK_ELEMS, CUDA_BLOCK_ELEMS

DATA = Path(__file__).parent / "data" / "mufu.json"
OFFSET_BITS = 17
SQUARE_DROPPED_BITS = 19

_INF = 0x7F800000
_ONE = 0x3F800000
_EXPONENT_ONE = 0x00800000  # 1 in the exponent field; the smallest normal number
_MANTISSA = 0x007FFFFF
_OFFSET = (1 << OFFSET_BITS) - 1
_SIGN = -0x80000000
_TANH_FIRST, _TANH_LAST = 119, 129  # exponent fields of [2^-8, 8), where tanh is interpolated


class Unit(NamedTuple):
    """One function's tables: ``c0`` (with the bias), ``c1`` and ``c2`` (with the 4) as fp64 reals, ``square`` is S."""

    c0: Tensor
    c1: Tensor
    c2: Tensor
    square: Tensor


def square(x: Tensor) -> Tensor:
    """S(x) of int64 offsets below 2^17: the square without its terms below 2^19, shifted right by 19."""
    low = x & 1023
    dropped = low * low  # no term of bits 0 … 9 among themselves reaches 2^19
    for i in range(10, OFFSET_BITS):
        partners = x & ((1 << (SQUARE_DROPPED_BITS - 1 - i)) - 1)
        dropped = dropped + ((x >> i) & 1) * (partners << (i + 1))
    return (x * x - dropped) >> SQUARE_DROPPED_BITS


@functools.cache
def coefficients() -> dict:
    """What ``data/mufu.json`` holds."""
    return json.loads(DATA.read_text())


@functools.cache
def unit(name: str, device: torch.device) -> Unit:
    """The tables of one function on a device."""
    table = coefficients()[name]
    c0, c1, c2 = (torch.tensor(table[key], dtype=torch.int64, device=device) for key in ("c0", "c1", "c2"))
    exact = ((c0 << table["shift"]) + table["bias"], c1, 4 * c2)
    c0, c1, c2 = (c.to(torch.float64) * 2.0 ** -table["fraction_bits"] for c in exact)
    offsets = torch.arange(1 << OFFSET_BITS, device=device)
    return Unit(c0, c1, c2, square(offsets).to(torch.int16))


@functools.cache
def _tanh_table(key: str, device: torch.device) -> Tensor:
    """For each exponent field from 2^-8: the low bits that the significand loses ("dropped_bits"), or what is added
    to its segments ("segment_base")."""
    return torch.tensor(coefficients()["tanh"][key], dtype=torch.int32, device=device)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """From int32 bit patterns [n] → [n] to fp32 tensors, in blocks whose temporaries stay in the cache."""

    @functools.wraps(function)
    def apply(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise ValueError(f"x: got {x.dtype}, the special-function unit takes torch.float32")
        block = CUDA_BLOCK_ELEMS if x.is_cuda else CPU_BLOCK_ELEMS
        bits = x.contiguous().view(torch.int32).view(-1)
        out = torch.empty_like(bits)
        for source, target in zip(bits.split(block), out.split(block), strict=True) if bits.numel() else ():
            target.copy_(function(source))
        return out.view(torch.float32).view(x.shape)

    return apply


def _quadratic(name: str, segment: Tensor, offset: Tensor) -> Tensor:
    """V of the module's formula as fp64, exact; int32 segments and 17-bit offsets."""
    c0, c1, c2, squares = unit(name, segment.device)
    value = c2.index_select(0, segment).mul_(squares.index_select(0, offset))
    value.add_(c1.index_select(0, segment).mul_(offset))
    return value.add_(c0.index_select(0, segment))


def _truncate(value: Tensor) -> Tensor:
    """Positive fp64 of a normal fp32 exponent to fp32, toward zero; int32 bit patterns. Overwrites ``value``."""
    value.mul_(2.0**-896)  # 1023 − 127: the exponent field is fp32's now
    return value.view(torch.int64).bitwise_right_shift_(29).to(torch.int32)


def _less(a: Tensor, limit: int) -> Tensor:
    """The mask of a < limit, for int32 whose difference does not overflow."""
    return (a - limit).bitwise_right_shift_(31)


def _choose(mask: Tensor, a: Tensor | int, b: Tensor | int) -> Tensor:
    """a where the mask is set, elsewhere b."""
    return ((b ^ a) & mask) ^ b


def _nan(magnitude: Tensor) -> Tensor:
    """The mask of the NaNs, from bits without the sign."""
    return (_INF - magnitude).bitwise_right_shift_(31)


@_elementwise
def ex2_approx_ftz(x: Tensor) -> Tensor:
    """2^x of fp32 ``x``: ``ex2.approx.ftz.f32``.

    |x| is cut to 23 fraction bits, Q = trunc(|x| · 2^23). For negative x that is no integer the fixed-point
    argument is the one's complement −Q − 1, otherwise ±Q; so ex2 of an integer is exact. The integer part is the
    result's exponent, the fraction the interpolator's argument, 64 segments. ±0 and subnormals give 1, results
    below 2^-126 +0, −inf +0, x ≥ 128 +inf.
    """
    # At −127 the result is flushed and at 128 it is inf, whatever lies beyond.
    fixed = x.view(torch.float32).clamp(-127.0, 128.0).mul_(2.0**23).to(torch.int32)
    inexact = (fixed & _MANTISSA).neg_()
    fixed += inexact.bitwise_and_(fixed).bitwise_right_shift_(31)
    fraction = fixed & _MANTISSA
    result = _truncate(_quadratic("ex2", fraction >> OFFSET_BITS, fraction & _OFFSET))
    result += fixed.sub_(fraction)
    result &= ~_less(result, _EXPONENT_ONE)
    magnitude = x & FP32_NAN
    return _choose(_nan(magnitude), FP32_NAN, result) if int(magnitude.max()) > _INF else result


@_elementwise
def rcp_approx_ftz(x: Tensor) -> Tensor:
    """1 / x of fp32 ``x``: ``rcp.approx.ftz.f32``.

    The mantissa is the interpolator's argument, 128 segments of 2^16 whose offset enters doubled; the exponent
    scales exactly. Results below 2^-126 become zeros, ±0 and subnormals give ±inf, ±inf ±0, of the sign of x.
    """
    magnitude = x & FP32_NAN
    mantissa = x & _MANTISSA
    result = _truncate(_quadratic("rcp", mantissa >> 16, (mantissa & 0xFFFF) << 1))
    result += _ONE - (magnitude - mantissa)
    result &= ~_less(result, _EXPONENT_ONE)
    result = _choose(_less(magnitude, _EXPONENT_ONE), _INF, result) | (x & _SIGN)
    return _choose(_nan(magnitude), FP32_NAN, result)


@_elementwise
def rsqrt_approx(x: Tensor) -> Tensor:
    """1 / √x of fp32 ``x``: ``rsqrt.approx.f32``, subnormal inputs included.

    The mantissa and the exponent's parity are the interpolator's argument, 2 · 64 segments; half the exponent
    scales exactly. 4^k gives 2^-k exactly, ±0 gives ±inf, +inf +0, a negative number NaN.
    """
    magnitude = x & FP32_NAN
    subnormal = _less(magnitude, _EXPONENT_ONE)
    scaled = (magnitude & _MANTISSA).to(torch.float32).mul_(2.0 ** (24 - 149)).view(torch.int32)
    result = _rsqrt(_choose(subnormal, scaled, magnitude)) + (subnormal & (12 << 23))
    return _rsqrt_specials(x, result, zero=_less(magnitude, 1))


@_elementwise
def rsqrt_approx_ftz(x: Tensor) -> Tensor:
    """1 / √x of fp32 ``x``: ``rsqrt.approx.ftz.f32``. As ``rsqrt_approx``, but subnormals of either sign give ±inf."""
    magnitude = x & FP32_NAN
    return _rsqrt_specials(x, _rsqrt(magnitude), zero=_less(magnitude, _EXPONENT_ONE))


def _rsqrt(magnitude: Tensor) -> Tensor:
    """Bits of 1 / √x for bits of positive normal x."""
    argument = (magnitude & 0xFFFFFF) ^ _EXPONENT_ONE  # the lowest exponent bit is 0 for odd powers of two
    result = _truncate(_quadratic("rsqrt", argument >> OFFSET_BITS, argument & _OFFSET))
    result -= _less(argument, 1)  # a power of four: V alone is just below 1
    return result - (((magnitude >> 23) - 127 >> 1) << 23)


def _rsqrt_specials(x: Tensor, result: Tensor, zero: Tensor) -> Tensor:
    """The results of 1 / √x put right for zeros, infinities, negative numbers and NaNs."""
    magnitude = x & FP32_NAN
    result = result & _less(magnitude, _INF)
    result = _choose(zero, (x & _SIGN) | _INF, result)
    return _choose(_nan(magnitude) | ((x >> 31) & ~zero), FP32_NAN, result)


@_elementwise
def lg2_approx_ftz(x: Tensor) -> Tensor:
    """log2 x of fp32 ``x``: ``lg2.approx.ftz.f32``.

    The mantissa is the interpolator's argument, 64 segments. Exponent and fraction together are cut (floor) to 36
    fraction bits, negated by one's complement if negative, then cut to 24 significand bits. 1 gives +0, ±0 and
    subnormals −inf, +inf +inf, a negative number NaN.
    """
    magnitude = x & FP32_NAN
    mantissa = x & _MANTISSA
    value = _quadratic("lg2", mantissa >> OFFSET_BITS, mantissa & _OFFSET)
    value.add_((magnitude >> 23) - 127).mul_(2.0**36)
    fixed = torch.floor(value).to(torch.int64)
    negative = fixed >> 63
    result = _truncate((fixed ^ negative).to(torch.float64).mul_(2.0**-36))
    result |= (negative << 31).to(torch.int32)
    one = _less(magnitude, _ONE + 1) & ~_less(magnitude, _ONE)
    result &= ~one
    result = _choose(_less(magnitude, _INF), result, magnitude)
    zero = _less(magnitude, _EXPONENT_ONE)
    result = _choose(zero, _INF | _SIGN, result)
    return _choose(_nan(magnitude) | ((x >> 31) & ~zero), FP32_NAN, result)


@_elementwise
def tanh_approx(x: Tensor) -> Tensor:
    """tanh x of fp32 ``x``: ``tanh.approx.f32``.

    Below 2^-8 the result is x, subnormals included, from 8 on ±1. Between, each exponent drops its own number of
    low significand bits; what is left is the interpolator's argument, 51 segments in all. The sign is x's.
    """
    magnitude = x & FP32_NAN
    exponent = magnitude >> 23
    row = (exponent - _TANH_FIRST).clamp_(0, _TANH_LAST - _TANH_FIRST)
    dropped = _tanh_table("dropped_bits", x.device).index_select(0, row)
    base = _tanh_table("segment_base", x.device).index_select(0, row)
    argument = ((magnitude & _MANTISSA) | _EXPONENT_ONE) >> dropped
    value = _quadratic("tanh", base.add_(argument >> OFFSET_BITS), argument & _OFFSET)
    result = _choose(_less(exponent, _TANH_FIRST), magnitude, _truncate(value))
    result = _choose(_less(exponent, _TANH_LAST + 1), result, _ONE) | (x & _SIGN)
    return _choose(_nan(magnitude), FP32_NAN, result)
