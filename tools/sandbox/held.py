"""A candidate that is imported and called, its exits and what it leaves changed in Python and torch contained."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.call import CallFailed, Candidate, Tensors, Unsupported, call, collect, words
from tools.sandbox.load import CandidateError, load

REPLAYS = 2
SUBNORMAL = 2.0**-130  # of fp32


class Held:
    """A candidate by its name, imported now; called in this process.

    CandidateError, or Missing, if it cannot be imported. claims, outputs, batch_invariant: as it
    declares them.
    """

    def __init__(self, candidate: str, device: torch.device):
        self.device = device
        with _exits_as(lambda said: CandidateError(f"{candidate}: its import {said}")):
            self._loaded = load(candidate)
        self.claims, self.outputs = self._loaded.claims, self._loaded.outputs
        self.batch_invariant = self._loaded.batch_invariant
        self._made: dict[tuple[str, str | None], Candidate] = {}
        self._modes = [get() for get, _ in MODES]

    def call(
        self,
        kernel: str,
        schedule: str | None,
        inputs: Tensors,
        params: Mapping[str, Any],
        written: Collection[str],
        graph: bool = False,
    ) -> Tensors:
        """The outputs, on the CPU. CallFailed or Unsupported; Missing if the candidate's package is not there.

        Each call finds torch as the candidate's import left it: see ``MODES``.
        """
        key = (kernel, schedule)
        with _exits_as(lambda said: CallFailed(f"the candidate {said}")):
            try:
                if key not in self._made:
                    self._made[key] = self._loaded.make(kernel, schedule)
                return (replay if graph else call)(self._made[key], inputs, params, self.device, written)
            finally:
                for (get, put), value in zip(MODES, self._modes, strict=True):
                    if get() != value:
                        put(value)


def _flushes() -> bool:
    return not bool(torch.tensor(SUBNORMAL, dtype=torch.float32, device="cpu") * 1)


# What a call must not leave changed for the next: how it is read, how it is set.
MODES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_flushes, torch.set_flush_denormal),
)


def replay(
    candidate: Candidate, inputs: Tensors, params: Mapping[str, Any], device: torch.device, written: Collection[str]
) -> Tensors:
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

    return call(run, inputs, params, device, written)


def is_broken() -> bool:
    """Whether an earlier error has left the GPU unusable for this process."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


@contextlib.contextmanager
def _exits_as(failure: Callable[[str], Exception]) -> Iterator[None]:
    """A candidate's SystemExit, or another that is no Exception, as a failure that says what it did."""
    try:
        yield
    except SystemExit as error:
        raise failure("called sys.exit()" if error.code is None else f"called sys.exit({error.code!r})") from None
    except Exception:
        raise
    except BaseException as error:
        raise failure(words(error)) from None
