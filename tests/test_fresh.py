"""Inputs that are in no file, and calls made more than once."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import goldens
from goldens import store
from tools import cli
from tools.trial import Run, Trial, run

pytestmark = pytest.mark.usefixtures("in_process")

THEIRS = Path(__file__).parent / "on_trial" / "theirs.py"
INSERT, TWO_ROWS = "cache_insert/b1-p1x1-unit", "cache_insert/b2-crossing-normal"


def verify(candidate: str, *options: str | Path) -> Result:
    words = ["verify", "--candidate", candidate, "--device", "cpu", *map(str, options)]
    return CliRunner().invoke(cli.app, words)


@pytest.mark.parametrize("kernel", goldens.KERNELS)
def test_every_recipe_makes_fresh_inputs_that_the_exact_models_and_their_bounds_pass(kernel: str) -> None:
    """The first committed case of each: its first schedule's own bits, and the bound on inputs that nobody chose."""
    manifest = store.read_manifest()
    cases = [case for case in goldens.KERNELS[kernel].cases if case.committed and case.schedules]
    with Trial("exact", "cpu") as trial:
        for case in {case.recipe: case for case in reversed(cases)}.values():
            given = trial.given(case, manifest, case.schedules[:1], 12345)
            [result] = trial.by_golden(given, case.schedules[0])
            assert isinstance(result, Run)
            assert result.passed, (case.id, [(v.output, v.against, v.reason) for v in result.verdicts if not v.passed])


def test_another_seed_gives_other_inputs_of_the_same_form() -> None:
    case, manifest = goldens.find(TWO_ROWS), store.read_manifest()
    with Trial("exact", "cpu") as trial:
        seeds = (None, 1, 2, 1)
        first, one, two, again = (trial.given(case, manifest, (None,), seed).judge.inputs for seed in seeds)
    for name, x in first.items():
        assert (one[name].shape, one[name].dtype) == (x.shape, x.dtype)
        assert torch.equal(one[name], again[name])
    assert not torch.equal(first["kv"], one["kv"])
    assert not torch.equal(one["kv"], two["kv"])


def test_answers_that_were_stored_fail_on_fresh_inputs_with_the_command_that_makes_them_again(tmp_path: Path) -> None:
    golden = store.obtain(goldens.KERNELS["cache_insert"], goldens.find(TWO_ROWS), store.read_manifest())
    torch.save(golden["exact/insert/cache"], tmp_path / "stored.pt")
    module = tmp_path / "cheats.py"
    module.write_text(
        f"import torch\ndef f(inputs, params):\n    return {{'cache': torch.load('{tmp_path}/stored.pt')}}\n"
    )
    options = ("--case", TWO_ROWS, "--schedule", "insert")
    assert verify(f"{module}:f", *options).exit_code == 0
    result = verify(f"{module}:f", *options, "--fresh", 2)
    assert result.exit_code == 1
    assert "1 of 3 runs passed" in result.stdout
    lines = result.stdout.splitlines()
    [printed] = [line for line in lines if line.startswith("fresh inputs: --fresh 2 --fresh-seed ")]
    seed = int(printed.split()[5])
    again = [line for line in lines if line.startswith("  again: ")]
    command = f"  again: goldens verify --case {TWO_ROWS} --candidate {module}:f --device cpu --schedule insert"
    assert again == [f"{command} --fresh 1 --fresh-seed {s}" for s in (seed, seed + 1)]
    assert verify(f"{module}:f", *options, "--fresh", 2).stdout != result.stdout
    assert verify(f"{module}:f", *options, "--fresh", 2, "--fresh-seed", seed).stdout == result.stdout
    alone = verify(f"{module}:f", *options, "--fresh", 1, "--fresh-seed", seed + 1)
    assert (alone.exit_code, f"{TWO_ROWS}-fresh{seed + 1} insert cache against exact: " in alone.stdout) == (1, True)


def test_fresh_inputs_are_in_no_older_report(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    right = f"{THEIRS}:right"
    assert verify(right, "--case", TWO_ROWS, "--json", old, "--fresh", 1).exit_code == 0
    assert verify(right, "--case", TWO_ROWS, "--json", old).exit_code == 0
    result = verify(right, "--case", TWO_ROWS, "--fresh", 2, "--against", old)
    assert (result.exit_code, "added" in result.stdout, "removed" in result.stdout) == (0, False, False)


def test_fresh_inputs_are_tried_for_invariance_too() -> None:
    result = verify("exact", "--case", TWO_ROWS, "--invariance", "--fresh", 1, "--fresh-seed", 7)
    assert result.exit_code == 0
    assert f"{TWO_ROWS}-fresh7" in result.stdout


def test_a_call_that_fails_now_and_then_is_found_by_repeating_it() -> None:
    candidate = f"{THEIRS}:fails_third"
    assert verify(candidate, "--case", TWO_ROWS).exit_code == 0
    result = verify(candidate, "--case", TWO_ROWS, "--repeat", 4)
    assert result.exit_code == 1
    assert f"{TWO_ROWS} any call 3: cache against model: " in result.stdout
    assert f"again: goldens verify --case {TWO_ROWS} --candidate {candidate} --device cpu --repeat 4\n" in result.stdout


def test_another_result_that_keeps_the_bound_passes(tmp_path: Path) -> None:
    module = tmp_path / "wanders.py"
    module.write_text(
        "from pathlib import Path\nimport importlib.util\nimport torch\n"
        f"spec = importlib.util.spec_from_file_location('theirs', '{THEIRS}')\n"
        "theirs = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(theirs)\ncalls = []\n"
        "def f(inputs, params):\n    calls.append(0)\n    outputs = theirs.attention(inputs, params)\n"
        "    outputs['lse'] *= 1 + len(calls) * 2.0**-23\n    return outputs\n"
    )
    result = verify(f"{module}:f", "--case", "fmha/d64-q1-k65-normal", "--repeat", 3)
    assert result.exit_code == 0, result.stdout


def test_repeating_is_for_invariance_too() -> None:
    result = verify(f"{THEIRS}:fails_third", "--case", TWO_ROWS, "--invariance", "--repeat", 2)
    assert result.exit_code == 1


def test_a_case_and_its_fresh_inputs_are_one_outcome_each() -> None:
    with Trial(f"{THEIRS}:right", "cpu", seeds=(3, 4)) as trial:
        found = run(trial, goldens.find(INSERT), store.read_manifest(), False)
    assert [(x.case.id, x.seed) for x in found if isinstance(x, Run)] == [
        (INSERT, None),
        (f"{INSERT}-fresh3", 3),
        (f"{INSERT}-fresh4", 4),
    ]
    assert {x.seen.case for x in found if x.seen} == {INSERT}
