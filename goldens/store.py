"""Golden files and their manifest: written whole or not at all, read with every claim checked.

A golden is one safetensors file with the keys ``in/NAME``, ``exact/SCHEDULE/NAME`` and ``model/NAME``. Its
metadata is a single entry, "golden", holding sorted JSON: with several entries the order, hence the
bytes of the file, varies from process to process. manifest.json lists every case with the SHA-256
of each tensor's dtype, shape and element bytes; cases that are not committed are in it too. Most committed files keep
exact outputs alone, less the rows that another tensor has as well: inputs and the model's outputs are made again when
the golden is loaded. Every digest is checked once all is together.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from goldens import cache
from goldens.case import Case, Kernel, Tensors
from goldens.files import GoldenError, write
from goldens.judge import select

FORMAT = 2  # of a golden's file
MANIFEST_FORMAT = 1
DATA = Path(__file__).parent / "data"
MANIFEST = "manifest.json"
DIGEST_DIGITS = 32
ROWS = "rows/"  # in front of an output's name: which of its rows the file holds
SHARES = "shares"  # by output, its shape, and the tensor that it shares rows with ("": none)
REMEDY = "`git checkout` restores a committed file, `goldens regenerate --case ID` makes any again"


def path_of(case: Case, root: Path | None = None) -> Path:
    """The file of a case: under ``root``, or its own place (the checkout, or the cache folder)."""
    root = root or (DATA if case.committed else cache.folder())
    return root / case.kernel / f"{case.name}.safetensors"


def compute(kernel: Kernel, case: Case) -> Tensors:
    """All tensors of a case's golden, from its recipe."""
    made = make_again(kernel, case)
    for schedule in case.schedules:
        outputs = kernel.reference.exact(select(made, "in/"), case.params, schedule)
        made |= {f"exact/{schedule}/{name}": x.contiguous() for name, x in outputs.items()}
    return made


def read_whole(path: Path) -> Tensors:
    """All tensors of a golden file, what it leaves out made again if its case is known. GoldenError as ``read``."""
    from goldens import find

    metadata, tensors = read(path)
    shares = metadata.get(SHARES, {})
    try:
        case = find(str(metadata.get("id")))
    except ValueError:
        return tensors
    return (
        tensors
        if any(name.startswith("in/") for name in tensors)
        else _with_repetition(path, tensors | _left_out(case), shares)
    )


def _left_out(case: Case) -> Tensors:
    from goldens import KERNELS  # which import their rooms, and those could not import this module otherwise

    return make_again(KERNELS[case.kernel], case)


def make_again(kernel: Kernel, case: Case) -> Tensors:
    """What a file leaves out: inputs and the model's outputs."""
    inputs = kernel.inputs(case)
    outputs = kernel.reference.model(inputs, case.params)
    made = {f"in/{name}": x for name, x in inputs.items()} | {f"model/{name}": x for name, x in outputs.items()}
    return {name: x.contiguous() for name, x in made.items()}


def obtain(kernel: Kernel, case: Case, manifest: dict[str, Any]) -> Tensors:
    """The golden of a case; one that is not committed is made now unless the cache folder has it."""
    if case.committed:
        return load(case, manifest)
    _require_listed(case, manifest)
    path = path_of(case)
    cache.touch(path)
    with contextlib.suppress(GoldenError):  # missing, damaged, of another version, or something else: made again
        return load(case, manifest)
    tensors = compute(kernel, case)
    if entry(case, tensors) != manifest[case.id]:
        raise GoldenError(f"{case.id}: made now, its bits are not those of the manifest; {REMEDY}")
    cache.keep(path, to_bytes(case, tensors))
    return tensors


def digest(x: Tensor) -> str:
    """SHA-256 of dtype, shape and element bytes: its first half, in hex."""
    head = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} "
    flat = x.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(head.encode() + flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:DIGEST_DIGITS]


def entry(case: Case, tensors: Tensors) -> dict[str, Any]:
    """The manifest's entry of a case."""
    digests = {name: digest(x) for name, x in sorted(tensors.items())}
    return {**case.describe(), "committed": case.committed, "sha256": digests}


def to_bytes(case: Case, tensors: Tensors) -> bytes:
    """The golden's file.

    Unless the case is self-contained, inputs and model outputs are left out, and each row of the exact outputs is kept
    once: none that the tensor which the metadata names for it has. ROWS says where each row is from.
    """
    kept, shares = (dict(tensors), {}) if case.self_contained else _without_repetition(tensors)
    said = {"format": FORMAT, "id": case.id, **case.describe(), **({SHARES: shares} if shares else {})}
    # The format refuses strides and shared storage, which an output that is an input's view has.
    separate = {name: x.clone(memory_format=torch.contiguous_format) for name, x in kept.items()}
    return save(separate, metadata={cache.METADATA: json.dumps(said, sort_keys=True)})


def _without_repetition(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The tensors to keep of a golden, and the metadata's entry SHARES."""
    kept: Tensors = {}
    shares: dict[str, Any] = {}
    bases = [name for name in tensors if name.startswith("in/")]
    for name in sorted(name for name in tensors if name.startswith("exact/")):  # a base comes before what it is for
        x = tensors[name]
        found = {"": _new_rows(x, None), **{base: _new_rows(x, tensors[base]) for base in bases}}
        base = min(found, key=lambda base: len(found[base][0]))
        rows, places = found[base]
        bases.append(name)
        if rows.nbytes + places.nbytes >= x.nbytes:
            kept[name] = x
        else:
            shares[name] = {"shape": list(x.shape), "with": base}
            kept[ROWS + name], kept[name] = places, rows
    return kept, shares


def _new_rows(x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor]:
    """The different rows (of the last dimension) of ``x`` that ``base`` lacks, [n, columns], and for each row of ``x``
    where it is, int32: row i of ``base``, or −1 − i, row i of these. Of another form: all rows of ``x``."""
    flat = _as_rows(x)
    same = base is not None and base.dtype == x.dtype and _as_rows(base).shape[1] == flat.shape[1]
    known = {row: i for i, row in enumerate(_bytes_of_rows(_as_rows(base)))} if same else {}  # type: ignore[arg-type]
    new, places = [], []
    for i, row in enumerate(_bytes_of_rows(flat)):
        if row not in known:
            new.append(i)
            known[row] = -len(new)
        places.append(known[row])
    return flat[new], torch.tensor(places, dtype=torch.int32)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1] if x.dim() else 1) if x.numel() else x.reshape(0, 1)


