"""fp32 arithmetic with one rounding, against exact rational numbers."""

import itertools
import math
import subprocess
import sys
import timeit
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.numerics import ieee
from reference.numerics.formats import canonical_nan
from reference.numerics.order import chain_matmul

SPECIALS = Path(__file__).parent / "data" / "h200_specials.txt"
INF = 0x7F800000
EPS = 2.0**-23
few = settings(derandomize=True, max_examples=300)
finite = st.integers(0, 0xFFFFFFFF).filter(lambda code: code & 0x7FFFFFFF < INF)


def tensor(*patterns: int) -> Tensor:
    """fp32 [n] of bit patterns."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def pattern(x: Tensor) -> int:
    """The bits of one fp32."""
    return int(x.view(torch.int32)) & 0xFFFFFFFF


def exactly(code: int) -> Fraction:
    """The value of a finite pattern."""
    return Fraction(tensor(code).item())


def nearest(value: Fraction, negative_zero: bool = False) -> int:
    """The pattern of the fp32 nearest to ``value``, ties to even: integer arithmetic, none of the code under test."""
    sign = 1 << 31 if value < 0 or (value == 0 and negative_zero) else 0
    value = abs(value)
    if value == 0:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    quantum = max(exponent, -126) - 23
    count = round(value / Fraction(2) ** quantum)  # Python rounds halves to even
    # A normal number's count holds the hidden bit, which adds 1 to the exponent field.
    return sign | min(INF, count + ((max(exponent, -126) + 126) << 23))


def fma_exactly(a: int, b: int, c: int) -> int:
    """The pattern of a · b + c rounded once."""
    negative = (a ^ b) >> 31 == 1 and c >> 31 == 1
    return nearest(exactly(a) * exactly(b) + exactly(c), negative)


def adversarial(count: int) -> list[Tensor]:
    """a, b, c [count] of fma's hard cases: c near a power of two times a product whose tail lies about a midpoint."""
    random = np.random.Generator(np.random.Philox(5))
    near_one = random.choice([0, 1, 2, 3, (1 << 23) - 1, (1 << 23) - 2, 1 << 22], (3, count))
    exponents = np.stack([random.integers(90, 140, count), random.integers(90, 140, count), np.zeros(count, int)])
    exponents[2] = exponents[0] + exponents[1] - 127 + random.integers(-27, 28, count)
    exponents -= random.choice([0, 0, 60, 105], count)  # some results become subnormal
    signs = random.integers(0, 2, (3, count)) << 31
    codes = signs | (exponents.clip(0, 254) << 23) | near_one
    return [tensor(*row) for row in codes.tolist()]


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((1 + EPS) / 4096, (1 - EPS) / 4096, 1 + EPS),  # product just below a midpoint that the fp64 sum rounds to
        (-(1 + EPS) / 4096, (1 - EPS) / 4096, 1 + EPS),
        ((1 + EPS) * 2.0**-75, (1 - EPS) * 2.0**-75, 2.0**-126 + 2.0**-149),  # the same at the subnormals' end
        ((1 + EPS) * 2.0**-75, (1 - EPS) * 2.0**-75, 3 * 2.0**-149),
        ((1 + EPS) * 2.0**-76, 1 + EPS, 2.0**-149),
        ((2 - EPS) * 2.0**63, (2 - EPS) * 2.0**63, 2.0**105),  # about the overflow threshold
    ],
)
def test_fma_where_rounding_twice_is_wrong(a, b, c):
    operands = [torch.tensor([x], dtype=torch.float32) for x in (a, b, c)]
    assert pattern(ieee.fma_rn(*operands)) == fma_exactly(*[pattern(x) for x in operands])


