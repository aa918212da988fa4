"""What changed since an older JSON report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.report.document import FORMAT, to_json
from tools.report.result import Result

NEWLY_FAILING, FIXED, MOVED, ADDED, REMOVED = "newly failing", "fixed", "changed", "added", "removed"
KINDS = (NEWLY_FAILING, REMOVED, MOVED, FIXED, ADDED)  # what may need a look comes first


class Key(NamedTuple):
    """What both reports know a verdict by; the candidate may be another."""

    case: str
    schedule: str
    output: str
    against: str


@dataclass(frozen=True)
class Change:
    """One difference between two reports; ``output`` and ``against`` are empty where it is about a whole run."""

    kind: str
    case: str
    schedule: str
    output: str
    against: str
    words: str

    def __str__(self) -> str:
        parts = [self.case, self.schedule, self.output, f"against {self.against}" if self.against else ""]
        return f"{self.kind}: {' '.join(part for part in parts if part)}" + (f": {self.words}" if self.words else "")


def against(results: Iterable[Result], old: Mapping[str, Any], cases: Iterable[str] | None = None) -> list[Change]:
    """The changes from ``old``, a report as ``to_json`` makes it, to ``results``, in the order of ``KINDS``.

    cases: ids of those that this run is about; what ``old`` says of others is left aside. None: all.
    ValueError if ``old`` is no such report.
    """
    now, before = _verdicts(to_json(results)), _verdicts(_checked(old))
    if cases is not None:
        about = set(cases)
        before = {key: verdict for key, verdict in before.items() if key.case in about}
    runs = [{key[:2] for key in verdicts} for verdicts in (before, now)]
    changes = [Change(REMOVED, *run, "", "", "") for run in sorted(runs[0] - runs[1])]
    changes += [Change(ADDED, *run, "", "", _state(now, run)) for run in sorted(runs[1] - runs[0])]
    both = runs[0] & runs[1]
    for key in sorted(k for k in before.keys() | now.keys() if k[:2] in both):
        kind, words = _difference(before.get(key), now.get(key))
        if kind:
            changes.append(Change(kind, *key, words))
    return sorted(changes, key=lambda change: KINDS.index(change.kind))


def _checked(old: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(old, Mapping) or "format" not in old or not isinstance(old.get("results"), list):
        raise ValueError("old report: this is no JSON report of `goldens report` or `goldens verify`")
    if old["format"] != FORMAT:
        raise ValueError(f"old report: its format is {old['format']!r}, allowed is {FORMAT}; make it again")
    return old


def _verdicts(report: Mapping[str, Any]) -> dict[Key, Mapping[str, Any]]:
    try:
        return {
            Key(run["case"], run["schedule"], verdict["output"], verdict["against"]): verdict
            for run in report["results"]
            for verdict in run["verdicts"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"old report: a run or a verdict is not as it should be ({error!r})") from None


def _state(verdicts: Mapping[Key, Mapping[str, Any]], run: tuple[str, ...]) -> str:
    return "passes" if all(v["passed"] for key, v in verdicts.items() if key[:2] == run) else "fails"


def _difference(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> tuple[str, str]:
    """Kind and words, both empty if there is nothing to say."""
    if before is None or now is None:
        verdict = before or now or {}
        return (REMOVED if now is None else ADDED), "passes" if verdict["passed"] else f"fails: {verdict['reason']}"
    if before["passed"] != now["passed"]:
        return (FIXED, f"was: {before['reason']}") if now["passed"] else (NEWLY_FAILING, now["reason"])
    moved = [
        f"{words} {before[field]} → {now[field]}"
        for field, words in (("failing", "failing elements"), ("max_ulps", "largest ULPs"))
        if before[field] != now[field]
    ]
    return (MOVED, ", ".join(moved)) if moved else ("", "")
