"""The command line: exit codes 0 pass, 1 fail, 2 usage, 3 hardware missing; every option changes something.

Commands run in this process through typer's runner, in another where imports or pytest itself are at stake.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import goldens
from goldens import store
from reference.numerics.mufu import coefficients as mufu_coefficients
from tools import candidates, cli, doctor
from tools import mufu as mufu_tool
from tools.adapters import exact as exact_adapter
from tools.adapters import ours as our_adapter

REPOSITORY = Path(__file__).parent.parent
SMALL, ZEROS = "fmha/d64-q1-k65-normal", "fmha/d64-n64-zeros"
NORMAL = "fmha/d64-causal-n64-normal"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in arguments])


def python(*arguments: str) -> subprocess.CompletedProcess:
    """Another Python process in the repository."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )


def has_hopper() -> bool:
    try:
        candidates.require_hopper()
    except candidates.HardwareMissing:
        return False
    return True


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


REPORTING = (
    "--all",
    *("--kernel", "--case", "--schedule", "--shard"),
    *("--json", "--markdown", "--html", "--against"),
)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> str:
    """A second kernel: fmha under another name, one case of which is on demand."""
    cases = (goldens.find(SMALL), goldens.find(ZEROS))
    twins = [dataclasses.replace(case, kernel="twin") for case in cases]
    twins.append(dataclasses.replace(twins[0], name="d64-on-demand", committed=False))
    monkeypatch.setitem(
        goldens.KERNELS, "twin", dataclasses.replace(goldens.KERNELS["fmha"], name="twin", cases=tuple(twins))
    )
    return "twin"


def test_every_option_is_known_here() -> None:
    """An option that is new belongs into this table and into a test below."""
    found = {
        (name, option)
        for name, command in typer.main.get_command(cli.app).commands.items()
        for parameter in command.params
        for option in parameter.opts
        if option != "--help"
    }
    assert found == {
        ("list", "--json"),
        ("list", "--kernel"),
        *(("regenerate", option) for option in ("--check", "--kernel", "--case", "--all", "--out", "--shard")),
        *((name, option) for name in ("verify", "report") for option in REPORTING),
        *(
            ("verify", option)
            for option in (
                "--candidate",
                "--device",
                "--invariance",
                "--timeout",
                "--fresh",
                "--fresh-seed",
                "--repeat",
                "--partial",
            )
        ),
        *(("export", option) for option in ("--out", "--kernel", "--case", "--all", "--force")),
        # Tested in test_evidence.py.
        *(("evidence", option) for option in ("--check", "--kernel", "--allow-unproven", "--jobs", "--folder")),
        # Tested in test_faults.py.
        *(
            ("faults", o)
            for o in (
                "--kernels",
                "--compile",
                "--fresh",
                "--candidates",
                "--fault",
                "--jobs",
                "--json",
                "--markdown",
                "--html",
            )
        ),
        ("show", "case"),
        ("diff", "first"),
        ("diff", "second"),
        ("measure", "file"),
        ("fit", "file"),
        ("fit", "--check"),
    }


