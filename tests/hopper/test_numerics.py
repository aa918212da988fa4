"""Scalar arithmetic of an sm_90 GPU against ``reference.numerics``, bit for bit.

Instructions with one operand meet all 2^32 inputs; fma meets 1.25 · 10^9 triples, most of them near ties, underflow or
cancellation; the others 2 · 10^8 pairs each. The model runs on the GPU, and a last group of tests ties it to the
model on the CPU. A failure lists the first differing elements in hex.
"""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_impl import probes
from reference.numerics import formats, ieee, mufu, order, portable
from reference.numerics.formats import BF16, E4M3, FP16, canonical_nan
from tools import mufu as tool

pytestmark = pytest.mark.hopper

CHUNK = 1 << 27
RANDOM_CHUNK = 50_000_000
FMA_CHUNKS = 5  # of each class
SHOWN = 10

UNARY = {
    "ex2": mufu.ex2_approx_ftz,
    "rcp": mufu.rcp_approx_ftz,
    "rsqrt": mufu.rsqrt_approx,
    "rsqrt_ftz": mufu.rsqrt_approx_ftz,
    "lg2": mufu.lg2_approx_ftz,
    "tanh": mufu.tanh_approx,
    "rcp_rn": ieee.rcp_rn,
}
CONVERSIONS = {form.name: form for form in (BF16, FP16, E4M3)}
BINARY = {
    "add": ieee.add_rn,
    "sub": ieee.sub_rn,
    "mul": ieee.mul_rn,
    "div": ieee.div_rn,
    "max": ieee.max_f32,
}


def word(x: Tensor) -> Tensor:
    """Bit patterns as int32: of fp32 with NaNs made canonical, or of a narrow format's codes."""
    if x.dtype == torch.float32:
        return canonical_nan(x).view(torch.int32)
    width = 8 * x.dtype.itemsize
    return x.view(torch.uint8 if width == 8 else torch.int16).to(torch.int32) & ((1 << width) - 1)


def check(name: str, want: Tensor, *operands: Tensor) -> None:
    """The instruction gives the words ``want``."""
    got = probes.run(name, *operands).view(torch.int32)
    if torch.equal(got, want):
        return
    where = (got != want).nonzero().flatten()
    rows = torch.stack(
        [*(x.view(torch.int32)[where[:SHOWN]] for x in operands), got[where[:SHOWN]], want[where[:SHOWN]]]
    )
    lines = [" ".join(f"{code & 0xFFFFFFFF:08x}" for code in row) for row in rows.t().tolist()]
    pytest.fail(f"{name}: {len(where)} of {len(got)} differ; operands, hardware, model:\n" + "\n".join(lines))


@pytest.mark.parametrize("name", [*UNARY, *CONVERSIONS])
def test_every_input(name):
    model = UNARY.get(name) or (lambda x: formats.encode(x, CONVERSIONS[name]))
    first = torch.arange(CHUNK, dtype=torch.int32, device="cuda")
    starts = range(-(1 << 31), 1 << 31, CHUNK)
    assert len(starts) * CHUNK == 1 << 32
    for start in starts:
        x = (first + start).view(torch.float32)
        check(name, word(model(x)), x)


class Random:
    """Tensors of random fp32 patterns [n] on the GPU, from a seed."""

    def __init__(self, seed: int, count: int = RANDOM_CHUNK):
        self.count = count
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def integers(self, low: int, high: int) -> Tensor:
        """int32, uniform in low … high."""
        return torch.randint(low, high + 1, (self.count,), generator=self.generator, device="cuda").to(torch.int32)

    def bits(self) -> Tensor:
        """Any pattern."""
        return self.integers(-(1 << 31), (1 << 31) - 1).view(torch.float32)

    def of(self, exponent: Tensor, fraction: Tensor | None = None) -> Tensor:
        """Any sign, the exponent field held to 0 … 254, any fraction unless one is given."""
        fraction = self.integers(0, (1 << 23) - 1) if fraction is None else fraction
        sign = self.integers(0, 1) << 31
        return (sign | (exponent.clamp(0, 254) << 23) | fraction).view(torch.float32)

    def choice(self, values: tuple[int, ...]) -> Tensor:
        """int32, one of the values."""
        table = torch.tensor(values, dtype=torch.int32, device="cuda")
        return table.index_select(0, self.integers(0, len(values) - 1))

    def near_one(self) -> Tensor:
        """Fractions a few units from a power of two, or half way between."""
        return self.choice(
            (0, 1, 2, 3, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, (1 << 23) - 3, (1 << 23) - 2, (1 << 23) - 1)
        )


def bits(random: Random) -> list[Tensor]:
    """Any patterns, NaNs and infinities included."""
    return [random.bits() for _ in range(3)]


def close(random: Random) -> list[Tensor]:
    """c within 2^±30 of the product."""
    a, b = random.integers(70, 180), random.integers(70, 180)
    return [random.of(a), random.of(b), random.of(a + b - 127 + random.integers(-30, 30))]


