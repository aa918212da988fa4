"""Commands whose output is closed, full or of a narrow encoding go on to their end, without a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
REPORT = ("report", "--case", "cache_insert/b1-p1x1-ties")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line with ``goldens`` for the program."""
    command = command.replace("goldens", f"{sys.executable} -m tools.cli", 1)
    variables = os.environ | environment
    return subprocess.run(
        ["sh", "-c", command],
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        timeout=300,
        check=False,
        encoding="utf-8",
        errors="replace",
    )


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_costs_the_output_alone(tmp_path: Path, closed: str) -> None:
    file = tmp_path / "report.json"
    done = shell(f"goldens {' '.join(REPORT)} --json {file} {closed}")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert json.loads(file.read_text())["results"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_output_is_said_once_and_files_are_written(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = shell(f"goldens {' '.join(REPORT)} --json {file} >/dev/full")
    assert done.returncode == 0
    assert done.stderr.count("goldens: standard output cannot be written (No space left on device)") == 1
    assert "Traceback" not in done.stderr
    assert json.loads(file.read_text())["results"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_shows_other_signs(encoding: str) -> None:
    done = shell(f"goldens {' '.join(REPORT)}", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert "1 of 1 runs passed" in done.stdout
    done = shell("goldens show fmha/d64-n64-nö", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)


def test_a_report_nested_beyond_reading_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("[" * 200_000)
    done = shell(f"goldens {' '.join(REPORT)} --against {old}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"goldens: --against: {old}: ")
    assert "Traceback" not in done.stderr