def _bytes_of_rows(x: Tensor) -> list[bytes]:
    return [row.tobytes() for row in x.contiguous().view(torch.uint8).numpy()]


def _with_repetition(path: Path, tensors: Tensors, shares: dict[str, Any]) -> Tensors:
    """The golden of what its file holds and what it leaves out. GoldenError where they do not fit."""
    whole = {name: x for name, x in tensors.items() if not name.startswith(ROWS)}
    try:
        for name, said in sorted(shares.items()):
            rows = tensors[name].flip(0)  # so that row −1 is the first
            if said["with"]:
                rows = torch.cat([_as_rows(whole[said["with"]]), rows])
            whole[name] = rows[tensors[ROWS + name].to(torch.int64)].reshape(said["shape"])
    except (KeyError, IndexError, RuntimeError, AttributeError, TypeError) as error:
        raise GoldenError(f"{path}: its rows do not fit ({error!r}); {REMEDY}") from None
    return whole


def read_manifest(root: Path = DATA) -> dict[str, Any]:
    """The manifest's entries by case id. GoldenError if it is missing or not ours."""
    path = root / MANIFEST
    try:
        content = json.loads(path.read_text())
        found, cases = content["format"], content["cases"]
        if found == MANIFEST_FORMAT and not all(isinstance(made["sha256"], dict) for made in cases.values()):
            raise TypeError("an entry lacks its digests")
    except FileNotFoundError:
        raise GoldenError(f"{path}: missing; `goldens regenerate` writes it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GoldenError(f"{path}: damaged ({error!r}); restore it from git") from None
    if found != MANIFEST_FORMAT:
        raise GoldenError(f"{path}: format {found}, this version reads {MANIFEST_FORMAT}; restore it from git")
    return cases


def manifest_bytes(entries: dict[str, Any]) -> bytes:
    """The manifest's file of these entries, a case a line."""
    cases = (f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(entries.items()))
    body = ",\n".join(cases)
    return f'{{\n "cases": {{\n{body}\n }},\n "format": {MANIFEST_FORMAT}\n}}\n'.encode()


def write_manifest(entries: dict[str, Any], root: Path = DATA) -> None:
    """Write the manifest of these entries."""
    write(root / MANIFEST, manifest_bytes(entries))


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a golden file. GoldenError if it is missing, damaged or not a golden."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise GoldenError(f"{path}: is there and is no regular file; name another file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(json.loads((file.metadata() or {})[cache.METADATA]))
            # Cloned: a tensor's place in the file need not be aligned as kernels want it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise GoldenError(f"{path}: missing; `goldens regenerate` writes it") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise GoldenError(
            f"{path}: no golden of this suite (its metadata has no readable entry 'golden'); name another file"
        ) from None
    except (SafetensorError, OSError) as error:
        raise GoldenError(f"{path}: damaged or truncated ({error}); {REMEDY}") from None
    if metadata.get("format") != FORMAT:
        raise GoldenError(f"{path}: format {metadata.get('format')}, this version reads {FORMAT}; {REMEDY}")
    return metadata, tensors


def _require_listed(case: Case, manifest: dict[str, Any]) -> None:
    if case.id not in manifest:
        raise GoldenError(f"{case.id}: not in the manifest; `goldens regenerate --case {case.id}` adds it")


def load(case: Case, manifest: dict[str, Any], root: Path | None = None) -> Tensors:
    """The tensors of a case's golden, its description and every digest checked against case and manifest."""
    path = path_of(case, root)
    metadata, tensors = read(path)
    shares = metadata.pop(SHARES, {})
    wanted = json.loads(json.dumps({"format": FORMAT, "id": case.id, **case.describe()}))
    wrong = sorted(name for name in wanted | metadata if metadata.get(name) != wanted.get(name))
    if wrong:
        said = {name: metadata.get(name) for name in wrong}
        case_is = {name: wanted.get(name) for name in wrong}
        raise GoldenError(f"{path}: says {said}, the case is {case_is}; {REMEDY}")
    _require_listed(case, manifest)
    either = f"this file was changed, or the case's entry in {(root or DATA) / MANIFEST}; {REMEDY}"
    again = {} if case.self_contained else _left_out(case)
    tensors = _with_repetition(path, tensors | again, shares)
    digests = manifest[case.id]["sha256"]
    if set(digests) != set(tensors):
        raise GoldenError(f"{path}: holds {sorted(tensors)}, the manifest lists {sorted(digests)}; {either}")
    for name in sorted(tensors, key=lambda name: name not in again):  # what the rows were put into comes first
        if digest(tensors[name]) != digests[name]:
            what = f"{name} is not what the manifest says (SHA-256 {digests[name][:12]}…)"
            reason = "the code makes it otherwise now; `goldens regenerate --check` says for which cases"
            raise GoldenError(f"{path}: {what}; {reason if name in again else either}")
    return {name: tensors[name] for name in digests}
