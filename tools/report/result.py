"""One run of a case and its verdicts, as rows and lines of text."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from goldens.case import Case
from goldens.compare import Verdict

EXACT_MODEL = "exact model"  # the candidate of `goldens report`
ANY = "any"  # the schedule of a candidate that claims none
OURS = "cute_impl"  # the candidate of `goldens verify` unless it is given another
COLUMNS = (
    "case",
    "schedule",
    "output",
    "against exact",
    "ULPs of model",
    "error / bound",
    "error / model's",
    "verdict",
)


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

    @property
    def command(self) -> str:
        """The one command that makes this run again."""
        if self.candidate == EXACT_MODEL:
            return f"goldens report --case {shlex.quote(self.case.id)}"
        candidate = "" if self.candidate == OURS else f" --candidate {shlex.quote(self.candidate)}"
        return f"goldens verify --case {shlex.quote(self.case.id)}{candidate}"


@dataclass(frozen=True)
class Row:
    """All that a table says of one output of a run; ``exact``: what its bits were compared with, the golden or another
    call of the same candidate."""

    result: Result
    output: str
    exact: Verdict | None
    model: Verdict | None

    @property
    def passed(self) -> bool:
        return all(v.passed for v in (self.exact, self.model) if v)

    @property
    def cells(self) -> tuple[str, ...]:
        """One text a column of ``COLUMNS``."""
        exact, model = self.exact, self.model
        words = "pass" if self.passed else "FAIL"
        if model is None and self.result.note:
            words += ", exact alone"
        if model and model.undecided:
            words += f", model decides on {model.judged:,} of {model.elements:,}"
        return (
            self.result.case.id,
            self.result.schedule,
            self.output,
            "" if exact is None else ("0 bits" if exact.passed else exact.reason),
            f"{model.max_ulps:.3g}" if model and model.elements else "",
            _number(model.max_error_over_bound if model else None, ".0%"),
            _number(model.error_over_model_error if model else None, ".6f"),
            words,
        )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def rows(result: Result) -> list[Row]:
    """The result's table rows, one an output."""
    outputs = dict.fromkeys(verdict.output for verdict in result.verdicts)
    bits = {v.output: v for v in result.verdicts if v.against != "model"}
    model = {v.output: v for v in result.verdicts if v.against == "model"}
    return [Row(result, output, bits.get(output), model.get(output)) for output in outputs]


def details(result: Result) -> list[str]:
    """What helps to find a failure: reasons, histogram, where in the kernel, the worst elements, the command."""
    lines = []
    for verdict in result.verdicts:
        if verdict.passed:
            continue
        lines.append(f"{result.case.id} {result.schedule} {verdict.output} against {verdict.against}: {verdict.reason}")
        if verdict.histogram:
            lines.append("  elements by ULPs: " + ", ".join(f"≤{high}: {n}" for high, n in verdict.histogram.items()))
        lines += [f"  {words}" for words in (verdict.place, place(verdict)) if words]
        for e in verdict.worst:
            made_by = " ".join(f"{part} {number}" for part, number in e.where.items())
            lines.append(
                f"  {list(e.index)}: got {e.got_bits} ({e.got:g}), wanted {e.want_bits} ({e.want:g}), {e.ulps:g} ULPs"
                + (f"; {made_by}" if made_by else "")
            )
    return [*lines, f"  again: {result.command}"] if lines else []


def place(verdict: Verdict) -> str:
    """The parts of the kernel of which a single number made every failing element; empty if there is none to name."""
    found = verdict.kernel_map
    single = (
        [f"{part} {next(iter(counts))}" for part, counts in found.parts.items() if len(counts) == 1] if found else []
    )
    return f"{whose(verdict)} come from {', '.join(single)}" if single and verdict.failing > 1 else ""


def whose(verdict: Verdict) -> str:
    """The failing elements that a kernel map speaks of."""
    located = verdict.kernel_map.located if verdict.kernel_map else 0
    return f"all {located:,}" if located == verdict.failing else f"all {located:,} looked at (of {verdict.failing:,})"


def summary(results: Iterable[Result]) -> str:
    """One line: how many cases passed, and what was compared."""
    results = list(results)
    passed = sum(result.passed for result in results)
    verdicts = [verdict for result in results for verdict in result.verdicts]
    bits = sum(v.elements for v in verdicts if v.against != "model")
    by_model = [v for v in verdicts if v.against == "model"]
    judged, undecided = sum(v.judged for v in by_model), sum(v.undecided for v in by_model)
    words = f"{passed} of {len(results)} runs passed; {bits:,} elements compared bit for bit"
    words += f", {judged:,} judged by the model" if judged else ""
    return words + (f", which does not decide on {undecided:,}" if undecided else "")
