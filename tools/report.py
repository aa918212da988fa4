"""Verdicts as a table in the terminal, as Markdown, and as JSON."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from goldens.case import Case
from goldens.compare import Verdict
from tools.environment import environment

FORMAT = 1
EXACT_MODEL = "exact model"  # the candidate of `goldens report`
COLUMNS = ("case", "schedule", "output", "against exact", "ULPs of model", "bound used", "error ratio", "verdict")


@dataclass(frozen=True)
class Result:
    """The verdicts on one candidate's run of one case; ``note`` says what could not be judged and why."""

    case: Case
    schedule: str
    candidate: str
    verdicts: tuple[Verdict, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)


def rows(result: Result) -> list[tuple[str, ...]]:
    """The result's table rows, one an output."""
    table: list[tuple[str, ...]] = []
    for output in dict.fromkeys(verdict.output for verdict in result.verdicts):
        by = {v.against: v for v in result.verdicts if v.output == output}
        exact, model = by.get("exact"), by.get("model")
        bits = "" if exact is None else ("0 bits" if exact.passed else exact.reason)
        ulps = f"{model.max_ulps:.3g}" if model and model.elements else ""
        used = f"{model.used:.0%}" if model and model.used is not None else ""
        ratio = f"{model.ratio:.6f}" if model and model.ratio is not None else ""
        passed = all(v.passed for v in by.values())
        words = "pass" if passed else "FAIL"
        if model is None and result.note:
            words += ", exact alone"
        table.append((result.case.id, result.schedule, output, bits, ulps, used, ratio, words))
    return table


def details(result: Result) -> list[str]:
    """What helps to find a failure: reasons, histogram, where in the kernel, the worst elements, the command."""
    lines = []
    for verdict in result.verdicts:
        if verdict.passed:
            continue
        lines.append(f"{result.case.id} {result.schedule} {verdict.output} against {verdict.against}: {verdict.reason}")
        if verdict.histogram:
            lines.append("  elements by ULPs: " + ", ".join(f"≤{high}: {n}" for high, n in verdict.histogram.items()))
        for part, values in _places(verdict).items():
            if len(values) == 1:
                lines.append(f"  all {verdict.differing} come from {part} {values.pop()}")
        for e in verdict.worst:
            place = " ".join(f"{part} {number}" for part, number in e.where.items())
            lines.append(
                f"  {list(e.index)}: got {e.got_bits} ({e.got:g}), wanted {e.want_bits} ({e.want:g}), {e.ulps:g} ULPs"
                + (f"; {place}" if place else "")
            )
    if lines:
        command = "report" if result.candidate == EXACT_MODEL else "verify"
        lines.append(f"  again: goldens {command} --case {result.case.id}")
    return lines


def _places(verdict: Verdict) -> dict[str, set[int]]:
    parts: dict[str, set[int]] = {}
    for element in verdict.worst:
        for part, number in element.where.items():
            parts.setdefault(part, set()).add(number)
    # Only where every differing element is listed do the listed ones speak for all.
    return parts if 1 < verdict.differing == len(verdict.worst) else {}


def summary(results: Iterable[Result]) -> str:
    """One line: how many cases passed, and what was compared."""
    results = list(results)
    passed = sum(result.passed for result in results)
    elements = sum(v.elements for r in results for v in r.verdicts if v.against == "exact")
    return f"{passed} of {len(results)} runs passed; {elements:,} elements compared bit for bit"


def to_table(results: Iterable[Result], title: str) -> Table:
    """A table for the terminal."""
    table = Table(*COLUMNS, title=title, title_justify="left")
    for result in results:
        for row in rows(result):
            table.add_row(*row, style=None if result.passed else "red")
    return table


def to_markdown(results: Iterable[Result], title: str) -> str:
    """A Markdown document: summary, table, failures, environment."""
    results = list(results)
    lines = [f"# {title}", "", summary(results), "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for r in results for row in rows(r)]
    notes = sorted({f"- {r.case.id}: judged against exact alone: {r.note}" for r in results if r.note})
    if notes:
        lines += ["", "## Judged against exact alone", "", *notes]
    failures = [line for result in results for line in details(result)]
    if failures:
        lines += ["", "## Failures", "", "```", *failures, "```"]
    lines += ["", "## Made with", "", *(f"- {name}: {value or 'none'}" for name, value in environment().items()), ""]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks as strings: "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def to_json(results: Iterable[Result]) -> dict[str, Any]:
    """A JSON document: format, environment, and for each run its verdicts with every field."""
    return {
        "format": FORMAT,
        "environment": environment(),
        "results": [
            {
                "case": r.case.id,
                "kernel": r.case.kernel,
                "schedule": r.schedule,
                "candidate": r.candidate,
                "passed": r.passed,
                "note": r.note,
                "verdicts": [_plain(asdict(v)) for v in r.verdicts],
            }
            for r in results
        ],
    }
