"""Evidence of what ran on hardware: digests that move with the code alone, the check, and what --record writes."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import goldens
from goldens import store
from goldens.files import write_text
from tools import evidence
from tools.evidence import Compiled
from tools.ptx_digest import normalised_host, normalised_ptx, toolkit
from tools.record import Record

ROOT = Path(__file__).parent.parent
ROOMS = ("cute_impl", "goldens", "reference", "tools")
DIGEST = """
import sys, tempfile
from cute_impl import cache_insert
from cute_impl.attn_res import cluster7
from tools.ptx_digest import digests
if "warm" in sys.argv:  # what a process has compiled before must not show
    cluster7.compile_variant(cluster7.Config(nb=1))
for compile in (cache_insert.compile_variant, lambda o: cluster7.compile_variant(cluster7.Config(nb=1), o)):
    print(*digests(compile("--keep-ptx --dump-dir=" + tempfile.mkdtemp())))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout's code in another folder; its function edits a copy of it."""
    root = tmp_path_factory.mktemp("another") / "deep" / "folder"
    ignore = shutil.ignore_patterns("data", "__pycache__")
    for room in ROOMS:
        shutil.copytree(ROOT / room, root / room, ignore=ignore)

    def edited(path, old, new):
        text = (ROOT / path).read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}"
        copy = root.parent / f"edited{len(list(root.parent.iterdir()))}"
        shutil.copytree(root, copy)
        (copy / path).write_text(text.replace(old, new))
        return copy

    return root, edited


def start(root, cwd, seed, *arguments):
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", DIGEST, *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)


def lines(process):
    """(PTX, host) of the cache insert and of attn_res."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return [line.split() for line in out.splitlines()]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The digests of this checkout."""
    return lines(start(ROOT, ROOT, 0))


def test_digests_do_not_depend_on_folder_seed_or_order(here, tree, tmp_path):
    root, _ = tree
    other = lines(start(root, tmp_path, 4711, "warm"))
    assert other == here
    assert [len(word) for line in here for word in line] == [32] * 4
    assert len({word for line in here for word in line}) == 4


def test_digests_do_not_depend_on_names(here, tree, tmp_path):
    _, edited = tree
    path = "cute_impl/cache_insert.py"
    root = edited(path, "class CacheInsert:", "class Writer:")
    text = (root / path).read_text()
    (root / path).write_text("# One line more.\n" + text.replace("CacheInsert", "Writer"))
    assert lines(start(root, tmp_path, 1)) == here


def test_fma_made_mul_and_add_changes_the_ptx_alone(here, tree, tmp_path):
    _, edited = tree
    path, old = "cute_impl/mla_query/insert.py", "fma_rn(total, Float32(1 / LATENT), eps)"
    insert, attn_res = lines(start(edited(path, old, "add_rn(mul_rn(total, Float32(1 / LATENT)), eps)"), tmp_path, 0))
    assert attn_res == here[1]
    assert insert[0] != here[0][0]
    assert insert[1] == here[0][1]


def test_another_grid_changes_the_host_code_alone(here, tree, tmp_path):
    _, edited = tree
    path, old = "cute_impl/cache_insert.py", "grid=[(rows + WARPS - 1) // WARPS, 1, 1]"
    insert, attn_res = lines(start(edited(path, old, "grid=[(rows + WARPS) // WARPS, 1, 1]"), tmp_path, 0))
    assert attn_res == here[1]
    assert insert[0] == here[0][0]
    assert insert[1] != here[0][1]


PTX = """// Compiler Build ID: CL-1
// Cuda compilation tools, release 13.4, V13.4.59
.version 9.4
.visible .entry kernel_cutlass_a_0(.param .b64 kernel_cutlass_a_0_param_0)
{ /* two
lines */
	.loc 1 17 5
	fma.rn.f32 	%f1, %f2, %f3, %f4;
}
.section .debug_str
{
	.b8 1
}
"""


def test_normalised_ptx_keeps_instructions_alone():
    wanted = ".version 9.4\n.visible .entry kernel0(.param .b64 kernel0_param_0)\n{\nfma.rn.f32 %f1, %f2, %f3, %f4;\n}"
    assert normalised_ptx(PTX) == wanted
    assert normalised_ptx(PTX.replace("fma.rn", "fma.rz")) != wanted
    assert normalised_ptx(PTX.replace("CL-1", "CL-2").replace("a_0", "another_1")) == wanted


