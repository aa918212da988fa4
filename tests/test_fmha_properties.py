"""FMHA's properties: every schedule has those that it owes, a kernel at fault violates the one that says so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import goldens
from goldens import invariance
from goldens.call import call
from goldens.case import Case, Tensors
from goldens.compare import Verdict
from goldens.fmha import WGMMA, make_case
from goldens.fmha.properties import causality, heads, packed
from reference import fmha as reference
from tools.adapters import exact

KERNEL = goldens.KERNELS["fmha"]
Candidate = Callable[[Tensors, Any], Tensors]

SQUARE = make_case(64, True, 64, "normal", batch=2)
GROUPED = make_case(64, True, (70, 140), "normal", batch=2, heads=(4, 2), schedules=WGMMA)
LENGTHS = ((3, 140), (0, 5), (66, 130), (2, 3), (4, 9), (1, 0))
PACKED = make_case(64, True, (76, 287), "normal", heads=(3, 1), packed=LENGTHS, schedules=WGMMA)
SHORT = make_case(128, True, (5, 9), "normal", batch=3, heads=(2, 1), schedules=WGMMA)
NAN = make_case(64, True, (5, 40), "nan", schedules=WGMMA)


def tried(case: Case, candidate: Candidate, schedule: str | None = None) -> list[Any]:
    on_cpu = lambda inputs, params, _: call(candidate, inputs, params, torch.device("cpu"), ())  # noqa: E731
    return list(invariance.check(KERNEL, case, KERNEL.inputs(case), on_cpu, schedule, graphs=False))


def violated(outcomes: list[Any]) -> set[str]:
    return {x.output.split(":")[0] for x in outcomes if isinstance(x, Verdict) and not x.passed}


HOLDING = [(case, schedule) for case in (SQUARE, GROUPED, PACKED, SHORT, NAN) for schedule in case.schedules]


@pytest.mark.parametrize(("case", "schedule"), HOLDING, ids=lambda x: getattr(x, "name", x))
def test_exact_models_have_every_property(case: Case, schedule: str) -> None:
    outcomes = tried(case, exact.make("fmha", schedule), schedule)
    assert violated(outcomes) == set()
    assert all(isinstance(x, Verdict) for x in outcomes)
    assert len(outcomes) >= 10
    if case.dims["batch"] > 1:
        assert any(x.output.startswith("packed") for x in outcomes) == (schedule != "k2")


def names(case: Case) -> dict[str, bool]:
    """The variants of a case, and whether they are the same sequence in another batch."""
    variants = (v for p in KERNEL.properties for v in p(case, KERNEL.inputs(case), case.params))
    return {variant.name: variant.batch for variant in variants}


def test_cases_have_the_variants_and_what_another_batch_may_change_is_marked() -> None:
    grouped, several = names(GROUPED), names(PACKED)
    batch = {"head 0 alone", "head 3 alone", "behind others", "amid NaN", "thrice", "packed", "rows and keys appended"}
    assert {name for name, marked in grouped.items() if marked} == batch
    own = {"heads rotated", "a KV head each", "another last key", "other keys for row 35 on", "strides"}
    assert own <= set(grouped) - batch
    alone = {"sequence 0 alone", "sequence 2 alone", "sequence 3 alone", "sequence 4 alone", "sequence 5 alone"}
    assert alone == {name for name in several if name.startswith("sequence")}
    assert all(several[name] for name in alone | {"in reverse order", "even sequences amid NaN"})
    assert "other keys for row 33 on" in several  # of the longest sequence


def test_no_key_that_a_schedule_may_visit_is_replaced_where_it_is_no_number() -> None:
    assert not any("key" in name for name in names(NAN) if name != "rows and keys appended")
    x = KERNEL.inputs(GROUPED)
    x["v"][:, -1, 0] = torch.nan
    assert [v.name for v in causality(GROUPED, x, GROUPED.params)] == [
        "other queries before the last",
        "rows and keys appended",
    ]


# Faults.


def sound(inputs: Tensors, params: Any) -> Tensors:
    return reference.exact(inputs, params, "wgmma128")


def looking_ahead(inputs: Tensors, params: Any) -> Tensors:
    """A key has something of the one after it."""
    k = inputs["k"]
    return sound(inputs | {"k": k + torch.cat([k[:, 1:], k[:, -1:]], 1)}, params)


def of_other_groups(inputs: Tensors, params: Any) -> Tensors:
    """Query head h takes KV head h mod Hkv."""
    k = inputs["k"].shape[0]
    order = torch.tensor([h % k for h in range(inputs["q"].shape[0])])
    return sound(inputs | {name: inputs[name][order] for name in ("k", "v")}, params)


def last_head_of_the_first(inputs: Tensors, params: Any) -> Tensors:
    last = inputs["k"].shape[0] - 1
    order = torch.tensor([*range(last), 0])
    return sound(inputs | {name: inputs[name][order] for name in ("k", "v")}, params)


def seven_at_most(inputs: Tensors, params: Any) -> Tensors:
    """From the ninth query head on, the eighth's output."""
    return {name: x[torch.arange(len(x)).clamp(max=7)] for name, x in sound(inputs, params).items()}


def scaled_by_the_length(inputs: Tensors, params: Any) -> Tensors:
    return {name: x * (1 + 2.0**-6 * inputs["k"].shape[1]) for name, x in sound(inputs, params).items()}


def aligned_to_all_rows(inputs: Tensors, params: Any) -> Tensors:
    """Packed sequences begin at the multiples of their mean length."""
    if "cu_seqlens_q" not in inputs:
        return sound(inputs, params)
    starts = inputs["cu_seqlens_k"]
    even = torch.linspace(0, int(starts[-1]), len(starts)).to(torch.int32)
    return sound(inputs | {"cu_seqlens_k": even}, params)


def one_key_late(inputs: Tensors, params: Any) -> Tensors:
    """Packed sequences take the last key of the one before for their first."""
    if "cu_seqlens_q" not in inputs:
        return sound(inputs, params)
    return sound(inputs | {name: inputs[name].roll(1, 1) for name in ("k", "v")}, params)


FAULTS: dict[str, tuple[Case, Candidate, str]] = {
    "looking-ahead": (GROUPED, looking_ahead, "other keys for row 35 on"),
    "looking-ahead-in-the-longest": (PACKED, looking_ahead, "another last key"),
    "groups-of-other-heads": (GROUPED, of_other_groups, "a KV head each"),
    "last-head-of-the-first": (GROUPED, last_head_of_the_first, "heads rotated"),
    "seven-heads-at-most": (SHORT, seven_at_most, "thrice"),
    "scaled-by-the-length": (SHORT, scaled_by_the_length, "rows and keys appended"),
    "sequences-of-one-length": (PACKED, aligned_to_all_rows, "in reverse order"),
    "first-key-of-the-neighbour": (PACKED, one_key_late, "odd sequences amid NaN"),
    "packed-unlike-a-batch": (SHORT, one_key_late, "packed"),
}


@pytest.mark.parametrize(("case", "candidate", "name"), FAULTS.values(), ids=FAULTS)
def test_a_fault_violates_its_property(case: Case, candidate: Candidate, name: str) -> None:
    assert violated(tried(replace(case, schedules=()), candidate)) >= {name}


def test_few_calls_decide_a_case() -> None:
    for case in KERNEL.cases:
        if case.committed:
            inputs = KERNEL.inputs(case)
            made = [v for p in (heads, packed, causality) for v in p(case, inputs, case.params)]
            assert len(made) <= 20, case.id
