"""Tests that need a browser or a compiler: left out and said where it is missing, an error where it was asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest
@pytest.mark.{marker}
def test_it(): pass
def test_other(): pass
"""
NAMES = {"browser": "Chromium: apt-get install chromium", "cxx": "a C++ compiler: apt-get install g++"}


def run(folder, marker, *options, **environment):
    (folder / "test_it.py").write_text(TESTS.format(marker=marker))
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "tests.needs", "-p", "no:cacheprovider"]
    variables = {n: v for n, v in os.environ.items() if n not in ("CXX", "GOLDENS_BROWSER")}
    variables |= {"PYTHONPATH": str(ROOT), "PATH": str(folder), "PLAYWRIGHT_BROWSERS_PATH": str(folder)}
    variables |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    done = subprocess.run([*command, *options], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("marker", NAMES)
def test_left_out_and_said(marker, tmp_path):
    code, text = run(tmp_path, marker)
    assert code == 0
    assert "1 passed, 1 skipped" in text
    assert f"left out: 1 of the tests, for want of {NAMES[marker]}" in text


@pytest.mark.parametrize("marker", NAMES)
def test_asked_for_it_is_an_error(marker, tmp_path):
    for options in (("--need-all",), ("-m", marker)):
        code, text = run(tmp_path, marker, *options)
        assert code == 3
        assert f"1 tests need {NAMES[marker]}" in text


@pytest.mark.parametrize(("marker", "tool"), [("browser", "chromium"), ("cxx", "g++")])
def test_found_on_the_path(marker, tool, tmp_path):
    (tmp_path / tool).write_text("#!/bin/sh\n")
    (tmp_path / tool).chmod(0o755)
    code, text = run(tmp_path, marker, "--need-all")
    assert code == 0
    assert "2 passed" in text


def test_a_browser_may_be_named(tmp_path):
    assert "2 passed" in run(tmp_path, "browser", "--need-all", GOLDENS_BROWSER="/opt/chrome")[1]