def test_normalised_host_keeps_comparisons_and_numbers():
    text = '%1 = llvm.icmp "slt" %0, %c : i32\n%2 = llvm.mlir.constant(256 : i32) : i32\n%3 = "\\7FELF and a lot more"'
    assert normalised_host(text) != normalised_host(text.replace("slt", "sle"))
    assert normalised_host(text) != normalised_host(text.replace("256", "128"))
    assert normalised_host(text) == normalised_host(text.replace("a lot", "little"))


def test_toolkit():
    assert toolkit(PTX) == "13.4.59"
    assert toolkit("") == "unknown"


def test_rooms_list_their_variants():
    """Each name once; every golden of attn_res has its variant."""
    for kernel, count in (("attn_res", 36), ("mla_query", 40), ("cache_insert", 1)):
        assert len(evidence.variants(kernel)) >= count
    from cute_impl.attn_res.cluster7 import Config

    names = ("nb", "slots", "has_delta", "write", "final", "aux")
    for case in goldens.KERNELS["attn_res"].cases:
        for schedule in case.schedules:
            config = Config(*(case.params[name] for name in names), schedule)
            assert config.name in evidence.variants("attn_res")


@pytest.fixture
def proven():
    """Evidence of the cache insert that holds, what compiles now, and the manifest."""
    manifest = store.read_manifest()
    compiled = {"insert": Compiled("a" * 32, "b" * 32, "13.4.59", "('cache_insert',)")}
    cases = {
        case_id: {"golden": evidence.golden_digest(entry), "insert": {"passed": 1, "failed": 0}}
        for case_id, entry in manifest.items()
        if entry["kernel"] == "cache_insert"
    }
    content = {
        "format": evidence.FORMAT,
        "kernel": "cache_insert",
        "commit": "0123abc",
        "dirty": False,
        "environment": {"gpu": "NVIDIA H200", "driver": "580.1"},
        "compiler": evidence.compiler(compiled.values()),
        "variants": {"insert": {"ptx": "a" * 32, "host": "b" * 32}},
        "cases": cases,
        "verdicts": {"exact": {"passed": len(cases), "failed": 0, "elements": 9}},
        "tests": {"test_cache_insert.py::test_committed": {"passed": len(cases), "seconds": 0.1}},
    }
    return content, compiled, manifest


def judge(content, compiled, manifest, exception=None):
    return evidence.status("cache_insert", content, compiled, manifest, exception)


def test_evidence_that_holds(proven):
    found = judge(*proven)
    assert found.proven
    assert found.lines[0].startswith("cache_insert  proven: 1 variants, ")
    assert "NVIDIA H200, driver 580.1, compiler 4.8.1 / 13.4.59, commit 0123abc" in found.lines[0]
    assert len(found.lines) == 1
    assert "with changes" in judge(proven[0] | {"dirty": True}, *proven[1:]).lines[0]


def test_what_makes_a_kernel_unproven(proven):
    content, compiled, manifest = proven
    insert = compiled["insert"]
    first = min(content["cases"])
    changed = content | {"cases": content["cases"] | {first: content["cases"][first] | {"golden": "0" * 16}}}
    committed = min(i for i in content["cases"] if manifest[i]["committed"])
    fewer = content | {"cases": {i: c for i, c in content["cases"].items() if i != committed}}
    several = {f"v{i}": insert for i in range(7)} | compiled
    for arguments, reason in (
        ((ValueError("no evidence"), compiled, manifest), "no evidence"),
        ((content, None, manifest), "its variants are not known: cute_impl.cache_insert has no function variants()"),
        ((content, {"insert": replace(insert, ptx="c")}, manifest), "other PTX than what ran: insert"),
        ((content, {"insert": replace(insert, host="c")}, manifest), "other launch code than what ran: insert"),
        ((content, several, manifest), "never ran on hardware: v0, v1, v2, v3, v4 and 2 more"),
        (
            (content, {"insert": replace(insert, toolkit="13.5.0")}, manifest),
            "the compiler is 4.8.1 / 13.5.0, proven was 4.8.1 / 13.4.59",
        ),
        (
            (content, compiled | {"new": Compiled(error="ValueError: no")}, manifest),
            "do not compile: new; new: ValueError: no",
        ),
        ((changed, compiled, manifest), f"goldens that are others than those judged: {first}"),
        ((fewer, compiled, manifest), f"committed goldens never judged on hardware: {committed}"),
    ):
        found = judge(*arguments)
        assert found.reasons == (reason,)
        assert found.lines[0].startswith("cache_insert  UNPROVEN")
        assert found.lines[1] == f"  {reason}"


