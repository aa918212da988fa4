"""Any callable on trial: what it may return, how it may fail, which device and schedule it is held to, the plugin."""

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import goldens
from goldens import store
from goldens.judge import CallFailed, Unsupported, duplicate, judge, select, words
from tools import adapters, candidates, cli
from tools.shard import parse, part
from tools.trial import NotSupported, Run, Trial, run
from tools.worker import Worker

REPOSITORY = Path(__file__).parent.parent
INSERT, ATTENTION = "cache_insert/b1-p1x1-unit", "fmha/d64-n64-zeros"
MODEL_ONLY, EXACT_ONLY = "fmha/d64-q1-k65-normal", "fmha/d64-n64-overflow"
PRELUDE = """
import os, signal, sys, time
import torch
from goldens.judge import Unsupported
from reference import attn_res, cache_insert, fmha, mla_query


def right(inputs, params):
    return cache_insert.exact(inputs, params, "insert")


def claims(inputs, params):
    return right(inputs, params)


claims.schedules = ("insert",)


def mistyped(inputs, params):
    return right(inputs, params)


def one_word(inputs, params):
    return right(inputs, params)


def other_outputs(inputs, params):
    return right(inputs, params)


mistyped.schedules, one_word.schedules, other_outputs.outputs = ("isnert",), "insert", ("lse",)


def raises(inputs, params):
    raise KeyError("no such page")


def renames(inputs, params):
    return {"caches": right(inputs, params)["cache"]}


def adds(inputs, params):
    return right(inputs, params) | {"lse": torch.zeros(1)}


def reshapes(inputs, params):
    return {"cache": right(inputs, params)["cache"].flatten()}


def widens(inputs, params):
    return {"cache": right(inputs, params)["cache"].view(torch.float8_e4m3fn).float()}


def lists(inputs, params):
    return [right(inputs, params)["cache"]]


def tuples(inputs, params):
    return {"cache": (1, 2)}


def numbers(inputs, params):
    return {1: right(inputs, params)["cache"]}


def empties(inputs, params):
    return {}


def refuses(inputs, params):
    raise Unsupported("pages of one row")


def interrupts(inputs, params):
    raise KeyboardInterrupt("mine")


def is_interrupted(inputs, params):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(3600)


def hangs(inputs, params):
    if inputs["kv"].shape[0] == 1:
        time.sleep(3600)
    return right(inputs, params)


def crashes(inputs, params):
    if inputs["kv"].shape[0] == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(inputs, params)


def exits(inputs, params):
    os._exit(7)


def leaves(inputs, params):
    sys.exit(0)


def overwrites(inputs, params):
    outputs = right(inputs, params)
    for x in inputs.values():
        x.zero_()
    params.clear()
    return outputs


def attention(inputs, params):
    return {name: x.to(torch.bfloat16) if name == "o" else x for name, x in fmha.model(inputs, params).items()}


def only_o(inputs, params):
    return {"o": attention(inputs, params)["o"]}


only_o.outputs = ("o",)


def fp32_o(inputs, params):
    return fmha.model(inputs, params)


not_callable = 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "theirs.py"
    path.write_text(PRELUDE)
    return path


def tried(candidate: str, case_id: str, schedule: str | None = None) -> list[Run | NotSupported]:
    """The case's outcomes, the candidate called in this process."""
    with Trial(candidate, "cpu", 0, schedule) as trial:
        return run(trial, goldens.find(case_id), store.read_manifest(), invariant=False)


def goldens_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in arguments])


def python(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("name", ["right", "claims", "overwrites"])
def test_a_right_candidate_passes(module: Path, name: str) -> None:
    [result] = tried(f"{module}:{name}", INSERT)
    assert isinstance(result, Run)
    assert result.passed
    against = {verdict.against for verdict in result.verdicts}
    assert against == ({"exact", "model"} if name == "claims" else {"model"})
    assert result.schedule == ("insert" if name == "claims" else "any")


def test_a_candidate_that_overwrites_its_inputs_changes_no_golden(module: Path) -> None:
    [first], [second] = (tried(f"{module}:overwrites", INSERT) for _ in range(2))
    assert first.verdicts == second.verdicts


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mistyped", "mistyped.schedules: got 'isnert', allowed are "),
        ("one_word", "one_word.schedules: got 'insert', allowed is a tuple of names"),
    ],
)
def test_a_claim_must_name_schedules(module: Path, name: str, words: str) -> None:
    result = goldens_command("verify", "--candidate", f"{module}:{name}", "--case", INSERT, "--device", "cpu")
    assert result.exit_code == 2
    assert words in result.stderr


