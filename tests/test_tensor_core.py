"""``reference.numerics.tensor_core`` against an independent model in exact rationals, by hand, and an H200.

The independent model decodes integer codes and computes with ``fractions.Fraction``, one output at a
time, from the statement of the semantics in the module's docstring.
"""

import dataclasses
import json
import math
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from reference.numerics import tensor_core
from reference.numerics.tensor_core import FORMS, fused_sum, mma

HARDWARE = Path(__file__).parent / "data" / "mma_h200.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# name: width, fraction bits, bias, whether the top exponent holds inf and NaN
LAYOUTS = {
    "bf16": (16, 7, 127, True),
    "fp16": (16, 10, 15, True),
    "e4m3": (8, 3, 7, False),
    "fp32": (32, 23, 127, True),
}
NAN = {"fp32": 0x7FFFFFFF, "fp16": 0x7FFF}
INF = {"fp32": 0x7F800000, "fp16": 0x7C00}
Special = float  # an infinity or a NaN; numbers are Fractions


def slow_decode(code: int, name: str) -> tuple[Fraction | Special, int]:
    """A code's value and exponent, which is held at the smallest for subnormals and zeros."""
    width, fraction_bits, bias, has_inf = LAYOUTS[name]
    sign = -1 if code >> (width - 1) else 1
    top = (1 << (width - 1 - fraction_bits)) - 1
    field, fraction = code >> fraction_bits & top, code & ((1 << fraction_bits) - 1)
    if has_inf and field == top:
        return (math.nan if fraction else sign * math.inf), 0
    if not has_inf and code & 0x7F == 0x7F:
        return math.nan, 0
    significand = fraction + (1 << fraction_bits if field else 0)
    exponent = max(field, 1) - bias
    return sign * significand * Fraction(2) ** (exponent - fraction_bits), exponent


def slow_round(value: Fraction, name: str, toward_zero: bool, fraction_bits: int) -> int:
    """The code of a rational rounded once, to ``fraction_bits`` where it is normal; a zero is +0."""
    if value == 0:
        return 0
    width, _, bias, _ = LAYOUTS[name]
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, 1 - bias) - fraction_bits)
    rounded = (math.floor(magnitude / quantum) if toward_zero else round(magnitude / quantum)) * quantum
    if rounded == 0:
        return 0
    pack, unpack = ("<f", "<I") if name == "fp32" else ("<e", "<H")
    overflows = rounded >= Fraction(2) ** (bias + 1)
    code = INF[name] if overflows else struct.unpack(unpack, struct.pack(pack, rounded))[0]
    return (value < 0) << (width - 1) | code


def sign_or_special(x: Fraction | Special) -> float:
    """What decides a product with an infinity or a NaN."""
    return x if isinstance(x, Special) else float((x > 0) - (x < 0))


ZERO_EXPONENT = {"fp32": -133, "fp16": -21}  # of a zero accumulator


def slow_fused_sum(
    a: list[int], b: list[int], c: int, operand: str, accumulator: str = "fp32", fraction_bits: int = 25, keep: int = 23
) -> int:
    """One fused sum on codes, by the docstring of ``tensor_core``."""
    terms, specials = [], []
    for x, y in zip(a, b, strict=True):
        (x, ex), (y, ey) = slow_decode(x, operand), slow_decode(y, operand)
        if isinstance(x, Special) or isinstance(y, Special):
            specials.append(sign_or_special(x) * sign_or_special(y))
        elif x * y != 0:
            terms.append((x * y, ex + ey))
    start, exponent = slow_decode(c, accumulator)
    if isinstance(start, Special):
        specials.append(start)
    else:
        terms.append((start, exponent if start else ZERO_EXPONENT[accumulator]))
    if specials:
        total = sum(specials)
        sign = (total < 0) << (LAYOUTS[accumulator][0] - 1)
        return NAN[accumulator] if math.isnan(total) else sign | INF[accumulator]
    quantum = Fraction(2) ** (max(e for _, e in terms) - fraction_bits)
    total = sum(math.trunc(value / quantum) for value, _ in terms) * quantum
    return slow_round(total, accumulator, accumulator == "fp32", keep if accumulator == "fp32" else 10)


