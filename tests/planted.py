"""Runs with a fault planted on purpose: the golden's own outputs, spoilt, as a candidate's."""

from collections.abc import Callable
from typing import Any

import goldens
from goldens import store
from goldens.judge import judge, select
from tools.report import OURS, Result

CASE = "fmha/d64-n64-normal"
WARP_ROWS, GROUP = 8, 32  # rows of o that a warp of fmha's k2 makes; threads a warp


def run(case_id: str, spoil: Callable[[dict], Any] = lambda outputs: None, candidate: str = OURS) -> Result:
    """The verdicts on a golden's first schedule after ``spoil`` has changed its outputs in place."""
    case = goldens.find(case_id)
    kernel = goldens.KERNELS[case.kernel]
    golden = store.load(case, store.read_manifest())
    schedule = case.schedules[0]
    outputs = {name: x.clone() for name, x in select(golden, f"exact/{schedule}/").items()}
    spoil(outputs)
    verdicts = tuple(judge(kernel, case, golden, outputs, schedule))
    return Result(case, schedule, candidate, verdicts, case.exact_only or "")


def warp(number: int) -> Callable[[dict], None]:
    """A fault in one warp of fmha's k2, in every tile."""

    def spoil(outputs: dict) -> None:
        o = outputs["o"]
        for start in range(number * WARP_ROWS, o.shape[1], 64):
            o[:, start : start + WARP_ROWS] *= 1.02

    return spoil


def special(outputs: dict) -> None:
    """NaN and inf where finite numbers are wanted."""
    outputs["o"][0, 5, 7] = float("nan")
    outputs["o"][0, 6, 7] = float("-inf")


def missing(outputs: dict) -> None:
    """The output left out, and another in its place."""
    outputs["O"] = outputs.pop("o")
