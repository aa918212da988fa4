"""Speed of the models on one CPU core: ``pytest -m benchmark_suite tests/bench``.

Rates are in ``extra_info`` of each benchmark, in million elements (products, for matrices) a second. The floors that
the suite promises are asserted with room for a busy machine: half of what a quiet core does.
"""

import math
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from goldens import compare
from reference.numerics import formats, ieee, mufu, order, tensor_core

pytestmark = pytest.mark.benchmark_suite

ELEMS = 1 << 22
COMPARED = 100_000_000


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rate(benchmark, count: int, function: Callable, *arguments, rounds: int = 8) -> float:
    """Millions of ``count`` a second, in the best round."""
    benchmark.pedantic(function, arguments, rounds=rounds, warmup_rounds=1)
    millions = count / benchmark.stats.stats.min / 1e6
    benchmark.extra_info["millions_a_second"] = round(millions, 1)
    return millions


@pytest.mark.parametrize(
    ("function", "floor"),
    [
        (mufu.ex2_approx_ftz, 20),
        (mufu.rcp_approx_ftz, 15),
        (mufu.rsqrt_approx_ftz, 12),
        (mufu.lg2_approx_ftz, 8),
        (mufu.tanh_approx, 10),
        (formats.to_bf16, 50),
        (formats.to_e4m3, 30),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_elementwise(benchmark, function, floor):
    assert rate(benchmark, ELEMS, function, normal(ELEMS).abs() * 3, rounds=40) > floor


def test_fma(benchmark):
    operands = [normal(ELEMS, seed=seed) for seed in range(3)]
    assert rate(benchmark, ELEMS, ieee.fma_rn, *operands) > 10


def test_chain_matmul(benchmark):
    a, b = normal(2, 256, 128), normal(2, 128, 256, seed=1)
    assert rate(benchmark, 2 * 256 * 256 * 128, order.chain_matmul, a, b) > 50


@pytest.mark.parametrize("form", ["bf16", "fp16", "wgmma_e4m3"])
def test_tensor_core(benchmark, form):
    dtype = tensor_core.FORMS[form].source
    a, b = normal(256, 256).to(dtype), normal(256, 256, seed=1).to(dtype)
    assert rate(benchmark, 256**3, tensor_core.mma, a, b, None, form, rounds=4) > 40


def fused_sum(a: list[float], b: list[float], c: float) -> float:
    """One output of one instruction in plain Python, as public models have it; finite operands, none of them zero."""
    exponents = [math.frexp(x)[1] + math.frexp(y)[1] - 2 for x, y in zip(a, b, strict=True)]
    largest = max([*exponents, math.frexp(c)[1] - 1 if c else -126])
    unit = tensor_core.FRACTION_BITS - largest
    total = sum(int(math.ldexp(x * y, unit)) for x, y in zip(a, b, strict=True)) + int(math.ldexp(c, unit))
    excess = max(0, abs(total).bit_length() - 24)
    cut = abs(total) >> excess << excess
    return math.ldexp(cut if total > 0 else -cut, -unit)


def test_tensor_core_element_by_element(benchmark):
    """A loop over elements, for the ratio; the bits are those of the model."""
    a, b = normal(16, 64).bfloat16(), normal(8, 64, seed=1).bfloat16()
    rows, columns = a.tolist(), b.tolist()

    def loop() -> list[list[float]]:
        out = [[0.0] * len(columns) for _ in rows]
        for k in range(0, 64, 16):
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    out[i][j] = fused_sum(row[k : k + 16], column[k : k + 16], out[i][j])
        return out

    slow = rate(benchmark, 16 * 8 * 64, loop, rounds=4)
    assert loop() == tensor_core.mma(a, b).tolist()
    large = [normal(256, 256, seed=seed).bfloat16() for seed in (2, 3)]
    start = time.perf_counter()
    tensor_core.mma(*large)
    fast = 256**3 / (time.perf_counter() - start) / 1e6
    benchmark.extra_info["times_slower"] = round(fast / slow)
    assert fast > 10 * slow


@pytest.mark.parametrize("differing", [0, 1000], ids=["equal", "1000-differ"])
def test_compare_bf16(benchmark, differing):
    """Two bf16 tensors of 10^8 elements against each other."""
    want = torch.arange(COMPARED, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got = want.clone()
    got.view(torch.int16)[: differing * 1000 : 1000] ^= 1
    verdict = benchmark.pedantic(compare.against_exact, ("O", got, want), rounds=1, warmup_rounds=0)
    assert verdict.failing == differing
    assert benchmark.stats.stats.min < 4.0
