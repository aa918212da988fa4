"""The suite is tested: every planted fault must change a committed golden's bits, and none may without it.

``tools.faults`` has the registry; what the other checks notice is its command's affair, not a demand.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import goldens
from reference import fmha
from tools.faults import candidates, gpu, report, trial
from tools.faults.fresh import FRESH
from tools.faults.patch import ROOT, Edit, Fault, PatchError, edited, imported, tree
from tools.faults.plain.legal import LEGAL
from tools.faults.plain.wrong import WRONG
from tools.faults.planted import KERNELS, MODELS

FAULTS = {fault.id: fault for fault in MODELS}
LEAST = {"fmha": 6, "attn_res": 6, "mla_query": 6, "cache_insert": 6, "kda": 6, "numerics": 5}


@pytest.fixture(scope="module")
def bench() -> trial.Bench:
    return trial.Bench()


def test_the_registry() -> None:
    """As many as are asked for, each of its own name; every schedule's goldens and every kernel's source are in it."""
    for faults in (MODELS, KERNELS, FRESH):
        assert max(Counter(fault.id for fault in faults).values()) == 1
    rooms = Counter(fault.id.partition("/")[0] for fault in MODELS)
    assert all(rooms[room] >= least for room, least in LEAST.items())
    assert {fault.kernel for fault in KERNELS} == set(goldens.KERNELS)


def test_the_candidates() -> None:
    """As many as are asked for, each of its own name, and each edit fits and changes the plain candidate."""
    both = (*LEGAL, *WRONG)
    assert max(Counter(x.id for x in both).values()) == 1
    right, wrong = (Counter(x.kernel for x in rows) for rows in (LEGAL, WRONG))
    for kernel in goldens.KERNELS:
        assert right[kernel] >= 8
        assert wrong[kernel] >= (40 if kernel == "cache_insert" else 60)
    for x in both:
        candidates.candidate_of(x)
        assert x.name == "plain" or all(edit.old != edit.new for edit in x.edits)


@pytest.mark.parametrize("kernel", sorted(goldens.KERNELS))
def test_the_plain_candidate_is_not_refused(bench: trial.Bench, kernel: str) -> None:
    """On the smallest cases; of all of them ``--candidates`` says it."""
    candidate = candidates.candidate_of(next(x for x in LEGAL if x.id == f"{kernel}/plain"))
    for case in candidates.small_first(bench, kernel)[:3]:
        verdicts = [*candidates.judged(bench, case, candidate), *candidates.compared(bench, case, candidate)]
        assert all(x.passed for x in verdicts), [x.reason for x in verdicts if not x.passed]


COARSE = (
    "fmha/unscaled",
    "fmha/noise",
    "attn_res/softmax-base-2",
    "mla_query/w-qa-missing",
    "mla_query/pitch-2112",
    "cache_insert/pitch-of-kv",
    "kda/scale-missing",
)


@pytest.mark.parametrize("name", COARSE)
def test_a_coarse_mistake_is_refused(bench: trial.Bench, name: str) -> None:
    assert candidates.run(next(x for x in WRONG if x.id == name), bench).refused


def test_invariance_refuses_a_mistaken_pitch(bench: trial.Bench) -> None:
    candidate = candidates.candidate_of(next(x for x in WRONG if x.id == "cache_insert/pitch-of-kv"))
    cases = candidates.small_first(bench, "cache_insert")
    assert not all(x.passed for case in cases for x in candidates.compared(bench, case, candidate))


def test_the_table_of_candidates() -> None:
    """Shares by kernel; each refusal of a right candidate and each wrong one that is not refused has a row."""
    refusal = candidates.Refusal("judge", "case", "lse", "too far", 10.12)
    made = [
        candidates.Outcome(LEGAL[0], True, (refusal,)),
        candidates.Outcome(WRONG[0], False, (refusal,)),
        candidates.Outcome(WRONG[1], False, ()),
    ]
    table = report.candidates_table(made)
    assert "| fmha | 1 | 1 | 2 | 1 | 0 | 1 | 50.0% |" in table
    assert f"| {LEGAL[0].id} | {LEGAL[0].what} | judge | case | lse | 10.1 | too far |" in table
    assert f"| {WRONG[1].id} | {WRONG[1].what} |" in table
    assert WRONG[0].what not in table
    assert [row["right"] for row in report.candidates_json(made)["candidates"]] == [True, False, False]


@pytest.mark.parametrize("fault", FRESH, ids=lambda fault: fault.id)
def test_a_fresh_fault_fits_the_source(fault: Fault) -> None:
    """Each an edit of its own that still is Python; whether a golden notices it is measured, not demanded."""
    for path, source in edited(fault.edits).items():
        assert source != path.read_text()
        compile(source, str(path), "exec")
    assert trial.cases_of(fault)


SOUND = sorted({(f.case_id, f.schedule) for f in FAULTS.values()})


@pytest.mark.parametrize(("case_id", "schedule"), SOUND, ids=[f"{case}-{schedule}" for case, schedule in SOUND])
def test_without_a_fault_no_check_notices_anything(bench: trial.Bench, case_id: str, schedule: str) -> None:
    """Imported as a patched module is, with nothing changed."""
    case = goldens.find(case_id)
    reference = trial.patched(Fault("none", case.kernel, schedule, "nothing", case.name, ()))
    outputs = trial.call(reference, bench, case, schedule)
    assert trial.noticed(bench, case, outputs, schedule) == set()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_changes_the_bits_of_its_golden(bench: trial.Bench, fault: Fault) -> None:
    case = trial.cases_of(fault)[0]
    assert case.id == fault.case_id
    outputs = trial.call(trial.patched(fault), bench, case, fault.schedule)
    assert "bits" in trial.noticed(bench, case, outputs, fault.schedule)


PLAIN = (
    "fmha/mask-one-key-more",
    "fmha/mask-missing",
    "fmha/scale-missing",
    "fmha/weights-in-bf16",
    "fmha/output-by-fp16",
    "fmha/wgmma-mask-top-left",
    "fmha/wgmma-rescale-missing",
    "fmha/wgmma-heads-modulo",
    "attn_res/source-left-out",
    "mla_query/rope-unscaled",
    "cache_insert/last-byte-kept",
    "cache_insert/scale-inverted",
    "kda/scale-missing",
    "kda/beta-without-sigmoid",
    "numerics/bf16-truncated",
)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_fault_exceeds_the_derived_bound(bench: trial.Bench, name: str) -> None:
    """Judged by ULPs alone, as a kernel without an exact model would be."""
    fault = FAULTS[name]
    case = goldens.find(fault.case_id)
    outputs = trial.call(trial.patched(fault), bench, case, fault.schedule)
    assert "bound" in trial.noticed(bench, case, outputs, fault.schedule)


def test_rounding_the_products_of_a_score_is_no_fault(bench: trial.Bench) -> None:
    """The product of two bf16 has 16 bits: fp32 holds it, so that a product and a sum are an FMA."""
    edit = Edit(
        "reference/fmha.py",
        "chain_matmul(q, k[:, tile].transpose(1, 2))",
        "functools.reduce(lambda s, i: s + q[..., i, None] * k[:, tile, i][:, None], range(d), torch.zeros(()))",
    )
    fault = Fault("none", "fmha", "k2", "nothing", "", (edit,))
    assert trial.run(fault, bench).noticed_on == {}


def test_which_square_of_two_comes_first_is_no_fault(bench: trial.Bench) -> None:
    """The square of a bf16 has 16 bits: fp32 holds it, so that an FMA of two squares is the same either way."""
    edit = Edit("reference/kda.py", "fma_rn(odd, odd, mul_rn(even, even))", "fma_rn(even, even, mul_rn(odd, odd))")
    fault = Fault("none", "kda", "chunk16", "nothing", "", (edit,))
    assert trial.run(fault, bench).noticed_on == {}


def test_an_edit_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PatchError, match="is there 0 times"):
        edited([Edit("reference/fmha.py", "no such line", "")])
    with pytest.raises(PatchError, match=r"is there \d\d+ times"):
        edited([Edit("reference/fmha.py", "device", "")])
    with pytest.raises(PatchError, match="there is no such file"):
        edited([Edit("reference/none.py", "", "")])


def test_edits_of_a_file_are_applied_in_turn() -> None:
    name = "reference/fmha.py"
    [source] = edited([Edit(name, "LN_2 = 0.69", "LN_2 = 0.70"), Edit(name, "LN_2 = 0.70", "LN_2 = 0.71")]).values()
    assert "LN_2 = 0.7131" in source


def test_this_process_keeps_its_own_modules() -> None:
    before = sys.modules["reference.fmha"]
    with imported("reference", [Edit("reference/fmha.py", "LN_2 = 0.69", "LN_2 = 0.70")]) as load:
        patched = load("reference.fmha")
        assert patched.LN_2 > 0.7
    assert sys.modules["reference.fmha"] is before is fmha
    assert fmha.LN_2 < 0.7
    assert patched.to_bf16 is not fmha.to_bf16


def test_a_fault_in_numerics_reaches_the_kernels() -> None:
    edit = Edit("reference/numerics/formats.py", "top=0x7E, nan=0x7F)", "top=0x7E, nan=0x7E)")
    with imported("reference", [edit]) as load:
        assert load("reference.mla_query").E4M3.nan == load("reference.cache_insert").E4M3.nan == 0x7E


def test_the_command_reports_shares_and_writes_its_files(tmp_path: Path) -> None:
    names = ["fmha/mask-missing", "numerics/bf16-nan-payload"]
    done = faults(
        "--jobs", "1", *options(names), "--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")
    )
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["shares"] == {"bits": 2, "bound": 1, "tolerance": 1}
    assert [fault["id"] for fault in made["faults"]] == names
    assert "| numerics/bf16-nan-payload | k2 |" in (tmp_path / "a.md").read_text()


def test_the_command_refuses_an_unknown_fault() -> None:
    done = faults("--fault", "fmha/none")
    assert done.returncode == 2
    assert "fmha/none" in done.stderr


def test_the_command_wants_a_gpu_for_kernels() -> None:
    done = faults("--kernels", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 3
    assert "sm_90" in done.stderr


def test_a_section_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Page\n\nWords.\n")
    report.put(path, "models", "first")
    report.put(path, "kernels", "other")
    report.put(path, "models", "second")
    text = path.read_text()
    assert text.startswith("# Page\n\nWords.\n")
    assert "first" not in text
    assert text.index("second") < text.index("other")


def test_the_page_lists_every_fault() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    assert [f.id for f in (*MODELS, *KERNELS) if f"| {f.id} | {f.schedule} | {f.what} |" not in text] == []


def options(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--fault", name)]


def faults(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.faults", *words]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kernel fault whether it compiles for sm_90a, to other code than without it."""
    path = tmp_path_factory.mktemp("faults") / "kernels.json"
    done = faults("--compile", "--json", str(path))
    assert path.exists(), done.stderr
    return {fault["id"]: fault["compiles"] for fault in json.loads(path.read_text())["faults"]}


