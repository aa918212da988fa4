"""Faults as edits of source text, and where the edited source runs: in this process, or in a copy of the tree."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("reference", "goldens", "cute_impl", "tools")


class PatchError(Exception):
    """An edit that does not fit the source it is for."""


@dataclass(frozen=True)
class Edit:
    """``old`` → ``new`` in a file of the checkout, where ``old`` stands exactly once."""

    file: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The edited source. PatchError unless ``old`` is there once."""
        count = source.count(self.old)
        if count != 1:
            raise PatchError(f"{self.file}: {self.old!r} is there {count} times, an edit takes one place")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """Something wrong on purpose.

    kernel, schedule: whose goldens must notice; "model" is the mathematics without a schedule. about: the room that
    the fault is in, where that is another: "numerics". case: the committed golden that is to catch it.
    """

    name: str
    kernel: str
    schedule: str
    what: str
    case: str
    edits: tuple[Edit, ...]
    about: str = ""

    @property
    def id(self) -> str:
        return f"{self.about or self.kernel}/{self.name}"

    @property
    def case_id(self) -> str:
        return f"{self.kernel}/{self.case}"


def edited(edits: Sequence[Edit]) -> dict[Path, str]:
    """The sources that the edits change, by file, all edits applied. PatchError if one does not fit."""
    sources: dict[Path, str] = {}
    for edit in edits:
        path = ROOT / edit.file
        if path not in sources and not path.is_file():
            raise PatchError(f"{edit.file}: there is no such file")
        sources[path] = edit.apply(sources.get(path) or path.read_text())
    return sources


class _Loader(importlib.machinery.SourceFileLoader):
    """A module of its own source text, never of cached bytecode."""

    def __init__(self, name: str, path: str, source: str):
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules whose source was edited."""

    def __init__(self, sources: Mapping[Path, str]):
        self._sources = sources

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or Path(spec.origin) not in self._sources:
            return None
        spec.loader = _Loader(fullname, spec.origin, self._sources[Path(spec.origin)])
        return spec


@contextlib.contextmanager
def imported(package: str, edits: Sequence[Edit]) -> Iterator[Callable[[str], ModuleType]]:
    """A function that imports modules of ``package`` with the edits; this process's own are back on the way out.

    All of the package is imported afresh, so that every module sees the edited ones. Not for several threads at once.
    """

    def own() -> dict[str, ModuleType]:
        return {name: x for name, x in sys.modules.items() if name.split(".")[0] == package}

    finder = _Finder(edited(edits))
    kept = own()
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(finder)
        for name in own():
            del sys.modules[name]
        sys.modules.update(kept)


@contextlib.contextmanager
def tree(edits: Sequence[Edit]) -> Iterator[Path]:
    """A temporary folder that looks like the checkout, with an edited copy of ``cute_impl``: where to run a process.

    PatchError for an edit of another package: the others are the checkout's own.
    """
    for edit in edits:
        if Path(edit.file).parts[0] != "cute_impl":
            raise PatchError(f"{edit.file}: a tree has edits of cute_impl alone")
    sources = edited(edits)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        for package in PACKAGES:
            if package == "cute_impl":
                shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (folder / package).symlink_to(ROOT / package)
        for path, source in sources.items():
            (folder / path.relative_to(ROOT)).write_text(source)
        yield folder
