"""A candidate on trial: its calls judged by the goldens, or its invariance tried."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from goldens import KERNELS, invariance, store
from goldens.case import Case
from goldens.compare import Verdict
from goldens.judge import CallFailed, Judge, Unsupported, decided, failed, select
from tools import candidates
from tools.report import OURS, Result
from tools.worker import InProcess, Worker

ANY = "any"  # the schedule of a candidate that claims none
INVARIANCE = "invariance"
SECONDS = 600.0


@dataclass(frozen=True)
class Run(Result):
    """The verdicts on one run, and the command that makes it again alone."""

    again: str = ""

    @property
    def command(self) -> str:
        return self.again


@dataclass(frozen=True)
class NotSupported:
    """What a candidate says that it does not do, or what cannot judge it: never passed."""

    case: Case
    schedule: str
    reason: str
    word: str = "not supported"

    def __str__(self) -> str:
        return f"{self.case.id} {self.schedule}: {self.word}: {self.reason}"


class Trial:
    """A candidate by its name or ``module:function``, imported now; a context manager that ends its process.

    device: where it runs, by default the sm_90 GPU. seconds: what a call may take; 0: called in this process, without a
    limit. schedule: the one whose bits are demanded, instead of those that the candidate claims.
    CandidateError, Missing, HardwareMissing, ValueError (device) if it cannot be tried.
    """

    def __init__(self, candidate: str, device: str | None, seconds: float = SECONDS, schedule: str | None = None):
        self._candidate, self._device, self._schedule, self._seconds = candidate, device, schedule, seconds
        self.device = candidates.device_of(device)
        self.name = OURS if candidate == candidates.OURS else candidate
        self._held: Any = Worker(candidate, self.device, seconds) if seconds > 0 else InProcess(candidate, self.device)

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the candidate's process."""
        self._held.close()

    def schedules(self, case: Case) -> tuple[str | None, ...]:
        """The schedules whose bits are demanded of the candidate in a case; None: the model judges it."""
        if self._schedule is not None:
            return tuple(s for s in case.schedules if s == self._schedule)
        if self._held.claims is None:
            return case.schedules
        return tuple(s for s in case.schedules if s in self._held.claims) or (None,)

    def by_golden(
        self, case: Case, manifest: dict[str, Any], schedules: tuple[str | None, ...]
    ) -> Iterator[Run | NotSupported]:
        """The case's golden, once for each schedule."""
        kernel = KERNELS[case.kernel]
        golden = store.obtain(kernel, case, manifest)
        judge = Judge(kernel, case, golden)
        for schedule in schedules:
            note = case.exact_only or ""
            only = (self._held.outputs or {}).get(case.kernel)
            try:
                outputs = self._held.call(case.kernel, schedule, judge.inputs, case.params)
                verdicts = judge(outputs, schedule, only)
            except Unsupported as refused:
                yield NotSupported(case, schedule or ANY, str(refused))
                continue
            except CallFailed as error:
                verdicts = failed(str(error), _judged_by(schedule))
            if not decided(verdicts):
                why = case.exact_only or "the model decides on no element"
                reason = f"only the bits of a schedule decide here, and it claims none: {why}"
                yield NotSupported(case, ANY, reason, "not judged")
                continue
            yield self._run(case, schedule, verdicts, note, "")

    def by_invariance(
        self, case: Case, manifest: dict[str, Any], schedules: tuple[str | None, ...]
    ) -> Iterator[Run | NotSupported]:
        """The properties of the case's kernel, once for each schedule."""
        inputs = select(store.obtain(KERNELS[case.kernel], case, manifest), "in/")
        for schedule in schedules:
            call = self._caller(case.kernel, schedule)
            verdicts: list[Verdict] = []
            try:
                graphs = self.device.type == "cuda"
                for found in invariance.check(KERNELS[case.kernel], case, inputs, call, schedule, graphs):
                    if isinstance(found, Verdict):
                        verdicts.append(found)
                    else:
                        yield NotSupported(case, schedule or ANY, f"{found.name}: {found.reason}")
            except Unsupported as refused:
                yield NotSupported(case, schedule or ANY, str(refused))
                continue
            except CallFailed as error:
                verdicts += failed(str(error), INVARIANCE)
            yield self._run(case, schedule, verdicts, "", " --invariance")

    def without_golden(
        self, case: Case, schedules: tuple[str | None, ...], reason: str, invariant: bool
    ) -> list[Run | NotSupported]:
        """The failure of a case whose golden cannot be read, once for each schedule."""
        found: list[Run | NotSupported] = []
        for schedule in schedules or (None,):
            verdicts = failed(reason, INVARIANCE if invariant else _judged_by(schedule), "golden")
            found.append(self._run(case, schedule, verdicts, "", " --invariance" if invariant else ""))
        return found

    def _caller(self, kernel: str, schedule: str | None) -> invariance.Call:
        return lambda inputs, params, graph: self._held.call(kernel, schedule, inputs, params, graph)

    def _run(self, case: Case, schedule: str | None, verdicts: list[Verdict], note: str, options: str) -> Run:
        again = f"goldens verify --case {shlex.quote(case.id)}"
        again += f" --candidate {shlex.quote(self._candidate)}" if self._candidate != candidates.OURS else ""
        again += f" --device {self._device}" if self._device else ""
        again += f" --schedule {schedule}" if schedule else ""
        again += f" --timeout {self._seconds:g}" if self._seconds != SECONDS else ""
        return Run(case, schedule or ANY, self.name, tuple(verdicts), note, again + options)


def _judged_by(schedule: str | None) -> str:
    """What a verdict is against: the bits of a schedule that is demanded, else the model."""
    return "model" if schedule is None else "exact"


def run(
    trial: Trial, case: Case, manifest: dict[str, Any], invariant: bool, *only: str | None
) -> list[Run | NotSupported]:
    """One case, judged by its golden or tried for invariance; for ``only`` one schedule, or all that are demanded.

    A golden that cannot be read fails its case alone.
    """
    judged, schedules = trial.by_invariance if invariant else trial.by_golden, only or trial.schedules(case)
    try:
        return list(judged(case, manifest, schedules))
    except store.GoldenError as error:
        return trial.without_golden(case, schedules, str(error), invariant)
