"""Distances between bit patterns: the pairs on which comparisons have gone wrong elsewhere."""

import pytest
import torch
from torch import Tensor

from reference.numerics import formats, ulp
from reference.numerics.formats import BF16, E4M3, FP16

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = [BF16.dtype, FP16.dtype, E4M3.dtype, torch.float32]


def from_code(dtype: torch.dtype, code: int) -> Tensor:
    """A tensor [1] of a bit pattern."""
    return torch.tensor([code]).to(INTEGER[dtype.itemsize]).view(dtype)


def sorted_finite(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16 or 8 bit format from the lowest to −0, then from +0 up."""
    half = 1 << (8 * dtype.itemsize - 1)
    codes = torch.cat([torch.arange(2 * half - 1, half - 1, -1), torch.arange(half)])
    numbers = codes.to(INTEGER[dtype.itemsize]).view(dtype)
    return numbers[ulp.number_class(numbers) == ulp.FINITE]


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        (BF16.dtype, 0x0001, 0x8001, 2),
        (BF16.dtype, 0x0000, 0x8000, 0),
        (BF16.dtype, 0x7F7F, 0xFF7F, 65278),
        (BF16.dtype, 0x7F7F, 0x7F80, 1),  # largest and inf: one code apart, of different class
        (FP16.dtype, 0x7BFF, 0xFBFF, 63486),
        (E4M3.dtype, 0x7E, 0xFE, 252),
        (E4M3.dtype, 0x00, 0x80, 0),
        (E4M3.dtype, 0x01, 0x81, 2),
        (torch.float32, 0x00000001, 0x80000001, 2),
        (torch.float32, 0x7F7FFFFF, 0xFF7FFFFF, 4278190078),  # beyond 32 bits with a sign
        (torch.float32, 0x3F800000, 0x3F800001, 1),
        (torch.float32, 0x3F800000, 0x3F7FFFFF, 1),
    ],
)
def test_distance(dtype, a, b, distance):
    x, y = from_code(dtype, a), from_code(dtype, b)
    assert (ulp.distance(x, y).item(), ulp.distance(y, x).item()) == (distance, distance)
    assert ulp.distance(x, x).item() == 0


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_key_counts_the_numbers(dtype):
    """Over all finite numbers in order, the key rises by 1 each, save from −0 to +0."""
    x = sorted_finite(dtype)
    step = ulp.key(x).diff()
    middle = len(x) // 2 - 1
    assert bool((x.to(torch.float64).diff() >= 0).all())
    assert step[middle].item() == 0
    assert bool((torch.cat([step[:middle], step[middle + 1 :]]) == 1).all())


@pytest.mark.parametrize(
    ("dtype", "code", "wanted"),
    [
        (BF16.dtype, 0x7F7F, ulp.FINITE),
        (BF16.dtype, 0x7F80, ulp.INFINITE),
        (BF16.dtype, 0xFF80, ulp.INFINITE),
        (BF16.dtype, 0x7F81, ulp.NAN),
        (FP16.dtype, 0x7C00, ulp.INFINITE),
        (FP16.dtype, 0xFE00, ulp.NAN),
        (E4M3.dtype, 0x7E, ulp.FINITE),
        (E4M3.dtype, 0x7F, ulp.NAN),
        (E4M3.dtype, 0xFF, ulp.NAN),
        (torch.float32, 0x7F800000, ulp.INFINITE),
        (torch.float32, 0x7F800001, ulp.NAN),
        (torch.float32, 0x00000001, ulp.FINITE),
    ],
)
def test_number_class(dtype, code, wanted):
    assert ulp.number_class(from_code(dtype, code)).item() == wanted


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_size_is_the_gap_above(dtype):
    """At every finite number that is not below the format's subnormals, on both sides of zero."""
    x = sorted_finite(dtype).to(torch.float64)
    positive = x[len(x) // 2 :]
    gap = positive.diff()
    assert torch.equal(ulp.size(positive[:-1], dtype), gap)
    assert torch.equal(ulp.size(-positive[:-1], dtype), gap)
    assert torch.equal(ulp.size(positive[:-1] + 0.99 * gap, dtype), gap)


@pytest.mark.parametrize(
    ("x", "size"), [(1.0, 2.0**-23), (0.99, 2.0**-24), (0.0, 2.0**-149), (2.0**-140, 2.0**-149), (3e38, 2.0**104)]
)
def test_size_of_fp32(x, size):
    assert ulp.size(torch.tensor([x], dtype=torch.float64), torch.float32).item() == size


def test_a_midpoint_is_half_an_ulp_from_both_neighbours():
    """fp32 30.0625 lies between bf16 30.0 and 30.125: either is right, an absolute tolerance of 0.06 fails both."""
    exact = torch.tensor([30.0625], dtype=torch.float64)
    half = ulp.size(exact, BF16.dtype) / 2
    for neighbour in (30.0, 30.125):
        assert torch.equal((torch.tensor([neighbour]) - exact).abs(), half)
    assert formats.to_bf16(exact.to(torch.float32)).item() == 30.0  # the even one


def test_truncation_stays_within_one_ulp():
    """So distance alone does not show it: half of the elements differ, and all toward zero."""
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(3))
    cut = (x.view(torch.int32) >> 16).to(torch.int16).view(BF16.dtype)
    rounded = formats.to_bf16(x)
    assert ulp.distance(cut, rounded).max().item() == 1
    assert bool((cut.abs().to(torch.float32) <= rounded.abs().to(torch.float32)).all())
    assert (ulp.distance(cut, rounded) != 0).to(torch.float64).mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_strides_and_bits(dtype):
    x = torch.arange(12).to(INTEGER[dtype.itemsize]).view(dtype).view(3, 4)
    assert ulp.bits(x.t()).tolist() == torch.arange(12).view(3, 4).t().tolist()
    assert ulp.distance(x[:0], x[:0]).shape == (0, 4)
    assert ulp.key(x[0, 0]).shape == ()
    top = 1 << (8 * dtype.itemsize - 1)
    assert ulp.bits(from_code(dtype, top | 1)).item() == top | 1


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"x: got torch\.float64, allowed are torch\.float32"):
        ulp.bits(torch.ones(1, dtype=torch.float64))
