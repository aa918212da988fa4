"""What notices a fault: equal bits, the derived bound in ULPs, and the customary tolerance, one for all."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import goldens
from goldens import store
from goldens.case import Case, Tensors
from goldens.compare import Verdict, against_exact, against_model
from goldens.judge import Judge, by_format, select
from reference.numerics.formats import E4M3, encode
from tools.faults.patch import Fault, imported

TOLERANCE = 1e-2  # rtol and atol
CHECKS = ("bits", "bound", "tolerance")
SLOW = ("fmha/d64-causal-n512-normal",)  # no branch that a shorter case lacks


@dataclass(frozen=True)
class Outcome:
    """By check, the first case on which it noticed the fault; a check that did not is left out."""

    fault: Fault
    noticed_on: dict[str, str]


def cases_of(fault: Fault) -> list[Case]:
    """The committed cases that hold outputs of the fault's schedule: the one that is to catch it, then by name.

    ``SLOW`` ones only where they are to catch it. ValueError if there is no such case.
    """
    cases = [c for c in goldens.KERNELS[fault.kernel].cases if c.committed]
    if fault.schedule != "model":
        cases = [c for c in cases if fault.schedule in c.schedules]
    cases = [c for c in cases if c.name == fault.case or c.id not in SLOW]
    if fault.case and fault.case not in [c.name for c in cases]:
        raise ValueError(f"case: got {fault.case_id}, no committed case of schedule {fault.schedule} has this name")
    return sorted(cases, key=lambda case: (case.name != fault.case, case.id))


class Bench:
    """Goldens and their judges, each made once."""

    def __init__(self) -> None:
        self._manifest = store.read_manifest()
        self._kept: dict[tuple, Any] = {}

    def golden(self, case: Case) -> Tensors:
        return self._once(("golden", case.id), lambda: store.load(case, self._manifest))

    def judge(self, case: Case) -> Judge:
        """The case's judge, which locates nothing."""
        kernel = dataclasses.replace(goldens.KERNELS[case.kernel], locate=lambda *_: {})
        return self._once(("judge", case.id), lambda: Judge(kernel, case, self.golden(case)))

    def right(self, case: Case, schedule: str) -> Tensors:
        """The golden's own outputs of a schedule or the model."""
        return select(self.golden(case), "model/" if schedule == "model" else f"exact/{schedule}/")

    def right_is_close(self, case: Case, schedule: str) -> bool:
        """Whether the golden's own outputs are within the tolerance of the model's."""
        return self._once((case.id, schedule, "close"), lambda: self.close(case, self.right(case, schedule), schedule))

    def close(self, case: Case, outputs: Mapping[str, Tensor], schedule: str) -> bool:
        """Whether all values are within ``TOLERANCE`` of the model's in the output's format, NaN being equal.

        Outputs that the model does not make are held to the schedule's.
        """
        kernel, golden = goldens.KERNELS[case.kernel], self.golden(case)
        for name, got in outputs.items():
            value = by_format(kernel, case, name, got)
            model = golden.get(f"model/{name}")
            if model is None:
                want = by_format(kernel, case, name, golden[f"exact/{schedule}/{name}"])
            else:
                want = encode(model, E4M3) if value.dtype == E4M3.dtype else model
            value, want = value.to(torch.float32), want.to(torch.float32)
            if not torch.allclose(value, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                return False
        return True

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def verdicts(bench: Bench, case: Case, outputs: Tensors, schedule: str) -> list[Verdict]:
    """Those of ``Judge``; of the model's own outputs, bits and twice the model's bound."""
    judge, found = bench.judge(case), []
    if schedule != "model":
        return judge(outputs, schedule)
    for name, want in judge.model.items():
        found.append(against_exact(name, outputs[name], want))
        if case.exact_only is None:
            bound = judge.bound("model")[name]
            found.append(against_model(name, outputs[name], want, judge.oracle[name], bound))
    return found


def noticed(bench: Bench, case: Case, outputs: Tensors, schedule: str) -> set[str]:
    """Those of ``CHECKS`` that say something is wrong.

    The bound is no judge where the case has none, the tolerance where right outputs are beyond it.
    """
    right = bench.right(case, schedule)
    if outputs.keys() == right.keys() and all(against_exact(name, outputs[name], right[name]).passed for name in right):
        return set()  # the golden itself passes all three: other tests see to that
    found = verdicts(bench, case, outputs, schedule)
    said = {"bits" if v.against == "exact" else "bound" for v in found if not v.passed}
    usable = bench.right_is_close(case, schedule)
    if usable and not bench.close(case, outputs, schedule):
        said.add("tolerance")
    return said


def patched(fault: Fault) -> ModuleType:
    """The kernel's reference module with the fault in it, or in what it imports."""
    with imported("reference", fault.edits) as load:
        return load(f"reference.{fault.kernel}")


def call(reference: ModuleType, bench: Bench, case: Case, schedule: str) -> Tensors:
    """Outputs of a module's schedule or model for clones of the golden's inputs."""
    inputs = {name: x.clone() for name, x in select(bench.golden(case), "in/").items()}
    if schedule == "model":
        return reference.model(inputs, case.params)
    return reference.exact(inputs, case.params, schedule)


def run(fault: Fault, bench: Bench) -> Outcome:
    """The fault on the committed cases of its schedule, until every check has noticed it."""
    reference = patched(fault)
    noticed_on: dict[str, str] = {}
    for case in cases_of(fault):
        for check in noticed(bench, case, call(reference, bench, case, fault.schedule), fault.schedule):
            noticed_on.setdefault(check, case.name)
        if len(noticed_on) == len(CHECKS):
            break
    return Outcome(fault, noticed_on)


def run_for_bits(fault: Fault, bench: Bench) -> Outcome:
    """The fault on the committed cases of its schedule, small ones first, until bits differ or nothing comes out."""
    reference = patched(fault)
    for case in sorted(cases_of(fault), key=lambda case: sum(x.numel() for x in bench.golden(case).values())):
        right = select(bench.golden(case), "model/" if fault.schedule == "model" else f"exact/{fault.schedule}/")
        try:
            outputs = call(reference, bench, case, fault.schedule)
        except Exception:  # a kernel that ends so is noticed
            return Outcome(fault, {"bits": case.name})
        if outputs.keys() != right.keys() or not all(against_exact(n, outputs[n], right[n]).passed for n in right):
            return Outcome(fault, {"bits": case.name})
    return Outcome(fault, {})
