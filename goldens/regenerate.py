"""Making goldens again: in memory to check them, or to files that appear together."""

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goldens import KERNELS, files, store
from goldens.case import Case


@dataclass(frozen=True)
class Difference:
    """How a case made now differs from what was there; ``done``: what was done about it, empty in a check."""

    case: str
    what: str
    done: str = ""


def all_cases() -> list[Case]:
    """Every case of every kernel."""
    return [case for kernel in KERNELS.values() for case in kernel.cases]


def _compare(case: Case, made: dict, content: bytes, manifest: dict, path: Path) -> str:
    """What is different, in words; empty if nothing is. GoldenError if something else has the file's name."""
    if path.exists() and not path.is_file():
        raise store.GoldenError(f"{path}: is there and is no regular file; move it away")
    if case.id not in manifest:
        return "new"
    if made != manifest[case.id]:
        was, now = manifest[case.id].get("sha256", {}), made["sha256"]
        tensors = sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n))
        return f"changed: {', '.join(tensors) or 'its description'}"
    if case.committed and not path.exists():
        return "its file is missing"
    if path.exists() and path.read_bytes() != content:
        return "its file does not hold these bytes"
    return ""


def regenerate(
    cases: Iterable[Case],
    *,
    check: bool,
    root: Path | None = None,
    progress: Callable[[Case], None] = lambda case: None,
) -> list[Difference]:
    """Make the goldens of ``cases`` and say how they differ from what is there.

    Unless ``check``, write files and manifest, all together at the end; an interruption leaves everything as it was.
    ``root`` is another folder to compare with and write to; by default each case has its own place.
    """
    cases = list(cases)
    data = root or store.DATA
    made, differences = {}, []
    written, removed, left_alone = ("", "", "") if check else ("written", "removed", "left alone")
    with _locked(data, check), files.staging() as stage:
        if not check:
            _remove_abandoned(data)
        manifest = _read_manifest(data, may_lack=not check)
        for case in cases:
            tensors = store.compute(KERNELS[case.kernel], case)
            made[case.id], content = store.entry(case, tensors), store.to_bytes(case, tensors)
            path = store.path_of(case, root)
            what = _compare(case, made[case.id], content, manifest, path)
            if what:
                differences.append(Difference(case.id, what, written))
            if not check and (what or not path.exists()):
                stage.add(path, content)
            progress(case)
        kernels = {case.kernel for case in cases}
        stale, foreign = _leftovers(manifest, data, root, kernels, stage.temporary)
        differences += [Difference(case_id, "in the manifest, but there is no such case", removed) for case_id in stale]
        theirs = root is not None  # another folder's files are not ours to remove
        fate = left_alone if theirs else removed
        differences += [Difference(str(path), "a file of no case", fate) for path in foreign]
        if not check:
            kept = {case_id: entry for case_id, entry in (manifest | made).items() if case_id not in stale}
            stage.add(data / store.MANIFEST, store.manifest_bytes(kept))
            stage.publish()
            for path in [] if theirs else foreign:
                path.unlink()
    return differences


def _locked(data: Path, check: bool) -> contextlib.AbstractContextManager[None]:
    """The folder held against other runs; a folder that is not there needs no holding to be checked."""
    return files.locked(data, exclusive=not check) if data.is_dir() or not check else contextlib.nullcontext()


def _remove_abandoned(data: Path) -> None:
    """What killed runs left behind; the folder is held, so none is at work."""
    for folder in (data, *(path for path in data.iterdir() if path.is_dir())):
        for path in files.leftovers(folder, rf"({re.escape(store.MANIFEST)}|.+\.safetensors)"):
            path.unlink(missing_ok=True)


def _read_manifest(data: Path, may_lack: bool) -> dict[str, Any]:
    """The manifest's entries; none where it does not exist yet and ``may_lack``."""
    if may_lack and not (data / store.MANIFEST).exists():
        return {}
    return store.read_manifest(data)


def _leftovers(
    manifest: dict[str, Any], data: Path, root: Path | None, kernels: set[str], temporary: set[Path]
) -> tuple[list[str], list[Path]]:
    """Entries and files that belong to no case: those of ``kernels``, and of kernels that do not exist."""
    known = {case.id for case in all_cases()}
    wanted = {store.path_of(case, root) for case in all_cases()} | temporary
    others = set(KERNELS) - kernels
    stale = sorted(case_id for case_id in manifest if case_id not in known and case_id.split("/")[0] not in others)
    files = sorted(path for path in data.rglob("*.safetensors*") if path not in wanted)
    return stale, [path for path in files if path.relative_to(data).parts[0] not in others]
