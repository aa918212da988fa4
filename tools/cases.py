"""Which cases a command is about, from what its user asks for."""

import secrets

import goldens
from goldens.case import Case
from goldens.regenerate import all_cases
from tools import candidates, shard

MOST_SECONDS = 1e6  # of a call: beyond what a poll takes
MOST_TIMES = 1_000_000
SEEDS = 1 << 48


class UsageError(Exception):
    """What was asked for does not exist; the words begin with the option's name."""


def kernel_of(candidate: str, kernel: str | None, ids: list[str] | None) -> str | None:
    """The kernel whose cases a candidate is judged by, None for all."""
    adapter = candidates.ADAPTERS.get(candidate)
    if adapter is None and kernel is None and not ids:
        raise UsageError("kernel: missing; it says which kernel's interface the candidate has")
    if adapter is not None and len(adapter.kernels) == 1 and kernel is None and not ids:
        kernel = adapter.kernels[0]
    try:
        candidates.check(candidate, {kernel} if kernel else {case_id.partition("/")[0] for case_id in ids or []})
    except candidates.CandidateError as error:
        raise UsageError(f"candidate: {error}") from None
    return kernel


def check_device(candidate: str, device: str | None) -> None:
    """UsageError if a candidate that runs on GPUs alone is asked for on the CPU."""
    adapter = candidates.ADAPTERS.get(candidate)
    if device != "cpu" or adapter is None or adapter.cpu:
        return
    if candidate == candidates.OURS:
        who = "our kernels need an sm_90 GPU (H100, H200); `goldens report` judges the exact models without one"
    else:
        who = f"{candidate} needs a GPU"
    raise UsageError(f"device: got 'cpu', {who}")


def check_seconds(option: str, seconds: float) -> None:
    """UsageError unless it is a time that a call may take."""
    if not 0 <= seconds <= MOST_SECONDS:
        raise UsageError(f"{option}: got {seconds:g}, allowed are 0 (no limit) to {MOST_SECONDS:,.0f} seconds")


def seeds(fresh: int, first: int | None) -> tuple[int, ...]:
    """The seeds of ``fresh`` further inputs, from ``first`` or from a random one on. UsageError for others."""
    if not 0 <= fresh <= MOST_TIMES:
        raise UsageError(f"fresh: got {fresh}, allowed are 0 to {MOST_TIMES:,}")
    if first is not None and not fresh:
        raise UsageError("fresh-seed: is an option of --fresh, which is missing")
    if first is not None and not 0 <= first < SEEDS:
        raise UsageError(f"fresh-seed: got {first}, allowed are 0 to {SEEDS - 1}")
    start = secrets.randbelow(SEEDS) if first is None else first
    return tuple(range(start, start + fresh))


def check_repeat(repeat: int) -> None:
    """UsageError unless it is a number of calls."""
    if not 1 <= repeat <= MOST_TIMES:
        raise UsageError(f"repeat: got {repeat}, allowed are 1 to {MOST_TIMES:,}")


def choose(
    kernel: str | None,
    ids: list[str] | None,
    everything: bool = False,
    part: str | None = None,
    schedule: str | None = None,
) -> list[Case]:
    """The cases; on-demand ones only by id, or with ``everything``. ``part``: I/N. UsageError if there are none."""
    if kernel is not None and kernel not in goldens.KERNELS:
        raise UsageError(f"kernel: got {kernel!r}, allowed are {', '.join(goldens.KERNELS)}")
    try:
        cases = [goldens.find(case_id) for case_id in ids] if ids else all_cases()
    except ValueError as error:
        raise UsageError(str(error)) from None
    cases = [case for case in cases if kernel in (None, case.kernel)]
    if not cases:
        raise UsageError(f"case: none of {', '.join(ids or [])} is a case of kernel {kernel}")
    cases = [case for case in cases if case.committed or ids or everything]
    if schedule is not None:
        known = sorted({name for case in cases for name in case.schedules})
        cases = [case for case in cases if schedule in case.schedules]
        if not cases:
            demand = [case.id for case in all_cases() if kernel in (None, case.kernel) and schedule in case.schedules]
            hint = f"; it has cases on demand, named by --case, such as {demand[0]}" if demand and not ids else ""
            raise UsageError(f"schedule: got {schedule!r}, these cases have {', '.join(known) or 'none'}{hint}")
    try:
        chosen = shard.part(cases, part)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not chosen:
        raise UsageError(f"shard: got {part}, there are only {len(cases)} cases: at most {len(cases)} parts")
    return chosen
