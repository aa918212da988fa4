"""``goldens.inputs`` and FMHA's recipes: the same values on every machine, and as hostile as they claim.

The generator's values are pinned by SHA-256 over dtype, shape and bytes (``store.digest``); a recipe is
tested on the committed cases that use it.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import goldens
from goldens import inputs, store
from goldens.fmha import RECIPES
from goldens.judge import select
from reference.fmha import scale_of
from reference.numerics.order import chain_matmul

KERNEL = goldens.KERNELS["fmha"]
SMALLEST_NORMAL = 2.0**-126

PINNED = {
    "words": (
        lambda label: inputs.words(label, 16),
        "d37c2082a82cd0b0b874c10a32c9ea66",
    ),
    "integers": (
        lambda label: inputs.integers(label, (4, 5), -3, 100),
        "13e8bf65aecdfa4d906fcd56fbc43367",
    ),
    "normal": (
        lambda label: inputs.normal(label, (33,)),
        "1d3408304217c65f0e5077752fa57973",
    ),
    "normal-bf16": (
        lambda label: inputs.normal_bf16(label, (33,), 0.5),
        "68e99769c648df9332b723fc0e46b7ee",
    ),
    "wide-bf16": (
        lambda label: inputs.wide_bf16(label, (33,), -40, 40),
        "df132869cf05c315c39ea22e6df99fc8",
    ),
    "bits-bf16": (
        lambda label: inputs.bits_bf16(label, (33,)),
        "011f9e4f73d8d421c7be1d8d5ce9f633",
    ),
}
EVERY = pytest.mark.parametrize(("draw", "digest"), PINNED.values(), ids=PINNED)


@EVERY
def test_values_are_pinned(draw: Callable[[str], Tensor], digest: str) -> None:
    assert store.digest(draw("pin")) == digest


@EVERY
def test_another_label_is_another_stream(draw: Callable[[str], Tensor], digest: str) -> None:
    other = draw("pin/2")
    assert store.digest(other) != digest
    assert (draw("pin") != other).double().mean() > 0.8


def test_the_first_words_and_numbers_by_hand() -> None:
    assert [word & (2**64 - 1) for word in inputs.words("pin", 2).tolist()] == [0xAD22E16C490004A3, 0xBA0329FD7DB1B5F4]
    first = sum((0xAD22, 0xE16C, 0x4900, 0x04A3)) - 2 * 65535
    assert inputs.normal("pin", (1,)).item() == np.float32(2 * first) / np.float32(2 * 37837)
    assert inputs.integers("pin", (1,), -3, 100).item() == 0xE16C4900 % 103 - 3


PREFIX = {
    "words": lambda count: inputs.words("prefix", count),
    "integers": lambda count: inputs.integers("prefix", (count,), 0, 1000),
    "normal": lambda count: inputs.normal("prefix", (count,)),
    "wide-bf16": lambda count: inputs.wide_bf16("prefix", (count,), -3, 4),
}


@pytest.mark.parametrize("draw", PREFIX.values(), ids=PREFIX)
@pytest.mark.parametrize(("short", "long"), [(1, 2), (15, 16), (16, 17), (255, 4096)])
def test_a_shorter_draw_is_a_prefix_of_a_longer_one(draw: Callable[[int], Tensor], short: int, long: int) -> None:
    assert torch.equal(draw(short), draw(long)[:short])


def test_a_shape_is_filled_row_by_row() -> None:
    assert torch.equal(inputs.normal("shape", (6, 4)).view(-1), inputs.normal("shape", (24,)))
    assert inputs.normal("shape", ()).shape == ()
    assert inputs.normal("shape", (3, 0)).shape == (3, 0)


def test_drawing_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    inputs.normal("global", (100,))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_normal_has_the_moments_of_four_uniforms() -> None:
    """Mean 0, variance 1, kurtosis 3 − 1.2/4; the margins are six standard errors of 2^20 numbers."""
    x = inputs.normal("moments", (1 << 20,)).double()
    centred = x - x.mean()
    assert x.mean().item() == pytest.approx(0, abs=0.006)
    assert x.var().item() == pytest.approx(1, abs=0.008)
    assert (centred**3).mean().item() == pytest.approx(0, abs=0.012)
    assert (centred**4).mean().item() / x.var().item() ** 2 == pytest.approx(2.7, abs=0.02)
    assert x.abs().max() <= 3.5


def test_integers_are_uniform_and_within_their_limits() -> None:
    counts = torch.bincount(inputs.integers("uniform", (1 << 16,), -4, 4) + 4, minlength=8)
    assert counts.shape == (8,)
    assert (counts - (1 << 13)).abs().max() < 6 * (1 << 13) ** 0.5


def test_wide_numbers_have_every_exponent_and_both_signs() -> None:
    x = inputs.wide_bf16("exponents", (1 << 14,), -40, 40)
    assert (torch.frexp(x.float()).exponent - 1).unique().tolist() == list(range(-40, 40))
    assert 0.45 < (x > 0).double().mean() < 0.55


def test_bits_hold_every_class() -> None:
    x = inputs.bits_bf16("classes", (1 << 16,)).float()
    subnormal = (x != 0) & (x.abs() < SMALLEST_NORMAL)
    assert all(bool(kind.any()) for kind in (x.isnan(), x.isposinf(), x.isneginf(), subnormal, x == 0))


def tensors_of(name: str) -> dict[str, Tensor]:
    """The golden of a committed case, with in/s: its scores in fp64, [heads, Nq, Nk]."""
    case = goldens.find(f"fmha/{name}")
    tensors = store.load(case, store.read_manifest())
    q, k = (tensors[f"in/{n}"].double() for n in "qk")
    return tensors | {"in/s": q @ k.transpose(1, 2) * scale_of(q.shape[2], case.params)}


@pytest.mark.parametrize("case", KERNEL.cases, ids=lambda case: case.name)
def test_every_case_gets_inputs_of_its_shape(case: goldens.Case) -> None:
    dims, made = case.dims, KERNEL.inputs(case)
    assert made["q"].shape == (dims["batch"] * dims["heads_q"], dims["n_q"], dims["d"])
    assert made["k"].shape == made["v"].shape == (dims["batch"] * dims["heads_kv"], dims["n_k"], dims["d"])
    assert {made[name].dtype for name in ("q", "k", "v")} == {torch.bfloat16}
    assert {x.dtype for name, x in made.items() if name not in ("q", "k", "v")} <= {torch.int32}  # packed: offsets
    assert all(x.is_contiguous() for x in made.values())


def test_every_recipe_has_a_committed_case_and_every_id_is_unique() -> None:
    assert {case.recipe for case in KERNEL.cases if case.committed} == set(RECIPES)
    assert len({case.id for case in KERNEL.cases}) == len(KERNEL.cases)


# Tensors that a recipe makes the same for all cases.
NOT_DRAWN = {("ties", "q"), ("means", "q"), ("means", "v"), ("own", "q"), ("own", "k")}


def test_no_two_cases_share_their_values() -> None:
    drawn = [
        x
        for case in KERNEL.cases
        for n, x in KERNEL.inputs(case).items()
        if (case.recipe, n) not in NOT_DRAWN and not n.startswith("cu_seqlens")
    ]
    assert len({store.digest(x.reshape(-1)[:512]) for x in drawn}) == len(drawn)


def test_wide_spans_its_exponents() -> None:
    tensors = tensors_of("d64-n64-wide")
    exponents = {n: (torch.frexp(x.float()).exponent - 1).unique().tolist() for n, x in select(tensors, "in/").items()}
    assert exponents["q"] == exponents["k"] == list(range(-12, 3))
    assert exponents["v"] == list(range(-40, 40))


def test_cancel_cancels() -> None:
    """Half of the scores keep less than 2 % of their terms' magnitude; neighbouring values undo each other."""
    tensors = tensors_of("d64-causal-n64-cancel")
    q, k, v = (tensors[f"in/{n}"].double() for n in "qkv")
    terms = q.abs() @ k.abs().transpose(1, 2) / 8.0
    assert (tensors["in/s"].abs() / terms).median() < 0.02
    assert torch.equal(v[:, 1::2], -v[:, 0::2])


