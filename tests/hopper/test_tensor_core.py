"""The tensor cores of an sm_90 GPU against ``reference.numerics.tensor_core``, bit for bit.

Each form meets a dozen classes of operands, 25.6 million fused sums a class, and chains over K = 4096. Operands
are codes made from seeded integers on the GPU, where the model runs as well. A failure lists the first
differing elements and how many would differ under other hypotheses.
"""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cute_impl import probes
from cute_impl.probes_wgmma import WGMMA_FORMS, run_wgmma
from reference.numerics.tensor_core import FORMS, Form, mma

pytestmark = pytest.mark.hopper

SUMS = 25_600_000
CHAIN_K, CHAIN_SUMS = 4096, 131_072
COLUMNS = 8
ALTERNATIVES = [
    {"zero_products_align": True},
    {"zero_c": -21},
    {"zero_c": -126},
    {"zero_c": -252},
    {"lowest_c": -126},
    {"fraction_bits": 24},
    {"fraction_bits": 26},
    {"fraction_bits": 13},
    {"fraction_bits": 14},
    {"result_bits": 13},
    {"result_bits": 23},
    {"operand": torch.float16},
    {"k": 16},
]


class Layout(NamedTuple):
    """A format's code: total bits, fraction bits, largest exponent field of finite values, bias, code of its top."""

    bits: int
    fraction: int
    top: int
    bias: int
    special: int