def test_the_naive_fma_is_wrong_where_this_one_is_right():
    """c = 1 + 2^-23, a = (1 + 2^-23)/4096, b = (1 − 2^-23)/4096: fp64, then fp32, goes up."""
    a, b, c = (torch.tensor([x]) for x in ((1 + EPS) / 4096, (1 - EPS) / 4096, 1 + EPS))
    naive = (a.to(torch.float64) * b.to(torch.float64) + c.to(torch.float64)).to(torch.float32)
    assert (pattern(ieee.fma_rn(a, b, c)), pattern(naive)) == (0x3F800001, 0x3F800002)


def test_fma_hard_cases():
    a, b, c = adversarial(8000)
    got = ieee.fma_rn(a, b, c).view(torch.int32).tolist()
    codes = ([pattern(x) for x in operand] for operand in (a, b, c))
    wrong = [
        row for row, bits in zip(zip(*codes, strict=True), got, strict=True) if bits & 0xFFFFFFFF != fma_exactly(*row)
    ]
    assert wrong == []


@given(finite, finite, finite)
@few
@example(0x00000001, 0x3F000000, 0x00000000)  # a tie below the smallest subnormal
@example(0x00000003, 0x3F000000, 0x80000001)
@example(0x3F800000, 0x3F800000, 0xBF800000)
@example(0x80000000, 0x3F800000, 0x80000000)
def test_fma_of_any_numbers(a, b, c):
    assert pattern(ieee.fma_rn(tensor(a), tensor(b), tensor(c))) == fma_exactly(a, b, c)


@given(finite, finite)
@few
@example(0x00800001, 0x00800000)
@example(0x7F7FFFFF, 0x73000000)  # half a unit of the largest: overflows
@example(0x7F7FFFFF, 0x72FFFFFF)
@example(0x00000001, 0x3F000000)
def test_two_operands(a, b):
    x, y = exactly(a), exactly(b)
    both_negative, opposite = a >> 31 == 1 and b >> 31 == 1, (a ^ b) >> 31 == 1
    assert pattern(ieee.add_rn(tensor(a), tensor(b))) == nearest(x + y, both_negative)
    assert pattern(ieee.sub_rn(tensor(a), tensor(b))) == nearest(x - y, a >> 31 == 1 and b >> 31 == 0)
    assert pattern(ieee.mul_rn(tensor(a), tensor(b))) == nearest(x * y, opposite)
    if y:
        assert pattern(ieee.div_rn(tensor(a), tensor(b))) == nearest(x / y, opposite)


@given(finite.filter(lambda code: code & 0x7FFFFFFF))
@few
@example(0x00000001)
@example(0x007FFFFF)
@example(0x7E800001)
@example(0xFF7FFFFF)
def test_rcp_rn(a):
    assert pattern(ieee.rcp_rn(tensor(a))) == nearest(1 / exactly(a))


@given(st.integers(0, INF - 1))
@few
@example(0x00000001)
@example(697142)  # here, and at one significand in 200, torch's own fp32 root may be an ULP off
@example(0x3F7FFFFF)
def test_sqrt_rn(a):
    """Nearest: the midpoints around it squared lie on either side of a (none is a root of an fp32)."""
    value, code = exactly(a), pattern(ieee.sqrt_rn(tensor(a)))
    root, above = exactly(code), exactly(code + 1)
    assert value <= ((root + above) / 2) ** 2
    assert code == 0 or ((root + exactly(code - 1)) / 2) ** 2 <= value


def test_sqrt_rn_of_every_significand():
    """Against numpy, which uses the CPU's instruction."""
    x = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32).view(torch.float32)
    assert torch.equal(ieee.sqrt_rn(x), torch.from_numpy(np.sqrt(x.numpy())))


