"""The report as a table for the terminal and as Markdown for a CI summary."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tools.environment import environment
from tools.report.changes import Change
from tools.report.result import COLUMNS, Result, Row, details, rows, summary

# GitHub refuses a summary of more than 1 MiB.
MARKDOWN_ROWS = 1000
MARKDOWN_LINES = 2000

UNLIMITED = 10_000  # columns
REASON = 40  # columns of a table's cell that may hold a reason; `details` has it in full


@dataclass(frozen=True)
class Verdicts:
    """Rows for the terminal: a table where every word of it fits, else a few lines a row. Nothing is cut."""

    title: str
    rows: tuple[Row, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        least = Measurement.get(console, options.update(width=UNLIMITED), table).minimum
        if least <= options.max_width:
            yield table
            return
        yield Text(self.title, style="table.title", overflow="fold")
        for row in self.rows:
            *name, verdict = (row.cells[i] for i in (0, 1, 2, -1))
            figures = [f"{column} {cell}" for column, cell in zip(COLUMNS[3:-1], row.cells[3:-1], strict=True) if cell]
            yield Text(" ".join(name), style=_style(row), overflow="fold")
            yield Padding(Text("; ".join([verdict, *figures]), style=_style(row), overflow="fold"), (0, 0, 0, 2))

    def _table(self) -> Table:
        columns = [Column(name, overflow="fold") for name in COLUMNS]
        columns[COLUMNS.index("against exact")].max_width = REASON
        table = Table(*columns, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row.cells), style=_style(row))
        return table


def _style(row: Row) -> str:
    return "" if row.result.passed else "red"


def to_table(results: Iterable[Result], title: str) -> Verdicts:
    """What a rich console prints as a table, or as lines where it is too narrow."""
    return Verdicts(title, tuple(row for result in results for row in rows(result)))


def to_markdown(results: Iterable[Result], title: str, changes: Iterable[Change] | None = None) -> str:
    """A Markdown document: summary, changes since an older report, table, failures, environment.

    Of more than MARKDOWN_ROWS rows the failing ones come first; what is left out is said.
    """
    results = list(results)
    lines = [f"# {title}", "", summary(results), ""]
    if changes is not None:
        listed = [f"- {change}" for change in changes]
        lines += ["## Since the older report", "", *_bounded(listed or ["Nothing changed."], MARKDOWN_ROWS), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    table = [row for result in results for row in rows(result)]
    if len(table) > MARKDOWN_ROWS:
        table.sort(key=lambda row: row.passed)
    lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row.cells) + " |" for row in table[:MARKDOWN_ROWS]]
    if len(table) > MARKDOWN_ROWS:
        lines += ["", f"{MARKDOWN_ROWS} of {len(table)} rows, failures first."]
    notes = sorted({f"- {r.case.id}: judged against exact alone: {r.note}" for r in results if r.note})
    if notes:
        lines += ["", "## Judged against exact alone", "", *notes]
    failures = [line for result in results for line in details(result)]
    if failures:
        lines += ["", "## Failures", "", "```", *_bounded(failures, MARKDOWN_LINES), "```"]
    lines += ["", "## Made with", "", *(f"- {name}: {value or 'none'}" for name, value in environment().items()), ""]
    return "\n".join(lines)


def _bounded(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"… {len(lines) - most} of {len(lines)} lines left out"]
