"""The special-function unit's model against what an H200 returned, and against the mathematics.

data/mufu_h200.safetensors holds 3,500 inputs of each function with the hardware's results: random ones, the edges of
underflow, integers for ex2, subnormals. data/h200_specials.txt holds zeros, subnormals, infinities and NaNs.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from reference.numerics import mufu
from reference.numerics.ieee import CPU_BLOCK_ELEMS
from tools import mufu as tool

DATA = Path(__file__).parent / "data"
FUNCTIONS = {
    "ex2": mufu.ex2_approx_ftz,
    "rcp": mufu.rcp_approx_ftz,
    "rsqrt": mufu.rsqrt_approx,
    "rsqrt_ftz": mufu.rsqrt_approx_ftz,
    "lg2": mufu.lg2_approx_ftz,
    "tanh": mufu.tanh_approx,
}
ONE = 0x3F800000
EXACT = {
    "ex2": torch.exp2,
    "rcp": torch.reciprocal,
    "rsqrt": lambda x: 1 / x.sqrt(),
    "lg2": torch.log2,
    "tanh": torch.tanh,
}


def evaluate(function: Callable[[Tensor], Tensor], patterns: Tensor) -> Tensor:
    """Bit patterns to bit patterns, int32."""
    return function(patterns.to(torch.int32).view(torch.float32)).view(torch.int32)


def specials(name: str) -> tuple[Tensor, Tensor]:
    """One line of the table: inputs and results as int32 patterns."""
    lines = dict(line.split(" ", 1) for line in (DATA / "h200_specials.txt").read_text().splitlines())
    pairs = [[int(code, 16) for code in entry.split(":")] for entry in lines[name].split()]
    inputs, results = torch.tensor(pairs).to(torch.int32).unbind(1)
    return inputs, results


def ulps_from_rounded(name: str, patterns: Tensor) -> Tensor:
    """The model's result minus the correctly rounded one, in ULPs, for positive results."""
    x = patterns.to(torch.int32).view(torch.float32)
    rounded = EXACT[name](x.to(torch.float64)).to(torch.float32)
    return FUNCTIONS[name](x).view(torch.int32) - rounded.view(torch.int32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name):
    inputs, results = specials(name)
    assert len(inputs) == 37
    assert evaluate(FUNCTIONS[name], inputs).tolist() == results.tolist()


@pytest.mark.parametrize("name", tool.STRUCTURES)
def test_hardware_samples(name):
    samples = load_file(DATA / "mufu_h200.safetensors")
    inputs, results = samples[f"{name}/in"], samples[f"{name}/out"]
    assert inputs.numel() == 3500
    got = evaluate(FUNCTIONS[name], inputs)
    wrong = (got != results).nonzero().flatten()[:10].tolist()
    assert [(hex(inputs[i]), hex(got[i]), hex(results[i])) for i in wrong] == []


def test_samples_say_where_they_come_from():
    with safe_open(DATA / "mufu_h200.safetensors", "pt") as file:
        (about,) = file.metadata().values()
    assert json.loads(about)["gpu"] == mufu.coefficients()["provenance"]["gpu"]


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("ex2", -1.0, 0.5),
        ("ex2", -126.0, 2.0**-126),
        ("ex2", float.fromhex("-0x1.f80002p+6"), 0.0),  # just below −126: flushed
        ("ex2", 127.0, 2.0**127),
        ("ex2", 128.0, float("inf")),
        ("rcp", -4.0, -0.25),
        ("rcp", 2.0**126, 2.0**-126),
        ("rcp", float.fromhex("0x1.000002p+126"), 0.0),
        ("rsqrt", 4.0, 0.5),
        ("rsqrt", 2.0**-148, 2.0**74),
        ("rsqrt_ftz", 2.0**-148, float("inf")),
        ("lg2", 1.0, 0.0),
        ("lg2", 0.5, float.fromhex("-0x1.fffffcp-1")),  # as on the hardware; −1 is two ULPs away
        ("lg2", 2.0**-126, float.fromhex("-0x1.f7fffep+6")),  # −126 is one ULP away
        ("tanh", 8.0, 1.0),
        ("tanh", float.fromhex("0x1.fffffep-9"), float.fromhex("0x1.fffffep-9")),
    ],
)
def test_by_hand(name, x, want):
    assert FUNCTIONS[name](torch.tensor(x)).item() == want


def test_ex2_of_a_negative_argument_is_the_ones_complement():
    """2^-f takes the fraction 1 − f less one unit, save where f is 0."""
    fractions = torch.arange(1, 1 << 23, 997, dtype=torch.int32)
    x = -(fractions.to(torch.float32) * 2.0**-23)
    complement = ((1 << 23) - 1 - fractions).to(torch.float32) * 2.0**-23
    assert torch.equal(mufu.ex2_approx_ftz(x), mufu.ex2_approx_ftz(complement) * 0.5)