@given(st.lists(finite, min_size=3, max_size=3), st.integers(0, 30))
@few
def test_fma_of_a_product_that_cancels(codes, shift):
    """c is the negated product rounded, moved by a few units: the result is the product's tail."""
    a, b, _ = codes
    c = (pattern(tensor(a) * tensor(b)) ^ (1 << 31)) + shift - 15
    if not 0 <= c < 1 << 32 or c & 0x7FFFFFFF >= INF:
        return
    assert pattern(ieee.fma_rn(tensor(a), tensor(b), tensor(c))) == fma_exactly(a, b, c)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", ieee.add_rn),
        ("sub", ieee.sub_rn),
        ("mul", ieee.mul_rn),
        ("div", ieee.div_rn),
        ("max", ieee.max_f32),
        ("rcp_rn", ieee.rcp_rn),
    ],
)
def test_special_values_of_the_hardware(name, function):
    lines = dict(line.split(" ", 1) for line in SPECIALS.read_text().splitlines())
    pairs = [entry.split(":") for entry in lines[name].split()]
    operands = zip(*([int(code, 16) for code in given.split(",")] for given, _ in pairs), strict=True)
    got = canonical_nan(function(*[tensor(*codes) for codes in operands]))
    assert [pattern(x) for x in got] == [int(want, 16) for _, want in pairs]


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (math.inf, 0.0, 1.0, math.nan),
        (math.inf, 1.0, -math.inf, math.nan),
        (math.nan, 1.0, 1.0, math.nan),
        (math.inf, -1.0, 1.0, -math.inf),
        (2.0**100, 2.0**100, -math.inf, -math.inf),
        (2.0**100, 2.0**100, -(2.0**127), math.inf),
        (2.0**100, 2.0**28, -(2.0**127), 2.0**127),  # the product overflows, the sum does not
        (1.0, -1.0, 1.0, 0.0),
        (-0.0, 1.0, -0.0, -0.0),
        (-0.0, 1.0, 0.0, 0.0),
    ],
)
def test_fma_special_values(a, b, c, want):
    got = ieee.fma_rn(*[torch.tensor([x]) for x in (a, b, c)])
    assert pattern(canonical_nan(got)) == pattern(canonical_nan(torch.tensor([want])))


def test_fma_broadcasts_and_keeps_shapes():
    a, b, c = torch.randn(3, 1, generator=torch.Generator().manual_seed(1)), torch.ones(1, 4), torch.tensor(0.5)
    assert torch.equal(ieee.fma_rn(a, b, c), (a + 0.5).expand(3, 4))
    assert ieee.fma_rn(torch.empty(0, 3), torch.ones(3), torch.ones(3)).shape == (0, 3)
    assert ieee.fma_rn(c, c, c).shape == ()