@pytest.mark.parametrize("command", [None, *typer.main.get_command(cli.app).commands])
def test_help(command: str | None) -> None:
    result = run(*([command] if command else []), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    root = typer.main.get_command(cli.app)
    words = root.commands if command is None else [o for p in root.commands[command].params for o in p.opts]
    assert all(word in result.stdout for word in words)


USAGE = {
    "no-command": ([], "Usage:"),
    "unknown-command": (["certify"], "No such command"),
    "unknown-option": (["list", "--colour"], "No such option"),
    "list-kernel": (["list", "--kernel", "fhma"], "--kernel: got 'fhma', allowed are fmha"),
    "report-kernel": (["report", "--kernel", "fhma"], "--kernel: got 'fhma', allowed are fmha"),
    "verify-kernel": (["verify", "--kernel", "fhma"], "--kernel: got 'fhma', allowed are fmha"),
    "regenerate-kernel": (["regenerate", "--check", "--kernel", "fhma"], "--kernel: got 'fhma', allowed are fmha"),
    "report-case": (
        ["report", "--case", NORMAL + "l"],
        f"--case: got '{NORMAL}l', there is none of this id; nearest: {NORMAL}",
    ),
    "regenerate-case": (["regenerate", "--check", "--case", "x"], "--case: got 'x', there is none of this id"),
    "show-case": (["show", "x"], "--case: got 'x', there is none of this id; nearest: run `goldens list`"),
    "show-nothing": (["show"], "Missing argument 'case'"),
    "diff-one-file": (["diff", "a"], "Missing argument 'second'"),
}


@pytest.mark.parametrize(("arguments", "words"), USAGE.values(), ids=USAGE)
def test_wrong_usage_ends_with_2_and_says_why(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_case_of_another_kernel_is_wrong_usage(twin: str) -> None:
    result = run("report", "--kernel", twin, "--case", SMALL)
    assert result.exit_code == 2
    assert f"--case: none of {SMALL} is a case of kernel {twin}" in result.output


def test_list(twin: str) -> None:
    lines = run("list").stdout.splitlines()
    assert len(lines) == sum(len(kernel.cases) for kernel in goldens.KERNELS.values())
    by_id = {line.split()[0]: line for line in lines}
    assert by_id[NORMAL].split() == [NORMAL, "k2", "committed"]
    assert by_id[SMALL].split() == [SMALL, "model", "only", "committed"]
    assert by_id["twin/d64-on-demand"].endswith("on demand")
    assert (
        set(by_id)
        > {line.split()[0] for line in run("list", "--kernel", twin).stdout.splitlines()}
        == {
            "twin/d64-q1-k65-normal",
            "twin/d64-n64-zeros",
            "twin/d64-on-demand",
        }
    )


def test_list_as_json() -> None:
    listed = json.loads(run("list", "--json").stdout)
    assert [case["id"] for case in listed] == [c.id for kernel in goldens.KERNELS.values() for c in kernel.cases]
    assert next(case for case in listed if case["id"] == NORMAL) == {
        "id": NORMAL,
        "kernel": "fmha",
        "schedules": ["k2"],
        "committed": True,
    }


def test_regenerate_check_passes_on_what_is_committed() -> None:
    result = run("regenerate", "--check", "--case", SMALL, "--case", ZEROS)
    assert (result.exit_code, result.stdout) == (0, "2 cases made again, every byte as it was\n")


def test_regenerate_check_fails_on_a_damaged_copy_and_mends_it_without(folder: Path) -> None:
    path = folder / f"{SMALL}.safetensors"
    whole = path.read_bytes()
    damage(path)
    options = ("--case", SMALL, "--out", folder)
    result = run("regenerate", "--check", *options)
    assert (result.exit_code, result.stdout) == (1, f"{SMALL}: its file does not hold these bytes\n")
    assert "differences: 1" in result.stderr
    assert path.read_bytes() != whole
    result = run("regenerate", *options)
    assert result.exit_code == 0
    assert f"{SMALL}: its file does not hold these bytes; written\ndifferences: 1, now 1 written\n" in result.stdout
    assert path.read_bytes() == whole
    assert run("regenerate", "--check", *options).exit_code == 0


def test_regenerate_says_what_it_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a run that was killed."""
    left = folder / "fmha" / f".{Path(SMALL).name}.safetensors-x1y2"
    left.write_bytes(b"")
    result = run("regenerate", "--case", SMALL, "--out", folder)
    assert result.stdout == f"{left}: a file of no case; left alone\ndifferences: 1, now 1 left alone\n"
    assert left.exists()
    monkeypatch.setattr(store, "DATA", folder)
    damage(folder / f"{SMALL}.safetensors")
    result = run("regenerate", "--case", SMALL)
    assert result.exit_code == 0
    assert f"{left}: a file of no case; removed\n" in result.stdout
    assert "differences: 2, now 1 written, 1 removed\n" in result.stdout
    assert not left.exists()


def test_regenerate_takes_the_kernel_and_all_options(twin: str, tmp_path: Path) -> None:
    assert run("regenerate", "--kernel", twin, "--out", tmp_path).exit_code == 0
    assert sorted(p.name for p in (tmp_path / "twin").iterdir()) == [
        "d64-n64-zeros.safetensors",
        "d64-q1-k65-normal.safetensors",
    ]
    assert run("regenerate", "--kernel", twin, "--out", tmp_path, "--all").exit_code == 0
    assert (tmp_path / "twin" / "d64-on-demand.safetensors").exists()


def test_regenerate_interrupted_says_that_nothing_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "compute", interrupt)
    result = run("regenerate", "--case", SMALL, "--out", folder)
    assert result.exit_code == 1
    assert "interrupted; nothing was written" in result.stderr


UNWRITABLE = {
    "regenerate": (1, lambda place: ["regenerate", "--case", SMALL, "--out", place]),
    "report-json": (2, lambda place: ["report", "--case", ZEROS, "--json", place / "report.json"]),
    "report-markdown": (2, lambda place: ["report", "--case", ZEROS, "--markdown", place / "report.md"]),
}


@pytest.mark.parametrize(("code", "arguments"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, code: int, arguments: Callable) -> None:
    """A folder below a file: it stops root too."""
    (tmp_path / "file").write_text("")
    result = run(*arguments(tmp_path / "file"))
    assert result.exit_code == code
    assert "cannot be written (" in result.stderr
    assert "make its folder writable or choose another" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["report", "show", "regenerate"])
def test_a_damaged_manifest_ends_with_1_and_the_remedy(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def damaged(*_: object) -> None:
        raise store.GoldenError("manifest.json: damaged; restore it from git")

    monkeypatch.setattr(store, "read_manifest", damaged)
    result = run(*{"report": ("report", "--case", ZEROS), "show": ("show", ZEROS)}.get(command, (command, "--check")))
    assert result.exit_code == 1
    assert "restore it from git" in result.stderr


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BROKEN_GOLDEN = {
    "report": (("report",), (ZEROS, NORMAL), "exact", f"{NORMAL} k2 "),
    "report-model-only": (("report",), (ZEROS, SMALL), "exact", f"{SMALL} any "),
    "verify": (("verify", "--candidate", "exact"), (ZEROS, NORMAL), "exact", f"{NORMAL} k2 "),
    "verify-any": (("verify", "--candidate", "sdpa"), (ZEROS, NORMAL), "model", f"{NORMAL} any "),
    "invariance": (("verify", "--candidate", "exact", "--invariance"), (ZEROS, NORMAL), "invariance", f"{NORMAL} k2 "),
}


@pytest.mark.parametrize(("command", "cases", "against", "who"), BROKEN_GOLDEN.values(), ids=BROKEN_GOLDEN)
def test_a_damaged_golden_fails_its_case_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple, cases: tuple, against: str, who: str
) -> None:
    right, broken = cases
    cut(folder / f"{broken}.safetensors")
    monkeypatch.setattr(store, "DATA", folder)
    entries = store.read_manifest(folder)
    monkeypatch.setattr(store, "read_manifest", lambda: entries)
    files = [folder / f"r.{kind}" for kind in ("json", "md", "html")]
    options = ("--device", "cpu") if command[0] == "verify" else ()
    written = ("--json", files[0], "--markdown", files[1], "--html", files[2])
    result = run(*command, "--case", broken, "--case", right, *options, *written)
    assert result.exit_code == 1
    words = f"{folder / broken}.safetensors: damaged or truncated ("
    assert f"{who}golden against {against}: {words}" in result.stdout
    assert "1 of 2 runs passed" in result.stdout
    failed, passed = strict_json(files[0])["results"]
    assert (failed["case"], failed["passed"], passed["case"], passed["passed"]) == (broken, False, right, True)
    [verdict] = failed["verdicts"]
    assert (verdict["output"], verdict["against"], verdict["elements"]) == ("golden", against, 0)
    assert verdict["reason"].startswith(words)
    assert all(words in file.read_text() for file in files[1:])


def strict_json(path: Path) -> dict:
    """JSON without Infinity and NaN, which other languages refuse."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


VERDICT_FIELDS = {field.name for field in dataclasses.fields(goldens.judge.Verdict)}


def test_report_writes_json_and_markdown(tmp_path: Path) -> None:
    result = run(
        "report", "--case", NORMAL, "--case", ZEROS, "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md"
    )
    assert result.exit_code == 0
    assert "2 of 2 runs passed; 8,192 elements compared bit for bit" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.md"]
    content = strict_json(tmp_path / "r.json")
    assert set(content) == {"format", "environment", "results"}
    assert {"python", "machine", "gpu", "driver", "torch", "nvidia-cutlass-dsl"} <= set(content["environment"])
    first = content["results"][0]
    assert set(first) == {"case", "kernel", "schedule", "candidate", "passed", "note", "command", "verdicts"}
    assert (first["case"], first["schedule"], first["candidate"], first["passed"]) == (
        NORMAL,
        "k2",
        "exact model",
        True,
    )
    assert [(v["output"], v["against"], v["passed"]) for v in first["verdicts"]] == [
        ("o", "exact", True),
        ("o", "model", True),
    ]
    assert all(set(v) == VERDICT_FIELDS for v in first["verdicts"])
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# Exact models against model and oracle\n\n2 of 2 runs passed")
    assert f"| {NORMAL} | k2 | o | 0 bits |" in text
    assert f"- torch: {torch.__version__}" in text


def test_report_overwrites_an_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("x" * 100_000)
    assert run("report", "--case", ZEROS, "--json", path).exit_code == 0
    assert strict_json(path)["format"] == 2


def test_report_takes_one_kernel(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmha = {case.name: case for case in goldens.KERNELS["fmha"].cases}
    monkeypatch.setattr(store, "obtain", lambda kernel, case, manifest: store.load(fmha[case.name], manifest))
    result = run("report", "--kernel", twin)
    assert (result.exit_code, "1 of 1 runs passed" in result.stdout) == (0, True)


def test_a_report_on_nothing_is_no_success() -> None:
    result = run("report", "--case", SMALL)
    assert result.exit_code == 2
    assert "nothing was judged" in result.stderr


def test_report_says_what_is_judged_against_exact_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.md"
    case = "kda/t131-scan-from-bf16-lb-0.0625-normal"
    assert run("report", "--case", case, "--markdown", path).exit_code == 0
    assert f"- {case}: judged against exact alone: what does not decay keeps every chunk's error" in path.read_text()


def test_report_says_how_many_elements_the_model_judged_and_left_out() -> None:
    result = run("report", "--case", "fmha/d64-causal-n128-nan")
    words = "8,192 elements compared bit for bit, 8,065 judged by the model, which does not decide on 127"
    assert words in " ".join(result.stdout.split())
    assert "model decides on 8,065 of 8,192" in " ".join(result.stdout.replace("│", " ").split())


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    """k2 whose last row is NaN, and whose thread 1 of row 2 adds an ULP."""
    reference = goldens.KERNELS["fmha"].reference
    right = reference.exact

    def exact(*arguments: object) -> dict[str, torch.Tensor]:
        o = right(*arguments)["o"]
        o.view(torch.int16)[0, 2, 16:20] += 1
        o[0, -1, 0] = torch.nan
        return {"o": o}

    monkeypatch.setattr(reference, "exact", exact)


@pytest.mark.usefixtures("faulty")
def test_a_failing_report_ends_with_1_and_says_where(tmp_path: Path) -> None:
    result = run("report", "--case", NORMAL, "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md")
    assert result.exit_code == 1
    assert "0 of 1 runs passed" in result.stdout
    content = strict_json(tmp_path / "r.json")["results"][0]
    assert not content["passed"]
    exact = content["verdicts"][0]
    assert (exact["failing"], exact["wrong_class"], exact["max_ulps"]) == (5, 1, "inf")
    assert (exact["worst"][0]["index"], exact["worst"][0]["got"]) == ([0, 63, 0], "nan")
    assert exact["worst"][1]["where"] == {"tile": 0, "batch": 0, "warp": 0, "lane": 9, "register": 0}
    for text in (result.stdout, (tmp_path / "r.md").read_text()):
        assert f"{NORMAL} k2 o against exact: 5 of 4096 elements differ, 1 of them in class" in text
        assert "all 5 come from tile 0" in text
        assert "[0, 2, 16]: got 0x" in text
        assert f"again: goldens report --case {NORMAL}" in text


def test_verify_runs_the_kernels_or_names_what_is_missing() -> None:
    result = run("verify", "--case", ZEROS)
    if has_hopper():
        assert (result.exit_code, "1 of 1 runs passed" in result.stdout) == (0, True)
    else:
        assert result.exit_code == 3
        assert "sm_90 GPU (H100, H200)" in result.stderr
        assert "`goldens report` judges the exact models without a GPU" in result.stderr


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    """The exact models in the place of our kernels, called in this process."""
    monkeypatch.setattr(candidates, "require_hopper", lambda: torch.device("cpu"))
    monkeypatch.setattr(our_adapter, "make", exact_adapter.make)


@pytest.mark.usefixtures("pretended_gpu")
def test_verify_judges_and_writes_its_report(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--html", tmp_path / "r.html")
    assert run("verify", "--kernel", "fmha", "--case", ZEROS, *files).exit_code == 0
    assert strict_json(tmp_path / "r.json")["results"][0]["candidate"] == "cute_impl"
    assert (tmp_path / "r.md").read_text().startswith("# Our kernels on the GPU\n")
    assert "Our kernels on the GPU" in (tmp_path / "r.html").read_text()


@pytest.mark.usefixtures("pretended_gpu", "faulty")
def test_verify_fails_on_a_faulty_kernel_and_says_what_repeats_it() -> None:
    result = run("verify", "--case", ZEROS)
    assert result.exit_code == 1
    assert "0 of 1 runs passed" in result.stdout
    assert f"again: goldens verify --case {ZEROS} --schedule k2\n" in result.stdout


def test_our_kernels_are_refused_on_the_cpu_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "put_on_trial", lambda *_: pytest.fail("the run began"))
    result = run("verify", "--case", ZEROS, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--device: got 'cpu', our kernels need an sm_90 GPU (H100, H200)" in result.stderr
    result = run("verify", "--candidate", "flash_kda", "--device", "cpu")
    assert (result.exit_code, "--device: got 'cpu', flash_kda needs a GPU" in result.stderr) == (2, True)


def test_a_pipe_cuts_no_line() -> None:
    long = "fmha/d64-causal-q6-k33-h4-2-scale0.3-normal"
    lines = run("report", "--case", long).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:4] for row in rows] == [[long, "wgmma128", name, "0 bits"] for name in ("lse", "o")]


@pytest.mark.usefixtures("faulty")
def test_the_command_that_repeats_a_failure_does() -> None:
    command = f"goldens verify --case {ZEROS} --candidate exact --device cpu --schedule k2"
    first = run(*command.split()[1:])
    assert (first.exit_code, f"again: {command}\n" in first.stdout) == (1, True)


def test_schedule_takes_the_cases_that_have_it_and_no_other(tmp_path: Path) -> None:
    cases = ("--case", "mla_query/h1-b4-p2x3-alternate-padded", "--case", ZEROS)
    assert run("report", *cases, "--schedule", "tiled", "--json", tmp_path / "r.json").exit_code == 0
    results = strict_json(tmp_path / "r.json")["results"]
    assert [(r["kernel"], r["schedule"]) for r in results] == [("mla_query", "tiled")]
    result = run("report", "--case", ZEROS, "--schedule", "small")
    assert (result.exit_code, "--schedule: got 'small', these cases have k2" in result.stderr) == (2, True)


def test_shards_of_a_report_are_the_report(tmp_path: Path) -> None:
    cases = [f"cache_insert/b1-p1x1-{name}" for name in ("unit", "ties", "scale-zero", "scale-huge", "subnormal")]
    options = [word for case in cases for word in ("--case", case)]
    seen = []
    for i in (1, 2):
        path = tmp_path / f"{i}.json"
        assert run("report", *options, "--shard", f"{i}/2", "--json", path).exit_code == 0
        seen += [result["case"] for result in strict_json(path)["results"]]
    assert sorted(seen) == sorted(cases)
    result = run("report", "--case", ZEROS, "--shard", "2/2")
    assert (result.exit_code, "there are only 1 cases" in result.stderr) == (2, True)
    result = run("regenerate", "--check", "--case", ZEROS, "--shard", "2/1")
    assert (result.exit_code, "--shard: got '2/1'" in result.stderr) == (2, True)


def test_regenerate_takes_a_shard() -> None:
    result = run("regenerate", "--check", "--case", SMALL, "--case", ZEROS, "--shard", "2/2")
    assert (result.exit_code, result.stdout) == (0, "1 cases made again, every byte as it was\n")


@pytest.mark.usefixtures("pretended_gpu")
def test_against_says_what_changed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    old = tmp_path / "old.json"
    assert run("report", "--case", ZEROS, "--json", old).exit_code == 0
    request.getfixturevalue("faulty")
    result = run("report", "--case", ZEROS, "--against", old, "--markdown", tmp_path / "r.md")
    assert result.exit_code == 1
    assert "newly failing: fmha/d64-n64-zeros" in result.stdout
    assert "newly failing: fmha/d64-n64-zeros" in (tmp_path / "r.md").read_text()


def test_an_old_report_is_read_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "judge_exact", lambda *_: pytest.fail("the run began"))
    result = run("report", "--case", ZEROS, "--against", tmp_path / "missing.json")
    assert (result.exit_code, "missing.json" in result.stderr) == (2, True)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 0, "results": []}'])
