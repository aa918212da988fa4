"""Making goldens again: in memory to check them, or to files that appear together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from goldens import KERNELS, store
from goldens.case import Case


@dataclass(frozen=True)
class Difference:
    """How a case made now differs from what was there."""

    case: str
    what: str


def all_cases() -> list[Case]:
    """Every case of every kernel."""
    return [case for kernel in KERNELS.values() for case in kernel.cases]


def _compare(case: Case, made: dict, content: bytes, manifest: dict, path: Path) -> str:
    """What is different, in words; empty if nothing is."""
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
    try:
        manifest = store.read_manifest(data)
    except store.GoldenError:
        if check or (data / store.MANIFEST).exists():
            raise
        manifest = {}
    entries, differences = dict(manifest), []
    with store.staging() as stage:
        for case in cases:
            tensors = store.compute(KERNELS[case.kernel], case)
            made, content, path = store.entry(case, tensors), store.to_bytes(case, tensors), store.path_of(case, root)
            what = _compare(case, made, content, manifest, path)
            if what:
                differences.append(Difference(case.id, what))
            entries[case.id] = made
            if not check and (what or not path.exists()):
                stage.add(path, content)
            progress(case)
        known = {case.id for case in all_cases()}
        stale = sorted(set(entries) - known)
        differences += [Difference(case_id, "in the manifest, but there is no such case") for case_id in stale]
        wanted = {store.path_of(case, root) for case in all_cases()}
        foreign = sorted(path for path in data.rglob("*.safetensors") if path not in wanted)
        differences += [Difference(str(path), "a file of no case") for path in foreign]
        if not check:
            stage.publish()
            for path in foreign if root is None else []:  # another folder's files are not ours to remove
                path.unlink()
            store.write_manifest({case_id: e for case_id, e in entries.items() if case_id in known}, data)
    return differences
