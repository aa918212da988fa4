"""Any callable on trial: what it may return, how it may fail, which device and schedule it is held to."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import goldens
from goldens import store
from goldens.call import Unsupported, duplicate, words
from goldens.judge import judge, select
from tools import adapters, candidates, cli
from tools.shard import parse, part
from tools.trial import NotSupported, Run, Trial, run

pytestmark = pytest.mark.usefixtures("in_process")

REPOSITORY = Path(__file__).parent.parent
THEIRS = REPOSITORY / "tests" / "on_trial" / "theirs.py"
INSERT, ATTENTION = "cache_insert/b1-p1x1-unit", "fmha/d64-n64-zeros"
MODEL_ONLY, EXACT_ONLY = "fmha/d64-q1-k65-normal", "fmha/d64-n64-overflow"


def tried(candidate: str, case_id: str, schedule: str | None = None) -> list[Run | NotSupported]:
    """The case's outcomes, the candidate called in this process."""
    with Trial(candidate, "cpu", schedule=schedule) as trial:
        return run(trial, goldens.find(case_id), store.read_manifest(), invariant=False)


def goldens_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in arguments])


def python(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("name", ["right", "claims"])
def test_a_right_candidate_passes(name: str) -> None:
    [result] = tried(f"{THEIRS}:{name}", INSERT)
    assert isinstance(result, Run)
    assert result.passed
    against = {verdict.against for verdict in result.verdicts}
    assert against == ({"exact", "model"} if name == "claims" else {"model"})
    assert result.schedule == ("insert" if name == "claims" else "any")


def test_a_candidate_that_overwrites_its_inputs_changes_no_golden() -> None:
    [first], [second] = (tried(f"{THEIRS}:overwrites", INSERT) for _ in range(2))
    assert first.verdicts == second.verdicts
    [verdict] = first.verdicts
    assert (verdict.passed, verdict.reason.startswith("changed its input ")) == (False, True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mistyped", "mistyped.schedules: got 'isnert', allowed are "),
        ("one_word", "one_word.schedules: got 'insert', allowed is a tuple of names"),
    ],
)
def test_a_claim_must_name_schedules(name: str, words: str) -> None:
    result = goldens_command("verify", "--candidate", f"{THEIRS}:{name}", "--case", INSERT, "--device", "cpu")
    assert result.exit_code == 2
    assert words in result.stderr


def test_outputs_that_the_golden_lacks() -> None:
    [result] = tried(f"{THEIRS}:other_outputs", INSERT)
    assert isinstance(result, Run)
    assert [(v.output, v.passed, v.reason) for v in result.verdicts] == [
        ("outputs", False, "it says that it returns lse, the golden has cache")
    ]


FAILING = {
    "raises": "raised KeyError: 'no such page' (",
    "renames": "missing: the candidate returned no such output",
    "adds": "extra: the golden has no such output",
    "reshapes": "shape: got (576,), wanted (1, 1, 576)",
    "widens": "dtype: got torch.float32, wanted torch.float8_e4m3fn",
    "lists": "returned list, wanted a dictionary of named tensors",
    "tuples": "returned tuple as cache, wanted a tensor",
    "numbers": "returned the name 1, wanted a string",
    "empties": "missing: the candidate returned no such output",
}


@pytest.mark.parametrize("schedule", [None, "insert"])
@pytest.mark.parametrize(("name", "words"), FAILING.items(), ids=FAILING)
def test_a_wrong_candidate_fails_with_its_own_words(name: str, words: str, schedule: str | None) -> None:
    [result] = tried(f"{THEIRS}:{name}", INSERT, schedule)
    assert isinstance(result, Run)
    assert not result.passed
    assert any(words in verdict.reason for verdict in result.verdicts if not verdict.passed)
    again = f"goldens verify --case {INSERT} --candidate {THEIRS}:{name} --device cpu"
    assert result.command == again + (f" --schedule {schedule}" if schedule else "")


def test_the_error_is_shown_with_its_place() -> None:
    [result] = tried(f"{THEIRS}:raises", INSERT)
    line = THEIRS.read_text().splitlines().index('    raise KeyError("no such page")') + 1
    assert result.verdicts[0].reason == f"raised KeyError: 'no such page' ({THEIRS}, line {line})"


def test_what_is_not_supported_is_never_passed() -> None:
    [refused] = tried(f"{THEIRS}:refuses", INSERT)
    assert str(refused) == f"{INSERT} any: not supported: pages of one row"
    result = goldens_command("verify", "--candidate", f"{THEIRS}:refuses", "--case", INSERT, "--device", "cpu")
    assert result.exit_code == 2
    assert "not supported: pages of one row" in result.stdout
    assert "nothing was judged: the candidate does none of it" in result.stderr


def test_without_a_schedule_the_model_judges_and_log_sum_exp_may_come_too() -> None:
    [result] = tried(f"{THEIRS}:attention", ATTENTION)
    assert {(v.output, v.against, v.passed) for v in result.verdicts} == {("o", "model", True), ("lse", "model", True)}


