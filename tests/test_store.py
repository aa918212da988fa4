"""``goldens.store``: what is written is read back bit for bit, the same bytes every time, and damage is named.

Every file that cannot be trusted ends in a GoldenError that names it and says what to do; an interrupted
regeneration leaves a folder as it was.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import goldens
from goldens import store
from goldens.files import locked, write_text
from goldens.regenerate import all_cases, regenerate
from goldens.store import GoldenError

KERNEL = goldens.KERNELS["fmha"]
CASE = goldens.find("fmha/d64-causal-q6-k33-h4-2-scale0.3-normal")  # whole, and small
ON_DEMAND = dataclasses.replace(CASE, name="on-demand", committed=False)
REPOSITORY = Path(__file__).parent.parent


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


X = torch.arange(24, dtype=torch.float32)
TENSORS = {
    "bf16-nan-and-zeros": torch.tensor([-0.0, torch.nan, torch.inf, 1.0], dtype=torch.bfloat16),
    "e4m3": torch.tensor([-0.0, 448.0, 2.0**-9]).to(torch.float8_e4m3fn),
    "fp16": torch.tensor([65504.0, 2.0**-24], dtype=torch.float16),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "int32": torch.tensor([-(1 << 31)], dtype=torch.int32),
    "0-dim": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "transposed": X.view(4, 6).t(),
    "strided": X[::5],
    "expanded": X[:1].expand(3),
}


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_round_trip(tmp_path: Path, x: Tensor) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(store.to_bytes(CASE, {"in/x": x}))
    metadata, tensors = store.read(path)
    back = tensors["in/x"]
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert store.digest(back) == store.digest(x)
    assert back.untyped_storage().nbytes() >= back.numel() * back.itemsize
    assert metadata == {"format": store.FORMAT, "id": CASE.id, **json.loads(json.dumps(CASE.describe()))}


def test_tensors_that_share_storage_are_each_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(store.to_bytes(CASE, {"in/x": X, "exact/k2/x": X, "exact/k2/half": X[:12]}))
    _, tensors = store.read(path)
    assert torch.equal(tensors["in/x"], tensors["exact/k2/x"])
    assert torch.equal(tensors["exact/k2/half"], X[:12])


CANARIES = {
    "bf16-1.0": (torch.ones(1, dtype=torch.bfloat16), "803f"),
    "bf16-minus-zero": (torch.tensor([-0.0], dtype=torch.bfloat16), "0080"),
    "fp32-1.0": (torch.ones(1), "0000803f"),
    "e4m3-448": (torch.tensor([448.0]).to(torch.float8_e4m3fn), "7e"),
    "fp16-1.0": (torch.ones(1, dtype=torch.float16), "003c"),
}


@pytest.mark.parametrize(("x", "expected"), CANARIES.values(), ids=CANARIES)
def test_canaries_have_known_bytes_in_the_file(x: Tensor, expected: str) -> None:
    content = store.to_bytes(CASE, {"in/x": x})
    header = int.from_bytes(content[:8], "little")
    assert content[8 + header :].hex() == expected


def test_a_golden_has_one_metadata_entry_of_sorted_json() -> None:
    with safe_open(store.path_of(CASE), framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["golden"]
    content = json.loads(metadata["golden"])
    assert list(content) == sorted(content)
    assert set(content) == {"format", "id", "kernel", "dims", "params", "recipe", "seed", "schedules"}


def test_a_digest_covers_dtype_shape_and_bytes_but_no_layout() -> None:
    x = torch.zeros(2, 3)
    others = [x.view(3, 2), x.to(torch.int32), x.view(1, 2, 3), torch.tensor([[0.0, 0, 0], [0, 0, -0.0]])]
    assert len({store.digest(y) for y in (x, *others)}) == 5
    assert store.digest(X.view(4, 6).t()) == store.digest(X.view(4, 6).t().contiguous())
    by_hand = hashlib.sha256(b"bfloat16 [1] \x80\x3f").hexdigest()[:32]
    assert store.digest(torch.ones(1, dtype=torch.bfloat16)) == by_hand


def test_bytes_do_not_depend_on_the_process() -> None:
    """Two processes with different string hashes write this one's bytes: file and manifest."""
    script = (
        f"import goldens, hashlib, json; from goldens import store; case = goldens.find('{CASE.id}'); "
        "made = store.compute(goldens.KERNELS['fmha'], case); "
        "print(hashlib.sha256(store.to_bytes(case, made)).hexdigest(), json.dumps(store.entry(case, made)))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    printed = [run.communicate(timeout=120)[0] for run in runs]
    made = store.compute(KERNEL, CASE)
    here = f"{hashlib.sha256(store.to_bytes(CASE, made)).hexdigest()} {json.dumps(store.entry(CASE, made))}\n"
    assert printed == [here, here]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, change: Callable[[dict], object], text: str | None = None) -> None:
    """Save the tensors again with changed metadata."""
    metadata, tensors = store.read(path)
    change(metadata)
    save_file(tensors, path, metadata={"golden": text or json.dumps(metadata)})


