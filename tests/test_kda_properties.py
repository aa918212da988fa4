"""KDA's properties: every schedule has those that it owes, a kernel at fault violates the one that says so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import invariance
from goldens.call import call
from goldens.case import Case, Tensors
from goldens.compare import Verdict
from goldens.kda import make_case, properties
from reference import kda as reference
from tools.adapters import exact

KERNEL = goldens.KERNELS["kda"]
LONG = tuple(schedule for schedule in reference.SCHEDULES if schedule.endswith(("416", "512")))
Candidate = Callable[[Tensors, Any], Tensors]


def case_of(*args: Any, **more: Any) -> Case:
    return make_case(*args, **more, committed=False)


PACKED = case_of(40, 3, "rows", "tried", state="fp32", final="fp32")
BATCH = case_of(17, 2, "rows", batch=3, state="bf16", final="bf16")
EQUAL = case_of(21, 1, "normal", "thirds")
SEGMENTS = case_of(68, 1, "rows", "tried-66", state="fp32", final="fp32", schedules=("chunk16_scan64",))


@pytest.fixture(autouse=True)
def _offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(goldens.kda.OFFSETS, "tried", (0, 3, 4, 4, 22, 40))
    monkeypatch.setitem(goldens.kda.OFFSETS, "tried-66", (0, 2, 68))


def tried(case: Case, candidate: Candidate, schedule: str | None = None, only: tuple = ()) -> list[Any]:
    kernel = replace(KERNEL, properties=only) if only else KERNEL
    on_cpu = lambda inputs, params, _: call(candidate, inputs, params, torch.device("cpu"), ())  # noqa: E731
    return list(invariance.check(kernel, case, KERNEL.inputs(case), on_cpu, schedule, graphs=False))


def violated(outcomes: list[Any]) -> set[str]:
    return {x.output.split(":")[0] for x in outcomes if isinstance(x, Verdict) and not x.passed}


@pytest.mark.parametrize("case", [PACKED, BATCH, EQUAL, SEGMENTS], ids=lambda case: case.name)
def test_exact_models_have_every_property(case: Case) -> None:
    [schedule] = case.schedules
    outcomes = tried(case, exact.make("kda", schedule), schedule)
    assert violated(outcomes) == set()
    assert len(outcomes) > 10


@pytest.mark.parametrize("schedule", LONG)
def test_long_segments_have_no_look_ahead(schedule: str) -> None:
    [case] = [case for case in KERNEL.cases if case.committed and schedule in case.schedules]
    outcomes = tried(case, exact.make("kda", schedule), schedule, only=(properties.causal,))
    assert violated(outcomes) == set()
    assert any("other tokens from" in x.output for x in outcomes)


def test_cases_have_the_variants() -> None:
    def names(case: Case) -> set[str]:
        variants = (v for p in KERNEL.properties for v in p(case, KERNEL.inputs(case), case.params))
        return {variant.name for variant in variants}

    assert {"sequences rotated", "heads rotated", "other tokens from 9 on", "sequence 4 alone"} <= names(PACKED)
    assert {"packed", "sequences rotated", "other tokens from 8 on"} <= names(BATCH)
    assert "as a batch" in names(EQUAL)
    assert not any("heads" in name for name in names(EQUAL))


def test_what_another_batch_may_change_is_marked() -> None:
    found = [v for p in KERNEL.properties for v in p(PACKED, KERNEL.inputs(PACKED), PACKED.params)]
    marked = {v.name for v in found if v.batch}
    assert {v.name for v in found if "sequence" in v.name} == marked
    assert {v.name for v in found} - marked >= {"heads rotated", "other tokens from 9 on", "strides"}


# Faults.


def sound(inputs: Tensors, params: Any) -> Tensors:
    return reference.exact(inputs, params, "chunk16")


def looking_ahead(inputs: Tensors, params: Any) -> Tensors:
    """Queries of a token have something of the next one's gate."""
    g = inputs["g"]
    ahead = torch.cat([g[:, 1:], g[:, -1:]], 1)
    return sound(inputs | {"q": (inputs["q"] + ahead * 2.0**-4).contiguous()}, params)


def of_head_0(inputs: Tensors, params: Any) -> Tensors:
    bias = inputs["dt_bias"]
    return sound(inputs | {"dt_bias": bias[:1].expand_as(bias).contiguous()}, params)


def scaled_by_the_batch(inputs: Tensors, params: Any) -> Tensors:
    largest = inputs["v"].nan_to_num().abs().max()
    return sound(inputs | {"v": (inputs["v"] / largest * 3.0).contiguous()}, params)


def by_inverse_permutation(inputs: Tensors, params: Any) -> Tensors:
    """Final states put back in the wrong way."""
    made, starts = sound(inputs, params), reference.offsets(inputs)
    order = sorted(range(len(starts) - 1), key=lambda n: starts[n] - starts[n + 1])
    return made | {"final_state": by_order(by_order(made["final_state"], order), order)}


def by_order(x: Tensor, order: list[int]) -> Tensor:
    return x.index_select(0, torch.tensor(order))


def carrying_over(inputs: Tensors, params: Any) -> Tensors:
    """Sequences of a batch that are not packed begin where the one before ended."""
    made = sound(inputs, params)
    if "cu_seqlens" in inputs or len(made["final_state"]) == 1:
        return made
    return sound(inputs | {"initial_state": made["final_state"].roll(1, 0)}, params)


FAULTS: dict[str, tuple[Case, Candidate, str]] = {
    "looking-ahead": (PACKED, looking_ahead, "other tokens from 9 on"),
    "bias-of-head-0": (PACKED, of_head_0, "heads rotated"),
    "scaled-by-the-batch": (PACKED, scaled_by_the_batch, "sequence 0 alone"),
    "final-states-by-the-inverse-permutation": (PACKED, by_inverse_permutation, "sequences rotated"),
    "carrying-over": (BATCH, carrying_over, "packed"),
}


@pytest.mark.parametrize(("case", "candidate", "name"), FAULTS.values(), ids=FAULTS)
def test_a_fault_violates_its_property(case: Case, candidate: Candidate, name: str) -> None:
    outcomes = violated(tried(case, candidate))
    assert name in outcomes
    assert "twice" not in outcomes
