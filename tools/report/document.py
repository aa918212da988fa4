"""The report as JSON; docs/report_schema.json says what each field means."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tools.environment import environment
from tools.report.result import Result

FORMAT = 2


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
                "command": r.command,
                "verdicts": [_plain(asdict(v)) for v in r.verdicts],
            }
            for r in results
        ],
    }


def _plain(value: Any) -> Any:
    """As JSON has it: keys are strings, numbers that it lacks are "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
