"""A candidate's process: whatever it does costs one call, reaches no golden, and leaves nothing behind."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import goldens
from goldens import store
from goldens.call import CallFailed, Unsupported, clean, clean_name
from goldens.files import write
from tools import candidates, cli
from tools.sandbox import guard
from tools.sandbox.message import Garbage, pack, unpack
from tools.worker import Worker

REPOSITORY = Path(__file__).parent.parent
ON_TRIAL = REPOSITORY / "tests" / "on_trial"
THEIRS, HOSTILE = ON_TRIAL / "theirs.py", ON_TRIAL / "hostile.py"
INSERT, TWO_ROWS = "cache_insert/b1-p1x1-unit", "cache_insert/b2-crossing-normal"
CPU = torch.device("cpu")


def goldens_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in arguments])


def verify(name: str, *options: str) -> Result:
    return goldens_command("verify", "--candidate", f"{THEIRS}:{name}", "--device", "cpu", "--case", INSERT, *options)


def exists(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not exists(pid)


@pytest.fixture(scope="module")
def hostile() -> Iterator[Worker]:
    worker = Worker(f"{HOSTILE}:candidate", CPU, 60.0)
    yield worker
    worker.close()


def do(worker: Worker, what: str) -> dict[str, torch.Tensor]:
    """One call of the hostile candidate."""
    return worker.call("fmha", None, {"q": torch.zeros(1)}, {"do": what})


REFUSED = {
    "subclass": "returned the tensor subclass Dressed as o, wanted a tensor",
    "nested": "returned a nested tensor as o, wanted a tensor",
    "sparse": "returned a torch.sparse_coo tensor as o, wanted a tensor",
    "csr": "returned a torch.sparse_csr tensor as o, wanted a tensor",
    "meta": "returned a meta tensor as o, wanted a tensor",
    "quantised": "returned a quantised tensor as o, wanted a tensor",
    "huge": "returned 4,398,046,511,104 bytes of tensors",
    "many": "returned more than 64 outputs",
    "endless": "returned more than 64 outputs",
    "complex": "its outputs cannot be sent: raised ",
    "bits": "its outputs cannot be sent: raised ",
    "key": "returned the name b'o', wanted a string",
    "mute": "raised hostile.Mute: <exception str() failed>",
    "base": "the candidate raised hostile.Odd: odd�[31m",
    "recursion": "raised RecursionError: maximum recursion depth exceeded",
    "golden": "is the judge's: a candidate's process cannot open it",
    "listing": "is the judge's: a candidate's process cannot open it",
    "link": "is the judge's: a candidate's process cannot open it",
    "source": "is the judge's: a candidate's process cannot open it",
    "writes": "is the judge's: a candidate's process cannot open it",
    "models": "reference is the judge's: a candidate's process cannot import it",
    "judge": "goldens.compare is the judge's: a candidate's process has no more of it than goldens.judge",
    "tools": "tools is the judge's: a candidate's process cannot import it",
}


@pytest.mark.parametrize(("what", "words"), REFUSED.items(), ids=REFUSED)
def test_what_is_no_output_is_a_failed_call_with_its_words(hostile: Worker, what: str, words: str) -> None:
    with pytest.raises(CallFailed) as failed:
        do(hostile, what)
    assert words in str(failed.value)
    assert "\x1b" not in str(failed.value)


def test_a_refusal_is_a_line_that_looks_like_no_verdict(hostile: Worker) -> None:
    with pytest.raises(Unsupported) as refused:
        do(hostile, "refuses")
    said = str(refused.value)
    assert said.startswith("�[2Jno fmha/d64-n64-normal any o against exact: 0 bits�[2Jno")
    assert len(said) == 501


TAKEN = {
    "right": ("o", torch.float32, (2, 2)),
    "negative": ("o", torch.float32, (2,)),
    "scalar": ("o", torch.float32, ()),
    "empty": ("o", torch.float32, (0, 3)),
    "grad": ("o", torch.float32, (2,)),
    "line": ("o�fmha�d64-n64-normal�any�o�against�exact:�0�bits", torch.float32, (1,)),
    "long": ("o" * 64 + "…", torch.float32, (1,)),
    "surrogate": ("�", torch.float32, (1,)),
    "right-to-left": ("�o", torch.float32, (1,)),
    "metadata": ("__metadata__", torch.float32, (1,)),
}


@pytest.mark.parametrize(("what", "form"), TAKEN.items(), ids=TAKEN)
def test_what_can_be_judged_arrives_as_plain_tensors(hostile: Worker, what: str, form: tuple) -> None:
    [(name, x)] = do(hostile, what).items()
    assert (name, x.dtype, tuple(x.shape)) == form
    assert (type(x), x.is_contiguous()) == (torch.Tensor, True)


def test_elements_arrive_as_they_are(hostile: Worker) -> None:
    assert do(hostile, "right")["o"].tolist() == [[0.0, 2.0], [1.0, 3.0]]


def head(text: int, body: int = 0) -> bytes:
    return struct.pack("<QQ", text, body)


def forged(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return head(len(text)) + text


ENDED = {
    "garbage": (b"\x80\x04garbage" * 100, "its process sent a message of "),
    "oversized": (head(1 << 40), "its process sent a message of 1,099,511,627,776 bytes, and was ended"),
    "pickle": (head(5) + b"\x80\x04K\x01.", "its process sent what is no message (UnicodeDecodeError)"),
    "deep": (head(200_000) + b"[" * 200_000, "its process sent "),
    "other-number": (forged({"number": -1, "names": []}), "its process sent an answer that was not asked for"),
    "no-names": (forged({"number": 1}), "its process sent what is no message (KeyError)"),
    "list": (forged([1, 2]), "its process sent what is no message ("),
    "names": (forged({"number": 1, "names": ["o"]}), "its process sent what is no message (ValueError)"),
    "numbers": (forged({"number": 1, "names": [7]}), "its process sent what is no message (ValueError)"),
    "words": (forged({"number": 1, "names": [], "failed": {"a": ["\x1b[31m\n"]}}), "{'a': ['\\x1b[31m\\n']}"),
    "truncated": (head(100) + b"{", "hangs: no result within 0.5 s; its process was ended"),
    "nothing": (b"", "hangs: no result within 0.5 s; its process was ended"),
    "end": (None, "crashed: its process ended, or closed its connection"),
}
LIAR = """
import json, socket, sys, time
start = json.loads(sys.argv[1])
channel, control = (socket.socket(fileno=start[name]) for name in ("channel", "control"))
for hello in ({"hidden": "mounted"}, {"claims": [], "outputs": None}):
    text = json.dumps({**hello, "names": []}).encode()
    channel.sendall(len(text).to_bytes(8, "little") + bytes(8) + text)