@pytest.mark.parametrize(
    ("name", "binades", "shares"),
    [
        ("ex2", 1, None),
        ("rcp", 2, {-1: 0.045, 0: 0.868, 1: 0.087}),  # measured on [1, 4)
        ("rsqrt", 2, {-1: 0.140, 0: 0.783, 1: 0.077}),
    ],
)
def test_within_two_ulps_of_correct_rounding(name, binades, shares):
    """Every significand. The shares are those that the hardware showed before there was a closed form."""
    difference = ulps_from_rounded(name, torch.arange(ONE, ONE + (binades << 23), dtype=torch.int32))
    counts = dict(zip(*(x.tolist() for x in difference.unique(return_counts=True)), strict=True))
    assert set(counts) <= {-2, -1, 0, 1}
    if name == "rsqrt":
        assert counts[-2] == 8
    for ulps, share in (shares or {}).items():
        assert counts[ulps] / difference.numel() == pytest.approx(share, abs=6e-4)


def test_lg2_error():
    """Absolute: results near 0 lose relative accuracy, since the sum is cut to 36 fraction bits."""
    x = torch.arange(0x3F000000, 0x40000000, 3, dtype=torch.int32).view(torch.float32)
    error = mufu.lg2_approx_ftz(x).to(torch.float64) - x.to(torch.float64).log2()
    assert error.abs().max() < 2.0**-22


def test_tanh_error():
    x = torch.arange(0x3B000000, 0x41800000, 37, dtype=torch.int32).view(torch.float32)
    exact = x.to(torch.float64).tanh()
    error = (mufu.tanh_approx(x).to(torch.float64) - exact) / exact
    assert error.abs().max() < 1.11e-5


def test_tanh_is_odd():
    x = torch.arange(0, 0x7F800001, 65521, dtype=torch.int32).view(torch.float32)
    assert torch.equal(mufu.tanh_approx(-x).view(torch.int32), (-mufu.tanh_approx(x)).view(torch.int32))


def test_square_is_the_folded_squarer():
    """Against the sum over pairs of bits, term by term."""
    x = torch.arange(0, 1 << 17, 13)
    total = torch.zeros_like(x)
    for i in range(17):
        for j in range(i + 1):
            weight = 2 * i if i == j else i + j + 1
            if weight >= 19:
                total += ((x >> i) & (x >> j) & 1) << weight
    assert torch.equal(mufu.square(x), total >> 19)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)], ids=str)
def test_shapes(name, shape):
    x = torch.linspace(0.1, 3.0, max(1, int(np.prod(shape))))[: int(np.prod(shape))].view(shape)
    got = FUNCTIONS[name](x)
    assert (got.shape, got.dtype) == (x.shape, torch.float32)
    assert got.flatten().tolist() == [FUNCTIONS[name](v).item() for v in x.flatten()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_and_blocks(name):
    """Transposed, strided and expanded inputs, and one that ends inside a second block; the input is left as it was."""
    x = torch.arange(ONE, ONE + 4 * (CPU_BLOCK_ELEMS // 3), dtype=torch.int32).view(torch.float32)
    before = x.clone()
    want = FUNCTIONS[name](x)
    assert torch.equal(FUNCTIONS[name](x.view(4, -1).t()), want.view(4, -1).t())
    assert torch.equal(FUNCTIONS[name](x[5::3]), want[5::3])
    assert torch.equal(FUNCTIONS[name](x[:1].expand(3, 2)), want[:1].expand(3, 2))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_dtypes_are_refused(name):
    with pytest.raises(ValueError, match=r"x: got torch\.float64, .* takes torch\.float32"):
        FUNCTIONS[name](torch.ones(2, dtype=torch.float64))


def test_fit_returns_the_coefficients(tmp_path):
    """From results as ``measure`` writes them, here the model's at every 7th input, the committed file comes again."""
    arrays = {}
    for name in tool.STRUCTURES:
        inputs = tool.inputs(name)
        arrays[name] = np.full(inputs.shape, tool.NOT_MEASURED, np.int32)
        arrays[name][:, ::7] = evaluate(FUNCTIONS[name], torch.from_numpy(inputs[:, ::7])).numpy()
    about = mufu.coefficients()["provenance"]
    np.savez(tmp_path / "measured.npz", gpu=np.array(about["gpu"]), driver=np.array(about["driver"]), **arrays)
    tool.write(tool.fit(tmp_path / "measured.npz"), tmp_path / "mufu.json")
    assert (tmp_path / "mufu.json").read_bytes() == mufu.DATA.read_bytes()


def test_fit_refuses_results_of_another_datapath():
    argument = tool.inputs("ex2")[0]
    exact = np.exp2(argument.view(np.float32).astype(np.float64)).astype(np.float32)
    with pytest.raises(ValueError, match="0 solutions near C1"):
        tool._fit_segment(tool.STRUCTURES["ex2"], tool._points("ex2", argument, exact.view(np.int32)))


def test_measure_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs an sm_90 GPU"):
        tool.measure(tmp_path / "measured.npz")
