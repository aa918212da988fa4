"""What is refused of candidates that claim no schedule: right ones, which none should be, and wrong ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import ModuleType

import torch

import goldens
from goldens import invariance
from goldens.call import CallFailed, Candidate, call
from goldens.case import Case, Params, Tensors
from goldens.compare import Verdict
from goldens.judge import failed, select
from tools.faults.patch import Fault, edited
from tools.faults.plain.legal import LEGAL
from tools.faults.trial import Bench

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
    """The function ``candidate`` of the edited module, which imports nothing of the checkout."""
    module = ModuleType(fault.kernel)
    for path, source in edited(fault.edits).items():
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module.candidate


def small_first(bench: Bench, kernel: str) -> list[Case]:
    """The committed cases of a kernel by the elements of their goldens."""
    cases = [case for case in goldens.KERNELS[kernel].cases if case.committed]
    return sorted(cases, key=lambda case: sum(x.numel() for x in bench.golden(case).values()))


def judged(bench: Bench, case: Case, candidate: Candidate) -> list[Verdict]:
    """Those of ``Judge`` on copies of the golden's inputs."""
    try:
        written = goldens.KERNELS[case.kernel].written(case.params)
        outputs = call(candidate, select(bench.golden(case), "in/"), case.params, CPU, written)
    except CallFailed as error:
        return failed(str(error), "model")
    return bench.judge(case)(outputs, None)


def compared(bench: Bench, case: Case, candidate: Candidate) -> Iterator[Verdict]:
    """Those of ``invariance.check``, without graphs."""

    def once(inputs: Tensors, params: Params, graph: bool) -> Tensors:
        return call(candidate, inputs, params, CPU, kernel.written(params))

    kernel, inputs = goldens.KERNELS[case.kernel], select(bench.golden(case), "in/")
    try:
        for found in invariance.check(kernel, case, inputs, once, None, graphs=False):
            if isinstance(found, Verdict):
                yield found
    except CallFailed as error:
        yield from failed(str(error), invariance.AGAINST)


def refusals(fault: Fault, bench: Bench) -> Iterator[Refusal]:
    """All on the committed cases: the judge's before invariance's, small cases first."""
    candidate = candidate_of(fault)
    cases = small_first(bench, fault.kernel)
    for check, verdicts in zip(CHECKS, (judged, compared), strict=True):
        for case in cases:
            for x in verdicts(bench, case, candidate):
                if not x.passed:
                    yield Refusal(check, case.name, x.output, x.reason, x.max_error_over_bound)


def run(fault: Fault, bench: Bench) -> Outcome:
    """A right candidate on all cases, a wrong one until it is refused."""
    if fault in LEGAL:
        return Outcome(fault, True, tuple(refusals(fault, bench)))
    return Outcome(fault, False, tuple(islice(refusals(fault, bench), 1)))