channel.recv(1 << 20)
ANSWER
"""


def liar(monkeypatch: pytest.MonkeyPatch, answer: str) -> Worker:
    """A worker whose process is a program of the test's."""
    monkeypatch.setattr("tools.worker.MAIN", LIAR.replace("ANSWER", answer))
    monkeypatch.setattr("tools.worker.END_SECONDS", 0.3)
    return Worker("liar:f", CPU, 0.5)


@pytest.mark.parametrize(("answer", "words"), ENDED.values(), ids=ENDED)
def test_an_answer_that_is_none_is_a_failed_call(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, words: str
) -> None:
    said = "channel.close()" if answer is None else f"channel.sendall({answer!r})" if len(answer) < 9999 else DEEP
    worker = liar(monkeypatch, f"{said}\ntime.sleep(30)")
    with pytest.raises(CallFailed) as failed:
        do(worker, "anything")
    worker.close()
    assert str(failed.value).startswith(words)


DEEP = "channel.sendall((200000).to_bytes(8, 'little') + bytes(8) + b'[' * 200000)"
HELLOS = {
    "claims": ('{"claims": [1], "outputs": None}', "does not say what it declares"),
    "none": ('{"claims": None, "outputs": None}', "does not say what it claims"),
    "outputs": ('{"claims": [], "outputs": [3]}', "does not say what it returns"),
    "schedule": ('{"claims": ["\\x1bk2"], "outputs": None}', "f.schedules: got '�k2', allowed are k2"),
    "unknown": ('{"unknown": "no\\nlicence"}', "no licence"),
    "missing": ('{"missing": "a GPU"}', "does not say what it claims"),
}


