"""A candidate on trial: its calls judged by the goldens and by fresh inputs, or its invariance tried."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from goldens import KERNELS, invariance, store
from goldens.call import CallFailed, Unsupported, words
from goldens.case import Case, Tensors
from goldens.compare import Verdict, check_form
from goldens.judge import Judge, by_format, decided, failed
from tools import candidates
from tools.coverage import Account, Coverage, Seen
from tools.report import OURS, Result
from tools.worker import Worker

ANY = "any"  # the schedule of a candidate that claims none
INVARIANCE = "invariance"
SECONDS = 600.0


@dataclass(frozen=True)
class Run(Result):
    """The verdicts on one run, the command that makes it again alone, and what was asked and judged.

    seed: of its inputs, if they are fresh.
    """

    again: str = ""
    seen: Seen | None = None
    seed: int | None = None

    @property
    def command(self) -> str:
        return self.again


@dataclass(frozen=True)
class NotSupported:
    """What a candidate says that it does not do, or what cannot judge it: never passed.

    seen: None where the run is judged all the same, without this call.
    """

    case: Case
    schedule: str
    reason: str
    word: str = "not supported"
    seen: Seen | None = None

    def __str__(self) -> str:
        return f"{self.case.id} {self.schedule}: {self.word}: {self.reason}"


@dataclass(frozen=True)
class Given:
    """What a candidate meets: a case and what judges it; ``seed`` of fresh inputs, whose case is made of ``origin``."""

    judge: Judge
    origin: Case
    seed: int | None = None

    @property
    def case(self) -> Case:
        return self.judge.case


class Trial:
    """A candidate by its name or ``module:function``, imported now; a context manager that ends its process.

    The manifest must have been read before: the candidate's import may do anything to files.

    device: where it runs, by default the sm_90 GPU. seconds: what a call may take, 0 for no limit. schedule: the one
    whose bits are demanded, instead of those that the candidate claims. seeds: of further inputs for each case. repeat:
    how often each call is made.
    CandidateError, Missing, HardwareMissing, ValueError (device) if it cannot be tried.
    """

    def __init__(
        self,
        candidate: str,
        device: str | None,
        seconds: float = SECONDS,
        schedule: str | None = None,
        seeds: Sequence[int] = (),
        repeat: int = 1,
    ):
        self._candidate, self._device, self._schedule, self._seconds = candidate, device, schedule, seconds
        self.seeds, self.repeat = tuple(seeds), repeat
        self.device = candidates.device_of(device)
        self.name = OURS if candidate == candidates.OURS else candidate
        self._held = Worker(candidate, self.device, seconds)

    @property
    def guard(self) -> str:
        """What the candidate's process could not reach."""
        return self._held.guard

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

    def given(self, case: Case, manifest: dict[str, Any], schedules: Sequence[str | None], seed: int | None) -> Given:
        """The case with its golden; for a seed, with fresh inputs and a golden made of them now, in no file."""
        kernel = KERNELS[case.kernel]
        if seed is None:
            return Given(Judge(kernel, case, store.obtain(kernel, case, manifest)), case)
        demanded = tuple(s for s in schedules if s is not None) or case.schedules[:1]
        name = f"{case.name}-fresh{seed}"
        made = replace(case, name=name, seed=seed, schedules=demanded, committed=False)
        return Given(Judge(kernel, made, store.compute(kernel, made)), case, seed)

    def by_golden(self, given: Given, schedule: str | None) -> Iterator[Run | NotSupported]:
        """One schedule of the case, called as often as is asked for."""
        case, inputs, asked = given.case, given.judge.inputs, self._asked(given, schedule)
        first: Tensors = {}
        verdicts: list[Verdict] = []
        for number in range(1, self.repeat + 1):
            try:
                outputs = self._held.call(case.kernel, schedule, inputs, case.params)
            except Unsupported as refused:
                yield NotSupported(case, schedule or ANY, str(refused), seen=replace(asked, refused=1))
                return
            except CallFailed as error:
                found = failed(str(error), _judged_by(schedule))
            else:
                if number > 1 and _same_bits(outputs, first):
                    continue
                found = _judged(given, outputs, schedule, self._only(case.kernel))
                first = first or outputs
            if number == 1:
                verdicts = found
            else:
                verdicts += [replace(v, output=f"call {number}: {v.output}") for v in found if not v.passed]
            if any(not v.passed for v in found):
                break
        if not decided(verdicts):
            why = case.exact_only or "the model decides on no element"
            reason = f"only the bits of a schedule decide here, and it claims none: {why}"
            yield NotSupported(case, ANY, reason, "not judged", replace(asked, unjudgeable=True))
            return
        again = self.again(given.origin, schedule, given.seed)
        yield self._run(given, schedule, verdicts, asked, again, case.exact_only or "")

    def by_invariance(self, given: Given, schedule: str | None) -> Iterator[Run | NotSupported]:
        """The properties of the case's kernel for one schedule, tried as often as is asked for."""
        case, inputs, asked = given.case, given.judge.inputs, self._asked(given, schedule)
        verdicts: list[Verdict] = []
        skipped: dict[str, NotSupported] = {}
        refused, kernel, graphs = 0, KERNELS[case.kernel], self.device.type == "cuda"
        within = None if schedule or self._held.batch_invariant else given.judge.bound(None)

        def call(inputs: Tensors, params: Any, graph: bool) -> Tensors:
            return self._held.call(case.kernel, schedule, inputs, params, graph)

        try:
            verdicts += self._form(given, call(inputs, case.params, False), schedule)
            for _ in range(self.repeat if all(v.passed for v in verdicts) else 0):
                for found in invariance.check(kernel, case, inputs, call, schedule, graphs, within):
                    if isinstance(found, Verdict):
                        verdicts.append(found)
                    else:
                        refused += not found.allowed
                        reason = f"{found.name}: {found.reason}"
                        skipped[found.name] = NotSupported(case, schedule or ANY, reason)
        except Unsupported as error:
            yield NotSupported(case, schedule or ANY, str(error), seen=replace(asked, refused=1))
            return
        except CallFailed as error:
            verdicts += failed(str(error), INVARIANCE)
        except Exception as error:  # as in _judged
            verdicts += failed(f"comparing what it returned {words(error)}", INVARIANCE, "outputs")
        yield from skipped.values()
        again = self.again(given.origin, schedule, given.seed) + " --invariance"
        verdicts = verdicts or failed("nothing was compared", INVARIANCE)
        yield self._run(given, schedule, verdicts, replace(asked, refused=refused), again)

    def _form(self, given: Given, outputs: Tensors, schedule: str | None) -> Iterator[Verdict]:
        """What is wrong with the form of the case's own outputs; a passing verdict for an output without elements."""
        case, kernel, only = given.case, given.judge.kernel, self._only(given.case.kernel)
        wanted, model = given.judge.exact(schedule), given.judge.model
        interface = kernel.outputs(case.params)
        may = (wanted or model) | (model if schedule is None else {})
        for name, want in may.items():
            if (only is not None and name not in only) or (name not in (wanted or model) and name not in outputs):
                continue
            if name not in outputs:
                yield Verdict(name, INVARIANCE, False, "missing: the candidate returned no such output")
                continue
            got, dtype = by_format(kernel, case, name, outputs[name]), interface[name].dtype
            refused = check_form(name, INVARIANCE, got, want, dtype)
            if refused:
                yield refused
            elif not want.numel():
                yield Verdict(name, INVARIANCE, True, "", str(dtype).removeprefix("torch."), tuple(want.shape))
        for name in outputs.keys() - may.keys():
            yield Verdict(name, INVARIANCE, False, "extra: the golden has no such output")

    def without_golden(
        self, case: Case, schedules: Sequence[str | None], reason: str, invariant: bool, seed: int | None
    ) -> list[Run | NotSupported]:
        """The failure of a case whose golden cannot be read, once for each schedule."""
        found: list[Run | NotSupported] = []
        for schedule in schedules:
            verdicts = failed(reason, INVARIANCE if invariant else _judged_by(schedule), "golden")
            again = self.again(case, schedule, seed) + (" --invariance" if invariant else "")
            asked = Seen(case.id, case.kernel, ())
            found.append(
                self._run(Given(Judge(KERNELS[case.kernel], case, {}), case, seed), schedule, verdicts, asked, again)
            )
        return found

    def again(self, case: Case, schedule: str | None, seed: int | None) -> str:
        """The command that makes a run of the case again alone."""
        command = [f"goldens verify --case {shlex.quote(case.id)}"]
        command += [f"--candidate {shlex.quote(self._candidate)}"] if self._candidate != candidates.OURS else []
        command += [f"--device {self._device}"] if self._device else []
        command += [f"--schedule {schedule}"] if schedule else []
        command += [f"--timeout {self._seconds:g}"] if self._seconds != SECONDS else []
        command += [f"--repeat {self.repeat}"] if self.repeat > 1 else []
        command += [f"--fresh 1 --fresh-seed {seed}"] if seed is not None else []
        return " ".join(command)

    def _only(self, kernel: str) -> tuple[str, ...] | None:
        """The outputs that the candidate says it returns, None for all."""
        outputs = self._held.outputs or {}
        return outputs.get(kernel, outputs.get(""))

    def _asked(self, given: Given, schedule: str | None) -> Seen:
        """What a run asks for: the outputs of the schedule; without one those of the model too."""
        names = (given.judge.exact(schedule) or given.judge.model) | (given.judge.model if schedule is None else {})
        only = self._only(given.case.kernel)
        left_out = tuple(name for name in names if only is not None and name not in only)
        return Seen(given.origin.id, given.case.kernel, tuple(names), left_out)

    def _run(
        self, given: Given, schedule: str | None, verdicts: list[Verdict], asked: Seen, again: str, note: str = ""
    ) -> Run:
        elements: dict[str, int] = {}
        for v in verdicts:
            elements[v.output] = max(v.judged, elements.get(v.output, 0))
        judged = {v.output.rpartition(": ")[2] for v in verdicts if decided([v])}
        undecidable = {v.output for v in verdicts} - judged
        seen = replace(
            asked,
            asked=tuple(name for name in asked.asked if name not in undecidable),
            judged=tuple(name for name in asked.asked if name in judged),
            elements=sum(elements.values()),
        )
        return Run(given.case, schedule or ANY, self.name, tuple(verdicts), note, again, seen, given.seed)