def test_against_refuses_what_is_no_report(tmp_path: Path, content: str | None) -> None:
    old = tmp_path / "old.json"
    if content is not None:
        old.write_text(content)
    result = run("report", "--case", ZEROS, "--against", old)
    assert (result.exit_code, "--against: " in result.stderr) == (2, True)


@pytest.mark.parametrize("command", [("list",), ("list", "--json"), ("doctor",)])
def test_a_reader_that_goes_away_ends_nothing(command: tuple[str, ...]) -> None:
    """As in `goldens list | head -1`."""
    arguments = [sys.executable, "-m", "tools.cli", *command]
    with subprocess.Popen(
        arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0


def test_a_reader_that_goes_away_hides_no_failure() -> None:
    arguments = [
        sys.executable,
        "-m",
        "tools.cli",
        "diff",
        *(str(store.path_of(goldens.find(x))) for x in (SMALL, ZEROS)),
    ]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 1


@pytest.mark.skipif(has_hopper(), reason="measuring a real unit is tests/hopper/test_numerics.py")
def test_measure_names_the_missing_gpu(tmp_path: Path) -> None:
    result = run("measure", tmp_path / "unit.npz")
    assert (result.exit_code, "sm_90 GPU" in result.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b"not an archive"], ids=["missing", "empty", "foreign"])