LAYOUTS = {
    torch.bfloat16: Layout(16, 7, 254, 127, 0x7F80),
    torch.float16: Layout(16, 10, 30, 15, 0x7C00),
    torch.float8_e4m3fn: Layout(8, 3, 15, 7, 0x7F),
    torch.float32: Layout(32, 23, 254, 127, 0x7F800000),
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Codes:
    """Codes of formats (int64 tensors of ``shape``) from a seeded stream of integers."""

    def __init__(self, seed: int, device: str):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def integers(self, low: int, high: int, shape: tuple) -> Tensor:
        """Uniform in low … high."""
        return torch.randint(low, high + 1, shape, generator=self.generator, device=self.device)

    def chance(self, one_in: int, shape: tuple) -> Tensor:
        """True once in ``one_in``."""
        return self.integers(1, one_in, shape) == 1

    def fields(self, dtype: torch.dtype, low: int, high: int, shape: tuple) -> Tensor:
        """Any sign and fraction, exponent fields low … high (held to the format's)."""
        form = LAYOUTS[dtype]
        low, high = (min(form.top, max(0, x)) for x in (low, high))
        code = self.integers(low << form.fraction, ((high + 1) << form.fraction) - 1, shape)
        return self.signed(dtype, torch.where(code == form.special, form.special - 1, code))

    def signed(self, dtype: torch.dtype, code: Tensor) -> Tensor:
        """With a random sign."""
        return code | self.integers(0, 1, tuple(code.shape)) << (LAYOUTS[dtype].bits - 1)

    def tensor(self, dtype: torch.dtype, code: Tensor) -> Tensor:
        """The codes as values."""
        return code.to(INTEGERS[dtype.itemsize]).view(dtype)


class Shapes(NamedTuple):
    """Extents of the operands and of the accumulator."""

    a: tuple
    b: tuple
    c: tuple


def bits(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Random bit patterns."""
    dtypes = (form.source, form.source, form.accumulator)
    return tuple(codes.integers(0, (1 << LAYOUTS[d].bits) - 1, s) for d, s in zip(dtypes, shapes, strict=True))


def around(spread: int, c_below: int = 0):
    """Exponents within ``spread`` of 0; those of c as far from ``-c_below``."""

    def make(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
        middle, middle_c = LAYOUTS[form.source].bias, LAYOUTS[form.accumulator].bias - c_below
        reach = spread if form.accumulator == torch.float32 else min(spread, 6)  # an fp16 result stays finite
        a, b = (codes.fields(form.source, middle - reach, middle + reach, s) for s in shapes[:2])
        return a, b, codes.fields(form.accumulator, middle_c - 2 * reach, middle_c + 2 * reach, shapes.c)

    return make


def wide(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Every finite exponent; c in the products' range."""
    a, b = (codes.fields(form.source, 0, LAYOUTS[form.source].top, s) for s in shapes[:2])
    reach, middle = 2 * LAYOUTS[form.source].bias, LAYOUTS[form.accumulator].bias
    return a, b, codes.fields(form.accumulator, middle - reach, middle + reach, shapes.c)


def cancelling(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """All products but two cancel in pairs; c is zero half the time, else small."""
    a, b, c = around(12, c_below=20)(codes, form, shapes)
    sign = 1 << (LAYOUTS[form.source].bits - 1)
    a[..., 1:-2:2], b[..., 1:-2:2] = a[..., 0:-2:2] ^ sign, b[..., 0:-2:2]
    return a, b, torch.where(codes.chance(2, shapes.c), 0, c)


def subnormal(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Subnormal and smallest normal operands and accumulators."""
    a, b = (codes.fields(form.source, 0, 2, s) for s in shapes[:2])
    return a, b, codes.fields(form.accumulator, 0, 2, shapes.c)


def underflowing(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Products down to far below the accumulator's subnormals, where the format reaches; c zero or subnormal."""
    source, accumulator = LAYOUTS[form.source], LAYOUTS[form.accumulator]
    middle = source.bias - (accumulator.bias + accumulator.fraction) // 2
    a, b = (codes.fields(form.source, middle - 5, middle + 4, s) for s in shapes[:2])
    c = codes.signed(form.accumulator, codes.integers(0, 1 << 6, shapes.c))
    return a, b, torch.where(codes.chance(2, shapes.c), c & 1 << (accumulator.bits - 1), c)


def zeros(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Half of a is ±0 and the rest small, while b is of any size: a zero product's exponents are often the largest."""
    sign = 1 << (LAYOUTS[form.source].bits - 1)
    a = codes.fields(form.source, 0, LAYOUTS[form.source].top // 8, shapes.a)
    a = torch.where(codes.chance(2, shapes.a), a & sign, a)
    b = codes.fields(form.source, 0, LAYOUTS[form.source].top, shapes.b)
    b = torch.where(codes.chance(8, shapes.b), b & sign, b)
    middle = LAYOUTS[form.accumulator].bias - LAYOUTS[form.source].bias
    c = codes.fields(form.accumulator, middle - 30, middle + 10, shapes.c)
    return a, b, torch.where(codes.chance(3, shapes.c), c & 1 << (LAYOUTS[form.accumulator].bits - 1), c)


def signed_zeros(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """±0 almost everywhere, ±1 elsewhere: sums of zeros of each sign, exact cancellation; c often subnormal."""
    result = []
    for dtype, shape, one_in in zip((form.source, form.source, form.accumulator), shapes, (6, 6, 3), strict=True):
        one = LAYOUTS[dtype].bias << LAYOUTS[dtype].fraction
        result.append(codes.signed(dtype, torch.where(codes.chance(one_in, shape), one, 0)))
    a, b, c = result
    return a, b, torch.where(codes.chance(3, shapes.c), codes.fields(form.accumulator, 0, 2, shapes.c), c)


def special(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Infinities, NaNs, zeros and the largest values among ordinary ones."""
    result = []
    parts = zip((form.source, form.source, form.accumulator), shapes, around(4)(codes, form, shapes), strict=True)
    for dtype, shape, code in parts:
        layout = LAYOUTS[dtype]
        sign = 1 << (layout.bits - 1)
        extremes = [layout.special, layout.special, sign | layout.special, layout.special - 1, 0, sign - 1]
        chosen = torch.tensor(extremes, device=codes.device)[codes.integers(0, 5, shape)]
        result.append(torch.where(codes.chance(100, shape), chosen, code))
    return tuple(result)


def ties(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """The first product is half a unit of every accumulator's last place; the others are zero or far smaller."""
    half = form.accumulator == torch.float16
    # c subnormal or in [2^8, 2^9): half a unit is 2^-25 or 2^-16.
    c = codes.fields(form.accumulator, 0, 1, shapes.c) if half else codes.fields(torch.float32, 135, 135, shapes.c)
    result = []
    for shape, value in zip(shapes[:2], (2.0**-13, 2.0**-12) if half else (2.0**-8, 2.0**-8), strict=True):
        # fp16: the other products stay below 2^-42.
        low = LAYOUTS[form.source].bias - 40
        far = codes.integers(0, 7, shape) if half else codes.fields(form.source, low, max(2, low + 25), shape)
        x = codes.signed(form.source, torch.where(codes.chance(2, shape), 0, far))
        exact = torch.tensor([value], device=codes.device).to(form.source).view(INTEGERS[form.source.itemsize])
        x[..., :1] = codes.signed(form.source, exact.to(torch.int64).expand(x[..., :1].shape))
        result.append(x)
    return *result, c


def huge(codes: Codes, form: Form, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Products around the accumulator's largest value, where the format reaches, and c likewise."""
    source, accumulator = LAYOUTS[form.source], LAYOUTS[form.accumulator]
    middle = source.bias + (accumulator.bias + 1) // 2
    a, b = (codes.fields(form.source, middle - 4, middle + 1, s) for s in shapes[:2])
    return a, b, codes.fields(form.accumulator, accumulator.top - 4, accumulator.top, shapes.c)


CLASSES = {
    "bits": bits,
    "normal": around(3),
    "spread": around(14),
    "wide": wide,
    "cancelling": cancelling,
    "subnormal": subnormal,
    "underflowing": underflowing,
    "zeros": zeros,
    "signed-zeros": signed_zeros,
    "special": special,
    "ties": ties,
    "huge": huge,
}


def operands(name: str, form: Form, rows: int, sums: int, depth: int, device: str = "cuda") -> tuple[Tensor, ...]:
    """a, b, c of a class of operands for tiles of ``rows`` by 8."""
    tiles = sums // (rows * COLUMNS)
    codes = Codes(list(CLASSES).index(name), device)
    shapes = Shapes((tiles, rows, depth), (tiles, COLUMNS, depth), (tiles, rows, COLUMNS))
    dtypes = (form.source, form.source, form.accumulator)
    return tuple(codes.tensor(d, x) for d, x in zip(dtypes, CLASSES[name](codes, form, shapes), strict=True))


def run(name: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The instruction on the GPU, chained over K."""
    if name in WGMMA_FORMS:
        return run_wgmma(name, a, b, c)
    depth = FORMS[name].k_instruction
    for x, y in zip(a.split(depth, dim=-1), b.split(depth, dim=-1), strict=True):
        c = probes.run_mma(name, x.contiguous(), y.contiguous(), c)
    return c


def differing(got: Tensor, want: Tensor) -> Tensor:
    """Where the bits differ."""
    integer = INTEGERS[want.element_size()]
    return got.view(integer) != want.view(integer)


def report(name: str, got: Tensor, want: Tensor, arguments: tuple[Tensor, ...]) -> str:
    """The first differing elements, and how many differ under other hypotheses."""
    where = differing(got, want)
    lines = [f"{name}: {int(where.sum())} of {where.numel()} fused sums differ"]
    mask, integer = (1 << 8 * want.element_size()) - 1, INTEGERS[want.element_size()]
    for index in where.nonzero()[:10].tolist():
        codes = [int(x[tuple(index)].view(integer)) & mask for x in (got, want, arguments[2])]
        lines.append("{}: got {:#x}, want {:#x}, c {:#x}".format(index, *codes))
    sample = [x[: 1 << 14] for x in (got, *arguments)]
    for change in ALTERNATIVES:
        other = mma(*sample[1:], dataclasses.replace(FORMS[name], **change))
        lines.append(f"{change}: {int(differing(sample[0], other).sum())} differ in the first {len(sample[0])} tiles")
    return "\n".join(lines)


def check(name: str, label: str, arguments: tuple[Tensor, ...]) -> None:
    """Hardware and model give the same bits."""
    got, want = run(name, *arguments), mma(*arguments, name)
    depth = arguments[0].shape[-1] // FORMS[name].k_instruction
    count = int(differing(got, want).sum())
    print(f"{name} {label}: {count} mismatches in {want.numel() * depth} fused sums")
    assert count == 0, report(name, got, want, arguments)


def rows(name: str) -> int:
    """Rows of the instruction's tile."""
    return 64 if name in WGMMA_FORMS else 16


@pytest.mark.parametrize("name", FORMS)
def test_small_integers_are_exact(name):
    """A wrong fragment or shared-memory layout fails here, whatever the arithmetic."""
    form, codes = FORMS[name], Codes(99, "cuda")
    depth, tiles = 2 * form.k_instruction, 64
    shapes = Shapes((tiles, rows(name), depth), (tiles, COLUMNS, depth), (tiles, rows(name), COLUMNS))
    a, b, c = (codes.integers(-4, 4, s).to(torch.float64) for s in shapes)
    got = run(name, a.to(form.source), b.to(form.source), c.to(form.accumulator))
    assert torch.equal(got.to(torch.float64), a @ b.transpose(-1, -2) + c)


@pytest.mark.parametrize("label", CLASSES)
@pytest.mark.parametrize("name", FORMS)
def test_one_instruction(name, label):
    form = FORMS[name]
    check(name, label, operands(label, form, rows(name), SUMS, form.k_instruction))


@pytest.mark.parametrize("label", ["normal", "spread", "cancelling"])
@pytest.mark.parametrize("name", FORMS)
def test_chain(name, label):
    check(name, f"{label}, K = {CHAIN_K}", operands(label, FORMS[name], rows(name), CHAIN_SUMS, CHAIN_K))
