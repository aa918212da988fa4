"""Goldens made on demand, kept in a folder of the user's: what cannot be kept there costs time and nothing else.

The folder may hold other files. Only goldens of this suite, each in its own place, are counted and removed.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from goldens import files
from goldens.files import GoldenError

METADATA = "golden"  # the one entry of a golden file's metadata


def folder() -> Path:
    """Where goldens made on demand are kept: $GOLDENS_CACHE, or ~/.cache/hopper-goldens."""
    return Path(os.environ.get("GOLDENS_CACHE") or "~/.cache/hopper-goldens").expanduser()


def capacity() -> int:
    """Bytes that it may hold: $GOLDENS_CACHE_MB, or 2048 MB; 0 keeps nothing. GoldenError if it is no number."""
    text = os.environ.get("GOLDENS_CACHE_MB", "2048")
    if not (text.isascii() and text.isdecimal()):
        raise GoldenError(f"$GOLDENS_CACHE_MB: got {text!r}, allowed is a whole number of megabytes")
    return int(text) * 10**6


def keep(path: Path, content: bytes) -> None:
    """Write a golden to its place in the folder if there is room for it, on the disk too.

    What was used longest ago gives way. What stands in the way, or a folder that cannot be written, is left as it is.
    """
    if len(content) > capacity():
        return
    with contextlib.suppress(OSError, GoldenError):
        existing = next(parent for parent in path.parents if parent.exists())
        if shutil.disk_usage(existing).free > 2 * len(content):
            _make_room(len(content))
            files.write(path, content)


def touch(path: Path) -> None:
    """Mark a golden as used now: the last to be removed. One that has vanished meanwhile stays away."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _make_room(size: int) -> None:
    """Remove the least recently used goldens until ``size`` more bytes fit."""
    found = [(path, stat) for path in folder().glob("*/*.safetensors") if (stat := _ours(path))]
    used = sum(stat.st_size for _, stat in found)
    for path, stat in sorted(found, key=lambda entry: entry[1].st_mtime):
        if used + size <= capacity():
            return
        path.unlink(missing_ok=True)
        used -= stat.st_size


def _ours(path: Path) -> os.stat_result | None:
    """The file's size and times if it is a golden in its own place, by what its metadata says; else None."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with safe_open(path, framework="numpy") as file:
            said = json.loads((file.metadata() or {})[METADATA])["id"]
        return path.stat() if said == f"{path.parent.name}/{path.stem}" else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        return None
