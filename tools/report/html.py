"""The report as one HTML file that needs nothing else: no network, light and dark, phone and desktop.

Its one script finds, sorts and follows links to folded parts; all is there without it.
"""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from goldens.compare import KernelMap, TensorMap, Verdict
from tools.environment import environment
from tools.report.changes import Change
from tools.report.result import ANY, Result, Row, place, rows, summary, whose

FAILURES = 100  # failing verdicts shown in full
LISTED_OPEN = 40  # a kernel with more failing runs is folded
UNFOLDED = 3  # so many failures are open at first
TABLE_ROWS = 1000  # rows of one kernel's table; failures come first
CHANGES = 200
STRIP = 256  # a part of the kernel with more numbers than this is listed, not drawn
LISTED = 8  # numbers of a part named in words
EVEN = 1.5  # "evenly": no number of a part made more than this times the mean
LANES = 32


@dataclass(frozen=True)
class Bar:
    """A bucket of a histogram: label, count, and its length among the others from 0 to 1, on a log scale."""

    label: str
    count: int
    length: float


@dataclass(frozen=True)
class Cell:
    """A square of a map: where it is drawn, how strong from 0 to 1, and what it says when pointed at."""

    column: int
    row: int
    strength: float
    words: str


@dataclass(frozen=True)
class Part:
    """A part of the kernel: how many failing elements each number of it made, in words and as a strip of cells."""

    name: str
    words: str
    width: int
    height: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Group:
    """All cases of one output of one schedule."""

    kernel: str
    schedule: str
    output: str
    rows: tuple[Row, ...]

    @property
    def failed(self) -> int:
        return sum(not row.passed for row in self.rows)

    @property
    def unequal(self) -> int:
        """Elements whose bits differ from exact."""
        return sum(row.exact.failing for row in self.rows if row.exact)

    @property
    def elements(self) -> int:
        return sum(row.exact.elements for row in self.rows if row.exact)

    @property
    def by_model(self) -> int:
        """Elements judged by the model."""
        return sum(row.model.judged for row in self.rows if row.model)

    def largest(self, field: str) -> float | None:
        """The largest value of a field of the verdicts against the model, those that compared no element aside."""
        values = [getattr(row.model, field) for row in self.rows if row.model and row.model.elements]
        return max((value for value in values if value is not None), default=None)

    @property
    def histogram(self) -> list[Bar]:
        """Elements by ULPs against the model, of all cases."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total.update(row.model.histogram if row.model else {})
        return histogram(total)


def histogram(counts: dict[str, int]) -> list[Bar]:
    """The bars of a verdict's histogram. A bar of one element is seen beside one of millions."""
    top = math.log2(1 + max(counts.values(), default=0))
    ordered = sorted(counts.items(), key=lambda item: float(item[0]))
    return [Bar(_bucket(high), n, max(0.04, math.log2(1 + n) / top)) for high, n in ordered if n]


def _bucket(high: str) -> str:
    return "0" if high == "0" else "more" if high == "inf" else f"≤ {high}"


def tensor_cells(found: TensorMap) -> list[Cell]:
    """The squares of a tensor map that hold failing elements."""
    result = []
    for row, column, count in found.cells:
        rows_, columns = row * found.cell_rows, column * found.cell_columns
        last_row = min(rows_ + found.cell_rows, found.rows)
        last_column = min(columns + found.cell_columns, found.columns)
        share = count / ((last_row - rows_) * (last_column - columns))
        words = f"rows {_span(rows_, last_row)}, columns {_span(columns, last_column)}: {count:,} ({share:.0%})"
        result.append(Cell(column, row, share, words))
    return result


