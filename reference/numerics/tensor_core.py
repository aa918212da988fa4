"""Tensor-core products, bit for bit: ``mma.sync`` and ``wgmma`` of sm_90a with fp32 or fp16 accumulators.

One fused sum, d = c + Σ a_k · b_k over the K of one instruction:

1. Each term is a signed significand times 2^exponent. A product is exact and stays unnormalised: its
   exponent is exponent(a) + exponent(b), its significand lies in [1, 4). A subnormal operand keeps the
   format's smallest exponent and is not normalised.
2. All terms are aligned to the largest exponent E and cut toward zero to multiples of 2^(E − F), F = 25
   fraction bits (13 for e4m3 in ``wgmma``). A zero product has no part in E; a subnormal
   accumulator has the exponent of the smallest normal, −126 (fp16: −14), a zero one seven less, −133 (−21).
3. The cut terms are added exactly, so their order does not matter.
4. The sum is cut toward zero to fp32, in the subnormal range to multiples of 2^-149, and to inf from
   2^128 on, though a term above 2^128 may cancel; e4m3 in ``wgmma`` keeps 13 fraction bits. An fp16
   accumulator rounds to nearest, ties to even, and overflows to inf.
5. Infinities and NaNs follow IEEE 754: inf · 0 and inf − inf give NaN, always 0x7fffffff (fp16 0x7fff).
   A zero result is +0, even where a negative sum was cut or rounded to zero.

e4m3 in ``mma.sync`` m16n8k32 is an expansion by the assembler: conversion to fp16, a fused sum over the
sixteen k with k mod 4 < 2 starting from 0, a second one over the others starting from the first, and
one FADD with c.

How established. ``pytest -m hopper tests/hopper/test_tensor_core.py`` on an H200: no mismatch in 307 million fused
sums a form, random bits, wide exponents, cancellation, subnormals, signed zeros, infinities and NaNs among
them. 24 and 26 fraction bits, aligning zero products, and every other exponent of a zero fp32 accumulator
from −252 to −121 fail there; for a zero fp16 one −14 and −24 fail. tests/data/mma_h200.safetensors holds a sample for
machines without a GPU.
Where public sources differ: MMA-Sim (arXiv 2511.10909) has one fused sum of 32 for e4m3 in ``mma.sync`` and a zero
accumulator at −126.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.numerics.formats import BF16, E4M3, FP16, canonical_nan, encode

FRACTION_BITS = 25  # Hopper's aligner, 16-bit operands
FRACTION_BITS_WGMMA_E4M3 = 13
CPU_BLOCK_SUMS = 1 << 16  # outputs in flight: three temporaries of 512 KiB stay in the L2 cache of most servers
CUDA_BLOCK_SUMS = 1 << 22  # enough to hide the launches

MIN_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14, torch.float8_e4m3fn: -6}
_NO_EXPONENT = -1024  # of a zero operand: its products never reach the maximum
_FP64_BIAS, _FP64_FRACTION = 1023, 52


@dataclass(frozen=True)
class Form:
    """One instruction: ``operand`` as multiplied (after ``source`` was converted), ``k`` products a fused sum.

    ``result_bits`` are the fraction bits an fp32 result keeps. ``groups`` lists the k of each fused sum of
    an expanded instruction, which then starts from 0 and adds c with an FADD; empty for a true one.
    ``lowest_c`` and ``zero_c`` are the exponents of a subnormal and of a zero accumulator.
    """

    source: torch.dtype
    operand: torch.dtype
    accumulator: torch.dtype = torch.float32
    k: int = 16
    fraction_bits: int = FRACTION_BITS
    result_bits: int = 23
    groups: tuple[tuple[int, ...], ...] = ()
    zero_products_align: bool = False
    lowest_c: int = -126
    zero_c: int = -133

    @property
    def k_instruction(self) -> int:
        """The depth of the instruction."""
        return self.k * max(1, len(self.groups))


_E4M3_GROUPS = tuple(tuple(k for k in range(32) if (k % 4 < 2) == first) for first in (True, False))

FORMS = {
    "bf16": Form(torch.bfloat16, torch.bfloat16),
    "fp16": Form(torch.float16, torch.float16),
    "fp16_acc16": Form(torch.float16, torch.float16, torch.float16, lowest_c=-14, zero_c=-21),
    "e4m3": Form(torch.float8_e4m3fn, torch.float16, groups=_E4M3_GROUPS),
    "wgmma_bf16": Form(torch.bfloat16, torch.bfloat16),
    "wgmma_fp16": Form(torch.float16, torch.float16),
    "wgmma_e4m3": Form(
        torch.float8_e4m3fn,
        torch.float8_e4m3fn,
        k=32,
        fraction_bits=FRACTION_BITS_WGMMA_E4M3,
        result_bits=FRACTION_BITS_WGMMA_E4M3,
    ),
}


def fused_sum(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    fraction_bits: int = FRACTION_BITS,
    result_bits: int = 23,
    operand: torch.dtype | None = None,
) -> Tensor:
    """c + Σ_k a[…, k] · b[…, k] as one fused sum; a and b broadcast to […, K], c is […] of the same extents.

    a, b: bf16, fp16 or e4m3, or fp32 holding values of the format ``operand``. c: fp32, or fp16 for the fp16
    accumulator. Returns c's dtype and shape. ValueError for other dtypes or shapes.
    """
    operand = a.dtype if operand is None else operand
    if operand not in MIN_EXPONENT or operand == torch.float32:
        raise ValueError(f"operand: got {operand}, need bfloat16, float16 or float8_e4m3fn (fp32 values must name it)")
    if tuple(torch.broadcast_shapes(a.shape, b.shape)[:-1]) != tuple(c.shape):
        raise ValueError(f"c: got shape {tuple(c.shape)}, a {tuple(a.shape)} and b {tuple(b.shape)} need […] of […, K]")
    lowest_c = MIN_EXPONENT.get(c.dtype, -126)
    form = Form(
        operand, operand, c.dtype, a.shape[-1], fraction_bits, result_bits, lowest_c=lowest_c, zero_c=lowest_c - 7
    )
    limit = CUDA_BLOCK_SUMS if c.is_cuda else CPU_BLOCK_SUMS
    a, b = (x.expand(*c.shape, -1).reshape(-1, 1, form.k).split(limit) for x in (a, b))
    parts = [mma(*block, form) for block in zip(a, b, c.reshape(-1, 1, 1).split(limit), strict=True)]
    return torch.cat(parts).view(c.shape)


def mma(
    a: Tensor, b: Tensor, c: Tensor | None = None, form: str | Form = "bf16", k_order: Tensor | None = None
) -> Tensor:
    """a · bᵀ + c by a chain of instructions over K, each taking the one before as its accumulator.

    a […, M, K], b […, N, K] (leading extents broadcast), of the form's operand type, or fp32 holding such
    values; c […, M, N] of the accumulator's type, or None for zero. Returns […, M, N], the accumulator's type.
    ``form`` is a name in ``FORMS`` or a ``Form``. ``k_order`` [steps, k_instruction] (int64) says which k
    each instruction takes, and where; by default ascending. ValueError for wrong shapes, dtypes or values.
    """
    form = _form(form)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    rows, columns, depth = a.shape[-2], b.shape[-2], a.shape[-1]
    _check(a, b, c, form, (*batch, rows, columns))
    order = _order(k_order, depth, form, a.device)
    count = math.prod(batch)
    left, right = (_decode(x.expand(*batch, -1, -1).reshape(count, x.shape[-2], depth), order, form) for x in (a, b))
    out = torch.zeros(count, rows, columns, device=a.device)  # [B, M, N]
    if c is not None:
        out.copy_(c.reshape(out.shape))
    limit = CUDA_BLOCK_SUMS if a.is_cuda else CPU_BLOCK_SUMS
    sums = min(out.numel(), max(limit, columns))
    scratch = _Scratch(sums, min(limit, sums * form.k), a.device)
    for batches, lines in _blocks(count, rows, columns, limit):
        a_block = [x[:, batches, lines].unsqueeze(-1) for x in left]  # [K, B, M, 1]
        b_block = [x[:, batches].unsqueeze(-2) for x in right]  # [K, B, 1, N]
        _chain(a_block, b_block, out[batches, lines], form, scratch)
    out = canonical_nan(out.add_(0.0)).reshape(*batch, rows, columns)  # −0 becomes +0
    return encode(out, FP16) if form.accumulator == torch.float16 else out


def _form(form: str | Form) -> Form:
    """The form of that name. ValueError if there is none."""
    if isinstance(form, str):
        if form not in FORMS:
            raise ValueError(f"form: got {form!r}, need one of {', '.join(FORMS)}")
        return FORMS[form]
    return form


def _check(a: Tensor, b: Tensor, c: Tensor | None, form: Form, shape: tuple[int, ...]) -> None:
    """ValueError where an argument of ``mma`` does not fit the form."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in (form.source, torch.float32):
            raise ValueError(f"{name}: got {x.dtype}, need {form.source} or torch.float32 values of it")
        if x.dtype == torch.float32 and not bool(_is_exactly(x, form.source).all()):
            raise ValueError(f"{name}: has values that {form.source} does not hold")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"b: got K = {b.shape[-1]}, a has K = {a.shape[-1]}")
    if form.accumulator not in (torch.float32, torch.float16):
        raise ValueError(f"c: got {form.accumulator}, an accumulator is torch.float32 or torch.float16")
    if c is not None and c.dtype != form.accumulator:
        raise ValueError(f"c: got {c.dtype}, need {form.accumulator}")
    if c is not None and tuple(c.shape) != shape:
        raise ValueError(f"c: got shape {tuple(c.shape)}, need {shape}")


