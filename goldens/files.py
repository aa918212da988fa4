"""Files that appear whole or not at all, in folders held against other runs."""

import contextlib
import fcntl
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_ABANDONED_SECONDS = 86400.0  # no run takes a day between writing a file and publishing it


class GoldenError(Exception):
    """A golden, the manifest or a file to be written is missing, damaged, foreign, or contradicts another."""


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def leftovers(folder: Path, name: str) -> list[Path]:
    """Temporary neighbours of files called ``name`` (a regular expression) in a folder, of runs killed or at work."""
    return [path for path in folder.iterdir() if re.fullmatch(rf"\.{name}-[0-9a-f]{{8}}", path.name)]


def _remove_abandoned(path: Path) -> None:
    for found in leftovers(path.parent, re.escape(path.name)):
        with contextlib.suppress(OSError):
            if time.time() - found.stat().st_mtime > _ABANDONED_SECONDS:
                found.unlink()


def unwritable(path: Path, error: OSError) -> GoldenError:
    """The error of a file or folder that cannot be written."""
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
            _remove_abandoned(path)
            temporary = _temporary(path)
            handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the umask
            self._files.append((temporary, path))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
        except OSError as error:
            raise unwritable(path, error) from None

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
                    raise unwritable(path, error) from None
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


def write(path: Path, content: bytes) -> None:
    """Write a file whole: to a temporary neighbour, then renamed. GoldenError if that cannot be done."""
    with staging() as stage:
        stage.add(path, content)
        stage.publish()


def write_text(path: Path, text: str) -> None:
    """``write`` for text, as UTF-8."""
    write(path, text.encode())


@contextlib.contextmanager
def locked(folder: Path, exclusive: bool) -> Iterator[None]:
    """Hold the folder against other runs that write to it. GoldenError if one is at work there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise GoldenError(f"{folder}: another run is writing goldens there; wait for it") from None
    finally:
        os.close(handle)