def test_a_case_without_schedules_wants_all_that_the_model_makes() -> None:
    [whole] = tried(f"{THEIRS}:attention", MODEL_ONLY)
    assert whole.passed
    assert {verdict.output for verdict in whole.verdicts} == {"o", "lse"}
    [declared] = tried(f"{THEIRS}:only_o", MODEL_ONLY)
    assert declared.passed
    assert {verdict.output for verdict in declared.verdicts} == {"o"}


def test_an_output_in_another_type_fails_without_a_schedule_too() -> None:
    [result] = tried(f"{THEIRS}:fp32_o", ATTENTION)
    assert "dtype: got torch.float32, wanted torch.bfloat16" in [verdict.reason for verdict in result.verdicts]


def test_where_only_bits_decide_a_candidate_without_a_schedule_is_not_judged() -> None:
    [found] = tried(f"{THEIRS}:attention", EXACT_ONLY)
    assert isinstance(found, NotSupported)
    assert "not judged: only the bits of a schedule decide here" in str(found)


def test_without_a_schedule_the_widest_bound_counts() -> None:
    """k2's bound is a small part of that of the tensor cores, whose weights are rounded to bf16."""
    case = goldens.find("fmha/d64-n64-normal")
    kernel = goldens.KERNELS["fmha"]
    golden = store.load(case, store.read_manifest())
    o = select(golden, "model/")["o"]
    step = 3 * kernel.bound(select(golden, "in/"), case.params, "k2")["o"]
    off = (o.to(torch.float64) + step).to(torch.float32)
    [verdict] = judge(kernel, case, golden, {"o": off.to(torch.bfloat16)}, None)
    widest = judge(kernel, case, golden, {"o": off.to(torch.bfloat16)}, "k2")[1]
    assert (verdict.against, widest.against) == ("model", "model")
    assert verdict.max_error_over_bound < widest.max_error_over_bound


def test_copies_are_held_to_their_bits_without_a_schedule() -> None:
    case = goldens.find("attn_res/nb1-t2-half-nan")
    kernel = goldens.KERNELS["attn_res"]
    golden = store.load(case, store.read_manifest())
    outputs = select(golden, "exact/cluster7/")
    assert all(verdict.passed for verdict in judge(kernel, case, golden, outputs, None))
    prefix = outputs["prefix"].clone()
    prefix.view(torch.int16)[0, 5] ^= 1
    wrong = [v for v in judge(kernel, case, golden, outputs | {"prefix": prefix}, None) if not v.passed]
    assert [(v.output, v.against, v.failing) for v in wrong] == [("prefix", "exact", 1)]


def test_words_of_an_error_are_one_line_without_control_characters() -> None:
    text = words(RuntimeError("boom\nsecond \x1b[31mline"))
    assert text == "raised RuntimeError: boom second \ufffd[31mline"


LABELS = {
    "any": ((), "any call against model: "),
    "schedule": (("--schedule", "insert"), "insert call against exact: "),
    "invariance": (("--invariance",), "any call against invariance: "),
}


@pytest.mark.parametrize(("options", "label"), LABELS.values(), ids=LABELS)
def test_a_failed_call_is_labelled_by_what_was_asked_for(options: tuple, label: str) -> None:
    candidate = ("--candidate", f"{THEIRS}:raises", "--device", "cpu")
    result = goldens_command("verify", *candidate, "--case", INSERT, *options)
    assert result.exit_code == 1
    assert f"{INSERT} {label}raised KeyError" in result.stdout


ENDS = {
    "raise KeyboardInterrupt": "raised KeyboardInterrupt",
    "import sys; sys.exit('no licence')": "called sys.exit('",
}


@pytest.mark.parametrize(("code", "words"), ENDS.items())
def test_a_module_that_ends_its_process_is_wrong_usage(tmp_path: Path, code: str, words: str) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(f"{code}\n")
    result = goldens_command("verify", "--candidate", f"{path}:f", "--device", "cpu", "--case", INSERT)
    assert result.exit_code == 2
    assert f"{path}:f: its import {words}" in result.stderr


UNKNOWN = {
    "no-colon": ("theirs", "allowed are package.module:function, FILE.py:function, ours"),
    "no-module": ("no.such.module:f", "no.such.module cannot be imported: raised ModuleNotFoundError"),
    "no-file": ("no/such/file.py:f", "no/such/file.py: there is no such file"),
    "no-function": ("MODULE:wrong", "has no function wrong"),
    "not-callable": ("MODULE:not_callable", "has no function not_callable"),
}