def _is_exactly(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Where fp32 ``x`` is NaN or a value of ``dtype``."""
    narrow = next(f for f in (BF16, FP16, E4M3) if f.dtype == dtype)
    return (encode(x, narrow).to(torch.float32) == x) | (x != x)


def _order(k_order: Tensor | None, depth: int, form: Form, device: torch.device) -> Tensor | None:
    """The k of every product in the order of the fused sums, flat; None if ascending. ValueError if it does not fit."""
    if k_order is None:
        if depth % form.k_instruction:
            raise ValueError(f"a: got K = {depth}, need a multiple of {form.k_instruction}")
        if not form.groups:
            return None
        k_order = torch.arange(depth, device=device).view(-1, form.k_instruction)
    if k_order.dim() != 2 or k_order.shape[1] != form.k_instruction:
        raise ValueError(f"k_order: got shape {tuple(k_order.shape)}, need [steps, {form.k_instruction}]")
    k_order = k_order.to(device)
    if form.groups:
        k_order = k_order[:, torch.tensor(form.groups, device=device).flatten()]
    return k_order.flatten()


def _decode(x: Tensor, order: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    """[B, M, K] → values fp64 and exponents int16, both [K', B, M], with k in the order of the fused sums."""
    by_k = x.flatten(0, -2).t().contiguous().to(torch.float32)  # transposed while narrow
    if order is not None:
        by_k = by_k.index_select(0, order)
    by_k = by_k.view(by_k.shape[0], *x.shape[:-1])
    lowest = MIN_EXPONENT[form.operand]
    zero = lowest if form.zero_products_align else _NO_EXPONENT
    return by_k.to(torch.float64), _exponents(by_k, lowest, zero).to(torch.int16)


def _exponents(x: Tensor, lowest: int, zero: int) -> Tensor:
    """Exponents of fp32 values as int32: not below ``lowest``, and ``zero`` for a zero."""
    exponents = ((x.view(torch.int32) >> 23) & 255).clamp_(min=lowest + 127).sub_(127)
    if lowest == zero:
        return exponents
    return torch.where(x == 0, torch.tensor(zero, dtype=torch.int32, device=x.device), exponents)


def _blocks(batch: int, rows: int, columns: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Parts of [batch, rows, columns] of at most ``limit`` outputs (or one row), as slices of the first two."""
    lines = min(rows, max(1, limit // max(1, columns)))
    batches = max(1, limit // max(1, lines * columns)) if lines == rows else 1
    for i in range(0, batch, batches):
        for j in range(0, rows, max(1, lines)):
            yield slice(i, min(batch, i + batches)), slice(j, min(rows, j + lines))


class _Scratch:
    """The temporaries of a block of ``sums`` outputs, allocated once; products several at a time where they fit."""

    def __init__(self, sums: int, products: int, device: torch.device):
        self.total = torch.empty(sums, dtype=torch.float64, device=device)
        self.scale = torch.empty(sums, dtype=torch.int64, device=device)
        self.largest = torch.empty(sums, dtype=torch.int16, device=device)
        self.product = torch.empty(max(sums, products), dtype=torch.float64, device=device)
        self.exponent = torch.empty(max(sums, products), dtype=torch.int16, device=device)

    def of_outputs(self, shape: torch.Size) -> list[Tensor]:
        """Total fp64, the scale's bits int64, largest exponent int16, of the outputs' shape."""
        return [x[: shape.numel()].view(shape) for x in (self.total, self.scale, self.largest)]

    def of_products(self, shape: torch.Size, k: int) -> tuple[Tensor, Tensor]:
        """Products fp64 and their exponents int16: ``k`` or as many as fit, by the outputs' shape."""
        count = max(1, min(k, self.product.numel() // max(1, shape.numel())))
        product, exponent = (x[: count * shape.numel()].view(count, *shape) for x in (self.product, self.exponent))
        return product, exponent


def _chain(a: list[Tensor], b: list[Tensor], c: Tensor, form: Form, scratch: _Scratch) -> None:
    """c ← the chain of instructions from c, in place: a and b are (values, exponents) [K', B, M, 1], [K', B, 1, N]."""
    sums = max(1, len(form.groups))
    for first in range(0, a[0].shape[0], form.k * sums):
        accumulator = torch.zeros_like(c) if form.groups else c
        for start in range(first, first + form.k * sums, form.k):
            part = slice(start, start + form.k)
            _fused([x[part] for x in a], [x[part] for x in b], accumulator, form, scratch)
        if form.groups:
            c.add_(accumulator.add_(0.0))  # the FADD; −0 of the accumulator becomes +0 before it


def _fused(a: list[Tensor], b: list[Tensor], c: Tensor, form: Form, scratch: _Scratch) -> None:
    """c ← one fused sum of (values, exponents) a and b, in place; c is fp32, also where the accumulator is fp16.

    Exact by construction: |cut term · 2^(F − E)| < 2^(F + 2) are integers, and fewer than 2^24 of them
    are added; every other fp64 operation is a product of two significands of at most 11 bits or with a power
    of two, far from the ends of fp64's range. Zero and non-finite operands need no special case.
    """
    total, bits, largest = scratch.of_outputs(c.shape)
    product, exponent = scratch.of_products(c.shape, form.k)
    parts = range(0, form.k, product.shape[0])
    largest.copy_(_exponents(c, form.lowest_c, form.zero_c))
    for start in parts:
        part = slice(start, min(form.k, start + product.shape[0]))
        for x in torch.add(a[1][part], b[1][part], out=exponent[: part.stop - start]):
            torch.maximum(largest, x, out=largest)
    # The bits of 2^(F − E).
    bits.copy_(largest).neg_().add_(form.fraction_bits + _FP64_BIAS).bitwise_left_shift_(_FP64_FRACTION)
    scale = bits.view(torch.float64)
    total.copy_(c).mul_(scale).trunc_()
    for start in parts:
        part = slice(start, min(form.k, start + product.shape[0]))
        for x in torch.mul(a[0][part], b[0][part], out=product[: part.stop - start]).mul_(scale).trunc_():
            total.add_(x)
    if form.accumulator == torch.float16:
        c.copy_(_to_fp16(total.div_(scale)))
        return
    # In units of the smallest subnormal: cut to whole ones, then to the result's significand, both toward zero.
    unit = MIN_EXPONENT[torch.float32] - form.result_bits
    _reciprocal_bits(bits, -unit)
    total.mul_(scale).trunc_()
    total.view(torch.int64).bitwise_and_(-1 << (_FP64_FRACTION - form.result_bits))
    c.copy_(total.mul_(2.0**unit))


def _reciprocal_bits(bits: Tensor, exponent: int) -> None:
    """The bits of an fp64 power of two p become those of 2^exponent / p, in place."""
    bits.neg_().add_(_wrapped((2 * _FP64_BIAS + exponent) << _FP64_FRACTION))


def _wrapped(x: int) -> int:
    """``x`` modulo 2^64 as a signed 64-bit integer."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _to_fp16(x: Tensor) -> Tensor:
    """fp64 to the nearest fp16, ties to even: first to fp32 by rounding to odd, which keeps what decides a tie."""
    sticky = (1 << 29) - 1  # what fp32 drops of an fp64 significand
    bits = x.view(torch.int64)
    low = bits & sticky
    odd = (bits - low) | ((low + sticky) & (sticky + 1))
    return encode(odd.view(torch.float64).to(torch.float32), FP16)
