"""Exports: complete, self-contained, readable by the C++ reader, and written whole or not at all."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import goldens
from goldens import store
from tools import cli, export

IDS = ("cache_insert/b2-crossing-normal", "fmha/d64-n64-scale0.5-normal", "mla_query/h1-b1-p1x1-ties")
NUMPY = {"f32": "<f4", "f64": "<f8", "i32": "<i4", "i64": "<i8", "u8": "u1", "e4m3": "u1", "bf16": "<u2", "f16": "<u2"}


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["export", *(str(word) for word in arguments)])


def lines(path: Path) -> list[dict[str, str]]:
    head, *rest = (line.split("\t") for line in path.read_text().splitlines())
    return [dict(zip(head, fields, strict=True)) for fields in rest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "new" / "export"
    export.write([goldens.find(case_id) for case_id in IDS], folder)
    return folder


def test_every_tensor_is_there_with_its_bytes(folder: Path) -> None:
    found = {(line["case"], line["tensor"]): line for line in lines(folder / "index.tsv")}
    for case in map(goldens.find, IDS):
        golden = store.load(case, store.read_manifest())
        assert {name for case_id, name in found if case_id == case.id} == set(golden)
        for name, x in golden.items():
            line = found[case.id, name]
            content = (folder / line["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == line["sha256"]
            assert len(content) == int(line["bytes"]) == x.numel() * x.element_size()
            shape = tuple(int(n) for n in line["shape"].split("x"))
            read = np.frombuffer(content, NUMPY[line["dtype"]]).reshape(shape)
            words = x.contiguous().view({1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[x.itemsize])
            assert np.array_equal(read.view(words.numpy().dtype), words.numpy())


def test_inputs_that_a_golden_leaves_out_are_there_too(folder: Path) -> None:
    case = goldens.find(IDS[2])
    assert not case.whole
    names = {line["tensor"] for line in lines(folder / "index.tsv") if line["case"] == case.id}
    assert {"in/w_qb", "in/w_uk"} <= names


def test_bytes_of_a_format_say_which(folder: Path) -> None:
    dtypes = {(line["case"], line["tensor"]): line["dtype"] for line in lines(folder / "index.tsv")}
    assert dtypes[IDS[0], "exact/insert/cache"] == dtypes[IDS[0], "in/cache"] == "e4m3"
    assert dtypes[IDS[0], "in/slots"] == "i64"
    assert dtypes[IDS[1], "in/q"] == "bf16"


def test_parameters_are_exact(folder: Path) -> None:
    found = {(line["case"], line["name"]): (line["type"], line["value"]) for line in lines(folder / "params.tsv")}
    assert float.fromhex(found[IDS[0], "eps"][1]) == goldens.find(IDS[0]).params["eps"]
    assert found[IDS[1], "causal"] == ("bool", "false")
    assert found[IDS[1], "scale"] == ("float", (0.5).hex())
    assert found[IDS[2], "heads"] == ("int", "1")


def test_the_readme_describes_every_column_and_type(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert all(f"| {column} |" in text for column in export.COLUMNS)
    assert all(line["dtype"] in text for line in lines(folder / "index.tsv"))


def test_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    export.write([goldens.find(case_id) for case_id in IDS], tmp_path / "again")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert all((folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def fnv(content: bytes) -> str:
    value = 0xCBF29CE484222325
    for byte in content:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


@pytest.mark.cxx
def test_the_reader_reads_every_tensor(tmp_path: Path) -> None:
    source = Path(export.__file__).with_name("export_reader.cpp")
    assert len(source.read_text().splitlines()) <= 30
    small = tmp_path / "export"
    assert command("--out", small, "--case", IDS[0]).exit_code == 0
    assert (small / "reader.cpp").read_bytes() == source.read_bytes()
    program = tmp_path / "reader"
    build = [compiler(), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", small / "reader.cpp", "-o", program]
    subprocess.run(build, check=True, timeout=120)
    done = subprocess.run([program, small], capture_output=True, text=True, timeout=60, check=True)
    wanted = [
        "\t".join((*(x[c] for c in ("case", "tensor", "dtype", "shape")), fnv((small / x["file"]).read_bytes())))
        for x in lines(small / "index.tsv")
    ]
    assert done.stdout.splitlines() == wanted
    (small / lines(small / "index.tsv")[0]["file"]).write_bytes(b"")
    assert subprocess.run([program, small], capture_output=True, timeout=60, check=False).returncode == 1


def test_the_command_takes_kernel_case_and_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []
    monkeypatch.setattr(export, "write", lambda cases, folder, **options: written.append([c.id for c in cases]))
    assert command("--out", tmp_path / "a", "--kernel", "cache_insert").exit_code == 0
    assert command("--out", tmp_path / "a", "--kernel", "cache_insert", "--all").exit_code == 0
    assert command("--out", tmp_path / "a", "--case", IDS[0]).exit_code == 0
    cases = goldens.KERNELS["cache_insert"].cases
    assert written == [[c.id for c in cases if c.committed], [c.id for c in cases], [IDS[0]]]


def foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("of years")


def a_file(folder: Path) -> None:
    folder.write_text("")


REFUSED: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "not-empty": (foreign, (), "is not empty; --force replaces an older export"),
    "foreign": (foreign, ("--force",), "holds something else than an export"),
    "file": (a_file, ("--force",), "is there and is no folder"),
}


@pytest.mark.parametrize(("make", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_there_is_not_overwritten(
    tmp_path: Path, make: Callable[[Path], None], options: tuple[str, ...], words: str
) -> None:
    place = tmp_path / "place"
    make(place)
    before = sorted(tmp_path.rglob("*"))
    result = command("--out", place, "--case", IDS[0], *options)
    assert (result.exit_code, words in result.stderr) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken_and_an_export_replaced_by_force(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert command("--out", place, "--case", IDS[0]).exit_code == 0
    assert command("--out", place, "--case", IDS[1]).exit_code == 2
    assert command("--out", place, "--case", IDS[1], "--force").exit_code == 0
    assert {line["case"] for line in lines(place / "index.tsv")} == {IDS[1]}
    assert not (place / "cache_insert").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, store.GoldenError("damaged")], ids=["interrupt", "damaged"])
def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def obtain(*_: object) -> None:
        raise error

    monkeypatch.setattr(store, "obtain", obtain)
    result = command("--out", tmp_path / "place", "--case", IDS[0])
    assert result.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = command("--out", tmp_path / "file" / "below", "--case", IDS[0])
    assert (result.exit_code, "cannot be written" in result.stderr) == (2, True)
