"""A candidate in a process of its own: what hangs, crashes, lies or leaks ends that process, never the run.

Nothing that comes from there is trusted: messages are data (JSON and safetensors), and of any other form they are a
failed call; words and names are cleaned here.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

import goldens
import reference
import tools
from goldens import cache
from goldens.call import MOST_BYTES, CallFailed, Unsupported, clean, clean_name, duplicate
from goldens.case import Tensors
from tools import candidates
from tools.adapters import Missing
from tools.sandbox.message import Garbage, pack, unpack

START_SECONDS = 300.0  # for the import of the candidate and of what it needs
END_SECONDS = 10.0
LINES = 200  # of what a candidate prints
ROOT = Path(tools.__file__).parents[1]
MAIN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tools.sandbox.start import main; main()"
GUARDS = {
    "mounted": "{what} did not exist for the candidate's process",
    "refused": "{what} were refused to Python in the candidate's process; compiled code could read them",
    "nothing": "nothing was hidden from it: it is this checkout's own and needs the models or the kernels",
}


class Declared(NamedTuple):
    """What a candidate says of itself."""

    claims: tuple[str, ...] | None
    outputs: dict[str, tuple[str, ...]] | None
    batch_invariant: bool


class Worker:
    """A candidate by its name, imported now in a process of its own.

    seconds: what a call may take before the process is ended, 0 for no limit; the next call starts it again.
    CandidateError or Missing if it cannot be imported. claims, outputs, batch_invariant: as it declares them. guard:
    what was hidden from it, in words.
    """

    def __init__(self, candidate: str, device: torch.device, seconds: float):
        self._candidate, self._device, self._seconds = candidate, str(device), seconds or None
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._own = candidate in candidates.ADAPTERS
        self.claims, self.outputs, self.batch_invariant = self._start()

    def call(
        self, kernel: str, schedule: str | None, inputs: Tensors, params: Mapping[str, Any], graph: bool = False
    ) -> Tensors:
        """The outputs, on the CPU. CallFailed or Unsupported; Missing if an adapter's package is not there."""
        if self._process is None:
            try:
                self._start()
            except (candidates.CandidateError, Missing) as error:
                raise CallFailed(f"its process was ended, and did not start again: {error}") from None
        self._number += 1
        request: dict[str, Any] = {"kernel": kernel, "schedule": schedule, "params": dict(params), "graph": graph}
        request["written"] = goldens.KERNELS[kernel].written(params)
        tensors, strides = _dense(inputs)
        deadline = None if self._seconds is None else time.monotonic() + self._seconds
        message = pack({**request, "number": self._number, "strides": strides}, tensors)
        answer, outputs = self._exchange(message, deadline)
        if answer.get("number") != self._number:
            self.close()
            raise CallFailed("its process sent an answer that was not asked for, and was ended")
        if answer.get("broken") is True:
            self.close()
        if "unsupported" in answer:
            raise Unsupported(clean(str(answer["unsupported"])))
        if "missing" in answer and self._own:
            raise Missing(clean(str(answer["missing"])))
        if "failed" in answer:
            raise CallFailed(clean(str(answer["failed"])), answer.get("refusal") is True)
        return {clean_name(name): x for name, x in outputs.items()}

    def close(self) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        self._control.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._channel.close()

    def _start(self) -> Declared:
        self._channel, channel = socket.socketpair()
        self._control, control = socket.socketpair()
        start = {
            "channel": channel.fileno(),
            "control": control.fileno(),
            "candidate": self._candidate,
            "device": self._device,
            "path": sys.path,
            "goldens": str(Path(goldens.__file__).parent),
            "folders": self._folders(),
            "forget": not self._own,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", MAIN, json.dumps(start)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(channel.fileno(), control.fileno()),
            start_new_session=True,
        )
        channel.close()
        control.close()
        assert self._process.stdout is not None
        threading.Thread(target=_relay, args=(self._process.stdout,), daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        try:
            before, _ = self._exchange(b"", deadline)
            self.guard = GUARDS.get(str(before.get("hidden")), "").format(what="goldens, their cache and the models")
            hello, _ = self._exchange(b"", deadline)
        except CallFailed as error:
            raise candidates.CandidateError(f"{self._candidate}: importing it failed: {error}") from None
        try:
            return self._declared(hello)
        except BaseException:
            self.close()
            raise

    def _declared(self, hello: dict[str, Any]) -> Declared:
        if "missing" in hello and self._own:
            raise Missing(clean(str(hello["missing"])))
        if "unknown" in hello:
            raise candidates.CandidateError(clean(str(hello["unknown"])))
        claims, outputs = hello.get("claims"), hello.get("outputs")
        if (claims is None) != (self._candidate in candidates.BY_SCHEDULE):
            raise candidates.CandidateError(f"{self._candidate}: its process does not say what it claims")
        if outputs is not None and not isinstance(outputs, dict):
            raise candidates.CandidateError(f"{self._candidate}: its process does not say what it returns")
        candidates.check_claims(self._candidate, _texts(claims or ()))
        named = {str(kernel): tuple(map(clean_name, _texts(names))) for kernel, names in (outputs or {}).items()}
        return Declared(
            None if claims is None else _texts(claims), named or None, hello.get("batch_invariant") is not False
        )

    def _folders(self) -> list[str]:
        """What the process may not have; ``tools`` too, but for the adapters that are in it."""
        if self._candidate in candidates.BY_SCHEDULE:
            return []
        packages = [goldens, reference] if self._own else [goldens, reference, tools]
        return [*(str(Path(str(package.__file__)).parent) for package in packages), str(cache.folder())]

    def _exchange(self, message: bytes, deadline: float | None) -> tuple[dict[str, Any], Tensors]:
        """Send, then the answer. CallFailed where there is none; the process is ended then."""
        try:
            self._channel.settimeout(_left(deadline))
            self._channel.sendall(message)
            return unpack(lambda count: self._read(count, deadline), MOST_BYTES)
        except Garbage as error:
            self.close()
            raise CallFailed(f"its process sent {error}, and was ended") from None
        except TimeoutError:
            self.close()
            seconds = self._seconds or START_SECONDS
            raise CallFailed(f"hangs: no result within {seconds:g} s; its process was ended") from None
        except (EOFError, OSError):
            raise CallFailed(self._ended()) from None

    def _read(self, count: int, deadline: float | None) -> bytearray:
        """So many bytes. EOFError if the process ends before, TimeoutError."""
        buffer = bytearray(count)
        view = memoryview(buffer)
        while len(view):
            ready = wait([self._channel, self._control], _left(deadline))
            if not ready:
                raise TimeoutError
            if self._channel not in ready:  # ended; what it sent before may have come since that look
                ready = wait([self._channel], 0)
            received = self._channel.recv_into(view) if ready else 0
            if received == 0:
                raise EOFError
            view = view[received:]
        return buffer

    def _ended(self) -> str:
        """How the process came to an end: what its keeper says."""
        said = b""
        with contextlib.suppress(OSError):
            self._control.settimeout(END_SECONDS)
            said = self._control.recv(64)
        self.close()
        kind, _, number = said.decode(errors="replace").partition(" ")
        if kind == "signal" and number.isdecimal():
            return f"crashed: its process ended by signal {number} ({_signal_name(int(number))})"
        if kind == "exit" and number.isdecimal():
            return f"crashed: its process ended with exit code {number}"
        return "crashed: its process ended, or closed its connection"


def _left(deadline: float | None) -> float | None:
    """Seconds that are left, at least a little."""
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def _dense(inputs: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, tuple[list[int], list[int]]]]:
    """Tensors as they can be sent: those with other strides as all that they span, and shape and strides of those."""
    tensors, strides = {}, {}
    for name, given in inputs.items():
        x = duplicate(given, torch.device("cpu"))
        if not x.is_contiguous():
            strides[name] = (list(x.shape), list(x.stride()))
            x = x.as_strided((x.untyped_storage().nbytes() // x.dtype.itemsize,), (1,))
        tensors[name] = x
    return tensors, strides


def _texts(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise candidates.CandidateError("the candidate's process does not say what it declares")
    return tuple(names)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else "unknown"


def _relay(stream: IO[bytes]) -> None:
    """What the candidate prints, to standard error, so that no line of it can be taken for the report's."""
    with stream:
        count = 0
        while line := stream.readline(2000):
            count += 1
            if count <= LINES:
                said = clean(line.decode(errors="replace"))
                print(f"candidate: {said}" if count < LINES else "candidate: … prints more", file=sys.stderr)