def test_fit_refuses_what_measure_did_not_write(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "unit.npz"
    if content is not None:
        file.write_bytes(content)
    result = run("fit", file)
    assert (result.exit_code, "no measurements of `goldens measure`" in result.stderr) == (2, True)


@pytest.mark.parametrize(("options", "code", "written"), [((), 0, True), (("--check",), 1, False)])
def test_fit_writes_what_differs_or_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple, code: int, written: bool
) -> None:
    found, wrote = {**mufu_coefficients(), "ex2": {}}, []
    monkeypatch.setattr(mufu_tool, "fit", lambda file: found)
    monkeypatch.setattr(mufu_tool, "write", wrote.append)
    result = run("fit", tmp_path / "unit.npz", *options)
    assert (result.exit_code, "differs: ex2" in result.stdout, wrote == [found]) == (code, True, written)


@pytest.mark.usefixtures("in_process")
def test_a_missing_module_counts_as_missing_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "require_hopper", lambda: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "cute_impl.fmha", None)
    result = run("verify", "--case", ZEROS)
    assert result.exit_code == 3
    assert "`goldens doctor` says what to install" in result.stderr


def test_doctor_says_what_will_run() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"torch {torch.__version__}" in lines
    assert any(line.startswith("GPU: ") for line in lines)
    assert "yes  make goldens (goldens regenerate) and report" in lines
    assert "yes  read the committed goldens" in lines
    [gpu] = [line for line in lines if "run the kernels" in line]
    assert gpu.startswith("yes") if has_hopper() else "sm_90" in gpu


