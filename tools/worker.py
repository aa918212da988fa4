"""A candidate in a process of its own: what hangs or crashes ends that process, never the run."""

import contextlib
import io
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from goldens.case import Tensors
from goldens.judge import CallFailed, Candidate, Unsupported, call, collect, duplicate, words
from tools import candidates
from tools.adapters import Missing

START_SECONDS = 300.0  # for the import of the candidate and of what it needs
REPLAYS = 2


def replay(candidate: Candidate, inputs: Tensors, params: Mapping[str, Any], device: torch.device) -> Tensors:
    """The outputs of a CUDA graph recorded on other numbers, once these inputs are in the places of those."""
    recorded = getattr(candidate, "capturable", candidate)

    def run(given: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Mapping[str, Tensor]:
        held = dict(given)
        if not recorded:
            raise Unsupported("it says that it cannot be recorded in a CUDA graph")
        for x in held.values():
            if x.dim() and x.dtype.is_floating_point:
                x.copy_(x.flip(0))
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # compiles, and allocates what it keeps
            recorded({name: x.clone() for name, x in held.items()}, parameters)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = recorded(held, parameters)
        for _ in range(REPLAYS):
            for name, x in held.items():
                x.copy_(inputs[name])
            graph.replay()
            torch.cuda.synchronize(device)
        return collect(outputs, device)

    return call(run, inputs, params, device)


class InProcess:
    """A candidate called in this process, without a limit of time: for debuggers and profilers."""

    def __init__(self, candidate: str, device: torch.device):
        self.device = device
        with _exits_as(lambda said: candidates.CandidateError(f"{candidate}: its import {said}")):
            self._loaded = candidates.load(candidate)
        self.claims, self.outputs = self._loaded.claims, self._loaded.outputs
        self._made: dict[tuple[str, str | None], Candidate] = {}

    def call(
        self, kernel: str, schedule: str | None, inputs: Tensors, params: Mapping[str, Any], graph: bool = False
    ) -> Tensors:
        """The outputs, on the CPU. CallFailed or Unsupported; Missing if the candidate's package is not there."""
        key = (kernel, schedule)
        with _exits_as(lambda said: CallFailed(f"the candidate {said}")):
            if key not in self._made:
                self._made[key] = self._loaded.make(kernel, schedule)
            return (replay if graph else call)(self._made[key], inputs, params, self.device)

    def close(self) -> None:
        """Nothing is held."""


@contextlib.contextmanager
def _exits_as(failure: Callable[[str], Exception]) -> Iterator[None]:
    """A candidate's SystemExit or KeyboardInterrupt as a failure that says what it did; the user's Ctrl-C passes."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    listens = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if listens:
        signal.signal(signal.SIGINT, press)
    try:
        yield
    except SystemExit as error:
        raise failure(f"called {_exit_call(error)}") from None
    except KeyboardInterrupt as error:
        # Where signals are neither ignored nor listened to, nothing tells whose it is.
        if pressed or not (listens or handler is signal.SIG_IGN):
            raise
        raise failure(words(error)) from None
    finally:
        if listens:
            signal.signal(signal.SIGINT, handler)


def _exit_call(error: SystemExit) -> str:
    return "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"


class Worker:
    """The same in another process, which is ended where it gives no answer within ``seconds``, and started again."""

    def __init__(self, candidate: str, device: torch.device, seconds: float):
        self._arguments, self._seconds = (candidate, str(device)), seconds
        self._process: multiprocessing.process.BaseProcess | None = None
        self._start()

    def call(
        self, kernel: str, schedule: str | None, inputs: Tensors, params: Mapping[str, Any], graph: bool = False
    ) -> Tensors:
        """As ``InProcess.call``; a hang or the end of the process is a CallFailed too."""
        if self._process is None:
            self._start()
        contiguous = {name: duplicate(x, torch.device("cpu")) for name, x in inputs.items()}
        request = {"kernel": kernel, "schedule": schedule, "inputs": contiguous, "params": dict(params), "graph": graph}
        try:
            self._connection.send_bytes(_pack(request))
        except OSError:
            raise CallFailed(self._ended()) from None
        answer = self._receive(self._seconds)
        if answer.get("broken"):
            self.close()
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "failed" in answer:
            raise CallFailed(answer["failed"], answer["refusal"])
        return answer["outputs"]

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join(10)
        self._connection.close()
        self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            hello = self._receive(START_SECONDS)
        except CallFailed as error:
            raise candidates.CandidateError(f"{self._arguments[0]}: importing it failed: {error}") from None
        if "ready" not in hello:
            self.close()
            raise Missing(hello["missing"]) if "missing" in hello else candidates.CandidateError(hello["unknown"])
        self.claims, self.outputs = hello["ready"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self._connection.poll(seconds):
                return _unpack(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise CallFailed(self._ended()) from None
        self.close()
        raise CallFailed(f"hangs: no result within {seconds:g} s; its process was ended")

    def _ended(self) -> str:
        process = self._process
        assert process is not None
        process.join(10)
        code = process.exitcode
        self.close()
        if code is not None and code < 0:
            return f"crashed: its process ended by signal {-code} ({signal.Signals(-code).name})"
        return f"crashed: its process ended with exit code {code}"


def serve(connection: Connection, candidate: str, device: str) -> None:
    """What the other process does: import the candidate, then answer calls until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when this process ends
    try:
        held = InProcess(candidate, torch.device(device))
    except candidates.CandidateError as error:
        return connection.send_bytes(_pack({"unknown": str(error)}))
    except Missing as error:
        return connection.send_bytes(_pack({"missing": str(error)}))
    connection.send_bytes(_pack({"ready": (held.claims, held.outputs)}))
    while True:
        try:
            request = _unpack(connection.recv_bytes())
        except (EOFError, OSError):
            return None
        connection.send_bytes(_pack(_answer(held, request)))


def _answer(held: InProcess, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"outputs": held.call(**request)}
    except Unsupported as refused:
        return {"unsupported": str(refused)}
    except Missing as error:
        return {"missing": str(error)}
    except CallFailed as error:
        return {"failed": str(error), "refusal": error.refusal, "broken": held.device.type == "cuda" and _is_broken()}


def _is_broken() -> bool:
    """Whether an earlier error has left the GPU unusable for this process."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _pack(message: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def _unpack(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), weights_only=True)
