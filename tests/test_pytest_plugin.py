"""pytest as the judge of a candidate: options, verdicts, exit codes, in one process and in several."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import goldens
from tools.shard import part

REPOSITORY = Path(__file__).parent.parent
THEIRS = REPOSITORY / "tests" / "on_trial" / "theirs.py"
INSERT, TWO_ROWS = "cache_insert/b1-p1x1-unit", "cache_insert/b2-crossing-normal"


def python(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: no conftest, and a module with candidates."""
    made = tmp_path_factory.mktemp("user")
    shutil.copy(THEIRS, made)
    return made


def plugin(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """pytest in a folder without a conftest: nothing but the plugin is loaded."""
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.pytest_plugin", *options, cwd=folder)


HERE = ("--device", "cpu")


def test_the_checkout_knows_the_options_and_makes_each_case_a_test() -> None:
    committed = [case for case in goldens.KERNELS["cache_insert"].cases if case.committed]
    done = python("-m", "pytest", "-q", "--candidate", "exact", "--kernel", "cache_insert", *HERE)
    assert done.returncode == 0, done.stdout
    assert f"{len(committed)} passed" in done.stdout


def test_the_plugin_shows_verdicts_and_skips_what_is_not_supported(folder: Path) -> None:
    done = plugin(folder, "--candidate", f"{THEIRS}:raises", "--case", INSERT, *HERE)
    assert done.returncode == 1
    assert "raised KeyError: 'no such page'" in done.stdout
    assert f"again: goldens verify --case {INSERT} --candidate {THEIRS}:raises --device cpu" in done.stdout
    assert "Traceback" not in done.stdout
    assert "guard: goldens, their cache and the models " in done.stdout
    done = plugin(folder, "--candidate", f"{THEIRS}:refuses", "--case", INSERT, "-rs", *HERE)
    assert done.returncode == 2
    assert "1 skipped" in done.stdout
    assert "not supported: pages of one row" in done.stdout
    assert "\nnothing was judged\n" in done.stdout


def test_what_was_not_judged_is_no_success_unless_it_is_meant(folder: Path) -> None:
    options = ("--candidate", "theirs:refuses_but_one", "--case", INSERT, "--case", TWO_ROWS, *HERE)
    done = plugin(folder, *options)
    assert done.returncode == 2
    assert "1 passed, 1 skipped" in done.stdout
    assert "judged: 1 of 2 runs, 1 of 2 cases" in done.stdout
    assert "not all was judged: refused by the candidate: 1 calls; --partial says that this is meant" in done.stdout
    assert plugin(folder, *options, "--partial").returncode == 0


def test_the_plugin_takes_a_shard_of_the_cases(folder: Path) -> None:
    options = ("--candidate", "theirs:right", "--kernel", "cache_insert", "--collect-only", "--shard", "2/3", *HERE)
    listed = [line.split()[0] for line in plugin(folder, *options).stdout.splitlines() if "cache_insert/" in line]
    committed = [case.id for case in goldens.KERNELS["cache_insert"].cases if case.committed]
    assert listed == part(committed, "2/3")


def test_the_plugin_takes_a_shard_of_other_tests_after_every_other_selection(tmp_path: Path) -> None:
    marks = "\n".join(f"@pytest.mark.skipif({i}, reason='')\ndef test_{i}(): pass" for i in range(6))
    (tmp_path / "test_six.py").write_text(f"import pytest\n{marks}\n")
    done = plugin(tmp_path, "-k", "not test_0", "--collect-only", "--shard", "2/2")
    assert [line for line in done.stdout.splitlines() if "::" in line] == ["test_six.py::test_2", "test_six.py::test_4"]


PLUGIN_USAGE = {
    "kernel": (["--candidate", "m:f", "--device", "cpu"], "--kernel: missing"),
    "shard": (["--shard", "3/2"], "--shard: got '3/2'"),
    "device-alone": (["--device", "cpu"], "--device: is an option of --candidate"),
    "cpu": (["--candidate", "ours", "--device", "cpu"], "--device: got 'cpu', our kernels need an sm_90 GPU"),
    "timeout": (
        ["--candidate", "m:f", "--case", INSERT, "--candidate-timeout", "inf", *HERE],
        "-timeout: got inf",
    ),
    "fresh-alone": (["--fresh", "3"], "--fresh: is an option of --candidate"),
    "module": (["--candidate", "no_such:f", "--case", INSERT, *HERE], "no_such cannot be imported"),
}


@pytest.mark.parametrize(("options", "words"), PLUGIN_USAGE.values(), ids=PLUGIN_USAGE)
def test_the_plugin_says_what_is_wrong(tmp_path: Path, options: list[str], words: str) -> None:
    done = plugin(tmp_path, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
def test_the_plugin_ends_with_3_without_the_gpu(folder: Path) -> None:
    done = plugin(folder, "--candidate", f"{THEIRS}:right", "--case", INSERT)
    assert done.returncode == 3
    assert "hardware missing" in done.stdout + done.stderr


def test_the_plugin_works_over_workers_which_make_the_same_fresh_inputs(folder: Path) -> None:
    options = ("--candidate", "theirs:right", "--kernel", "cache_insert", "-n", "2", *HERE)
    done = plugin(folder, *options, "--fresh", "1", "--repeat", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    committed = sum(case.committed for case in goldens.KERNELS["cache_insert"].cases)
    assert f"{committed} passed" in done.stdout
    assert f"judged: {2 * committed} of {2 * committed} runs, {committed} of {committed} cases" in done.stdout
    assert "fresh inputs: --fresh 1 --fresh-seed " in done.stdout