def test_doctor_names_what_is_wrong_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise store.GoldenError("manifest.json: damaged; restore it from git")

    def flushing() -> None:
        raise RuntimeError("the CPU flushes; call torch.set_flush_denormal(False)")

    monkeypatch.setattr(store, "read_manifest", damaged)
    monkeypatch.setattr(doctor, "require_subnormals", flushing)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    lines = run("doctor").stdout.splitlines()
    assert "no   read the committed goldens: manifest.json: damaged; restore it from git" in lines
    assert any(line.startswith("no   make goldens") and "set_flush_denormal(False)" in line for line in lines)
    assert any(line.startswith("no   compile") and "pip install 'nvidia-cutlass-dsl[cu13]==" in line for line in lines)


def test_show() -> None:
    result = run("show", "fmha/d64-causal-n128-nan")
    assert result.exit_code == 0
    first, *rows = result.stdout.splitlines()
    identity, _, description = first.partition(": ")
    assert (identity, json.loads(description)["recipe"]) == ("fmha/d64-causal-n128-nan", "nan")
    assert [row.split()[:5] for row in rows if "in/q" in row] == [["in/q", "bfloat16", "[1,", "128,", "64]"]]
    assert all("1 NaN" in row for row in rows if "in/" in row)
    note = run("show", "kda/t131-scan-from-bf16-lb-0.0625-normal").stdout.splitlines()[1]
    assert note.startswith("judged against exact alone: what does not decay keeps every chunk's error")


