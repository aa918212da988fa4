"""Standard output that may be closed, full, gone, or of a narrow encoding: a command goes on to its end."""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class Output:
    """A text stream whose failures cost what is written and nothing else; they are said once on ``errors``.

    A reader that has gone (``| head``) is no failure.
    """

    def __init__(self, stream: TextIO, errors: TextIO):
        self._stream, self._errors, self._works = stream, errors, True

    def write(self, text: str) -> int:
        """As the stream's; the number of characters."""
        self._unless_broken(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """As the stream's."""
        self._unless_broken(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _unless_broken(self, work: Callable[[], object]) -> None:
        if not self._works:
            return
        try:
            work()
        except OSError as error:
            self._works = False
            nothing = os.open(os.devnull, os.O_WRONLY)  # the interpreter flushes once more when it ends
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)
            if not isinstance(error, BrokenPipeError):
                self._errors.write(f"goldens: standard output cannot be written ({error.strerror})\n")


def prepare() -> None:
    """Make this process's standard output and error streams ones that never end a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the command
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows another
        setattr(sys, name, stream)
    sys.stdout = Output(sys.stdout, sys.stderr)