def e4m3_to_fp16(code: int) -> int:
    """The fp16 code of the same value."""
    value, _ = slow_decode(code, "e4m3")
    if isinstance(value, Special):
        return NAN["fp16"]
    return slow_round(value, "fp16", toward_zero=False, fraction_bits=10)


def slow_fadd(x: int, y: int) -> int:
    """x + y on fp32 codes, nearest even; x is not −0."""
    values = [slow_decode(code, "fp32")[0] for code in (x, y)]
    if any(isinstance(v, Special) for v in values):
        total = sum(v for v in values if isinstance(v, Special))
        return NAN["fp32"] if math.isnan(total) else (total < 0) << 31 | INF["fp32"]
    return slow_round(sum(values), "fp32", toward_zero=False, fraction_bits=23)


def slow_e4m3(a: list[int], b: list[int], c: int) -> int:
    """``mma.sync`` m16n8k32 on e4m3 codes: two fused sums of fp16 and an FADD."""
    a, b = [e4m3_to_fp16(x) for x in a], [e4m3_to_fp16(x) for x in b]
    accumulator = 0
    for half in ((0, 1), (2, 3)):
        ks = [k for k in range(32) if k % 4 in half]
        accumulator = slow_fused_sum([a[k] for k in ks], [b[k] for k in ks], accumulator, "fp16")
    return slow_fadd(accumulator, c)


def tensor(codes: list, name: str) -> Tensor:
    """Codes as a tensor of the format."""
    dtype = DTYPES[name]
    wide = torch.tensor(codes, dtype=torch.int64)
    bits = 8 * dtype.itemsize
    signed = torch.where(wide >= 1 << (bits - 1), wide - (1 << bits), wide) if bits > 8 else wide
    return signed.to(INTEGERS[dtype.itemsize]).view(dtype)


def codes(x: Tensor) -> list:
    """The inverse of ``tensor``."""
    width = x.element_size()
    return (x.contiguous().view(INTEGERS[width]).to(torch.int64) & ((1 << 8 * width) - 1)).tolist()


