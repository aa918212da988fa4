"""Portable sums, products, exponentials and logarithms: their stated accuracy, and bits that depend on nothing else."""

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch
from torch import Tensor

from reference.numerics import portable, ulp

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spread(count: int, low: float, high: float, seed: int = 0) -> Tensor:
    """fp64 of random signs and exponents in low … high."""
    generator = torch.Generator().manual_seed(seed)
    exponent = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return sign * 2.0**exponent


def ulps(function: Callable, got: Tensor, x: Tensor) -> float:
    """The largest error against mpmath in ULPs of ``got``'s format."""
    worst = 0.0
    precision = 24 if got.dtype == torch.float32 else 53
    lowest = -126 if got.dtype == torch.float32 else -1022
    with mpmath.workprec(160):
        for value, result in zip(x.tolist(), got.tolist(), strict=True):
            exact = function(mpmath.mpf(value))
            exponent = max(int(mpmath.floor(mpmath.log(abs(exact), 2))), lowest) if exact else lowest
            worst = max(worst, float(abs(exact - result) / mpmath.mpf(2) ** (exponent - precision + 1)))
    return worst


EXP_RANGES = {"small": (-60, -1), "ordinary": (-1, 6), "to-the-ends": (6, 9.4)}
EXP_ULPS = {torch.float32: 0.5 + 2.0**-27, torch.float64: 2.0}
LOG_ULPS = {torch.float32: 0.5 + 2.0**-26, torch.float64: 3.0}


@pytest.mark.parametrize("span", EXP_RANGES)
@both_dtypes
def test_exp_accuracy(dtype, span):
    x = spread(1500, *EXP_RANGES[span]).to(dtype)
    got = portable.exp(x)
    finite = got.isfinite()
    assert ulps(mpmath.exp, got[finite], x[finite]) <= EXP_ULPS[dtype]


@pytest.mark.parametrize("span", [(-1074, -1000), (-149, -120), (-30, 30), (-0.001, 0.001), (900, 1023.9)], ids=str)
@both_dtypes
def test_log_accuracy(dtype, span):
    x = spread(1500, *span).abs().to(dtype)
    x = x[(x > 0) & x.isfinite() & (x != 1)]
    got = portable.log(x)
    assert len(x) == 0 or ulps(mpmath.log, got, x) <= LOG_ULPS[dtype]


@pytest.mark.parametrize(
    ("function", "x", "want"),
    [
        (portable.exp, 0.0, 1.0),
        (portable.exp, -0.0, 1.0),
        (portable.exp, math.inf, math.inf),
        (portable.exp, -math.inf, 0.0),
        (portable.exp, 1e30, math.inf),
        (portable.exp, -1e30, 0.0),
        (portable.log, 1.0, 0.0),
        (portable.log, 0.0, -math.inf),
        (portable.log, -0.0, -math.inf),
        (portable.log, math.inf, math.inf),
    ],
)
@both_dtypes
def test_special_values(dtype, function, x, want):
    assert function(torch.tensor([x], dtype=dtype)).tolist() == [want]


@pytest.mark.parametrize(("function", "x"), [(portable.exp, math.nan), (portable.log, math.nan), (portable.log, -1.0)])
@both_dtypes
def test_nan(dtype, function, x):
    assert function(torch.tensor([x], dtype=dtype)).isnan().all()


@pytest.mark.parametrize("function", [portable.exp, portable.log])
@both_dtypes
def test_slices_have_the_bits_of_the_whole(dtype, function):
    """15 elements or 16, with vector loops or their remainders, strided: each element alone decides its result."""
    x = normal(257, dtype=dtype).abs()
    whole = function(x)
    for part in (slice(0, 15), slice(0, 16), slice(1, 16), slice(3, 250), slice(0, None, 3), slice(100, 101)):
        assert torch.equal(function(x[part]), whole[part])
    assert torch.equal(function(x[:256].view(16, 16).t()), whole[:256].view(16, 16).t())
    assert function(x[:0]).shape == (0,)
    assert torch.equal(function(x[0]), whole[0])


