"""Goldens as plain files for users of other languages: one file of element bytes a tensor, and a table of them."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldens import KERNELS, store
from goldens.case import Case
from goldens.judge import by_format

INDEX, PARAMS, README, READER = "index.tsv", "params.tsv", "README.md", "reader.cpp"
COLUMNS = ("case", "tensor", "dtype", "shape", "bytes", "file", "sha256")
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
TEXT = f"""# Goldens as plain files

`{INDEX}` has one line a tensor, its columns separated by tabs, after a line with their names:

| column | |
|---|---|
| case | the case's id, such as `fmha/d64-n64-normal` |
| tensor | `in/NAME`, an input; `exact/SCHEDULE/NAME`, the bits of a schedule; `model/NAME`, the FP32 model |
| dtype | {", ".join(DTYPES.values())}; e4m3 is the FP8 format with 4 exponent bits, without infinities, NaN 0x7f |
| shape | extents separated by `x`, the slowest first; empty for a scalar |
| bytes | the size of the file |
| file | its path in this folder: the elements' bytes alone, row by row without gaps, little-endian |
| sha256 | of the file |

`{PARAMS}` has one line a parameter, with the columns case, name, type and value. The types are `bool` (`true`,
`false`), `int`, `float` (hexadecimal, which C's `strtod` reads exactly), `str`, and `none` with an empty value: the
default.

A kernel gets copies of the inputs and writes its outputs; a tensor that is both is listed as both. An implementation of
a schedule must produce `exact/SCHEDULE/NAME` bit for bit. `model/NAME` is the mathematics in FP32 without a schedule,
before its conversion to the output's format; how far from it a schedule may be is derived in
`goldens/KERNEL/bounds.py`.

`{READER}` reads it all in C++ (`g++ -std=c++17 -O2 {READER} -o reader && ./reader .`): it prints each tensor with the
FNV-1a hash of its bytes.
"""


class ExportError(Exception):
    """A folder that an export cannot be written to."""


def write(
    cases: Sequence[Case], folder: Path, *, force: bool = False, progress: Callable[[Case], None] = lambda case: None
) -> None:
    """Write the cases' tensors, inputs that are regenerated included, to ``folder``: all of it, or nothing.

    The folder must be new or empty; with ``force`` it may hold an older export, which is replaced. ExportError if it
    holds anything else or cannot be written, GoldenError if a golden is damaged.
    """
    folder = folder.resolve()
    _check(folder, force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
    try:
        _fill(stage, cases, progress)
        stage.chmod(0o755)
        _publish(stage, folder)
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _check(folder: Path, force: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ExportError(f"{folder}: is there and is no folder; choose another")
    if not any(folder.iterdir()):
        return
    if not force:
        raise ExportError(f"{folder}: is not empty; --force replaces an older export")
    if not (folder / INDEX).is_file() or not (folder / PARAMS).is_file():
        raise ExportError(f"{folder}: holds something else than an export; choose another folder")


def _publish(stage: Path, folder: Path) -> None:
    """Rename the new folder to its place; an old one goes only when the new one is there."""
    if not folder.exists() or not any(folder.iterdir()):
        os.replace(stage, folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
    os.replace(folder, old)
    try:
        os.replace(stage, folder)
    except BaseException:
        os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _fill(stage: Path, cases: Sequence[Case], progress: Callable[[Case], None]) -> None:
    manifest = store.read_manifest()
    index, params = ["\t".join(COLUMNS)], ["case\tname\ttype\tvalue"]
    for case in cases:
        kernel = KERNELS[case.kernel]
        for name, x in sorted(store.obtain(kernel, case, manifest).items()):
            content = _bytes(x)
            file = Path(case.kernel, case.name, f"{name.replace('/', '.')}.bin")
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            (stage / file).write_bytes(content)
            stored = by_format(kernel, case, name.rpartition("/")[2], x).dtype
            shape = "x".join(map(str, x.shape))
            digest = hashlib.sha256(content).hexdigest()
            index.append("\t".join((case.id, name, DTYPES[stored], shape, str(len(content)), file.as_posix(), digest)))
        params += ["\t".join((case.id, name, *_text(value))) for name, value in case.params.items()]
        progress(case)
    for name, lines in ((INDEX, index), (PARAMS, params)):
        (stage / name).write_text("\n".join(lines) + "\n")
    (stage / README).write_text(TEXT)
    shutil.copyfile(Path(__file__).with_name("export_reader.cpp"), stage / READER)


def _bytes(x: Tensor) -> bytes:
    """Element bytes, row by row; little-endian, as every machine that torch runs on here is."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _text(value: Any) -> tuple[str, str]:
    """Type and value of a parameter."""
    if value is None:
        return "none", ""
    if isinstance(value, bool):
        return "bool", str(value).lower()
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, str(value)