def make_foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)


def make_other_case(path: Path) -> None:
    path.write_bytes(store.path_of(goldens.find("fmha/d64-causal-q17-k80-normal")).read_bytes())


def drop_a_tensor(path: Path) -> None:
    metadata, tensors = store.read(path)
    tensors.pop("model/lse")
    save_file(tensors, path, metadata={"golden": json.dumps(metadata)})


DAMAGE = {
    "missing": (Path.unlink, r"missing; `goldens regenerate`"),
    "truncated": (cut, r"damaged or truncated .*`git checkout`"),
    "header-cut": (cut_header, r"damaged or truncated .*`git checkout`"),
    "no-bytes": (lambda path: path.write_bytes(b""), r"damaged or truncated .*`git checkout`"),
    "text": (lambda path: path.write_text("golden" * 99), r"damaged or truncated .*`git checkout`"),
    "one-bit": (flip_a_bit, r"in/v is not what the manifest says .*`git checkout`"),
    "foreign": (make_foreign, r"no golden of this suite .*another file"),
    "metadata-no-json": (lambda p: rewrite(p, lambda m: None, "{"), r"no golden of this suite .*another file"),
    "metadata-a-list": (lambda p: rewrite(p, lambda m: None, "[1]"), r"no golden of this suite .*another file"),
    "other-case": (make_other_case, r"says .*q17-k80.*, the case is .*q6-k33.*`git checkout`"),
    "other-seed": (lambda p: rewrite(p, lambda m: m.update(seed=1)), r"says \{'seed': 1\}, the case is \{'seed': 0\}"),
    "extra-field": (lambda p: rewrite(p, lambda m: m.update(x=1)), r"says \{'x': 1\}, the case is \{'x': None\}"),
    "newer-format": (lambda p: rewrite(p, lambda m: m.update(format=3)), r"format 3, this version reads 2; .*git"),
    "no-format": (lambda p: rewrite(p, lambda m: m.pop("format")), r"format None, this version reads 2; .*git"),
    "lost-tensor": (drop_a_tensor, r"holds .*, the manifest lists .*lse.*`git checkout`"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_golden_is_named_with_its_remedy(folder: Path, damage: Callable, message: str) -> None:
    path = store.path_of(CASE, folder)
    assert store.load(CASE, store.read_manifest(folder), folder)
    damage(path)
    with pytest.raises(GoldenError, match=rf"(?s){path}: {message}"):
        store.load(CASE, store.read_manifest(folder), folder)


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


MANIFEST_DAMAGE = {
    "missing": (Path.unlink, r"missing; `goldens regenerate`"),
    "cut": (lambda p: p.write_text(p.read_text()[:-20]), "damaged .*restore it from git"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "damaged .*restore it from git"),
    "a-list": (lambda p: p.write_text("[]"), "damaged .*restore it from git"),
    "no-cases": (lambda p: edit(p, lambda m: m.pop("cases")), "damaged .*restore it from git"),
    "cases-a-list": (lambda p: edit(p, lambda m: m.update(cases=[1])), "damaged .*restore it from git"),
    "no-digests": (lambda p: edit(p, lambda m: m["cases"][CASE.id].pop("sha256")), "damaged .*restore it from git"),
    "newer-format": (lambda p: edit(p, lambda m: m.update(format=2)), "format 2, this version reads 1; restore it"),
}


@pytest.mark.parametrize(("damage", "message"), MANIFEST_DAMAGE.values(), ids=MANIFEST_DAMAGE)
def test_a_damaged_manifest_is_named_with_its_remedy(folder: Path, damage: Callable, message: str) -> None:
    path = folder / store.MANIFEST
    damage(path)
    with pytest.raises(GoldenError, match=rf"{path}: {message}"):
        store.read_manifest(folder)


def test_a_manifest_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / store.MANIFEST).mkdir()
    with pytest.raises(GoldenError, match=r"manifest\.json: damaged .*restore it from git"):
        store.read_manifest(tmp_path)


def test_a_manifest_that_disagrees_or_lacks_the_case(folder: Path) -> None:
    manifest = store.read_manifest(folder)
    digests = manifest[CASE.id]["sha256"]
    digests["model/o"] = "0" * 64
    with pytest.raises(GoldenError, match=r"q6-k33.*: model/o is not what the manifest says \(SHA-256 000000000000…\)"):
        store.load(CASE, manifest, folder)
    either = f"this file was changed, or the case's entry in {folder / store.MANIFEST}; `git checkout`"
    with pytest.raises(GoldenError, match=either):
        store.load(CASE, manifest, folder)
    del digests["model/o"]
    with pytest.raises(GoldenError, match=rf"holds .*model/o.*, the manifest lists .*; {either}"):
        store.load(CASE, manifest, folder)
    del manifest[CASE.id]
    with pytest.raises(GoldenError, match=f"{CASE.id}: not in the manifest; `goldens regenerate --case {CASE.id}`"):
        store.load(CASE, manifest, folder)


def test_the_committed_manifest_lists_every_committed_case() -> None:
    manifest = store.read_manifest()
    assert {case.id for case in all_cases() if case.committed} <= set(manifest)
    assert set(manifest) <= {case.id for case in all_cases()}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit], ids=lambda e: e.__name__)
