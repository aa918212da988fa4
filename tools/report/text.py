"""The report as a table for the terminal and as Markdown for a CI summary."""

from collections.abc import Iterable

from rich.table import Table

from tools.environment import environment
from tools.report.changes import Change
from tools.report.result import COLUMNS, Result, details, rows, summary

# GitHub refuses a summary of more than 1 MiB.
MARKDOWN_ROWS = 1000
MARKDOWN_LINES = 2000


def to_table(results: Iterable[Result], title: str) -> Table:
    """A table for the terminal."""
    table = Table(*COLUMNS, title=title, title_justify="left")
    for result in results:
        for row in rows(result):
            table.add_row(*row.cells, style=None if result.passed else "red")
    return table


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
