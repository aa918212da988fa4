"""What is refused of candidates that claim no schedule: right ones, which none should be, and wrong ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from goldens import invariance
from goldens.case import Case, Kernel, Params, Tensors
from goldens.compare import Verdict
from goldens.judge import CallFailed, Candidate, call, failed, judge, select
from tools.faults.patch import Fault, imported
from tools.faults.trial import Bench, cases_of

CPU = torch.device("cpu")
CHECKS = ("judge", "invariance")


@dataclass(frozen=True)
class Refusal:
    """One output of one case that a check of ``CHECKS`` refused, and its words."""

    check: str
    case: str
    output: str
    reason: str
    error_over_bound: float | None


@dataclass(frozen=True)
class Outcome:
    """What refused a candidate: of a wrong one the first that did, of a right one all."""

    fault: Fault
    right: bool
    refusals: tuple[Refusal, ...]

    @property
    def refused(self) -> bool:
        return bool(self.refusals)


def candidate_of(fault: Fault) -> Candidate:
    """The function ``candidate`` of the edited module."""
    with imported("tools", fault.edits) as load:
        return load(f"tools.faults.plain.{fault.kernel}").candidate


def judged(bench: Bench, kernel: Kernel, case: Case, candidate: Candidate) -> list[Verdict]:
    """Those of ``judge`` on copies of the golden's inputs."""
    golden = bench.golden(case)
    try:
        outputs = call(candidate, select(golden, "in/"), case.params, CPU)
    except CallFailed as error:
        return failed(str(error), "model")
    return judge(kernel, case, golden, outputs, None)


def compared(bench: Bench, kernel: Kernel, case: Case, candidate: Candidate) -> Iterator[Verdict]:
    """Those of ``invariance.check``, without graphs."""

    def once(inputs: Tensors, params: Params, graph: bool) -> Tensors:
        return call(candidate, inputs, params, CPU)

    try:
        for found in invariance.check(kernel, case, select(bench.golden(case), "in/"), once, None, graphs=False):
            if isinstance(found, Verdict):
                yield found
    except CallFailed as error:
        yield from failed(str(error), invariance.AGAINST)


def refusals(fault: Fault, bench: Bench) -> Iterator[Refusal]:
    """All on the committed cases: the judge's before invariance's, small cases first."""
    candidate = candidate_of(fault)
    cases = sorted(cases_of(fault), key=lambda case: sum(x.numel() for x in bench.golden(case).values()))
    for check, verdicts in zip(CHECKS, (judged, compared), strict=True):
        for case in cases:
            for x in verdicts(bench, bench.kernel(case), case, candidate):
                if not x.passed:
                    yield Refusal(check, case.name, x.output, x.reason, x.max_error_over_bound)


def run_right(fault: Fault, bench: Bench) -> Outcome:
    return Outcome(fault, True, tuple(refusals(fault, bench)))


def run_wrong(fault: Fault, bench: Bench) -> Outcome:
    first = next(refusals(fault, bench), None)
    return Outcome(fault, False, (first,) if first else ())