CASE = "cache_insert/b1-p1x1-unit"
TEST = "test_cache_insert.py::test_committed"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("cases", CASE, "insert"), {"passed": 1, "failed": 1}, f"goldens that failed: {CASE} by insert"),
        (("cases", CASE, "insert"), {"passed": 0, "failed": 1}, f"goldens that failed: {CASE} by insert"),
        (
            ("cases", CASE, "insert"),
            {"passed": 0, "failed": 0},
            f"exact schedules without a verdict: {CASE} by insert",
        ),
        (("cases", CASE, "insert"), None, f"exact schedules without a verdict: {CASE} by insert"),
        (("verdicts", "exact", "failed"), 2, "verdicts that failed, against: exact"),
        (("verdicts", "exact", "passed"), 0, "nothing was compared with exact bits"),
        (("verdicts", "exact"), None, "nothing was compared with exact bits"),
        (("verdicts", "model"), {"passed": 5, "failed": 1}, "verdicts that failed, against: model"),
        (("tests",), {}, "no test ran"),
        (("tests", TEST, "passed"), 0, f"tests that did not pass: {TEST}"),
        (("tests", TEST, "failed"), 1, f"tests that did not pass: {TEST}"),
        (("environment", "gpu"), "NVIDIA B200", "it ran on NVIDIA B200, wanted is an sm_90 GPU (H100, H200)"),
        (("environment", "gpu"), "NVIDIA A100-SXM4", "it ran on NVIDIA A100-SXM4, wanted is an sm_90 GPU (H100, H200)"),
    ],
)
def test_what_the_run_itself_says_against_it(path, value, reason, proven):
    """value: None leaves the entry out."""
    content = copy.deepcopy(proven[0])
    section = content
    for name in path[:-1]:
        section = section[name]
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    assert judge(content, *proven[1:]).reasons == (reason,)


def test_a_golden_that_is_not_committed_need_not_have_every_schedule_but_may_not_fail(proven):
    content, compiled, manifest = proven
    case_id = min(i for i in content["cases"] if not manifest[i]["committed"])
    case = {"golden": content["cases"][case_id]["golden"]}
    assert judge(content | {"cases": content["cases"] | {case_id: case}}, compiled, manifest).proven
    failed = content["cases"] | {case_id: case | {"insert": {"passed": 0, "failed": 1}}}
    found = judge(content | {"cases": failed}, compiled, manifest)
    assert found.reasons == (f"goldens that failed: {case_id} by insert",)


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H20-3e", "NVIDIA H800", "NVIDIA GH200 480GB"])
def test_gpus_of_sm_90(gpu, proven):
    environment = proven[0]["environment"] | {"gpu": gpu}
    assert judge(proven[0] | {"environment": environment}, *proven[1:]).proven


def test_an_exception_is_shown_with_its_reason(proven):
    content, compiled, manifest = proven
    found = judge(ValueError("no evidence"), compiled, manifest, "the H200 comes on Monday")
    assert found.lines[0] == "cache_insert  unproven, allowed"
    assert found.lines[-1] == "  allowed: the H200 comes on Monday"
    assert judge(content, compiled, manifest, "x").lines[-1] == "  no longer needed: x"


def test_a_variant_that_does_not_compile_is_named(monkeypatch):
    def broken(options):
        raise TypeError("no such thing\nand more")

    monkeypatch.setattr(evidence, "variants", lambda kernel: {"v": broken})
    assert evidence.compile_variant("fmha", "v") == Compiled(error="TypeError: no such thing")


def test_dump_has_one_entry_a_line_and_sorted_keys():
    content = {"b": {"y": {"q": 1, "p": 2}, "x": 3}, "a": None, "c": {}}
    text = evidence.dump(content)
    assert text == '{\n "a": null,\n "b": {\n  "x": 3,\n  "y": {"p": 2, "q": 1}\n },\n "c": {}\n}\n'
    assert json.loads(text) == content


APP = typer.Typer()
APP.command()(evidence.command)


def check(folder, *options):
    return CliRunner().invoke(APP, ["--kernel", "cache_insert", "--folder", str(folder), "--check", *options])


def test_check_exits_1_without_evidence_unless_allowed(tmp_path):
    done = check(tmp_path)
    assert done.exit_code == 1
    assert "unproven: cache_insert; renew the evidence: pytest -m hopper --record" in done.stderr
    assert f"  no evidence: {tmp_path / 'cache_insert.json'} is not there" in done.stdout
    done = check(tmp_path, "--allow-unproven", "cache_insert=no GPU yet")
    assert done.exit_code == 0
    assert "  allowed: no GPU yet" in done.stdout
    (tmp_path / evidence.EXCEPTIONS).write_text('{"cache_insert": "in the file"}')
    assert "  allowed: in the file" in check(tmp_path).stdout