@pytest.mark.parametrize(("candidate", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_candidate_that_is_not_there_is_wrong_usage(candidate: str, words: str) -> None:
    candidate = candidate.replace("MODULE", str(THEIRS))
    result = goldens_command("verify", "--candidate", candidate, "--device", "cpu", "--case", INSERT)
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_kernel_must_be_named() -> None:
    result = goldens_command("verify", "--candidate", f"{THEIRS}:right", "--device", "cpu")
    assert (result.exit_code, "--kernel: missing" in result.stderr) == (2, True)
    result = goldens_command("verify", "--candidate", "sdpa", "--device", "cpu", "--kernel", "attn_res")
    assert (result.exit_code, "sdpa takes kernel fmha" in result.stderr) == (2, True)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", ""])
def test_another_device_is_wrong_usage(device: str) -> None:
    result = goldens_command("verify", "--candidate", "exact", "--device", device, "--case", INSERT)
    assert (result.exit_code, "device: got" in result.stderr) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
@pytest.mark.parametrize("options", [(), ("--device", "cuda"), ("--device", "cuda:1")])
def test_the_cpu_never_stands_in_for_a_missing_gpu(options: tuple) -> None:
    result = goldens_command("verify", "--candidate", f"{THEIRS}:right", "--case", INSERT, *options)
    assert result.exit_code == 3
    assert "GPU" in result.stderr


def test_adapters_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_kda", None)
    monkeypatch.delitem(sys.modules, "tools.adapters.flash_kda", raising=False)
    with pytest.raises(adapters.Missing, match=r"flash_kda cannot be imported .* git clone"):
        candidates.load("flash_kda")
    monkeypatch.setattr(candidates, "require_hopper", lambda: torch.device("cpu"))
    monkeypatch.delitem(sys.modules, "tools.adapters.flash_attn_4", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    result = goldens_command("verify", "--candidate", "flash_attn_4", "--case", ATTENTION)
    assert result.exit_code == 3
    assert "pip install 'flash-attn-4[cu13]'" in result.stderr


def test_candidates_are_listed() -> None:
    lines = {line.split()[0]: line for line in goldens_command("candidates").stdout.splitlines()}
    assert set(lines) == set(adapters.ADAPTERS)
    assert lines["sdpa"].endswith("yes")
    assert all(line.endswith("yes") or "; no: " in line for line in lines.values())


@pytest.mark.parametrize("width", [40, 80])
def test_candidates_are_listed_within_the_terminals_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    whole = goldens_command("candidates").stdout
    monkeypatch.setattr(cli, "out", Console(width=width, highlight=False))
    wrapped = goldens_command("candidates").stdout
    assert max(map(len, whole.splitlines())) > 80
    assert max(map(len, wrapped.splitlines())) <= width
    assert "".join(wrapped.split()) == "".join(whole.split())


def test_every_adapter_is_a_module_that_imports_nothing_yet() -> None:
    script = (
        "import sys; from tools.adapters import ADAPTERS; import tools.cli; "
        "assert not {'vllm', 'fla', 'cudnn', 'flash_kda', 'flash_attn', 'cutlass', 'triton'} & set(sys.modules)"
    )
    assert python("-c", script).returncode == 0
    files = {path.stem for path in (REPOSITORY / "tools" / "adapters").glob("*.py")} - {"__init__"}
    assert files == set(adapters.ADAPTERS)


def test_sdpa_meets_the_model_with_other_lengths_and_grouped_heads() -> None:
    """Its own causal mask is aligned to the top left: row 0 of 65 would see a key."""
    for case_id in ("fmha/d64-causal-q65-k64-normal", "fmha/d64-causal-q17-k80-normal", "fmha/d64-n64-ties"):
        [result] = tried("sdpa", case_id)
        assert result.passed, result.verdicts
    [refused] = tried("sdpa", next(case.id for case in goldens.KERNELS["fmha"].cases if "packed" in case.name))
    assert "not supported: packed sequences" in str(refused)


def test_the_example_in_torch_is_right_on_every_case() -> None:
    example = f"{REPOSITORY}/docs/examples/torch_attention.py:attention"
    done = goldens_command("verify", "--candidate", example, "--kernel", "fmha", "--device", "cpu", "--partial")
    assert done.exit_code == 0, done.stdout
    [summary] = [line for line in done.stdout.splitlines() if "runs passed" in line]
    passed, total = (int(word) for word in summary.split(" runs passed")[0].split(" of "))
    assert passed == total > 20


def test_a_copy_keeps_its_strides_amid_nan() -> None:
    x = torch.arange(24.0).view(4, 6)[:, :4]
    copy = duplicate(x, torch.device("cpu"))
    assert (copy.stride(), torch.equal(copy, x)) == ((6, 1), True)
    assert copy.data_ptr() != x.data_ptr()
    assert bool(copy.as_strided((3, 6), (6, 1))[:, 4:].isnan().all())


def test_shards_hold_every_item_once() -> None:
    items = list(range(11))
    for count in (1, 2, 3, 11, 20):
        parts = [part(items, f"{i}/{count}") for i in range(1, count + 1)]
        assert sorted(itertools.chain(*parts)) == items
        assert parts == [part(items, f"{i}/{count}") for i in range(1, count + 1)]
    assert part(items, None) == items


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed is I/N with I from 1 to N"):
        parse(text)


def test_unsupported_is_what_candidates_import() -> None:
    assert adapters.Unsupported is Unsupported
