"""Conversions of fp32 to bf16, fp16 and e4m3: every code, every tie and its neighbours, the H200's special values."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.numerics import formats
from reference.numerics.formats import BF16, E4M3, FP16, Format, encode

SPECIALS = Path(__file__).parent / "data" / "h200_specials.txt"
FORMATS = [BF16, FP16, E4M3]
ML_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn}
by_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def codes(x: Tensor) -> Tensor:
    """Bit patterns of a narrow tensor, int64, not negative."""
    width = 8 * x.dtype.itemsize
    return x.view(torch.uint8 if width == 8 else torch.int16).to(torch.int64) & ((1 << width) - 1)


def fp32(patterns: Tensor) -> Tensor:
    """fp32 of int64 bit patterns."""
    return patterns.to(torch.int32).view(torch.float32)


def magnitudes(form: Format) -> Tensor:
    """fp64 values of the codes 0 … top + 1, by the format's definition; above the largest, the grid's next."""
    code = torch.arange(form.top + 2)
    field, fraction = code >> form.mantissa_bits, code & ((1 << form.mantissa_bits) - 1)
    significand = torch.where(field == 0, fraction, fraction + (1 << form.mantissa_bits))
    exponent = field.clamp(min=1) - form.bias - form.mantissa_bits
    return torch.ldexp(significand.to(torch.float64), exponent)


def finite_codes(form: Format) -> int:
    """How many codes from 0 up are finite numbers."""
    return form.top + 1 if form is E4M3 else form.top


@by_format
def test_decode_every_code(form):
    """Widening is exact, and the format's NaNs and infinities are where they should be."""
    count = 1 << form.bits
    decoded = torch.arange(count).to(form.integer).view(form.dtype).to(torch.float32).to(torch.float64)
    magnitude = magnitudes(form)[: finite_codes(form)]
    half = count // 2
    for sign, part in ((1.0, decoded[:half]), (-1.0, decoded[half:])):
        assert torch.equal(part[: len(magnitude)], sign * magnitude)
        assert torch.equal(part[: len(magnitude)].signbit(), torch.full((len(magnitude),), sign < 0))
        rest = part[len(magnitude) :]
        if form is not E4M3:
            assert rest[0] == sign * torch.inf
            rest = rest[1:]
        assert bool(rest.isnan().all())
        assert len(rest) > 0


@by_format
def test_every_code_comes_back(form):
    code = torch.arange(1 << form.bits)
    wide = code.to(form.integer).view(form.dtype).to(torch.float32)
    want = torch.where(wide.isnan(), form.nan, code)
    assert torch.equal(codes(encode(wide, form)), want)


@by_format
@pytest.mark.parametrize("sign", [0, 1], ids=["positive", "negative"])
def test_every_tie_and_its_neighbours(form, sign):
    """Between two codes the tie goes to the even one, the fp32 numbers next to it to the nearer one."""
    value = magnitudes(form)
    low = torch.arange(finite_codes(form))
    tie = ((value[:-1] + value[1:]) / 2)[: len(low)]
    bits = tie.to(torch.float32).view(torch.int32).to(torch.int64)
    assert torch.equal(fp32(bits).to(torch.float64), tie)  # every tie is an fp32 number
    negative = sign << (form.bits - 1)
    for step, want in ((-1, low), (0, low + (low & 1)), (1, low + 1)):
        got = codes(encode(fp32((bits + step) | (sign << 31)), form))
        assert torch.equal(got, want.clamp(max=form.top) | negative)


@by_format
def test_against_ml_dtypes(form):
    """Every upper half of an fp32 with the lower halves that matter. To e4m3 ml_dtypes does not saturate; we must."""
    upper = torch.arange(1 << 16) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = fp32((upper[:, None] | lower).flatten())
    x = x[~x.isnan()]
    with np.errstate(over="ignore"):
        theirs = x.numpy().astype(ML_DTYPES[form.name])
    integer = np.uint8 if form is E4M3 else np.uint16
    want = torch.from_numpy(theirs.view(integer).astype(np.int64))
    if form is E4M3:
        saturated = x.abs() > 464.0
        assert bool(((want & 0x7F) == 0x7F)[saturated].all())
        want = torch.where(saturated, 0x7E | (want & 0x80), want)
    assert torch.equal(codes(encode(x, form)), want)


@by_format
def test_special_values_of_the_hardware(form):
    lines = dict(line.split(" ", 1) for line in SPECIALS.read_text().splitlines())
    pairs = [[int(code, 16) for code in entry.split(":")] for entry in lines[form.name].split()]
    inputs, want = torch.tensor(pairs).unbind(1)
    assert codes(encode(fp32(inputs), form)).tolist() == want.tolist()