def test_check_names_what_it_does_not_know(tmp_path):
    done = check(tmp_path, "--allow-unproven", "fhma=reason")
    assert done.exit_code == 2
    assert "--allow-unproven: got 'fhma', allowed are fmha, " in done.stderr
    done = CliRunner().invoke(APP, ["--kernel", "fhma"])
    assert done.exit_code == 2
    assert "--kernel: got 'fhma', allowed are fmha, " in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("fhma=reason", "--allow-unproven: got 'fhma', allowed are fmha, "),
        ("foo", "--allow-unproven: got 'foo', allowed are fmha, .*, as KERNEL=REASON"),
        ("fmha", "--allow-unproven: fmha has no reason, allowed is KERNEL=REASON"),
        ("fmha= ", "--allow-unproven: fmha has no reason"),
    ],
)
def test_exceptions_refuse(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        evidence.exceptions(tmp_path, [option])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"damaged \(Expecting"),
        ('["fmha"]', r"got \['fmha'\], allowed is {"),
        ('{"fhma": "why"}', "got 'fhma', allowed are fmha, .*, as {"),
        ('{"fmha": " "}', "fmha has no reason, allowed is {"),
        ('{"fmha": 1}', "fmha has no reason, allowed is {"),
    ],
)
def test_exceptions_name_the_file_that_is_wrong(text, message, tmp_path):
    (tmp_path / evidence.EXCEPTIONS).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/unproven\.json: {message}"):
        evidence.exceptions(tmp_path)
    assert check(tmp_path).exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "the file has no valid 'format'"),
        ('{"format": 0, "kernel": "fmha"}', "its format is 0, allowed is 1"),
        ('{"format": 1, "kernel": "kda"}', "its kernel is 'kda', allowed is 'fmha'"),
        ('{"format": 1, "kernel": "fmha", "dirty": false}', "the file has no valid 'commit'"),
    ],
)
def test_a_file_that_is_no_evidence_is_refused(text, message, tmp_path):
    (tmp_path / "fmha.json").write_text(text)
    with pytest.raises(ValueError, match=rf"fmha\.json: no evidence of this suite \({message}"):
        evidence.read("fmha", tmp_path)


@pytest.mark.parametrize(
    ("section", "entry", "message"),
    [
        ("environment", {"gpu": "NVIDIA H200"}, "environment has no valid 'driver'"),
        ("compiler", {"toolkit": 13}, "compiler has no valid 'toolkit'"),
        ("variants", {"insert": {"ptx": "a"}}, "variants: insert has no valid 'host'"),
        ("variants", {"insert": {"host": "a"}}, "variants: insert has no valid 'ptx'"),
        ("variants", [], "the file has no valid 'variants'"),
        ("cases", {CASE: {}}, f"cases: {CASE} has no valid 'golden'"),
        ("cases", {CASE: {"golden": "a", "insert": {"failed": 0}}}, f"cases: {CASE}: insert has no valid 'passed'"),
        ("verdicts", {"exact": {"passed": 1}}, "verdicts: exact has no valid 'failed'"),
        ("tests", {TEST: 1}, f"tests: {TEST} has no valid 'passed'"),
    ],
)
def test_an_entry_that_is_no_evidence_is_refused(section, entry, message, proven, tmp_path):
    path = tmp_path / "cache_insert.json"
    path.write_text(evidence.dump(proven[0]))
    assert evidence.read("cache_insert", tmp_path) == proven[0]
    path.write_text(evidence.dump(proven[0] | {section: entry}))
    with pytest.raises(ValueError, match=message):
        evidence.read("cache_insert", tmp_path)


def test_a_damaged_file_costs_its_own_kernel_and_no_other(tmp_path, monkeypatch):
    shutil.copy(evidence.FOLDER / "cache_insert.json", tmp_path)
    (tmp_path / "fmha.json").write_text("{")
    kernels = {name: goldens.KERNELS[name] for name in ("fmha", "cache_insert")}
    monkeypatch.setattr(goldens, "KERNELS", kernels)
    done = CliRunner().invoke(APP, ["--folder", str(tmp_path), "--check"])
    assert done.exit_code == 1
    assert f"fmha          UNPROVEN\n  {tmp_path}/fmha.json: no evidence of this suite" in done.stdout
    assert "cache_insert  proven: 1 variants, " in done.stdout
    assert "1 of 2 kernels proven" in done.stdout
    assert "goldens: unproven: fmha; " in done.stderr