@pytest.mark.parametrize("fault", KERNELS, ids=lambda fault: fault.id)
def test_a_kernel_fault_compiles_to_other_code(compiled: dict[str, str], fault: Fault) -> None:
    assert trial.cases_of(fault)[0].id == fault.case_id
    assert compiled[fault.id] == "yes"


def test_an_edit_of_a_comment_compiles_to_the_same_code() -> None:
    """Else "yes" would mean nothing. In a process of its own, since the compiler's threads do not survive a fork."""
    edit = "Edit('cute_impl/mla_query/insert.py', '# Two lanes make a word.', '# Two lanes make one word.')"
    lines = (
        "from tools.faults import gpu",
        "from tools.faults.patch import Edit, Fault",
        f"fault = Fault('none', 'cache_insert', 'insert', 'nothing', 'b1-p1x1-unit', ({edit},))",
        "print(gpu.compiled([fault], 1)[fault.id])",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "the same PTX as without the fault", done.stderr


def test_a_kernel_is_run_from_its_edited_copy() -> None:
    """On the CPU a kernel refuses, in the words of its source."""
    edit = Edit("cute_impl/runtime.py", "tensors are on {device}; the kernels", "planted on {device}; the kernels")
    candidate = ("--candidate", "cute_impl.fmha:run", "--device", "cpu")
    code, made, _ = gpu.verify([edit], ["fmha/d64-n64-zeros"], "k2", candidate=candidate)
    [verdict] = made["results"][0]["verdicts"]
    assert code == 1
    assert "planted on cpu" in verdict["reason"]
    assert gpu.outcome(KERNELS[0], code, made, "").state.startswith("no verdict: ")


def test_a_tree_takes_edits_of_kernels_alone() -> None:
    """Its other packages are the checkout itself."""
    before = {path: path.read_bytes() for path in (ROOT / "reference").glob("*.py")}
    with pytest.raises(PatchError, match=r"reference/fmha\.py"), tree([Edit("reference/fmha.py", "D", "E")]):
        pass
    assert {path: path.read_bytes() for path in before} == before


def test_a_tree_leaves_the_checkout_alone() -> None:
    edit = Edit("cute_impl/runtime.py", 'ARCH = "sm_90a"', 'ARCH = "planted"')
    with tree([edit]) as folder:
        assert 'ARCH = "planted"' in (folder / "cute_impl" / "runtime.py").read_text()
        assert (folder / "goldens" / "judge.py").samefile(ROOT / "goldens" / "judge.py")
    assert not folder.exists()
    assert 'ARCH = "sm_90a"' in (ROOT / "cute_impl" / "runtime.py").read_text()