@given(st.integers(0, (1 << 32) - 1))
@settings(derandomize=True, max_examples=200)
@example(0x7F7FFFFF)
@example(0x00000001)
@example(0xFFFFFFFF)
def test_any_bits(pattern):
    """The result is a nearest number of the format: no other code is nearer."""
    x = fp32(torch.tensor([pattern]))
    for form in FORMATS:
        code = int(codes(encode(x, form)))
        if pattern & 0x7FFFFFFF > 0x7F800000:
            assert code == form.nan
            continue
        assert code >> (form.bits - 1) == pattern >> 31
        code &= (1 << (form.bits - 1)) - 1
        value = magnitudes(form)
        reach = x.abs().to(torch.float64).clamp(max=value[form.top])
        assert abs(value[code] - reach) == (value[: form.top + 1] - reach).abs().min()


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (448.0, 0x7E),
        (464.0, 0x7E),
        (464.0001, 0x7E),
        (465.0, 0x7E),
        (1000.0, 0x7E),
        (float("inf"), 0x7E),
        (-1000.0, 0xFE),
        (float("nan"), 0x7F),
        (1.0625 + 2.0**-10, 0x39),
        (2.0**-10, 0x00),
        (1.001 * 2.0**-10, 0x01),
        (-(2.0**-11), 0x80),
        (-0.0, 0x80),
    ],
)
def test_to_e4m3(x, code):
    assert codes(formats.to_e4m3(torch.tensor([x]))).tolist() == [code]


@pytest.mark.parametrize(("x", "code"), [(1.0625 + 2.0**-10, 0x38), (1.001 * 2.0**-10, 0x00)])
def test_through_bf16_rounds_twice(x, code):
    """What a kernel that rounds to bf16 first gives; ``test_to_e4m3`` has the direct codes."""
    narrow = formats.to_bf16(torch.tensor([x])).to(torch.float32)
    assert codes(formats.to_e4m3(narrow)).tolist() == [code]


def test_dividing_is_not_multiplying_by_the_reciprocal():
    x, scale = torch.tensor([0.1708984375]), torch.tensor([7.0])
    assert codes(formats.to_e4m3(x / scale)).tolist() == [0x0C]
    assert codes(formats.to_e4m3(x * (torch.ones(1) / scale))).tolist() == [0x0D]


@pytest.mark.parametrize("count", [1, 7, 64, 4099])
@by_format
def test_nan_has_one_code_on_every_code_path(form, count):
    """Vector loops and their remainders, quiet, signalling and negative NaNs."""
    patterns = torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0xFFFFFFFF]).repeat(count)[:count]
    assert set(codes(encode(fp32(patterns), form)).tolist()) == {form.nan}


@by_format
def test_shapes_and_strides(form):
    x = torch.linspace(-3.0, 3.0, 24).view(4, 6)
    want = codes(encode(x, form))
    assert torch.equal(codes(encode(x.t(), form).contiguous()), want.t())
    assert torch.equal(codes(encode(x[:, ::2], form).contiguous()), want[:, ::2])
    assert encode(torch.tensor(1.5), form).shape == ()
    assert encode(torch.empty(3, 0), form).shape == (3, 0)


@by_format
def test_other_dtypes_are_refused(form):
    with pytest.raises(ValueError, match=rf"x: got torch\.float64, a conversion to {form.name} takes torch\.float32"):
        encode(torch.ones(1, dtype=torch.float64), form)


def test_canonical_nan():
    patterns = torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001])
    got = formats.canonical_nan(fp32(patterns)).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    assert got.tolist() == [formats.FP32_NAN] * 3 + patterns[3:].tolist()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (1e-6, 0x358637BD),
        (1e-5, 0x3727C5AC),
        (np.float64(1e-6), 0x358637BD),
        (0, 0x00000000),
        (-0.0, 0x80000000),
        (1, 0x3F800000),
        (1 + 2.0**-24, 0x3F800000),
        (1 + 2.0**-24 + 2.0**-40, 0x3F800001),
        (1 + 3 * 2.0**-24, 0x3F800002),
        (2.0**-149, 0x00000001),
        (2.0**-150, 0x00000000),
        (-(2**127), 0xFF000000),
        (torch.finfo(torch.float32).max, 0x7F7FFFFF),
    ],
)
def test_parameters_are_rounded_to_the_nearest_fp32_number(given, want):
    number = formats.fp32_number("eps", given)
    assert isinstance(number, float)
    assert torch.tensor(number, dtype=torch.float64).to(torch.float32).view(torch.int32).item() & 0xFFFFFFFF == want
    assert torch.tensor(number, dtype=torch.float32).to(torch.float64).item() == number


@pytest.mark.parametrize(
    "given", [float("nan"), float("inf"), -float("inf"), 1e39, -(10**400), True, None, "1e-6", 1j, torch.tensor(1.0)]
)
def test_what_is_no_fp32_number_is_refused(given):
    with pytest.raises(ValueError, match=r"eps: got .*, allowed is a finite number of at most 3\.4"):
        formats.fp32_number("eps", given)