GOOD = """
import pytest, goldens
from cute_impl import cache_insert
from goldens import store
from goldens.compare import against_exact
from goldens.judge import judge, select

pytestmark = pytest.mark.hopper
KERNEL = goldens.KERNELS["cache_insert"]
CASES = [case for case in KERNEL.cases if case.committed]

@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_committed(case):
    cache_insert.compile_variant()
    golden = store.load(case, store.read_manifest())
    assert all(v.passed for v in judge(KERNEL, case, golden, select(golden, "exact/insert/"), "insert"))
    want = golden["exact/insert/cache"]
    assert against_exact("cache", want, want).passed

def test_two_gpus():
    pytest.skip("one GPU")
"""
BAD = """
import pytest
pytestmark = pytest.mark.hopper
def test_good(): pass
def test_bad(): assert False
"""
IDLE = BAD.replace("assert False", "pass")


def record(folder, tests, *options):
    """A run with --record of hopper tests of these texts, by file name."""
    place = folder / "tests" / "hopper"
    place.mkdir(parents=True)
    for name, text in tests.items():
        (place / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = hopper: x\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.record", "-p", "xdist", "-p", "no:cacheprovider"]
    command += ["--record-to", folder / "evidence", "--commit", "0123abc-dirty", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one-process", "two"])
def test_a_complete_run_is_recorded_and_then_proven(options, tmp_path):
    """Also: a kernel of which nothing was compiled has no variant proven, and one whose test failed has no file."""
    tests = {"test_cache_insert.py": GOOD, "test_mla_query.py": BAD, "test_mla_query_more.py": IDLE}
    code, text = record(tmp_path, tests, *options)
    cases = [case for case in goldens.KERNELS["cache_insert"].cases if case.committed]
    assert code == 1
    assert (
        f"cache_insert: recorded: {len(cases)} tests passed, 1 skipped, {len(cases)} cases, 1 of 1 variants\n" in text
    )
    assert "mla_query: not recorded: 1 of 4 tests failed" in text
    assert [path.name for path in (tmp_path / "evidence").iterdir()] == ["cache_insert.json"]
    found = evidence.read("cache_insert", tmp_path / "evidence")
    assert (found["commit"], found["dirty"]) == ("0123abc", True)
    assert set(found["cases"]) == {case.id for case in cases}
    for case in cases:
        assert found["cases"][case.id]["insert"] == {"passed": 2, "failed": 0}
    exact = found["verdicts"]["exact"]
    assert (exact["passed"], exact["failed"]) == (2 * len(cases), 0)
    assert found["tests"]["test_cache_insert.py::test_committed"]["passed"] == len(cases)
    assert list(found["skipped"].values()) == ["one GPU"]
    on_hopper = found | {"environment": found["environment"] | {"gpu": "NVIDIA H200"}}
    write_text(tmp_path / "evidence" / "cache_insert.json", evidence.dump(on_hopper))
    done = check(tmp_path / "evidence")
    assert done.exit_code == 0
    assert done.stdout.startswith("cache_insert  proven: 1 variants, ")


def test_a_filtered_run_is_not_recorded(tmp_path):
    code, text = record(tmp_path, {"test_mla_query.py": IDLE + "def test_two(): pass\n"}, "-k", "two")
    assert code == 1
    assert "mla_query: not recorded: 1 tests were selected, by name or filter" in text
    assert not (tmp_path / "evidence").exists()


def test_a_run_without_hopper_tests_says_so(tmp_path):
    code, text = record(tmp_path, {"test_numerics.py": IDLE})
    assert code == 1
    assert "nothing was recorded: no test of a kernel in tests/hopper ran" in text


FILE = "test_mla_query.py"


@pytest.mark.parametrize(
    ("what", "by_name", "gap"),
    [
        ({}, False, ""),
        ({"passed": {"a"}, "skipped": {"b": "why"}}, False, ""),
        ({"failed": {"b"}}, False, "1 of 2 tests failed"),
        ({"passed": {"a"}}, False, "1 of 2 tests ran"),
        ({"deselected": {"b"}, "passed": {"a"}}, False, "1 tests were selected, by name or filter"),
        ({}, True, "2 tests were selected, by name or filter"),
        ({"files": set()}, False, f"{FILE} did not run"),
    ],
)
def test_gaps(what, by_name, gap):
    record = Record(**({"collected": {"a", "b"}, "passed": {"a", "b"}, "files": {FILE}} | what))
    assert record.gap([FILE], by_name) == gap