def test_ties_tie() -> None:
    """Every output is the plain mean of 64 integers, halfway between two bf16, and rounds to even."""
    tensors = tensors_of("d64-n64-ties")
    mean = tensors["in/v"].double().mean(1, keepdim=True).expand(1, 64, 64)
    assert torch.equal(tensors["model/o"].double(), mean)
    halfway = mean % 1.0 == 0.5
    assert halfway.all()
    assert torch.equal(tensors["exact/k2/o"].double(), mean.round())
    assert (mean.round()[halfway] % 2 == 0).all()


def test_subnormal_outputs_are_subnormal() -> None:
    o = tensors_of("d64-n64-subnormal")["exact/k2/o"].float()
    assert ((o != 0) & (o.abs() < SMALLEST_NORMAL)).double().mean() > 0.9


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zeros_have_both_signs(name: str) -> None:
    x = tensors_of("d64-n64-zeros")[f"in/{name}"]
    assert (x == 0).all()
    assert 0.4 < torch.signbit(x).double().mean() < 0.6


def test_overflow_overflows_some_chains_to_either_side() -> None:
    tensors = tensors_of("d64-n64-overflow")
    chains = chain_matmul(tensors["in/q"].float(), tensors["in/k"].float().transpose(1, 2))
    assert chains.isposinf().any()
    assert chains.isneginf().any()
    assert not chains.isnan().any()
    near = chains[..., ::16]
    assert near.isfinite().double().mean() > 0.8
    assert near.abs().median() > 1e37
    o = tensors["exact/k2/o"]
    assert o.isnan().any()
    assert o.isfinite().any()


