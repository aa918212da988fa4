"""What a candidate's process may not have: the goldens, and the code that computes them.

Two layers. Where the system allows a mount namespace, the folders are empty for this process and all that it starts.
Everywhere, Python's ``import`` and ``open`` refuse them. Without the first layer, compiled code can read them; and a
candidate that sets out to undo either can. Inputs that are in no file (``--fresh``) are the answer to that.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
MS_RDONLY, MS_REC, MS_PRIVATE = 1, 1 << 14, 1 << 18  # linux/mount.h
EVENTS = ("open", "os.listdir", "os.scandir", "os.link", "os.symlink", "os.rename", "os.remove", "os.truncate")


def stand_in(folder: str) -> None:
    """Make ``goldens`` a package of ``goldens.call`` and of what candidates import from ``goldens.judge``, no more.

    folder: where the real package is.
    """
    package, judge = ModuleType("goldens"), ModuleType("goldens.judge")
    package.__path__ = [folder]
    sys.modules["goldens"] = package
    from goldens import call

    judge.Unsupported, judge.Candidate = call.Unsupported, call.Candidate  # type: ignore[attr-defined]
    sys.modules["goldens.judge"] = package.judge = judge  # type: ignore[attr-defined]
    package.__path__ = []


def hide(folders: Sequence[str]) -> bool:
    """Mount something empty over the folders, for this process and its children; whether the system allows that."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNS):
        if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
            return False
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError:
            return False
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    places = [os.fsencode(folder) for folder in folders if os.path.isdir(folder)]
    return not any(libc.mount(b"none", place, b"tmpfs", MS_RDONLY, b"size=4k") for place in places)


class Refusal:
    """An import finder before all others: a module that lies in one of the folders is not imported."""

    def __init__(self, folders: Sequence[str]):
        self._folders = folders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that the other finders have. ImportError if it is in the folders."""
        if name.startswith("goldens."):  # of the stand-in, which has no path
            raise ImportError(f"{name} is the judge's: a candidate's process has no more of it than goldens.judge")
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                places = [spec.origin, *(spec.submodule_search_locations or [])]
                if any(place and below(place, self._folders) for place in places):
                    raise ImportError(f"{name} is the judge's: a candidate's process cannot import it")
                return spec
        return None


def refuse(folders: Sequence[str]) -> None:
    """Refuse Python's imports and opens in the folders from now on."""
    held = tuple(os.path.realpath(folder) for folder in folders)
    sys.meta_path.insert(0, Refusal(held))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            for path in arguments[: 2 if event in ("os.link", "os.symlink", "os.rename") else 1]:
                if isinstance(path, (str, bytes, os.PathLike)) and below(os.fsdecode(path), held):
                    raise PermissionError(f"{os.fsdecode(path)} is the judge's: a candidate's process cannot open it")

    sys.addaudithook(hook)


def below(path: str, folders: Sequence[str]) -> bool:
    """Whether ``path`` is one of the folders or in it, links followed."""
    try:
        real = os.path.realpath(path)
    except (OSError, ValueError):  # no path at all, such as one with a zero byte
        return False
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)