def _span(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def kernel_parts(found: KernelMap) -> list[Part]:
    """The parts of a kernel map, each in words and, up to STRIP numbers, as a strip of cells."""
    return [_part(name, counts, found) for name, counts in found.parts.items()]


def _part(name: str, counts: dict[int, int], found: KernelMap) -> Part:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = ", ".join(f"{number} ({count / found.located:.0%})" for number, count in ordered[:LISTED])
    many, more = found.numbers[name], found.numbers[name] - LISTED
    words += f" and {more:,} more" if more > 0 else ""
    top, most = max(counts), ordered[0][1]
    if more > 0 and most <= EVEN * found.located / many:
        words = f"evenly over {many:,}, from {min(counts)} to {top}"
    if min(counts) < 0 or top >= STRIP:
        return Part(name, words, 0, 0, ())
    # As many as there may be is not known here; a warp's lanes are, and hardware likes powers of two.
    shown = LANES if name == "lane" else max(4, 1 << top.bit_length())
    width = min(shown, LANES)
    cells = (
        Cell(n % width, n // width, counts.get(n, 0) / most, f"{name} {n}: {counts.get(n, 0):,}") for n in range(shown)
    )
    return Part(name, words, width, -(-shown // width), tuple(cells))


def _groups(results: list[Result]) -> list[Group]:
    found: dict[tuple[str, str, str], list[Row]] = {}
    for result in results:
        for row in rows(result):
            found.setdefault((result.case.kernel, result.schedule, row.output), []).append(row)
    return [Group(*key, tuple(members)) for key, members in found.items()]


def _tables(results: list[Result]) -> list[tuple[str, list[Row], int]]:
    """Of each kernel its name, the rows shown, and how many there are."""
    found: dict[str, list[Row]] = {}
    for result in results:
        found.setdefault(result.case.kernel, []).extend(rows(result))
    return [
        (kernel, sorted(members, key=lambda row: row.passed)[:TABLE_ROWS], len(members))
        for kernel, members in found.items()
    ]


@dataclass(frozen=True)
class Failure:
    """A failing verdict, by its number among them."""

    number: int
    result: Result
    verdict: Verdict

    @property
    def case(self) -> str:
        return self.result.case.id

    @property
    def name(self) -> str:
        """Which output, what it was compared with, and how many elements fail."""
        count = f": {self.verdict.failing:,}" if self.verdict.elements else ""
        return f"{self.verdict.output} against {self.verdict.against}{count}"

    @property
    def where(self) -> str:
        """Where its elements lie, or what else is wrong."""
        return place(self.verdict) or self.verdict.place or self.verdict.reason


@dataclass(frozen=True)
class FailedRun:
    """A run with its failures, at least one."""

    kernel: str
    case: str
    schedule: str
    failures: tuple[Failure, ...]

    @property
    def words(self) -> str:
        """All that the run is found by."""
        return " ".join(f"{f.name} {f.where}" for f in self.failures)


def _failures(results: list[Result]) -> list[Failure]:
    found = [(result, verdict) for result in results for verdict in result.verdicts if not verdict.passed]
    return [Failure(number, *one) for number, one in enumerate(found)]


def _failed_runs(failures: list[Failure]) -> list[FailedRun]:
    """The failures by run, in their order."""
    runs = [list(members) for _, members in groupby(failures, lambda failure: id(failure.result))]
    return [
        FailedRun(members[0].result.case.kernel, members[0].case, members[0].result.schedule, tuple(members))
        for members in runs
    ]


def number(value: float | None, form: str = ".4g") -> str:
    """A figure, or a dash where there is none; NaN and infinities by name."""
    return "–" if value is None else format(value, form)


def short(count: int) -> str:
    """A count in four characters or so: 999, 1.2k, 35M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def to_html(
    results: Iterable[Result],
    title: str,
    changes: Iterable[Change] | None = None,
    refused: Iterable[str] = (),
    about: Iterable[str] = (),
) -> str:
    """The report as the text of an HTML file.

    changes: those since an older report, if there was one. refused: of each run that was not supported or not judged,
    which and why. about: of a trial, what was judged and how.

    FAILURES failing verdicts are shown in full and TABLE_ROWS rows a kernel; the totals are always said.
    """
    results = list(results)
    failures = _failures(results)
    listed = None if changes is None else list(changes)
    loader = PackageLoader("tools.report", "templates")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"number": number, "short": short}
    script = jinja.get_template("report.js").render()
    digest = hashlib.sha256(script.encode()).digest()
    context: dict[str, Any] = {
        "script": Markup(script),
        "script_hash": base64.b64encode(digest).decode(),
        "title": title,
        "summary": summary(results),
        "results": results,
        "failed": sum(not result.passed for result in results),
        "groups": _groups(results),
        "tables": _tables(results),
        "failures": failures,
        "failed_runs": _failed_runs(failures),
        "listed_open": LISTED_OPEN,
        "cards": FAILURES,
        "unfolded": UNFOLDED,
        "table_rows": TABLE_ROWS,
        "any_schedule": ANY,
        "changes": None if listed is None else listed[:CHANGES],
        "changes_total": len(listed or []),
        "refused": list(refused),
        "about": list(about),
        "notes": sorted({(r.case.id, r.note) for r in results if r.note}),
        "environment": environment(),
        "histogram": histogram,
        "tensor_cells": tensor_cells,
        "kernel_parts": kernel_parts,
        "place": place,
        "whose": whose,
    }
    return jinja.get_template("report.html").render(context)