def test_outputs_that_the_golden_lacks(module: Path) -> None:
    [result] = tried(f"{module}:other_outputs", INSERT)
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
def test_a_wrong_candidate_fails_with_its_own_words(module: Path, name: str, words: str, schedule: str | None) -> None:
    [result] = tried(f"{module}:{name}", INSERT, schedule)
    assert isinstance(result, Run)
    assert not result.passed
    assert any(words in verdict.reason for verdict in result.verdicts if not verdict.passed)
    again = f"goldens verify --case {INSERT} --candidate {module}:{name} --device cpu"
    assert result.command == again + (f" --schedule {schedule}" if schedule else "") + " --timeout 0"


def test_the_error_is_shown_with_its_place(module: Path) -> None:
    [result] = tried(f"{module}:raises", INSERT)
    line = PRELUDE.splitlines().index('    raise KeyError("no such page")') + 1
    assert result.verdicts[0].reason == f"raised KeyError: 'no such page' ({module}, line {line})"


def test_what_is_not_supported_is_never_passed(module: Path) -> None:
    [refused] = tried(f"{module}:refuses", INSERT)
    assert str(refused) == f"{INSERT} any: not supported: pages of one row"
    result = goldens_command("verify", "--candidate", f"{module}:refuses", "--case", INSERT, "--device", "cpu")
    assert result.exit_code == 2
    assert "not supported: pages of one row" in result.stdout
    assert "nothing was judged: the candidate does none of it" in result.stderr


def test_without_a_schedule_the_model_judges_and_log_sum_exp_may_come_too(module: Path) -> None:
    [result] = tried(f"{module}:attention", ATTENTION)
    assert {(v.output, v.against, v.passed) for v in result.verdicts} == {("o", "model", True), ("lse", "model", True)}


def test_a_case_without_schedules_wants_all_that_the_model_makes(module: Path) -> None:
    [whole] = tried(f"{module}:attention", MODEL_ONLY)
    assert whole.passed
    assert {verdict.output for verdict in whole.verdicts} == {"o", "lse"}
    [declared] = tried(f"{module}:only_o", MODEL_ONLY)
    assert declared.passed
    assert {verdict.output for verdict in declared.verdicts} == {"o"}


def test_an_output_in_another_type_fails_without_a_schedule_too(module: Path) -> None:
    [result] = tried(f"{module}:fp32_o", ATTENTION)
    assert "dtype: got torch.float32, wanted torch.bfloat16" in [verdict.reason for verdict in result.verdicts]


def test_where_only_bits_decide_a_candidate_without_a_schedule_is_not_judged(module: Path) -> None:
    [found] = tried(f"{module}:attention", EXACT_ONLY)
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


@pytest.fixture(scope="module")
def worker(module: Path) -> Iterator[Worker]:
    held = Worker(f"{module}:hangs", torch.device("cpu"), 2.0)
    yield held
    held.close()


def call(worker: Worker, case_id: str) -> dict[str, torch.Tensor]:
    case = goldens.find(case_id)
    return worker.call("cache_insert", None, goldens.KERNELS["cache_insert"].inputs(case), case.params)


def test_words_of_an_error_are_one_line_without_control_characters() -> None:
    text = words(RuntimeError("boom\nsecond \x1b[31mline"))
    assert text == "raised RuntimeError: boom second \ufffd[31mline"


def test_a_hang_is_a_verdict_and_the_next_case_is_judged(worker: Worker) -> None:
    with pytest.raises(CallFailed, match="hangs: no result within 2 s; its process was ended"):
        call(worker, INSERT)
    case = goldens.find("cache_insert/b2-crossing-normal")
    golden = store.load(case, store.read_manifest())
    assert torch.equal(call(worker, case.id)["cache"], golden["exact/insert/cache"])


def test_a_crash_is_a_verdict_and_the_next_case_is_judged(module: Path) -> None:
    cases = ("--case", INSERT, "--case", "cache_insert/b2-crossing-normal")
    result = goldens_command("verify", "--candidate", f"{module}:crashes", "--device", "cpu", *cases)
    assert result.exit_code == 1
    assert "crashed: its process ended by signal 11 (SIGSEGV)" in result.stdout
    assert "1 of 2 runs passed" in result.stdout


def test_an_exit_is_a_verdict(module: Path) -> None:
    result = goldens_command("verify", "--candidate", f"{module}:exits", "--device", "cpu", "--case", INSERT)
    assert result.exit_code == 1
    assert "crashed: its process ended with exit code 7" in result.stdout


