"""Golden files and their manifest: written whole or not at all, read with every claim checked.

A golden is one safetensors file with the keys ``in/NAME``, ``exact/SCHEDULE/NAME`` and ``model/NAME``. Its
metadata is a single entry, "golden", holding sorted JSON: with several entries the order, hence the
bytes of the file, varies from process to process. manifest.json lists every case with the SHA-256
of each tensor's dtype, shape and element bytes; cases that are not committed are in it too. Inputs that the case
names as ``regenerated`` are left out of its file, and made again by its recipe when it is loaded.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from goldens.case import Case, Kernel, Tensors

FORMAT = 1
DATA = Path(__file__).parent / "data"
MANIFEST = "manifest.json"
DIGEST_DIGITS = 32
REMEDY = "`git checkout` restores a committed file, `goldens regenerate --case ID` makes any again"


class GoldenError(Exception):
    """A golden or the manifest is missing, damaged, foreign, or contradicts the other."""


def cache_dir() -> Path:
    """Where goldens made on demand are kept: $GOLDENS_CACHE, or ~/.cache/hopper-goldens."""
    return Path(os.environ.get("GOLDENS_CACHE", "~/.cache/hopper-goldens")).expanduser()


def cache_bytes() -> int:
    """What that folder may hold: $GOLDENS_CACHE_MB, or 2048 MB; 0 keeps nothing. GoldenError if it is no number."""
    text = os.environ.get("GOLDENS_CACHE_MB", "2048")
    if not text.isdecimal():
        raise GoldenError(f"$GOLDENS_CACHE_MB: got {text!r}, allowed is a whole number of megabytes")
    return int(text) * 10**6


def _make_room(size: int) -> bool:
    """Remove the cache's least recently used goldens until ``size`` more bytes fit; whether they do."""
    files = sorted(cache_dir().rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    used = sum(path.stat().st_size for path in files)
    for path in files:
        if used + size <= cache_bytes():
            break
        used -= path.stat().st_size
        path.unlink()
    return used + size <= cache_bytes()


def path_of(case: Case, root: Path | None = None) -> Path:
    """The file of a case: under ``root``, or its own place (the checkout, or the cache folder)."""
    root = root or (DATA if case.committed else cache_dir())
    return root / case.kernel / f"{case.name}.safetensors"


def compute(kernel: Kernel, case: Case) -> Tensors:
    """All tensors of a case's golden, from its recipe."""
    tensors = kernel.inputs(case)
    made = {f"in/{name}": x for name, x in tensors.items()}
    for schedule in case.schedules:
        outputs = kernel.reference.exact(tensors, case.params, schedule)
        made |= {f"exact/{schedule}/{name}": x for name, x in outputs.items()}
    made |= {f"model/{name}": x for name, x in kernel.reference.model(tensors, case.params).items()}
    return {name: x.contiguous() for name, x in made.items()}


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
    """The golden's file."""
    metadata = {"golden": json.dumps({"format": FORMAT, "id": case.id, **case.describe()}, sort_keys=True)}
    left_out = {f"in/{name}" for name in case.regenerated}
    # The format refuses strides and shared storage, which an output that is an input's view has.
    own = {n: x.clone(memory_format=torch.contiguous_format) for n, x in tensors.items() if n not in left_out}
    return save(own, metadata=metadata)


def read_manifest(root: Path = DATA) -> dict[str, Any]:
    """The manifest's entries by case id. GoldenError if it is missing or not ours."""
    path = root / MANIFEST
    try:
        content = json.loads(path.read_text())
        found, cases = content["format"], content["cases"]
        if found == FORMAT and not all(isinstance(made["sha256"], dict) for made in cases.values()):
            raise TypeError("an entry lacks its digests")
    except FileNotFoundError:
        raise GoldenError(f"{path}: missing; `goldens regenerate` writes it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{path}: damaged ({error!r}); restore it from git") from None
    if found != FORMAT:
        raise GoldenError(f"{path}: format {found}, this version reads {FORMAT}; restore it from git")
    return cases


def write_text(path: Path, text: str) -> None:
    """Write a file whole: to a temporary neighbour, then renamed."""
    with staging() as stage:
        stage.add(path, text.encode())
        stage.publish()


def manifest_bytes(entries: dict[str, Any]) -> bytes:
    """The manifest's file of these entries, a case a line."""
    cases = (f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(entries.items()))
    body = ",\n".join(cases)
    return f'{{\n "cases": {{\n{body}\n }},\n "format": {FORMAT}\n}}\n'.encode()


def write_manifest(entries: dict[str, Any], root: Path = DATA) -> None:
    """Write the manifest of these entries."""
    write_text(root / MANIFEST, manifest_bytes(entries).decode())


@contextlib.contextmanager
def locked(folder: Path, exclusive: bool) -> Iterator[None]:
    """Hold the folder against other runs that write to it. GoldenError if one is at work there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise GoldenError(f"{folder}: another run is writing goldens there; wait for it") from None
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError) -> GoldenError:
    return GoldenError(f"{path}: cannot be written ({error.strerror}); make its folder writable or choose another")


class Staging:
    """Files that appear in their places together: ``add`` them, then ``publish``."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, Path]] = []

    def add(self, path: Path, content: bytes) -> None:
        """Write ``content`` beside its place under a temporary name. GoldenError if that cannot be done."""
        if path.exists() and not path.is_file():
            raise GoldenError(f"{path}: is there and is no regular file; choose another")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
            self._files.append((Path(name), path))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o644)
        except OSError as error:
            raise _unwritable(path, error) from None

    @property
    def temporary(self) -> set[Path]:
        """The files that wait to be published."""
        return {temporary for temporary, _ in self._files}

    def publish(self) -> None:
        """Rename every file to its place, in the order they were added; signals wait until all are there.

        GoldenError if that cannot be done.
        """
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            while self._files:
                temporary, path = self._files[0]
                try:
                    os.replace(temporary, path)
                except OSError as error:
                    raise _unwritable(path, error) from None
                self._files.pop(0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def discard(self) -> None:
        """Remove what was not published."""
        for temporary, _ in self._files:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def staging() -> Iterator[Staging]:
    """A Staging whose unpublished files vanish on the way out, interrupted or not."""
    stage = Staging()
    try:
        yield stage
    finally:
        stage.discard()


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a golden file. GoldenError if it is missing, damaged or not a golden."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(json.loads((file.metadata() or {})["golden"]))
            # Cloned: a tensor's place in the file need not be aligned as kernels want it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise GoldenError(f"{path}: missing; `goldens regenerate` writes it") from None
    except (KeyError, TypeError, ValueError):
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
    wanted = json.loads(json.dumps({"format": FORMAT, "id": case.id, **case.describe()}))
    wrong = sorted(name for name in wanted | metadata if metadata.get(name) != wanted.get(name))
    if wrong:
        said = {name: metadata.get(name) for name in wrong}
        case_is = {name: wanted.get(name) for name in wrong}
        raise GoldenError(f"{path}: says {said}, the case is {case_is}; {REMEDY}")
    _require_listed(case, manifest)
    if case.regenerated:
        from goldens import KERNELS  # which import their rooms, and those could not import this module otherwise

        made = KERNELS[case.kernel].inputs(case)
        tensors |= {f"in/{name}": made[name] for name in case.regenerated}
    digests = manifest[case.id]["sha256"]
    either = f"this file was changed, or the case's entry in {(root or DATA) / MANIFEST}; {REMEDY}"
    if set(digests) != set(tensors):
        raise GoldenError(f"{path}: holds {sorted(tensors)}, the manifest lists {sorted(digests)}; {either}")
    for name, x in tensors.items():
        if digest(x) != digests[name]:
            raise GoldenError(f"{path}: {name} is not what the manifest says (SHA-256 {digests[name][:12]}…); {either}")
    return tensors


def obtain(kernel: Kernel, case: Case, manifest: dict[str, Any]) -> Tensors:
    """The golden of a case; one that is not committed is made now if the cache folder lacks it."""
    path = path_of(case)
    if not case.committed and not path.exists():
        _require_listed(case, manifest)
        tensors = compute(kernel, case)
        if entry(case, tensors) != manifest[case.id]:
            raise GoldenError(f"{case.id}: made now, its bits are not those of the manifest; {REMEDY}")
        free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
        content = to_bytes(case, tensors)
        if free > 2 * len(content) and _make_room(len(content)):
            with staging() as stage:
                stage.add(path, content)
                stage.publish()
        return tensors
    if not case.committed:
        path.touch()  # used now: the last to be removed
    return load(case, manifest)