@pytest.mark.parametrize(("hello", "words"), HELLOS.values(), ids=HELLOS)
def test_a_declaration_that_is_none_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, hello: str, words: str) -> None:
    main = LIAR.replace('{"claims": [], "outputs": None}', hello).replace("ANSWER", "")
    monkeypatch.setattr("tools.worker.MAIN", main)
    monkeypatch.setattr("tools.worker.END_SECONDS", 0.3)
    with pytest.raises(candidates.CandidateError, match=re.escape(words)):
        Worker("liar:f", CPU, 5.0)


def test_an_import_that_hangs_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.worker.MAIN", "import time; time.sleep(60)")
    monkeypatch.setattr("tools.worker.START_SECONDS", 0.3)
    monkeypatch.setattr("tools.worker.END_SECONDS", 0.3)
    with pytest.raises(candidates.CandidateError, match="late:f: importing it failed: hangs: no result within "):
        Worker("late:f", CPU, 5.0)


def test_garbage_from_a_candidate_ends_its_process_and_the_next_call_has_another(hostile: Worker) -> None:
    with pytest.raises(CallFailed, match=r"its process sent a message of .* bytes, and was ended"):
        do(hostile, "garbage")
    assert "o" in do(hostile, "right")


def test_what_a_call_changes_in_torch_is_put_back_for_the_next(hostile: Worker) -> None:
    do(hostile, "modes")
    assert do(hostile, "seen")["o"].tolist() == [True] * 6
    assert torch.get_default_dtype() == torch.float32


def test_a_fork_that_returns_answers_nothing(hostile: Worker) -> None:
    for _ in range(2):
        assert do(hostile, "forks")["o"].shape == (2,)


@pytest.mark.parametrize("what", ["native", "elsewhere"])
def test_compiled_code_and_other_processes_find_nothing_where_the_system_can_hide_it(
    hostile: Worker, what: str
) -> None:
    do(hostile, "right")
    if "did not exist" not in hostile.guard:
        assert "compiled code could read them" in hostile.guard
        pytest.skip("this system allows no mount namespace")
    assert do(hostile, what)["o"].tolist() == [False]


def test_goldens_are_as_they_were() -> None:
    """After all that the hostile candidate did."""
    case = goldens.find(INSERT)
    assert store.load(case, store.read_manifest())


def test_a_process_that_a_candidate_leaves_behind_ends_with_it() -> None:
    worker = Worker(f"{HOSTILE}:candidate", CPU, 20.0)
    child = int(do(worker, "leak")["o"])
    assert exists(child)
    worker.close()
    assert soon_gone(child)


def test_what_a_candidate_prints_stands_apart_and_is_bounded(hostile: Worker, capfd: pytest.CaptureFixture) -> None:
    do(hostile, "loud")
    time.sleep(0.3)
    out, err = capfd.readouterr()
    assert out == ""
    assert "candidate: �[2J1 of 1 runs passed\n" in err
    assert all(line.startswith("candidate: ") for line in err.splitlines())
    assert len(err.splitlines()) <= 200
    assert "\x1b" not in err


def read_from(content: bytes):
    """A reader of these bytes, as a channel's."""
    left = memoryview(content)

    def read(count: int) -> bytes:
        nonlocal left
        part, left = left[:count], left[count:]
        assert len(part) == count
        return bytes(part)

    return read


def test_a_message_comes_back_with_names_types_and_bits() -> None:
    tensors = {"a b": torch.tensor([1.5, torch.nan], dtype=torch.bfloat16), "": torch.zeros(0, 2, dtype=torch.uint8)}
    content, back = unpack(read_from(pack({"scale": float("inf"), "n": [1]}, tensors)), 1000)
    assert content == {"scale": float("inf"), "n": [1]}
    assert list(back) == list(tensors)
    assert torch.equal(back["a b"].view(torch.int16), tensors["a b"].view(torch.int16))
    assert back[""].shape == (0, 2)