def test_diff_of_equal_files() -> None:
    path = store.path_of(goldens.find(SMALL))
    result = run("diff", path, path)
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [
        [name, "equal"] for name in ("in/k", "in/q", "in/v", "model/lse", "model/o")
    ]


def test_diff_of_files_that_differ(tmp_path: Path) -> None:
    case = goldens.find(SMALL)
    tensors = store.read_whole(store.path_of(case))
    tensors["in/q"].view(torch.int16)[0, 0, :3] += 2
    del tensors["model/lse"]
    other = tmp_path / "other.safetensors"
    other.write_bytes(store.to_bytes(dataclasses.replace(case, whole=True), tensors))
    result = run("diff", store.path_of(case), other)
    assert result.exit_code == 1
    words = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert words["in/q"] == "3 of 64 elements differ, by up to 2 ULPs"
    assert words["model/lse"] == f"only in {store.path_of(case)}"
    assert words["in/k"] == "equal"


def test_a_schedule_whose_cases_are_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = goldens.KERNELS["kda"]
    cases = [dataclasses.replace(c, committed=c.committed and "scan416" not in str(c.schedules)) for c in kernel.cases]
    monkeypatch.setitem(goldens.KERNELS, "kda", dataclasses.replace(kernel, cases=tuple(cases)))
    result = run("report", "--kernel", "kda", "--schedule", "chunk16_scan416")
    assert result.exit_code == 2
    assert "it has cases on demand, named by --case, such as kda/t" in result.stderr


