"""Candidates on the GPU: ours by the command, the Triton example, invariance with graph replay, hangs and lost GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

import goldens

pytestmark = pytest.mark.hopper

REPOSITORY = Path(__file__).parent.parent.parent
THEIRS = "tests/on_trial/theirs.py"
TRITON = "docs/examples/triton_cache_insert.py:cache_insert"
SMALL = {
    "fmha": "fmha/d64-causal-n64-b2-normal",
    "attn_res": "attn_res/nb1-t2-half-nan",
    "mla_query": "mla_query/h1-b4-p2x3-alternate-padded",
    "cache_insert": "cache_insert/b4-p2x3-alternate-padded",
    "kda": "kda/t20-normal",
}


def verify(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.cli", "verify", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False)


def passed(done: subprocess.CompletedProcess) -> int:
    """How many runs passed, all of those that there were."""
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if "runs passed" in line]
    count, total = line.partition(" runs passed")[0].split(" of ")
    assert count == total
    return int(count)


def test_the_triton_example_meets_the_model() -> None:
    cases = [c for c in goldens.KERNELS["cache_insert"].cases if c.committed]
    assert passed(verify("--candidate", TRITON, "--kernel", "cache_insert")) == len(cases)


def test_the_triton_example_is_invariant() -> None:
    done = verify("--candidate", TRITON, "--kernel", "cache_insert", "--invariance")
    assert passed(done) == sum(case.committed for case in goldens.KERNELS["cache_insert"].cases)
    assert "graph replay: cache" in done.stdout


@pytest.mark.parametrize("kernel", goldens.KERNELS)
def test_ours_are_invariant(kernel: str) -> None:
    case = goldens.find(SMALL[kernel])
    done = verify("--case", case.id, "--invariance")
    assert passed(done) == len(case.schedules)
    assert "graph replay: " in done.stdout


def test_sdpa_is_judged_on_the_gpu() -> None:
    """Whether it keeps the bound is its own affair; a verdict there must be."""
    done = verify("--candidate", "sdpa", "--case", "fmha/d64-causal-q65-k64-normal")
    assert done.returncode in (0, 1)
    assert "of 1 runs passed" in done.stdout


def test_a_gpu_that_hangs_or_is_lost_costs_one_case() -> None:
    ids = ("b1-p1x1-unit", "b2-crossing-normal", "b3-p2x3-page-normal")
    cases = [word for name in ids for word in ("--case", f"cache_insert/{name}")]
    done = verify("--candidate", f"{THEIRS}:sick", "--timeout", "30", *cases)
    assert done.returncode == 1
    assert "hangs: no result within 30 s" in done.stdout
    assert "CUDA error: device-side assert" in done.stdout
    assert "1 of 3 runs passed" in done.stdout