def test_an_interrupted_regeneration_leaves_no_trace(folder: Path, error: type[BaseException]) -> None:
    cases = [CASE, goldens.find("fmha/d64-causal-q17-k80-normal"), goldens.find("fmha/d64-n64-zeros")]
    for case in cases:
        flip_a_bit(store.path_of(case, folder))
    before, seen = snapshot(folder), []

    def stop_at_the_third(case: goldens.Case) -> None:
        seen.append(case)
        if len(seen) == 3:
            assert len(snapshot(folder)) == len(before) + 3  # three temporary files were there
            raise error

    with pytest.raises(error):
        regenerate(cases, check=False, root=folder, progress=stop_at_the_third)
    assert snapshot(folder) == before


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_text(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert snapshot(tmp_path) == {"report.json": b"old"}


def test_regeneration_mends_what_is_damaged_and_nothing_else(folder: Path) -> None:
    before = snapshot(folder)
    flip_a_bit(store.path_of(CASE, folder))
    cases = [CASE, goldens.find("fmha/d64-n64-zeros")]
    [difference] = regenerate(cases, check=True, root=folder)
    assert (difference.case, difference.what) == (CASE.id, "its file does not hold these bytes")
    assert snapshot(folder) != before
    [mended] = regenerate(cases, check=False, root=folder)
    assert (mended.case, mended.what, mended.done) == (CASE.id, difference.what, "written")
    assert snapshot(folder) == before
    assert regenerate(cases, check=False, root=folder) == []


CHANGES = {
    "digest": (lambda m: m[CASE.id]["sha256"].update({"model/o": "0"}), CASE.id, "changed: model/o"),
    "lost-tensor": (lambda m: m[CASE.id]["sha256"].pop("in/q"), CASE.id, "changed: in/q"),
    "description": (lambda m: m[CASE.id].update(seed=5), CASE.id, "changed: its description"),
    "new": (lambda m: m.pop(CASE.id), CASE.id, "new"),
    "stale": (lambda m: m.update({"fmha/gone": m[CASE.id]}), "fmha/gone", "in the manifest, but there is no such case"),
}


@pytest.mark.parametrize(("change", "case_id", "what"), CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_differs_is_found_and_mended(folder: Path, change: Callable, case_id: str, what: str) -> None:
    before = snapshot(folder)
    manifest = store.read_manifest(folder)
    change(manifest)
    store.write_manifest(manifest, folder)
    found = regenerate([CASE], check=True, root=folder)
    assert [(d.case, d.what) for d in found] == [(case_id, what)]
    regenerate([CASE], check=False, root=folder)
    assert snapshot(folder) == before


def test_a_lost_file_and_a_file_of_no_case_are_found(folder: Path) -> None:
    lost, foreign = store.path_of(CASE, folder), folder / "fmha" / "retired.safetensors"
    lost.unlink()
    make_foreign(foreign)
    found = regenerate([CASE], check=True, root=folder)
    assert [(d.case, d.what, d.done) for d in found] == [
        (CASE.id, "its file is missing", ""),
        (str(foreign), "a file of no case", ""),
    ]


def test_only_the_suites_own_folder_is_cleared_of_foreign_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder given by --out may hold somebody's weights."""
    foreign = folder / "weights.safetensors"
    make_foreign(foreign)
    regenerate([CASE], check=False, root=folder)
    assert foreign.exists()
    monkeypatch.setattr(store, "DATA", folder)
    regenerate([CASE], check=True)
    assert foreign.exists()
    regenerate([CASE], check=False)
    assert not foreign.exists()


def test_regeneration_into_an_empty_folder_makes_the_committed_bytes(tmp_path: Path) -> None:
    [difference] = regenerate([CASE], check=False, root=tmp_path)
    assert difference.what == "new"
    assert sorted(snapshot(tmp_path)) == [f"{CASE.id}.safetensors", "manifest.json"]
    assert store.path_of(CASE, tmp_path).read_bytes() == store.path_of(CASE).read_bytes()
    assert store.read_manifest(tmp_path)[CASE.id] == store.read_manifest()[CASE.id]


def test_a_damaged_manifest_is_never_overwritten(folder: Path) -> None:
    (folder / store.MANIFEST).write_text("{")
    before = snapshot(folder)
    with pytest.raises(GoldenError, match="restore it from git"):
        regenerate([CASE], check=False, root=folder)
    assert snapshot(folder) == before


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOLDENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def listed() -> dict:
    """A manifest that lists the on-demand case."""
    return {ON_DEMAND.id: store.entry(ON_DEMAND, store.compute(KERNEL, ON_DEMAND))}


def test_an_on_demand_case_is_kept_in_the_cache(cache: Path, listed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store.obtain(KERNEL, ON_DEMAND, listed)
    assert list(snapshot(cache)) == ["fmha/on-demand.safetensors"]
    monkeypatch.setattr(store, "compute", None)  # the second time it is read
    again = store.obtain(KERNEL, ON_DEMAND, listed)
    assert {n: store.digest(x) for n, x in made.items()} == {n: store.digest(x) for n, x in again.items()}


def test_the_cache_folder_has_a_default_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOLDENS_CACHE", raising=False)
    assert store.cache.folder() == Path.home() / ".cache" / "hopper-goldens"
    monkeypatch.setenv("GOLDENS_CACHE", "~/elsewhere")
    assert store.path_of(ON_DEMAND) == Path.home() / "elsewhere" / "fmha" / "on-demand.safetensors"


def test_an_on_demand_case_is_checked_against_the_manifest(cache: Path, listed: dict) -> None:
    with pytest.raises(GoldenError, match=f"{ON_DEMAND.id}: not in the manifest; `goldens regenerate --case"):
        store.obtain(KERNEL, ON_DEMAND, {})
    other = {ON_DEMAND.id: {**listed[ON_DEMAND.id], "sha256": {}}}
    with pytest.raises(GoldenError, match=r"made now, its bits are not those of the manifest; .*`goldens regenerate"):
        store.obtain(KERNEL, ON_DEMAND, other)
    assert not cache.exists()
    store.obtain(KERNEL, ON_DEMAND, listed)


def test_a_damaged_file_in_the_cache_is_made_again(cache: Path, listed: dict) -> None:
    store.obtain(KERNEL, ON_DEMAND, listed)
    path = store.path_of(ON_DEMAND)
    content = path.read_bytes()
    flip_a_bit(path)
    made = store.obtain(KERNEL, ON_DEMAND, listed)
    assert {name: store.digest(x) for name, x in made.items()} == listed[ON_DEMAND.id]["sha256"]
    assert path.read_bytes() == content


def test_without_room_an_on_demand_case_is_made_but_not_kept(
    cache: Path, listed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert store.obtain(KERNEL, ON_DEMAND, listed)
    assert not cache.exists()


LIGHT = goldens.find("mla_query/h1-b1-p1x1-ties")


def test_a_file_keeps_what_cannot_be_made_again() -> None:
    _, tensors = store.read(store.path_of(LIGHT))
    assert set(tensors) <= {prefix + name for name in tensors for prefix in ("", store.ROWS)}
    assert all(name.removeprefix(store.ROWS).startswith("exact/") for name in tensors)
    manifest = store.read_manifest()
    loaded = store.load(LIGHT, manifest)
    assert {name: store.digest(x) for name, x in loaded.items()} == manifest[LIGHT.id]["sha256"]
    assert {"in/w_qb", "model/output"} <= set(loaded)


def test_some_files_of_each_kind_need_no_code() -> None:
    whole = [case for case in all_cases() if case.committed and case.whole]
    assert {"fmha", "attn_res", "cache_insert", "kda"} <= {case.kernel for case in whole}
    manifest = store.read_manifest()
    for case in whole:
        _, tensors = store.read(store.path_of(case))
        assert {name: store.digest(x) for name, x in tensors.items()} == manifest[case.id]["sha256"]


OUTPUTS = {
    "as-an-input": torch.arange(12.0).view(3, 4),
    "one-row-changed": torch.arange(12.0).view(3, 4).index_fill(0, torch.tensor([1]), 7.0),
    "sign-of-zero": torch.arange(12.0).view(3, 4).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(-0.0)),
    "repeated": torch.arange(4.0).expand(3, 4),
    "in-another-order": torch.arange(12.0).view(3, 4).flip(0),
    "all-changed": -torch.arange(1.0, 13.0).view(3, 4),
    "another-dtype": torch.arange(12).view(3, 4),
    "another-shape": torch.arange(12.0),
    "empty": torch.zeros(0, 4),
    "0-dim": torch.tensor(2.0),
}


@pytest.mark.parametrize("x", OUTPUTS.values(), ids=OUTPUTS)
def test_rows_that_are_there_already_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    case = dataclasses.replace(CASE, name="rows", whole=False, schedules=("one", "two"))
    again = {"in/x": torch.arange(12.0).view(3, 4), "model/x": torch.zeros(3, 4)}
    tensors = {**again, "exact/one/x": x, "exact/two/x": x + x, "exact/two/y": x}
    monkeypatch.setattr(store, "make_again", lambda kernel, case: dict(again))
    path = store.path_of(case, tmp_path)
    path.parent.mkdir()
    path.write_bytes(store.to_bytes(case, tensors))
    loaded = store.load(case, {case.id: store.entry(case, tensors)}, tmp_path)
    assert {name: store.digest(y) for name, y in loaded.items()} == {n: store.digest(y) for n, y in tensors.items()}
    kept = store.read(path)[1]["exact/two/y"]
    assert kept.numel() == 0 or x.numel() < 12


def test_what_is_made_again_is_checked_against_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = goldens.KERNELS["mla_query"]

    def other(case: goldens.Case) -> dict[str, Tensor]:
        x = kernel.inputs(case)
        x["w_uk"][0, 0, 0] += 1.0
        return x

    monkeypatch.setitem(goldens.KERNELS, "mla_query", dataclasses.replace(kernel, inputs=other))
    with pytest.raises(GoldenError, match=r"p1x1-ties.*: in/w_uk is not what the manifest says"):
        store.load(LIGHT, store.read_manifest())


WRITERS = {"text": write_text, "manifest": lambda path, text: store.write_manifest({}, path)}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    """A file where a folder is needed: unlike a read-only folder, it stops root too."""
    (tmp_path / "file").write_text("")
    with pytest.raises(GoldenError, match=rf"{tmp_path}/file/x.*: cannot be written .*make its folder writable"):
        write(tmp_path / "file" / "x", "text")


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "pipe").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GoldenError, match=r"pipe: is there and is no regular file; choose another"):
        write_text(tmp_path / "pipe", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_folder_in_a_goldens_place_is_named(folder: Path) -> None:
    path = store.path_of(CASE, folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(GoldenError, match="is there and is no regular file; move it away"):
        regenerate([CASE], check=True, root=folder)


@pytest.mark.parametrize("check", [False, True], ids=["write", "check"])
def test_a_folder_that_another_run_writes_to_is_left_alone(folder: Path, check: bool) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with locked(folder, exclusive=True), pytest.raises(GoldenError, match="another run is writing goldens there"):
        regenerate([CASE], check=check, root=folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_manifest_is_published_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fmha" / f"{CASE.name}.safetensors").unlink()
    published, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (published.append(Path(b).name), replace(a, b)))
    regenerate([CASE], check=False, root=folder)
    assert published == [f"{CASE.name}.safetensors", store.MANIFEST]


def test_tensors_of_a_golden_are_aligned_for_kernels() -> None:
    for case in (CASE, LIGHT):
        assert all(x.data_ptr() % 16 == 0 for x in store.load(case, store.read_manifest()).values())


def test_the_cache_forgets_what_was_used_longest_ago(
    cache: Path, listed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.obtain(KERNEL, ON_DEMAND, listed)
    size = store.path_of(ON_DEMAND).stat().st_size
    monkeypatch.setattr(store.cache, "capacity", lambda: 2 * size + 200)
    for number, name in enumerate(("second", "third")):
        case = dataclasses.replace(ON_DEMAND, name=name)
        os.utime(store.path_of(ON_DEMAND), (number, number))
        store.obtain(KERNEL, case, {case.id: store.entry(case, store.compute(KERNEL, case))})
    assert set(snapshot(cache)) == {"fmha/second.safetensors", "fmha/third.safetensors"}


@pytest.mark.parametrize("megabytes", ["0", "1"])
def test_what_does_not_fit_is_not_kept_and_costs_nothing(
    cache: Path, listed: dict, monkeypatch: pytest.MonkeyPatch, megabytes: str
) -> None:
    store.obtain(KERNEL, ON_DEMAND, listed)
    before = snapshot(cache)
    monkeypatch.setenv("GOLDENS_CACHE_MB", megabytes)
    store.cache.keep(cache / "fmha" / "large.safetensors", bytes(1_000_001))
    assert snapshot(cache) == before


@pytest.mark.parametrize("text", ["much", "-1", "1.5", "٣", "²"])
def test_a_capacity_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GOLDENS_CACHE_MB", text)
    with pytest.raises(GoldenError, match=r"GOLDENS_CACHE_MB: got '.*', allowed is a whole number"):
        store.cache.capacity()


def foreign_files(cache: Path) -> None:
    """What a user may have below the folder: a model, links, a folder, garbage, a golden under another name."""
    (cache / "fmha" / "folder.safetensors").mkdir(parents=True)
    (cache / "deep" / "er").mkdir(parents=True)
    save_file({"weight": torch.zeros(300_000)}, cache / "fmha" / "model.safetensors")
    save_file({"weight": torch.zeros(300_000)}, cache / "model.safetensors")
    save_file({"weight": torch.zeros(300_000)}, cache / "deep" / "er" / "model.safetensors", metadata={"golden": "{}"})
    (cache / "fmha" / "garbage.safetensors").write_bytes(bytes(1_000_000))
    (cache / "fmha" / "nested.safetensors").write_bytes(b"[" * 200_000)
    (cache / "fmha" / "dangling.safetensors").symlink_to(cache / "nowhere")
    (cache / "fmha" / "loop.safetensors").symlink_to(cache / "fmha" / "loop.safetensors")
    (cache / "fmha" / "copy.safetensors").write_bytes(store.to_bytes(ON_DEMAND, store.compute(KERNEL, ON_DEMAND)))


def test_files_of_others_in_the_cache_are_neither_counted_nor_removed(
    cache: Path, listed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_files(cache)
    before = snapshot(cache)
    monkeypatch.setenv("GOLDENS_CACHE_MB", "1")
    store.obtain(KERNEL, ON_DEMAND, listed)
    assert snapshot(cache).keys() - before.keys() == {"fmha/on-demand.safetensors"}
    assert before.items() <= snapshot(cache).items()
    assert (cache / "fmha" / "loop.safetensors").is_symlink()


@pytest.mark.parametrize("kind", ["folder", "dangling", "loop", "pipe", "garbage"])
def test_what_stands_in_a_goldens_place_costs_time_alone(cache: Path, listed: dict, kind: str) -> None:
    path = store.path_of(ON_DEMAND)
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "garbage":
        path.write_bytes(b"x" * 100)
    else:
        path.symlink_to(path if kind == "loop" else cache / "nowhere")
    made = store.obtain(KERNEL, ON_DEMAND, listed)
    assert {name: store.digest(x) for name, x in made.items()} == listed[ON_DEMAND.id]["sha256"]


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, listed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GOLDENS_CACHE", str(tmp_path / "file"))
    assert store.obtain(KERNEL, ON_DEMAND, listed)


def test_a_golden_that_vanishes_while_it_is_looked_for_is_made_again(
    cache: Path, listed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.obtain(KERNEL, ON_DEMAND, listed)
    monkeypatch.setattr(store.cache, "touch", lambda path: path.unlink())
    assert store.obtain(KERNEL, ON_DEMAND, listed)
    assert store.path_of(ON_DEMAND).stat().st_size > 0


def test_files_have_the_permissions_that_the_user_asks_for(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            write_text(tmp_path / f"{mask}", "text")
        finally:
            os.umask(before)
        assert (tmp_path / f"{mask}").stat().st_mode & 0o777 == mode


def test_what_killed_runs_left_is_removed(folder: Path) -> None:
    """At once where the folder is held; beside a report once it is a day old."""
    left = [folder / ".manifest.json-0123abcd", folder / "fmha" / f".{CASE.name}.safetensors-0123abcd"]
    others = [folder / ".manifest.json-notes", folder / ".other-0123abcd", folder / "fmha" / ".x.safetensors"]
    for path in (*left, *others):
        path.write_text("")
    regenerate([CASE], check=True, root=folder)
    assert all(path.exists() for path in left)
    regenerate([CASE], check=False, root=folder)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    old, new = folder / ".report.md-0123abcd", folder / ".report.md-89abcdef"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (0, 0))
    write_text(folder / "report.md", "text")
    assert not old.exists()
    assert new.exists()