def test_two_reports_need_two_files(tmp_path: Path) -> None:
    file = tmp_path / "report"
    result = run("report", "--case", SMALL, "--json", file, "--html", tmp_path / "." / "report")
    assert (result.exit_code, "is named twice" in result.stderr) == (2, True)
    assert not file.exists()


def test_all_takes_the_cases_on_demand(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    monkeypatch.setattr(cli, "judge_exact_case", lambda case, *_: judged.append(case.name) or [])
    run("report", "--kernel", twin)
    assert "d64-on-demand" not in judged
    run("report", "--kernel", twin, "--all")
    assert "d64-on-demand" in judged


def test_diff_with_a_file_that_is_no_golden(tmp_path: Path) -> None:
    result = run("diff", store.path_of(goldens.find(SMALL)), tmp_path / "none.safetensors")
    assert result.exit_code == 2
    assert "none.safetensors: missing" in result.stderr


def test_reference_goldens_and_report_need_neither_cutlass_nor_cuda() -> None:
    script = (
        "import sys; sys.modules['cutlass'] = sys.modules['cuda'] = None; "
        "import pkgutil, importlib, reference, goldens; "
        "[importlib.import_module(m.name) for p in (reference, goldens) "
        "for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]; "
        "assert not [m for m in sys.modules if m.startswith('cute_impl')]; "
        f"from tools.cli import app; app(['report', '--case', '{ZEROS}'])"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs passed" in done.stdout


def test_the_module_is_a_program_too() -> None:
    done = python("-m", "tools.cli", "show", "x")
    assert (done.returncode, done.stdout) == (2, "")


def test_asked_for_the_hopper_tests_without_a_gpu_pytest_ends_with_3() -> None:
    if has_hopper():
        done = python("-m", "pytest", "-q", "-m", "hopper", "--collect-only", "tests/hopper")
        assert done.returncode == 0, done.stdout
    else:
        done = python("-m", "pytest", "-q", "-m", "hopper", "tests/hopper")
        assert done.returncode == 3, done.stdout
        assert "sm_90" in done.stdout + done.stderr