def _judged(given: Given, outputs: Tensors, schedule: str | None, only: tuple[str, ...] | None) -> list[Verdict]:
    """``judge``; outputs that it cannot compare fail."""
    try:
        return given.judge(outputs, schedule, only)
    except Exception as error:  # foreign tensors, and the next case must be judged
        return failed(f"comparing what it returned {words(error)}", _judged_by(schedule), "outputs")


def _same_bits(outputs: Tensors, first: Tensors) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(-1).view(torch.uint8)

    return outputs.keys() == first.keys() and all(
        x.dtype == first[name].dtype and x.shape == first[name].shape and torch.equal(bits(x), bits(first[name]))
        for name, x in outputs.items()
    )


def _judged_by(schedule: str | None) -> str:
    """What a verdict is against: the bits of a schedule that is demanded, else the model."""
    return "model" if schedule is None else "exact"


def run(
    trial: Trial, case: Case, manifest: dict[str, Any], invariant: bool, *only: str | None
) -> list[Run | NotSupported]:
    """One case and its fresh inputs, judged or tried for invariance; for ``only`` one schedule, or all demanded.

    A golden that cannot be read fails its case alone.
    """
    tried, schedules = trial.by_invariance if invariant else trial.by_golden, only or trial.schedules(case)
    found: list[Run | NotSupported] = []
    for seed in (None, *trial.seeds) if schedules else ():
        try:
            given = trial.given(case, manifest, schedules, seed)
        except (store.GoldenError, ValueError) as error:
            found += trial.without_golden(case, schedules, str(error), invariant, seed)
            continue
        for schedule in schedules:
            found += tried(given, schedule)
    return found


def account(trial: Trial, found: Sequence[Run | NotSupported], partial: bool) -> Account:
    """What a report says of the trial; ``partial``: that not all was judged is no fault."""
    judged = Coverage(tuple(run.seen for run in found if run.seen))
    lines = [str(judged), f"guard: {trial.guard}"]
    if trial.seeds:
        lines.append(f"fresh inputs: --fresh {len(trial.seeds)} --fresh-seed {trial.seeds[0]} makes them again")
    facts: dict[str, Any] = judged.plain()
    facts |= {"guard": trial.guard, "fresh_seeds": list(trial.seeds), "repeat": trial.repeat}
    refused = [one for one in found if isinstance(one, NotSupported)]
    listed = [{"case": r.case.id, "schedule": r.schedule, "reason": f"{r.word}: {r.reason}"} for r in refused]
    return Account(
        refused=[str(one) for one in refused],
        lines=lines,
        facts={"trial": facts} | ({"not_supported": listed} if listed else {}),
        gaps=[] if partial else judged.gaps,
        fresh=frozenset(run.case.id for run in found if isinstance(run, Run) and run.seed is not None),
    )
