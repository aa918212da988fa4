"""The digest of JSON reports: one line a candidate and kernel, each kind of run in its own columns."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.report.digest import ANY, COLUMNS, digest, main


def verdict(against: str, **fields: Any) -> dict[str, Any]:
    empty = {"max_error_over_bound": None, "error_over_model_error": None}
    return {"against": against, "failing": 0, "elements": 100, "max_ulps": 0.0} | empty | fields


def result(schedule: str, verdicts: list[dict[str, Any]], passed: bool = True, options: str = "") -> dict[str, Any]:
    command = f"goldens verify --case fmha/x --candidate peer{options}"
    common = {"case": "fmha/x", "kernel": "fmha", "candidate": "peer", "command": command}
    return common | {"schedule": schedule, "passed": passed, "verdicts": verdicts}


def model(ulps: float, share: float, ratio: float) -> dict[str, Any]:
    return verdict("model", max_ulps=ulps, max_error_over_bound=share, error_over_model_error=ratio)


def cells(*documents: dict[str, Any]) -> dict[str, str]:
    lines = digest(documents, {"peer": "1.2"}).splitlines()
    assert len(lines) == 3
    return dict(zip(COLUMNS, (cell.strip() for cell in lines[2].strip("| ").split(" | ")), strict=False))


PLAIN = {
    "results": [
        result(ANY, [model(1.0, 0.1, 1.0), verdict("exact", failing=7)]),
        result(ANY, [model(5.0, 0.7, 1.5)]),
        result(ANY, [model(2.0, 1.25, 2.0), verdict("model", elements=0, max_ulps=99.0)], passed=False),
    ],
    "not_supported": [{"case": "fmha/y", "schedule": ANY, "reason": "not supported: packed"}],
}
BITS = {
    "results": [result("k2", [verdict("exact", failing=3), model(50.0, 9.0, 9.0)], False)] * 2,
    "not_supported": [{"case": "fmha/y", "schedule": "k2", "reason": "not supported: packed"}],
}
REPORT = {"format": 2, "results": [result(ANY, [model(1.0, 0.1, 1.0) | {"output": "o", "passed": True}])]}
INVARIANT = {"results": [result(ANY, [verdict("invariance")], options=" --invariance")] * 4}


def test_each_kind_of_run_has_its_columns() -> None:
    row = cells(PLAIN, BITS, INVARIANT)
    assert row["version"] == "1.2"
    assert row["cases passed"] == "2 of 3"
    assert row["not supported, not judged"] == "1"
    assert row["bits that differ from exact"] == "k2: 6 of 200"
    assert row["ULPs of model: median, largest"] == "2, 5"
    assert row["error / bound, largest"] == "125%"
    assert row["error / model's: median, largest"] == "1.500, 2.000"
    assert row["invariance: cases passed"] == "4 of 4"


def test_what_did_not_run_is_empty() -> None:
    lines = digest([BITS], {}).splitlines()
    assert lines[2] == "| fmha | peer |  |  |  | k2: 6 of 200 |  |  |  |  |"


def test_infinite_errors_are_said() -> None:
    row = cells({"results": [result(ANY, [model(1.0, 0.5, 1.0) | {"max_error_over_bound": "inf"}], False)]})
    assert row["error / bound, largest"] == "inf%"
    row = cells({"results": [result(ANY, [model(1.0, 0.5, 1.0) | {"max_ulps": "inf"}], False)]})
    assert row["ULPs of model: median, largest"] == "inf, inf"


def test_a_file_that_is_a_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    assert main([str(path), str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2].startswith("| fmha | peer |")
    assert printed.err == ""


NO_REPORT = {
    "missing": (None, "No such file"),
    "empty": ("", "Expecting value"),
    "no-json": ("{", "Expecting property name"),
    "a-list": ("[]", "this is no JSON report of `goldens report`"),
    "older": ('{"format": 1, "results": []}', "its format is 1, allowed is 2"),
    "run-that-is-none": ('{"format": 2, "results": [3]}', "a run or a verdict is not as it should be"),
    "run-without-command": (
        json.dumps({"format": 2, "results": [{k: v for k, v in REPORT["results"][0].items() if k != "command"}]}),
        "a run or a verdict is not as it should be (KeyError('command'))",
    ),
}


@pytest.mark.parametrize(("content", "words"), NO_REPORT.values(), ids=NO_REPORT)
def test_what_is_no_report_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"digest: {path}: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1


def test_without_a_report_the_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "usage: python -m tools.report.digest REPORT.json …\n"
