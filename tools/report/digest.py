"""One line for each candidate and kernel out of JSON reports: what to put side by side of several candidates.

    python -m tools.report.digest REPORT.json …

prints it as a Markdown table; the versions are those of the packages that are installed where it runs.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.adapters import ADAPTERS
from tools.environment import version
from tools.report.changes import against
from tools.trial import ANY

COLUMNS = (
    "kernel",
    "candidate",
    "version",
    "cases passed",
    "not supported, not judged",
    "bits that differ from exact",
    "ULPs of model: median, largest",
    "error / bound, largest",
    "error / model's: median, largest",
    "invariance: cases passed",
)


def digest(documents: Iterable[Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """A Markdown table with a line for each kernel and candidate of these reports, whatever asked for each of them.

    A run that claims no schedule gives cases passed and what concerns the model, one against a schedule how many
    elements of how many have other bits than exact, one with ``--invariance`` the last column. Empty: nothing ran.
    versions: by candidate.
    """
    lines: dict[tuple[str, str], Line] = defaultdict(Line)
    for document in documents:
        results = document["results"]
        for result in results:
            lines[result["kernel"], result["candidate"]].add(result)
        refused = document.get("not_supported", [])
        if all(r["schedule"] == ANY for r in (*results, *refused)) and results and not _invariance(results[0]):
            for entry in refused:
                lines[entry["case"].partition("/")[0], results[0]["candidate"]].refused += 1
    rows = [(kernel, name, versions.get(name, ""), *line.cells()) for (kernel, name), line in sorted(lines.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows))


class Line:
    """What the runs of one candidate on one kernel came to."""

    def __init__(self) -> None:
        self.refused = 0
        self._passed: dict[str, list[bool]] = defaultdict(list)
        self._bits: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._model: list[Mapping[str, Any]] = []

    def add(self, result: Mapping[str, Any]) -> None:
        """Count one run."""
        schedule, verdicts = result["schedule"], result["verdicts"]
        self._passed["invariance" if _invariance(result) else schedule].append(result["passed"])
        if _invariance(result):
            return
        for verdict in verdicts:
            if verdict["against"] == "exact" and schedule != ANY:
                counts = self._bits[schedule]
                counts[0] += verdict["failing"]
                counts[1] += verdict["elements"]
            elif verdict["against"] == "model" and schedule == ANY and verdict["elements"]:
                self._model.append(verdict)

    def cells(self) -> tuple[str, ...]:
        """The columns after the version."""
        bits = "; ".join(f"{name}: {failing:,} of {all_:,}" for name, (failing, all_) in sorted(self._bits.items()))
        shares = self._numbers("max_error_over_bound")
        return (
            self._share(ANY),
            str(self.refused) if self.refused else "",
            bits,
            _spread(self._numbers("max_ulps"), ".3g"),
            f"{max(shares):.0%}" if shares else "",
            _spread(self._numbers("error_over_model_error"), ".3f"),
            self._share("invariance"),
        )

    def _share(self, what: str) -> str:
        passed = self._passed.get(what, [])
        return f"{sum(passed)} of {len(passed)}" if passed else ""

    def _numbers(self, field: str) -> list[float]:
        """A field of every verdict against the model; JSON reports have "inf" for what it lacks."""
        return [float(v[field]) for v in self._model if v[field] is not None]


def _invariance(result: Mapping[str, Any]) -> bool:
    return "--invariance" in result["command"].split()


def _spread(numbers: list[float], form: str) -> str:
    return f"{median(numbers):{form}}, {max(numbers):{form}}" if numbers else ""


def versions() -> dict[str, str]:
    """By adapter, the version of its package where that is installed."""
    found = {name: version(adapter.package) for name, adapter in ADAPTERS.items() if adapter.package}
    return {name: text for name, text in found.items() if text}


def read(path: Path) -> Mapping[str, Any]:
    """A JSON report. ValueError, naming the file, if it cannot be read or is none."""
    try:
        document = json.loads(path.read_text())
        against([], document)
        digest([document], {})
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {str(error).removeprefix('old report: ')}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: a run or a verdict is not as it should be ({error!r})") from None
    return document


def main(names: Sequence[str]) -> int:
    """Print the digest of these reports; the exit code: 0, or 2 for wrong usage."""
    if not names:
        print("usage: python -m tools.report.digest REPORT.json …", file=sys.stderr)
        return 2
    try:
        documents = [read(Path(name)) for name in names]
    except ValueError as error:
        print(f"digest: {error}", file=sys.stderr)
        return 2
    print(digest(documents, versions()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