def traps(random: Random) -> list[Tensor]:
    """Ties, and sums so near to one that fp64 rounds onto it."""
    a, b = random.integers(70, 180), random.integers(70, 180)
    c = a + b - 127 + random.choice((-49, -25, -24, -23, -1, 0, 1, 22, 23, 24, 25, 26, 48, 49))
    return [random.of(exponent, random.near_one()) for exponent in (a, b, c)]


def subnormal(random: Random) -> list[Tensor]:
    """Results about the smallest normal number and below, half of them from fractions that make ties."""
    a = random.integers(0, 126)
    b = 127 - a + random.integers(-50, 3)
    c = random.choice((0, 0, 0, 1, 2, 24))
    fractions = random.near_one(), random.near_one(), random.integers(0, 7)
    plain = random.integers(0, 1) - 1  # a mask: half of the triples keep any fraction
    operands = [random.of(exponent).view(torch.int32) for exponent in (a, b, c)]
    return [
        ((x & ~(plain & 0x7FFFFF)) | (f & plain)).view(torch.float32) for x, f in zip(operands, fractions, strict=True)
    ]


def cancelling(random: Random) -> list[Tensor]:
    """c is the negated product, rounded and moved by up to three units: the tail is the result."""
    a, b = (random.of(random.integers(40, 200)) for _ in range(2))
    c = (-(a * b)).view(torch.int32) + random.integers(-3, 3)
    return [a, b, c.view(torch.float32)]


FMA_CLASSES = [bits, close, traps, subnormal, cancelling]


@pytest.mark.parametrize("operands", FMA_CLASSES, ids=lambda f: f.__name__)
def test_fma(operands):
    random = Random(FMA_CLASSES.index(operands))
    for _ in range(FMA_CHUNKS):
        a, b, c = operands(random)
        check("fma", word(ieee.fma_rn(a, b, c)), a, b, c)


@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name):
    random = Random(11)
    for _ in range(2):
        a, b = random.bits(), random.bits()
        check(name, word(BINARY[name](a, b)), a, b)
        exponent = random.integers(0, 254)
        a, b = random.of(exponent), random.of(exponent + random.integers(-26, 26))
        check(name, word(BINARY[name](a, b)), a, b)


def test_measuring_again_gives_the_same_coefficients(tmp_path):
    tool.measure(tmp_path / "measured.npz")
    fitted = tool.fit(tmp_path / "measured.npz")
    assert fitted["provenance"].keys() == mufu.coefficients()["provenance"].keys()
    for name in tool.STRUCTURES:
        assert json.dumps(fitted[name]) == json.dumps(mufu.coefficients()[name])


def pair_model(function: Callable, arity: int) -> Callable[[Tensor], Tensor]:
    """An element-wise function of the first ``arity`` rows of the sample."""
    return lambda sample: function(*sample[:arity])


def matrices(sample: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 64, 200] and [1, 200, 80] of moderate values made exactly from the sample's bits."""
    steps = sample.view(torch.int32)[0, : 64 * 200 + 200 * 80] >> 8
    values = steps.to(torch.float32) * 2.0**-20
    return values[: 64 * 200].view(1, 64, 200), values[64 * 200 :].view(1, 200, 80)


def moderate(sample: Tensor) -> Tensor:
    """fp64 within ±128 made exactly from the sample's bits."""
    return sample.view(torch.int32)[0].to(torch.float64) * 2.0**-24


MODELS = {
    **{name: pair_model(function, 1) for name, function in UNARY.items()},
    **{name: pair_model(function, 2) for name, function in BINARY.items()},
    **{name: lambda sample, form=form: formats.encode(sample[0], form) for name, form in CONVERSIONS.items()},
    "fma": pair_model(ieee.fma_rn, 3),
    "sqrt": lambda sample: ieee.sqrt_rn(sample[0]),
    "chain_matmul": lambda sample: order.chain_matmul(*matrices(sample)),
    "portable.matmul": lambda sample: portable.matmul(*(x[0] for x in matrices(sample))),
    "portable.total": lambda sample: portable.total(moderate(sample)),
    "portable.exp": lambda sample: portable.exp(moderate(sample)),
    "portable.log": lambda sample: portable.log(moderate(sample).abs()),
}


@pytest.mark.parametrize("name", MODELS)
def test_cpu_and_gpu_give_the_same_bits(name):
    """The same model on the same 2^20 patterns; half of the rows' exponents are close to each other."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, (3, 1 << 20), generator=generator)
    patterns[:, ::2] = (patterns[:, ::2] & ~0x7F800000) | (((patterns[:, ::2] >> 23 & 31) + 110) << 23)
    sample = patterns.to(torch.int32).view(torch.float32)
    on_cpu, on_gpu = MODELS[name](sample), MODELS[name](sample.cuda()).cpu()
    if on_cpu.dtype == torch.float64:
        assert torch.equal(on_cpu.view(torch.int64), on_gpu.view(torch.int64))
    else:
        assert torch.equal(word(on_cpu), word(on_gpu))