@both_dtypes
def test_one_thread_or_two(dtype):
    x, a, b = normal(70_000, dtype=dtype), normal(90, 65, dtype=dtype), normal(65, 800, seed=1, dtype=dtype)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            results.append([portable.exp(x), portable.log(x.abs()), portable.total(x), portable.matmul(a, b)])
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 15, 16, 17, 1000])
@both_dtypes
def test_total(dtype, count):
    """Within the stated bound of the exact sum, and in the stated order."""
    x = normal(count, dtype=dtype) * 10.0 ** normal(count, seed=1, dtype=dtype)
    got = portable.total(x)
    exact = sum((Fraction(v) for v in x.tolist()), Fraction(0))
    bound = math.ceil(math.log2(max(count, 1))) * UNIT[dtype] * sum(abs(v) for v in x.tolist())
    assert abs(Fraction(got.item()) - exact) <= Fraction(bound)
    values = list(x)
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[half + i] for i in range(half)] + values[2 * half :]
    assert got.item() == (values[0].item() if values else 0.0)


def test_total_along_a_dimension():
    x = normal(3, 17, 5)
    want = torch.stack([torch.stack([portable.total(x[i, :, j]) for j in range(5)]) for i in range(3)])
    assert torch.equal(portable.total(x, dim=1), want)
    assert torch.equal(portable.total(x.transpose(1, 2)), want)
    assert torch.equal(portable.total(x[:, :0], dim=1), torch.zeros(3, 5, dtype=torch.float64))


@both_dtypes
def test_matmul(dtype):
    """Within the stated bound, and the bits of a loop over k with product and sum rounded apart."""
    a, b = normal(33, 70, dtype=dtype), normal(70, 41, seed=1, dtype=dtype)
    got = portable.matmul(a, b)
    want = torch.zeros(33, 41, dtype=dtype)
    for k in range(70):
        product = a[:, k, None] * b[k]
        want = want + product
    assert torch.equal(got, want)
    row = [[Fraction(v) for v in line] for line in a[:3].tolist()]
    column = [[Fraction(v) for v in line] for line in b.t().tolist()]
    for i, j in ((0, 0), (1, 20), (2, 40)):
        terms = [x * y for x, y in zip(row[i], column[j], strict=True)]
        assert abs(Fraction(got[i, j].item()) - sum(terms)) <= Fraction(71 * UNIT[dtype]) * sum(map(abs, terms))


def test_matmul_does_not_depend_on_its_other_rows_and_columns():
    a, b = normal(40, 33, dtype=torch.float32), normal(33, 5000, seed=1, dtype=torch.float32)
    whole = portable.matmul(a, b)
    assert torch.equal(portable.matmul(a[7:9], b[:, 15:31]), whole[7:9, 15:31])
    assert torch.equal(portable.matmul(a.t().contiguous().t(), b), whole)
    assert portable.matmul(a[:0], b).shape == (0, 5000)
    assert torch.equal(portable.matmul(a[:, :0], b[:0]), torch.zeros(40, 5000))


@both_dtypes
def test_matmul_leaves_out_what_is_not_kept(dtype):
    """A product that is not kept may hold NaN or inf; what is kept adds up as if it were alone."""
    a, b = normal(20, 12, dtype=dtype), normal(12, 9, seed=1, dtype=dtype)
    keep = normal(20, 12, seed=2) > 0
    keep[:, 5] = False
    keep[3] = False
    want = portable.matmul(torch.where(keep, a, 0.0), b)
    poisoned = b.clone()
    poisoned[5] = torch.nan
    got = portable.matmul(torch.where(keep, a, torch.inf), poisoned, keep)
    assert torch.equal(got, want)
    assert torch.equal(got[3], torch.zeros(9, dtype=dtype))


def test_ulp_measure_of_these_tests():
    """The yardstick itself: a neighbour of the right result is between ½ and 1½ ULP away."""
    x = normal(50).to(torch.float32)
    right = portable.exp(x)
    beside = (right.view(torch.int32) + 1).view(torch.float32)
    assert ulp.distance(right, beside).max().item() == 1
    assert 0.5 <= ulps(mpmath.exp, beside, x) <= 1.5