def shaped(raw: bytes, name: str, kind: str, middle: int) -> list[int]:
    """Codes of a format from four bytes each: any bits, exponents near ``middle``, or mostly edges."""
    width, fraction_bits, _, _ = LAYOUTS[name]
    top, fractions = (1 << (width - 1 - fraction_bits)) - 1, (1 << fraction_bits) - 1
    edges = (0, 1, fractions, 1 << fraction_bits, (top << fraction_bits) - 1, top << fraction_bits)
    result = []
    for (word,) in struct.iter_unpack("<I", raw):
        sign, low = word >> 31 << (width - 1), word & ((1 << (width - 1)) - 1)
        if kind == "near":
            field = min(top, max(0, middle * top // 255 + (word >> 24 & 7) - 3))
            low = field << fraction_bits | (0, fractions, 1, low & fractions)[word >> 28 & 3]
        elif kind == "edges" and word >> 27 & 3:
            low = edges[(word >> 24 & 7) % 6]
        result.append(sign | low)
    return result


@st.composite
def problems(draw, operand: str, accumulator: str, count: int) -> tuple[list[int], list[int], int]:
    """Operands and an accumulator; sometimes neighbouring products cancel."""
    codes_of = []
    for name, n in ((operand, count), (operand, count), (accumulator, 1)):
        raw, kind = draw(st.binary(min_size=4 * n, max_size=4 * n)), draw(st.sampled_from(["bits", "near", "edges"]))
        codes_of.append(shaped(raw, name, kind, draw(st.integers(0, 255))))
    a, b, (c,) = codes_of
    for i in range(1, draw(st.sampled_from([0, 0, count // 2, count])), 2):
        a[i], b[i] = a[i - 1] ^ 1 << (LAYOUTS[operand][0] - 1), b[i - 1]
    return a, b, c


@pytest.mark.parametrize(
    ("operand", "accumulator", "fraction_bits", "keep", "count"),
    [
        pytest.param("bf16", "fp32", 25, 23, 16, id="bf16"),
        pytest.param("fp16", "fp32", 25, 23, 16, id="fp16"),
        pytest.param("fp16", "fp16", 25, 10, 16, id="fp16_acc16"),
        pytest.param("e4m3", "fp32", 13, 13, 32, id="wgmma_e4m3"),
        pytest.param("bf16", "fp32", 24, 23, 5, id="other-width-and-depth"),
    ],
)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_equals_the_exact_rational_model(operand, accumulator, fraction_bits, keep, count, data):
    a, b, c = data.draw(problems(operand, accumulator, count))
    got = fused_sum(
        tensor(a, operand), tensor(b, operand), tensor(c, accumulator), fraction_bits, 23 if keep == 10 else keep
    )
    assert hex(codes(got)) == hex(slow_fused_sum(a, b, c, operand, accumulator, fraction_bits, keep))


@settings(max_examples=200, deadline=None)
@given(problem=problems("e4m3", "fp32", 32))
def test_e4m3_equals_the_exact_rational_expansion(problem):
    a, b, c = problem
    got = mma(tensor([a], "e4m3"), tensor([b], "e4m3"), tensor([[c]], "fp32"), "e4m3")
    assert hex(codes(got)[0][0]) == hex(slow_e4m3(a, b, c))


@settings(max_examples=50, deadline=None)
@given(problem=problems("bf16", "fp32", 16), order=st.permutations(range(16)))
def test_order_inside_an_instruction_does_not_matter(problem, order):
    a, b, c = problem
    sums = [
        fused_sum(tensor([x[k] for k in ks], "bf16"), tensor([y[k] for k in ks], "bf16"), tensor(c, "fp32"))
        for x, y, ks in ((a, b, range(16)), (a, b, order))
    ]
    assert codes(sums[0]) == codes(sums[1])


def one(products: list[tuple[float, float]], c: float = 0.0, form: str = "bf16", **changes) -> float:
    """One instruction of a form on the given products, the rest zeros; ``changes`` replace fields of the form."""
    chosen = dataclasses.replace(FORMS[form], **changes)
    a, b = torch.zeros(2, 1, chosen.k_instruction)
    for k, (x, y) in enumerate(products):
        a[0, k], b[0, k] = x, y
    return mma(a, b, torch.tensor([[c]]).to(chosen.accumulator), chosen).item()


INFINITY = math.inf
BIG = 2.0**100


@pytest.mark.parametrize(
    ("form", "products", "c", "want"),
    [
        pytest.param("bf16", [(1.0, 1.0), (-1.0, 1.0), (2.0**-25, 1.0)], 0.0, 2.0**-25, id="25-bits-below-the-largest"),
        pytest.param("bf16", [(1.0, 1.0), (-1.0, 1.0), (2.0**-26, 1.0)], 0.0, 0.0, id="26-bits-below-is-cut"),
        pytest.param(
            "bf16", [(1.5, 1.5), (-1.5, 1.5), (2.0**-25, 1.0)], 0.0, 2.0**-25, id="products-stay-unnormalised"
        ),
        pytest.param(
            "bf16", [(1.0, 1.0), (-1.0, 1.0), (-1.5 * 2.0**-25, 1.0)], 0.0, -(2.0**-25), id="terms-cut-toward-zero"
        ),
        pytest.param("bf16", [(2.0**-26, 1.0)] * 15, 1.0, 1.0, id="each-term-is-cut-before-the-sum"),
        pytest.param("bf16", [(2.0**-25, 1.0)] * 15, 1.0, 1.0 + 3 * 2.0**-23, id="sum-cut-toward-zero"),
        pytest.param("bf16", [(-(2.0**-25), 1.0)], 1.0, 1.0 - 2.0**-24, id="sum-below-1-has-a-finer-ulp"),
        pytest.param(
            "bf16", [(0.0, BIG), (2.0**-60, 1.0)], 2.0**-80, 2.0**-60 + 2.0**-80, id="zero-products-do-not-align"
        ),
        pytest.param("fp16", [(0.0, 1.0)] * 15, 2.0**-60, 2.0**-60, id="zero-fp16-products-do-not-align"),
        pytest.param("bf16", [(2.0**-75, 2.0**-74), (-(2.0**-80), 2.0**-80)], 0.0, 2.0**-149, id="zero-c-is-at-2^-133"),
        pytest.param("bf16", [(2.0**-76, 2.0**-76)] * 15, 0.0, 2.0**-149, id="fifteen-of-2^-152"),
        pytest.param("bf16", [(2.0**-75, 1.5 * 2.0**-75)] * 4, 0.0, 3 * 2.0**-149, id="subnormal-sum-of-2^-151-parts"),
        pytest.param("bf16", [(2.0**-75, 2.0**-75)], 3 * 2.0**-149, 3 * 2.0**-149, id="subnormal-cut-toward-zero"),
        pytest.param("bf16", [(2.0**-133, 2.0**20)], 0.0, 2.0**-113, id="subnormal-operands-are-not-flushed"),
        pytest.param(
            "bf16", [(2.0**-133, 1.0), (1.0, 2.0**-126), (1.0, -(2.0**-126))], 0.0, 2.0**-133, id="nor-normalised"
        ),
        pytest.param("fp16", [(2.0**-24, 2.0**-24)], 0.0, 2.0**-48, id="fp16-subnormal-operands"),
        pytest.param("bf16", [(2.0**127, 2.0)], 0.0, INFINITY, id="overflow"),
        pytest.param("bf16", [(-(2.0**127), 2.0)], 0.0, -INFINITY, id="overflow-negative"),
        pytest.param(
            "bf16", [(2.0**127, 2.0), (-(2.0**120), 1.0)], 0.0, 2.0**128 - 2.0**120, id="a-term-may-exceed-the-range"
        ),
        pytest.param(
            "bf16", [(2.0**127, 2.0), (-(2.0**127), 2.0)], 1.0, 0.0, id="huge-terms-cancel-and-take-c-with-them"
        ),
        pytest.param(
            "bf16", [(2.0**127, 2.0), (-(2.0**103), 1.0)], 0.0, 2.0**128 - 2.0**104, id="cut-to-the-largest-finite"
        ),
        pytest.param("fp16_acc16", [(2.0**-11, 1.0)], 1.0, 1.0, id="fp16-tie-to-even"),
        pytest.param("fp16_acc16", [(2.0**-11, 1.0)], 1.0 + 2.0**-10, 1.0 + 2.0**-9, id="fp16-tie-to-even-up"),
        pytest.param("fp16_acc16", [(2.0**-11, 1.0), (2.0**-24, 1.0)], 1.0, 1.0 + 2.0**-10, id="fp16-rounds-once"),
        pytest.param("fp16_acc16", [(65504.0, 1.0), (8.0, 1.0)], 0.0, 65504.0, id="fp16-largest"),
        pytest.param("fp16_acc16", [(65504.0, 1.0), (16.0, 1.0)], 0.0, INFINITY, id="fp16-overflow"),
        pytest.param("fp16_acc16", [(2.0**-13, 2.0**-12)], 0.0, 0.0, id="fp16-subnormal-tie"),
        pytest.param("fp16_acc16", [(2.0**-13, 1.5 * 2.0**-12)], 0.0, 2.0**-24, id="fp16-subnormal"),
        pytest.param(
            "fp16_acc16", [(2.0**-13, 2.0**-12), (2.0**-24, 2.0**-23)], 0.0, 0.0, id="fp16-zero-c-is-at-2^-21"
        ),
        pytest.param("fp16_acc16", [(2.0**-13, 2.0**-12), (2.0**-23, 2.0**-23)], 0.0, 2.0**-24, id="fp16-2^-46-counts"),
        pytest.param("e4m3", [(448.0, 448.0)], 2.0**-20, 448.0**2, id="e4m3-c-comes-by-a-rounded-add"),
        pytest.param("e4m3", [(2.0**-9, 2.0**-9)], 2.0**18, 2.0**18, id="e4m3-tiny-product"),
        pytest.param("e4m3", [(1.0, 1.0)], 2.0**24 + 2, 2.0**24 + 4, id="e4m3-add-ties-to-even"),
        pytest.param("wgmma_e4m3", [(1.0, 1.0), (-1.0, 1.0), (2.0**-7, 2.0**-6)], 0.0, 2.0**-13, id="wgmma-13-bits"),
        pytest.param("wgmma_e4m3", [(1.0, 1.0), (-1.0, 1.0), (2.0**-7, 2.0**-7)], 0.0, 0.0, id="wgmma-14-bits-below"),
        pytest.param("wgmma_e4m3", [], 1.0 + 2.0**-13 + 2.0**-14, 1.0 + 2.0**-13, id="wgmma-cuts-c-too"),
        pytest.param(
            "fp16_acc16", [(2.0**-12, 2.0**-13), (2.0**-20, 2.0**-20)], 2.0**-23, 2.0**-23, id="fp16-subnormal-c-aligns"
        ),
        pytest.param("bf16", [(0.0, INFINITY)], 0.0, math.nan, id="zero-times-inf"),
        pytest.param("bf16", [(1.0, INFINITY), (1.0, -INFINITY)], 0.0, math.nan, id="inf-minus-inf"),
        pytest.param("bf16", [(1.0, INFINITY)], -INFINITY, math.nan, id="inf-minus-inf-of-c"),
        pytest.param("bf16", [(-1.0, INFINITY), (2.0**127, 2.0)], 0.0, -INFINITY, id="inf-beats-overflow"),
        pytest.param("bf16", [(1.0, math.nan)], INFINITY, math.nan, id="nan"),
        pytest.param("bf16", [(1.0, 1.0)], math.nan, math.nan, id="nan-of-c"),
        pytest.param("fp16_acc16", [(1.0, math.nan)], 0.0, math.nan, id="fp16-nan"),
        pytest.param("e4m3", [(1.0, math.nan)], 0.0, math.nan, id="e4m3-nan"),
        pytest.param("e4m3", [(1.0, 1.0)], -INFINITY, -INFINITY, id="e4m3-inf-of-c"),
        pytest.param("wgmma_e4m3", [(0.0, math.nan)], 0.0, math.nan, id="wgmma-nan"),
    ],
)
def test_by_hand(form, products, c, want):
    got = one(products, c, form)
    assert (math.isnan(got) and math.isnan(want)) or got == want


@pytest.mark.parametrize(("bits", "want"), [(24, 1.0), (25, 1.0 + 2.0**-23)])
def test_24_and_25_bits_differ(bits, want):
    assert one([(2.0**-25, 1.0)] * 4, 1.0, fraction_bits=bits) == want


@pytest.mark.parametrize(("bits", "want"), [(25, 1.0), (26, 1.0 + 2.0**-23)])
def test_25_and_26_bits_differ(bits, want):
    assert one([(2.0**-26, 1.0)] * 8, 1.0, fraction_bits=bits) == want


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        pytest.param(-0.0, 1.0, -0.0, id="all-terms-minus-zero"),
        pytest.param(0.0, 1.0, -0.0, id="plus-and-minus-zero"),
        pytest.param(-0.0, -0.0, 0.0, id="plus-zeros"),
        pytest.param(0.0, -1.0, 0.0, id="minus-zero-products"),
    ],
)
def test_zero_results_are_plus_zero(form, a, b, c):
    form = FORMS[form]
    operands = [torch.full((1, form.k_instruction), x) for x in (a, b)]
    assert codes(mma(*operands, torch.tensor([[c]]).to(form.accumulator), form)) == [[0]]


@pytest.mark.parametrize(
    ("form", "products", "c"),
    [
        pytest.param("bf16", [(1.0, 1.0)], -1.0, id="exact-cancellation"),
        pytest.param("bf16", [(-(2.0**-75), 2.0**-75)], 0.0, id="fp32-negative-cut-to-zero"),
        pytest.param("fp16_acc16", [(-(2.0**-13), 2.0**-13)], 0.0, id="fp16-negative-rounded-to-zero"),
        pytest.param("fp16_acc16", [(-(2.0**-13), 2.0**-13)], -0.0, id="fp16-negative-rounded-to-zero-with-minus-zero"),
    ],
)
def test_cancelled_and_underflowed_results_are_plus_zero(form, products, c):
    assert math.copysign(1.0, one(products, c, form)) == 1.0
    assert one(products, c, form) == 0.0


def test_nan_is_canonical():
    a = torch.full((1, 16), math.nan, dtype=torch.bfloat16)
    assert codes(mma(a, a, torch.tensor([[-math.nan]]))) == [[0x7FFFFFFF]]
    half = a.to(torch.float16)
    assert codes(mma(half, half, None, "fp16_acc16")) == [[0x7FFF]]


def test_chain_order_matters_and_is_the_callers():
    a = torch.ones(1, 32, dtype=torch.bfloat16)
    a[0, :16] = 0.0
    a[0, 0] = 2.0**26
    b = torch.ones(1, 32, dtype=torch.bfloat16)
    ascending = torch.arange(32).view(2, 16)
    assert mma(a, b).item() == 2.0**26
    assert mma(a, b, k_order=ascending).item() == 2.0**26
    assert mma(a, b, k_order=ascending.flip(0)).item() == 2.0**26 + 16


def test_k_order_may_take_part_of_k():
    a = torch.arange(48.0).to(torch.bfloat16).view(1, 48)
    order = torch.arange(16, 32).view(1, 16)
    assert mma(a, torch.ones_like(a), k_order=order).item() == sum(range(16, 32))


def test_e4m3_sums_k_mod_4_below_2_first():
    products = [(0.0, 0.0)] * 32
    products[2], products[3], products[0] = (448.0, 448.0), (-448.0, 448.0), (2.0**-9, 2.0**-9)
    assert one(products, form="e4m3") == 0.0  # 2^-18 is an accumulator 35 bits below
    products[1], products[2], products[3] = (448.0, 448.0), (0.0, 0.0), (0.0, 0.0)
    products[4] = (-448.0, 448.0)
    products[0], products[2] = (0.0, 0.0), (2.0**-9, 2.0**-9)
    assert one(products, form="e4m3") == 2.0**-18


def test_matrices_equal_single_sums_in_any_blocking(monkeypatch):
    generator = torch.Generator().manual_seed(7)
    a = torch.randint(0, 1 << 16, (2, 1, 9, 32), generator=generator).to(torch.int16).view(torch.bfloat16)
    b = torch.randint(0, 1 << 16, (3, 5, 32), generator=generator).to(torch.int16).view(torch.bfloat16)
    c = torch.randint(-(1 << 31), 1 << 31, (2, 3, 9, 5), generator=generator).to(torch.int32).view(torch.float32)
    want = mma(a, b, c)
    x, y = a[..., :, None, :], b[..., None, :, :]
    steps = fused_sum(x[..., :16], y[..., :16], c)
    assert codes(fused_sum(x[..., 16:], y[..., 16:], steps)) == codes(want)
    assert codes(mma(a.float(), b.float(), c)) == codes(want)
    for limit in (1, 7, 12, 50):
        monkeypatch.setattr(tensor_core, "CPU_BLOCK_SUMS", limit)
        assert codes(mma(a, b, c)) == codes(want)


@pytest.mark.parametrize("name", FORMS)
def test_no_accumulator_is_zero(name):
    a = torch.ones(2, 64).to(FORMS[name].source)
    assert mma(a, a, None, name).tolist() == [[64.0, 64.0]] * 2


def test_empty_extents():
    a, b = torch.zeros(0, 16, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.bfloat16)
    assert mma(a, b).shape == (0, 4)
    assert codes(mma(b[:, :0], b[:, :0], torch.full((4, 4), -0.0))) == [[0] * 4] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"form": "tf32"}, "form: got 'tf32', need one of bf16", id="form"),
        pytest.param({"a": torch.zeros(2, 16, dtype=torch.float16)}, "a: got torch.float16", id="dtype"),
        pytest.param({"a": torch.full((2, 16), 1.001)}, "a: has values that torch.bfloat16 does not hold", id="values"),
        pytest.param({"b": torch.zeros(2, 32, dtype=torch.bfloat16)}, "b: got K = 32, a has K = 16", id="depth"),
        pytest.param(
            {"c": torch.zeros(2, 2, dtype=torch.float16)}, "c: got torch.float16, need torch.float32", id="c-dtype"
        ),
        pytest.param({"c": torch.zeros(2, 3)}, r"c: got shape \(2, 3\), need \(2, 2\)", id="c-shape"),
        pytest.param({"k_order": torch.zeros(1, 8, dtype=torch.int64)}, "k_order: got shape", id="k-order"),
    ],
)
def test_refuses(change, message):
    arguments = {"a": torch.zeros(2, 16, dtype=torch.bfloat16), "b": torch.zeros(2, 16, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=message):
        mma(**(arguments | change))


def test_refuses_a_ragged_depth():
    a = torch.zeros(2, 24, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a: got K = 24, need a multiple of 16"):
        mma(a, a)


def test_fused_sum_refuses():
    a = torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"operand: got torch\.float32"):
        fused_sum(a, a, torch.zeros(2))
    with pytest.raises(ValueError, match="c: got shape"):
        fused_sum(a.bfloat16(), a.bfloat16(), torch.zeros(3))


def hardware(form: str) -> list[Tensor]:
    """a, b, c, d of a form as the H200 had them."""
    dtypes = (FORMS[form].source, FORMS[form].source, FORMS[form].accumulator, FORMS[form].accumulator)
    with safe_open(HARDWARE, "pt") as file:
        return [file.get_tensor(f"{form}/{x}").view(dtype) for x, dtype in zip("abcd", dtypes, strict=True)]


def test_hardware_sample_says_what_it_is():
    with safe_open(HARDWARE, "pt") as file:
        note = json.loads(file.metadata()["mma_h200"])
        assert sorted(file.keys()) == sorted(f"{form}/{x}" for form in note["forms"] for x in "abcd")
    assert note["device"] == "NVIDIA H200"


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp16_acc16", "e4m3"])
def test_equals_the_hardware_sample(form):
    a, b, c, d = hardware(form)
    assert d.shape == (16, 16, 8)
    assert codes(mma(a, b, c, form)) == codes(d)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"fraction_bits": 24}, id="24-bits"),
        pytest.param({"fraction_bits": 26}, id="26-bits"),
        pytest.param({"result_bits": 22}, id="result-of-22-bits"),
    ],
)
@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_the_hardware_sample_refutes(form, change):
    a, b, c, d = hardware(form)
    assert codes(mma(a, b, c, dataclasses.replace(FORMS[form], **change))) != codes(d)