def test_negative_scores_are_far_below_zero_and_differ() -> None:
    s = tensors_of("d64-causal-n64-negative")["in/s"]
    assert s.max() < -400
    assert 0.5 < s.std(-1).mean() < 2.0


def test_the_dominant_key_outweighs_by_about_e_to_80() -> None:
    s = tensors_of("d64-causal-n128-dominant")["in/s"]
    assert (s.argmax(-1) == 96).all()
    lead = s[..., 96] - torch.cat([s[..., :96], s[..., 97:]], -1).mean(-1)
    assert lead.min() > 70
    assert lead.max() < 90


def test_constant_keys_weigh_the_same() -> None:
    tensors = tensors_of("d64-n64-constant")
    assert torch.equal(tensors["in/s"], tensors["in/s"][..., :1].expand(1, 64, 64))
    mean = tensors["in/v"].double().mean(1, keepdim=True)
    assert (tensors["model/o"].double() - mean).abs().max() < 1e-6


SPECIALS = {
    "nan": ("d64-causal-n128-nan", {"q": [(42, 5)], "k": [(85, 5)], "v": [(127, 5)]}),
    "inf": ("d64-causal-n128-inf", {"q": [(42, 5)], "k": [(85, 7)], "v": [(64, 9), (127, 11)]}),
}


@pytest.mark.parametrize(("name", "places"), SPECIALS.values(), ids=SPECIALS)
def test_single_specials_reach_some_outputs_and_spare_others(name: str, places: dict) -> None:
    tensors = tensors_of(name)
    found = {name: (~tensors[f"in/{name}"].isfinite()).nonzero() for name in "qkv"}
    assert {name: [(row, column) for _, row, column in x.tolist()] for name, x in found.items()} == places
    assert tensors["exact/k2/o"].isnan().any()
    assert tensors["exact/k2/o"].isfinite().double().mean() > 0.5
    below = tensors["model/o"][:, :42]
    assert below.isfinite().all()


def test_bits_give_outputs_of_several_classes() -> None:
    tensors = tensors_of("d64-causal-n128-bits")
    assert tensors["in/v"].isnan().any()
    assert (tensors["in/v"].float().abs() < SMALLEST_NORMAL).any()
    assert tensors["in/q"].isfinite().all()
    assert 0.1 < tensors["exact/k2/o"].isfinite().double().mean() < 0.9