def test_no_message_of_random_bytes_is_more_than_garbage() -> None:
    generator = torch.Generator().manual_seed(1)
    good = pack({"number": 1}, {"o": torch.zeros(3)})
    for _ in range(300):
        broken = bytearray(good)
        for at in torch.randint(16, len(good), (3,), generator=generator).tolist():
            broken[at] = int(torch.randint(0, 256, (1,), generator=generator))
        try:
            content, tensors = unpack(read_from(bytes(broken)), 1000)
        except Garbage:
            continue
        assert isinstance(content, dict)
        assert all(type(x) is torch.Tensor for x in tensors.values())
    with pytest.raises(Garbage, match="a message of 2,000,000 bytes"):
        unpack(read_from(struct.pack("<QQ", 0, 2_000_000)), 1000)


def test_foreign_text_becomes_part_of_a_line() -> None:
    assert clean("a\nb\t \x1b[31m\u202ec\u2028d") == "a b �[31m�c d"
    assert clean("x" * 10**6) == "x" * 500 + "…"
    assert clean_name("exact: 0 bits") == "exact:�0�bits"
    assert (clean_name(""), clean_name("aux0")) == ("�", "aux0")


def test_a_hang_is_a_verdict_and_the_next_case_is_judged() -> None:
    worker = Worker(f"{THEIRS}:hangs", CPU, 2.0)
    try:
        inputs = {case: goldens.KERNELS["cache_insert"].inputs(goldens.find(case)) for case in (INSERT, TWO_ROWS)}
        with pytest.raises(CallFailed, match="hangs: no result within 2 s; its process was ended"):
            worker.call("cache_insert", None, inputs[INSERT], {"eps": 0.0})
        case = goldens.find(TWO_ROWS)
        golden = store.load(case, store.read_manifest())
        outputs = worker.call("cache_insert", None, inputs[TWO_ROWS], case.params)
        assert torch.equal(outputs["cache"], golden["exact/insert/cache"])
    finally:
        worker.close()


THREE_ROWS = ("--case", TWO_ROWS, "--case", "cache_insert/b3-p2x3-page-normal")


def test_the_end_of_the_process_is_a_verdict_and_the_next_case_is_judged() -> None:
    result = verify("crashes", *THREE_ROWS)
    assert result.exit_code == 1
    assert "crashed: its process ended by signal 11 (SIGSEGV)" in result.stdout
    assert "crashed: its process ended with exit code 7" in result.stdout
    assert "1 of 3 runs passed" in result.stdout


def test_what_ends_python_is_a_verdict_and_the_next_case_is_judged() -> None:
    before = signal.getsignal(signal.SIGINT)
    result = verify("leaves", *THREE_ROWS)
    assert result.exit_code == 1
    assert f"{INSERT} any call against model: the candidate called sys.exit(0)\n" in result.stdout
    line = THEIRS.read_text().splitlines().index('        raise KeyboardInterrupt("mine")') + 1
    said = f"the candidate raised KeyboardInterrupt: mine ({THEIRS}, line {line})\n"
    assert f"{TWO_ROWS} any call against model: {said}" in result.stdout
    assert "1 of 3 runs passed" in result.stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_a_candidate_whose_attributes_raise_is_wrong_usage() -> None:
    with pytest.raises(candidates.CandidateError, match=r"odd: looking at it raised RuntimeError: schedules"):
        Worker(f"{THEIRS}:odd", CPU, 5.0)


def test_the_report_says_what_the_candidate_could_not_reach() -> None:
    assert "guard: goldens, their cache and the models " in verify("right").stdout


FORGES = """
import shutil
shutil.copytree({forged!r}, {data!r}, dirs_exist_ok=True)
def f(inputs, params):
    return {{"cache": inputs["cache"] * 0}}
"""