def test_fma_over_several_blocks():
    """The blocks' seams do not show, and a hard case in one block changes nothing in another."""
    count = ieee.CPU_BLOCK_ELEMS + 1000
    a, b, c = (x.repeat(count // 1000 + 1)[:count] for x in adversarial(1000))
    want = ieee.fma_rn(a[:1000], b[:1000], c[:1000]).repeat(count // 1000 + 1)[:count]
    assert torch.equal(ieee.fma_rn(a, b, c).view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (1.0, 2.0, 2.0),
        (math.nan, 1.0, 1.0),
        (1.0, math.nan, 1.0),
        (-0.0, 0.0, 0.0),
        (0.0, -0.0, 0.0),
        (-0.0, -0.0, -0.0),
        (-math.inf, math.nan, -math.inf),
        (-1.0, -0.0, -0.0),
        (2.0**-149, 0.0, 2.0**-149),
    ],
)
def test_max(a, b, want):
    got = ieee.max_f32(torch.tensor([a]), torch.tensor([b]))
    assert pattern(got) == pattern(torch.tensor([want]))


def test_max_of_two_nans_is_nan():
    assert bool(ieee.max_f32(tensor(0x7FC00000), tensor(0xFFC00001)).isnan())


def test_flushed_subnormals_are_refused():
    ieee.require_subnormals()
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush subnormals: the refusal is untested")
    try:
        with pytest.raises(RuntimeError, match=r"flushes subnormal .* torch\.set_flush_denormal\(False\)"):
            ieee.require_subnormals()
    finally:
        torch.set_flush_denormal(False)
    ieee.require_subnormals()


FLUSHING_WORKER = """
import torch
from goldens import KERNELS
from reference.numerics.ieee import require_subnormals

def refused(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as error:
        assert "flushes subnormal numbers" in str(error) and "torch.set_num_threads(1)" in str(error), error
        return True
    return False

def halved():
    return (torch.full((1 << 17,), 2.0**-126) * 0.5).view(torch.int32)

torch.set_num_threads({threads})
torch.set_flush_denormal(True)
halved()  # starts torch's threads
torch.set_flush_denormal(False)
assert halved()[0] == 1 << 22 and (halved() == 0).sum() == (1 << 17) * ({threads} - 1) // {threads}
assert refused(require_subnormals)
for kernel in KERNELS.values():
    case = kernel.cases[0]
    inputs = kernel.inputs(case)
    assert refused(kernel.reference.model, inputs, case.params), kernel.name
    assert refused(kernel.reference.model, inputs, case.params, torch.float64), kernel.name
    for schedule in kernel.reference.SCHEDULES:
        assert refused(kernel.reference.exact, inputs, case.params, schedule), (kernel.name, schedule)
torch.set_num_threads(1)
require_subnormals()
assert (halved() == 1 << 22).all()
"""


@pytest.mark.parametrize("threads", [2, 4])
def test_flushing_in_another_thread_is_refused_by_all_that_is_exact(threads):
    """A mode is a thread's own: after the remedy for the calling one, all shares but the first came out as 0."""
    program = FLUSHING_WORKER.format(threads=threads)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr


def test_looking_for_flushed_subnormals_costs_little():
    """Each model and exact call looks: below a millisecond, where the shortest takes several."""
    best = min(timeit.repeat(ieee.require_subnormals, number=10, repeat=20)) / 10
    assert best < 1e-3


def loop_of_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``chain_matmul`` as a loop over k."""
    for k in range(a.shape[-1]):
        c = ieee.fma_rn(a[:, :, k, None], b[:, None, k, :], c)
    return c


def ordinary(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiny(shape: tuple[int, ...], seed: int) -> Tensor:
    return ordinary(shape, seed) * 2.0**-70


def trap(shape: tuple[int, ...], seed: int) -> Tensor:
    """(1 ± a few 2^-23) / 4096: products whose tails lie about midpoints of sums near 1."""
    steps = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return (1 + steps * EPS) / 4096


@pytest.mark.parametrize("values", [ordinary, tiny, trap])
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"), [(1, 1, 1, 1), (2, 5, 7, 9), (1, 300, 257, 4), (3, 4, 5, 0), (0, 2, 2, 2)]
)
def test_chain_matmul_is_a_loop_of_fma(values: Callable, batch, m, n, k):
    a, b, c = values((batch, m, k), 1), values((batch, k, n), 2), 1 + EPS * ordinary((batch, m, n), 3).round()
    for start in (c, None):
        want = loop_of_fma(a, b, torch.zeros_like(c) if start is None else start)
        assert torch.equal(chain_matmul(a, b, start).view(torch.int32), want.view(torch.int32))


def test_chain_matmul_leaves_its_operands():
    a, b, c = ordinary((1, 2, 3), 1), ordinary((1, 3, 4), 2), ordinary((1, 2, 4), 3)
    before = [x.clone() for x in (a, b, c)]
    chain_matmul(a, b, c)
    assert all(torch.equal(x, y) for x, y in zip(before, (a, b, c), strict=True))


def test_nearest_agrees_with_torch():
    """The tests' own rounding, against fp64 to fp32 conversion of ties, neighbours and subnormals."""
    exponents, steps = (-150, -149, -140, -127, -126, 0, 127), (0, 1, 3, (1 << 24) - 1)
    for exponent, step, tail in itertools.product(exponents, steps, (-1, 0, 1)):
        value = Fraction(2) ** (exponent - 24) * ((1 << 24) + step) + tail * Fraction(2) ** (exponent - 50)
        assert Fraction(float(value)) == value
        assert nearest(value) == pattern(torch.tensor([float(value)], dtype=torch.float64).to(torch.float32))
