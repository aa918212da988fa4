"""Verdicts for people and machines: a table in the terminal, Markdown, JSON, one HTML file, and what changed."""

from tools.report.changes import Change, against
from tools.report.document import FORMAT, to_json
from tools.report.html import to_html
from tools.report.result import COLUMNS, EXACT_MODEL, OURS, Result, details, rows, summary
from tools.report.text import UNLIMITED, to_markdown, to_table

__all__ = [
    "COLUMNS",
    "EXACT_MODEL",
    "FORMAT",
    "OURS",
    "UNLIMITED",
    "Change",
    "Result",
    "against",
    "details",
    "rows",
    "summary",
    "to_html",
    "to_json",
    "to_markdown",
    "to_table",
]