def test_goldens_that_a_module_rewrites_when_it_is_imported_judge_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a copy of the data, which no guard hides; golden and manifest agree with each other, before and after."""
    case, data, forged = goldens.find(INSERT), tmp_path / "data", tmp_path / "forged"
    right = store.compute(goldens.KERNELS[case.kernel], case)
    zeros = right | {"exact/insert/cache": torch.zeros_like(right["exact/insert/cache"])}
    for folder, tensors in ((data, right), (forged, zeros)):
        write(store.path_of(case, folder), store.to_bytes(case, tensors))
        store.write_manifest({INSERT: store.entry(case, tensors)}, folder)
    monkeypatch.setattr(store, "DATA", data)
    read = store.read_manifest
    monkeypatch.setattr(store, "read_manifest", lambda: read(data))
    module = tmp_path / "theirs.py"
    module.write_text(FORGES.format(forged=str(forged), data=str(data)))
    options = ("--candidate", f"{module}:f", "--device", "cpu", "--case", INSERT, "--schedule", "insert")
    result = goldens_command("verify", *options)
    assert result.exit_code == 1
    assert "exact/insert/cache is not what the manifest says" in result.stdout


SPINS = """
import os, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import os; os.setsid()\\nwhile True: pass"])
pathlib.Path({file!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
def f(inputs, params):
    while True:
        pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_run_ends_the_candidate_and_its_children(tmp_path: Path, number: signal.Signals) -> None:
    pids, module = tmp_path / "pids", tmp_path / "spins.py"
    module.write_text(SPINS.format(file=str(pids)))
    command = [sys.executable, "-m", "tools.cli", "verify", "--candidate", f"{module}:f", "--device", "cpu"]
    run = subprocess.Popen(
        [*command, "--case", INSERT], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    running = [int(pid) for pid in pids.read_text().split()]
    assert all(map(exists, running))
    os.kill(run.pid, number)
    out, err = run.communicate(timeout=60)
    assert all(map(soon_gone, running))
    if number != signal.SIGKILL:
        assert (run.returncode, out) == (1, "")
        assert "interrupted; nothing was written" in err
        assert "Traceback" not in err


def test_the_import_hook_lets_another_repositorys_packages_through(tmp_path: Path) -> None:
    """Of the names of ours, what lies elsewhere is theirs."""
    for name in ("reference", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("own = 1\n")
    (tmp_path / "mine.py").write_text(
        "import reference, tools\nimport torch\nassert reference.own == tools.own == 1\n"
        "def f(inputs, params):\n    import cute_impl\n    return {'o': torch.zeros(1)}\n"
    )
    monkey = pytest.MonkeyPatch()
    monkey.syspath_prepend(str(tmp_path))
    try:
        worker = Worker("mine:f", CPU, 20.0)
        assert "o" in worker.call("fmha", None, {}, {})
        worker.close()
    finally:
        monkey.undo()


def test_below_is_a_matter_of_where_links_lead(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "held")
    held = [str(tmp_path / "held")]
    assert guard.below(str(tmp_path / "link" / "x"), held)
    assert guard.below(str(tmp_path / "a" / ".." / "held"), held)
    assert not guard.below(str(tmp_path / "held2"), held)
    assert not guard.below("a\0b", held)


NUMBERS = {
    "inf": (("--timeout", "inf"), "--timeout: got inf, allowed are 0 (no limit) to 1,000,000 seconds"),
    "nan": (("--timeout", "nan"), "--timeout: got nan"),
    "negative": (("--timeout=-1",), "--timeout: got -1"),
    "repeat": (("--repeat", "0"), "--repeat: got 0, allowed are 1 to 1,000,000"),
    "fresh": (("--fresh=-1",), "--fresh: got -1, allowed are 0 to 1,000,000"),
    "seed": (("--fresh", "1", "--fresh-seed=-5"), "--fresh-seed: got -5, allowed are 0 to 281474976710655"),
    "seed-alone": (("--fresh-seed", "5"), "--fresh-seed: is an option of --fresh, which is missing"),
}


@pytest.mark.parametrize(("options", "words"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_out_of_range_are_one_line(options: tuple, words: str) -> None:
    result = verify("right", *options)
    assert (result.exit_code, result.stdout, words in result.stderr) == (2, "", True)
    assert len(result.stderr.splitlines()) == 1