@pytest.mark.parametrize("options", [(), ("--timeout", "0")], ids=["worker", "in-process"])
def test_a_candidate_that_calls_sys_exit_fails_and_the_run_goes_on(module: Path, options: tuple) -> None:
    cases = ("--case", INSERT, "--case", "cache_insert/b2-crossing-normal")
    result = goldens_command("verify", "--candidate", f"{module}:leaves", "--device", "cpu", *cases, *options)
    assert result.exit_code == 1
    assert result.stdout.count("any call against model: the candidate called sys.exit(0)\n") == 2
    assert "0 of 2 runs passed" in result.stdout


@pytest.mark.parametrize("options", [(), ("--timeout", "0")], ids=["worker", "in-process"])
def test_a_candidate_that_raises_keyboard_interrupt_fails_and_the_run_goes_on(module: Path, options: tuple) -> None:
    cases = ("--case", INSERT, "--case", "cache_insert/b2-crossing-normal")
    before = signal.getsignal(signal.SIGINT)
    result = goldens_command("verify", "--candidate", f"{module}:interrupts", "--device", "cpu", *cases, *options)
    assert result.exit_code == 1
    line = PRELUDE.splitlines().index('    raise KeyboardInterrupt("mine")') + 1
    said = f"call against model: the candidate raised KeyboardInterrupt: mine ({module}, line {line})\n"
    assert result.stdout.count(said) == 2
    assert "0 of 2 runs passed" in result.stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_the_users_interruption_ends_the_run(module: Path) -> None:
    candidate = ("--candidate", f"{module}:is_interrupted", "--device", "cpu", "--timeout", "0")
    done = python("-m", "tools.cli", "verify", *candidate, "--case", INSERT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "interrupted; nothing was written" in done.stderr


LABELS = {
    "any": ((), "any call against model: "),
    "schedule": (("--schedule", "insert"), "insert call against exact: "),
    "invariance": (("--invariance",), "any call against invariance: "),
}


@pytest.mark.parametrize(("options", "label"), LABELS.values(), ids=LABELS)
def test_a_failed_call_is_labelled_by_what_was_asked_for(module: Path, options: tuple, label: str) -> None:
    candidate = ("--candidate", f"{module}:raises", "--device", "cpu", "--timeout", 0)
    result = goldens_command("verify", *candidate, "--case", INSERT, *options)
    assert result.exit_code == 1
    assert f"{INSERT} {label}raised KeyError" in result.stdout


@pytest.mark.parametrize("options", [(), ("--timeout", "0")], ids=["worker", "in-process"])
def test_a_module_that_raises_keyboard_interrupt_is_wrong_usage(tmp_path: Path, options: tuple) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("raise KeyboardInterrupt\n")
    result = goldens_command("verify", "--candidate", f"{path}:f", "--device", "cpu", "--case", INSERT, *options)
    assert result.exit_code == 2
    assert f"{path}:f: its import raised KeyboardInterrupt ({path}, line 1)" in result.stderr


@pytest.mark.parametrize("options", [(), ("--timeout", "0")], ids=["worker", "in-process"])
@pytest.mark.parametrize("argument", ["", "0", "'no licence'"])
def test_a_module_that_calls_sys_exit_is_wrong_usage(tmp_path: Path, argument: str, options: tuple) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(f"import sys\nsys.exit({argument})\n")
    result = goldens_command("verify", "--candidate", f"{path}:f", "--device", "cpu", "--case", INSERT, *options)
    assert result.exit_code == 2
    assert f"{path}:f: its import called sys.exit({argument})" in result.stderr


UNKNOWN = {
    "no-colon": ("theirs", "allowed are package.module:function, FILE.py:function, ours"),
    "no-module": ("no.such.module:f", "no.such.module cannot be imported: raised ModuleNotFoundError"),
    "no-file": ("no/such/file.py:f", "no/such/file.py: there is no such file"),
    "no-function": ("MODULE:wrong", "has no function wrong"),
    "not-callable": ("MODULE:not_callable", "has no function not_callable"),
}


@pytest.mark.parametrize(("candidate", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_candidate_that_is_not_there_is_wrong_usage(module: Path, candidate: str, words: str) -> None:
    candidate = candidate.replace("MODULE", str(module))
    result = goldens_command("verify", "--candidate", candidate, "--device", "cpu", "--case", INSERT, "--timeout", 0)
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_kernel_must_be_named(module: Path) -> None:
    result = goldens_command("verify", "--candidate", f"{module}:right", "--device", "cpu")
    assert (result.exit_code, "--kernel: missing" in result.stderr) == (2, True)
    result = goldens_command("verify", "--candidate", "sdpa", "--device", "cpu", "--kernel", "attn_res")
    assert (result.exit_code, "sdpa takes kernel fmha" in result.stderr) == (2, True)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", ""])
def test_another_device_is_wrong_usage(device: str) -> None:
    result = goldens_command("verify", "--candidate", "exact", "--device", device, "--case", INSERT)
    assert (result.exit_code, "device: got" in result.stderr) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
@pytest.mark.parametrize("options", [(), ("--device", "cuda"), ("--device", "cuda:1")])
def test_the_cpu_never_stands_in_for_a_missing_gpu(module: Path, options: tuple) -> None:
    result = goldens_command("verify", "--candidate", f"{module}:right", "--case", INSERT, *options)
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
    result = goldens_command("verify", "--candidate", "flash_attn_4", "--case", ATTENTION, "--timeout", 0)
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
    done = goldens_command("verify", "--candidate", example, "--kernel", "fmha", "--device", "cpu", "--timeout", 0)
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


def plugin(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """pytest in a folder without a conftest: nothing but the plugin is loaded."""
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.pytest_plugin", *options, cwd=folder)


HERE = ("--device", "cpu", "--candidate-timeout", "0")


def test_the_checkout_knows_the_options_and_makes_each_case_a_test(module: Path) -> None:
    committed = [case for case in goldens.KERNELS["cache_insert"].cases if case.committed]
    done = python("-m", "pytest", "-q", "--candidate", f"{module}:claims", "--kernel", "cache_insert", *HERE)
    assert done.returncode == 0, done.stdout
    assert f"{len(committed)} passed" in done.stdout


def test_the_plugin_shows_verdicts_and_skips_what_is_not_supported(module: Path) -> None:
    done = plugin(module.parent, "--candidate", f"{module}:raises", "--case", INSERT, *HERE)
    assert done.returncode == 1
    assert "raised KeyError: 'no such page'" in done.stdout
    assert f"again: goldens verify --case {INSERT} --candidate {module}:raises --device cpu" in done.stdout
    assert "Traceback" not in done.stdout
    done = plugin(module.parent, "--candidate", f"{module}:refuses", "--case", INSERT, "-rs", *HERE)
    assert "1 skipped" in done.stdout
    assert "not supported: pages of one row" in done.stdout


def test_the_plugin_takes_a_shard_of_the_cases(module: Path) -> None:
    options = ("--candidate", "theirs:right", "--kernel", "cache_insert", "--collect-only", "--shard", "2/3", *HERE)
    listed = [
        line.split()[0] for line in plugin(module.parent, *options).stdout.splitlines() if "cache_insert/" in line
    ]
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
    "module": (["--candidate", "no_such:f", "--case", INSERT, *HERE], "no_such cannot be imported"),
}


@pytest.mark.parametrize(("options", "words"), PLUGIN_USAGE.values(), ids=PLUGIN_USAGE)
def test_the_plugin_says_what_is_wrong(tmp_path: Path, options: list[str], words: str) -> None:
    done = plugin(tmp_path, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
def test_the_plugin_ends_with_3_without_the_gpu(module: Path) -> None:
    done = plugin(module.parent, "--candidate", f"{module}:right", "--case", INSERT)
    assert done.returncode == 3
    assert "hardware missing" in done.stdout + done.stderr


def test_the_plugin_works_over_workers(module: Path) -> None:
    options = ("--candidate", "theirs:right", "--kernel", "cache_insert", "--device", "cpu", "-n", "2")
    done = plugin(module.parent, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    committed = sum(case.committed for case in goldens.KERNELS["cache_insert"].cases)
    assert f"{committed} passed" in done.stdout


def test_reports_list_what_is_not_supported(module: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md")
    cases = ("--case", EXACT_ONLY, "--case", ATTENTION)
    candidate = ("--candidate", f"{module}:attention", "--device", "cpu", "--timeout", 0)
    result = goldens_command("verify", *candidate, *cases, *files)
    assert result.exit_code == 0
    assert "1 of 1 runs passed" in result.stdout
    assert "1 not supported or not judged" in result.stdout
    content = json.loads((tmp_path / "r.json").read_text())
    assert [(x["case"], x["schedule"]) for x in content["not_supported"]] == [(EXACT_ONLY, "any")]
    assert content["results"][0]["candidate"] == f"{module}:attention"
    assert f"- {EXACT_ONLY} any: not judged" in (tmp_path / "r.md").read_text()


def test_unsupported_is_what_candidates_import() -> None:
    assert adapters.Unsupported is Unsupported
