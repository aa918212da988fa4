"""What a trial judged of what it was asked for.

A trial is a success only if it judged everything that was asked for: each run, and each output that the goldens of its
cases have, at least once. What a candidate refuses or leaves out makes it none, unless its user says that this is meant
(``--partial``). An adapter of this checkout says in its own file what it leaves out, and that is enough.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """What was asked of one run, and what came of it.

    asked: the outputs that its golden has. left_out: those of them that the candidate says it does not return. judged:
    those that a verdict was made on. refused: calls that the candidate refused, the run itself among them. unjudgeable:
    whether nothing here can judge the run, whatever it returns.
    """

    case: str
    kernel: str
    asked: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    elements: int = 0
    refused: int = 0
    unjudgeable: bool = False

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it; ``Seen(**plain)`` counts as this one."""
        return asdict(self)


@dataclass(frozen=True)
class Coverage:
    """The share that was judged of the runs that were asked for."""

    seen: tuple[Seen, ...]

    @property
    def never(self) -> tuple[str, ...]:
        """The outputs on which no verdict was made in any run, with their kernels."""
        judged = {(x.kernel, output) for x in self.seen for output in x.judged}
        left_out = {(x.kernel, output) for x in self.seen for output in x.left_out}
        asked = dict.fromkeys((x.kernel, output) for x in self.seen if not x.unjudgeable for output in x.asked)
        return tuple(
            f"{kernel} {output}" + (" (which it says it does not return)" if (kernel, output) in left_out else "")
            for kernel, output in asked
            if (kernel, output) not in judged
        )

    @property
    def gaps(self) -> list[str]:
        """What keeps the trial from being a success, in words."""
        refused = sum(x.refused for x in self.seen)
        found = [f"refused by the candidate: {refused} calls"] if refused else []
        return found + ([f"never judged: {', '.join(self.never)}"] if self.never else [])

    def __str__(self) -> str:
        count = self.plain()
        share = (
            f"judged: {count['runs_judged']} of {count['runs']} runs, "
            f"{count['cases_judged']} of {count['cases']} cases, {count['elements']:,} elements"
        )
        unjudgeable = sum(x.unjudgeable for x in self.seen)
        bits_alone = [f"{unjudgeable} runs on which only a schedule's bits decide"] if unjudgeable else []
        return "; ".join([share, *bits_alone, *self.gaps])

    def plain(self) -> dict[str, Any]:
        """As a JSON report has it."""
        runs = [x for x in self.seen if x.judged]
        return {
            "runs": len(self.seen),
            "runs_judged": len(runs),
            "cases": len({x.case for x in self.seen}),
            "cases_judged": len({x.case for x in runs}),
            "elements": sum(x.elements for x in runs),
            "never_judged": list(self.never),
            "refused_calls": sum(x.refused for x in self.seen),
        }


@dataclass(frozen=True)
class Account:
    """What a report says of a trial beside its results.

    refused: what the candidate does not do, or what cannot judge it. lines: what was judged, how, from what the
    candidate was kept. facts: the same for JSON. gaps: what keeps the trial from being a success. fresh: ids of cases
    whose inputs are in no file, so that no other report knows them.
    """

    refused: Sequence[str] = ()
    lines: Sequence[str] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    gaps: Sequence[str] = ()
    fresh: frozenset[str] = frozenset()

    @property
    def markdown(self) -> str:
        """Sections of a Markdown document."""
        parts = (("Trial", self.lines), ("Not supported or not judged", self.refused))
        sections = (
            ["", f"## {title}", "", *(f"- {_as_markdown(x)}" for x in lines), ""] for title, lines in parts if lines
        )
        return "\n".join(line for section in sections for line in section)


NO_TRIAL = Account()


def _as_markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", text)
