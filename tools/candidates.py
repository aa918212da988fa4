"""Candidates by what a user writes: an adapter's name, ``package.module:function`` or ``FILE.py:function``."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import goldens
from goldens.judge import Candidate, words
from tools.adapters import ADAPTERS, Missing, need

OURS = "ours"
BY_SCHEDULE = (OURS, "exact")  # adapters that are a candidate of each schedule


class HardwareMissing(Exception):
    """What a run needs and this machine lacks."""


class CandidateError(Exception):
    """A candidate that cannot be found or imported."""


@dataclass(frozen=True)
class Loaded:
    """A candidate that is ready to be called.

    make: by kernel and schedule (None: it claims none). claims: the schedules whose bits it says it has, None for all.
    outputs: by kernel those that it returns, where that is less than the interface's.
    """

    make: Callable[[str, str | None], Candidate]
    claims: tuple[str, ...] | None = ()
    outputs: dict[str, tuple[str, ...]] | None = None


def require_hopper() -> torch.device:
    """The sm_90 GPU, or HardwareMissing with what is there instead."""
    if not torch.cuda.is_available():
        raise HardwareMissing("no CUDA GPU is visible; the kernels run on an sm_90 GPU (H100, H200)")
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(index) == (9, 0):
            return torch.device("cuda", index)
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    raise HardwareMissing(f"found {names}; the kernels run on an sm_90 GPU (H100, H200)")


def device_of(text: str | None) -> torch.device:
    """The device of a run: the sm_90 GPU unless given, ``cpu``, ``cuda`` (any GPU) or ``cuda:N``.

    The CPU never stands in for a missing GPU: HardwareMissing. ValueError for another name.
    """
    if text is None:
        return require_hopper()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(f"device: got {text!r}, allowed are cpu, cuda and cuda:N")
    device = torch.device(text)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise HardwareMissing(f"{text} is asked for, {count or 'no'} CUDA GPUs are visible")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def check(candidate: str, kernels: set[str]) -> None:
    """CandidateError if the text names nothing that could be a candidate, or an adapter of another kernel."""
    if candidate in ADAPTERS:
        takes = ADAPTERS[candidate].kernels
        if takes and not kernels <= set(takes):
            raise CandidateError(f"{candidate} takes kernel {', '.join(takes)}; add --kernel {takes[0]}")
    elif not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", candidate):
        raise CandidateError(
            f"got {candidate!r}, allowed are package.module:function, FILE.py:function, {', '.join(ADAPTERS)}"
        )


def load(candidate: str) -> Loaded:
    """Import a candidate. CandidateError if that fails, Missing if an adapter's package is not installed."""
    if candidate in BY_SCHEDULE:
        return Loaded(importlib.import_module(f"tools.adapters.{candidate}").make, claims=None)
    if candidate in ADAPTERS:
        module = importlib.import_module(f"tools.adapters.{candidate}")
        return Loaded(lambda kernel, schedule: module.candidate, outputs=getattr(module, "OUTPUTS", None))
    place, _, name = candidate.rpartition(":")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise CandidateError(f"{place} has no function {name}")
    kernels = goldens.KERNELS
    claims, outputs = (declared(function, f"{name}.{attribute}") for attribute in ("schedules", "outputs"))
    known = list(dict.fromkeys(s for kernel in kernels.values() for s in kernel.reference.SCHEDULES))
    for schedule in claims or ():
        if schedule not in known:
            raise CandidateError(f"{name}.schedules: got {schedule!r}, allowed are {', '.join(known)}")
    by_kernel = dict.fromkeys(kernels, outputs) if outputs else None
    return Loaded(lambda kernel, schedule: function, claims or (), by_kernel)


def declared(function: Callable, what: str) -> tuple[str, ...] | None:
    """The names in an attribute, such as "f.outputs", None without it. CandidateError if it is no tuple of names."""
    names = getattr(function, what.rpartition(".")[2], None)
    if names is None:
        return None
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(x, str) for x in names):
        raise CandidateError(f"{what}: got {names!r}, allowed is a tuple of names, such as ('a',)")
    return tuple(names)


def _module(place: str) -> object:
    """A module by its dotted name, found from the current folder too, or by its file."""
    try:
        if not place.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise CandidateError(f"{place}: there is no such file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except CandidateError:
        raise
    except Exception as error:
        raise CandidateError(f"{place} cannot be imported: {words(error)}") from None


def ours(kernel: str, schedule: str) -> Candidate:
    """cute_impl's implementation of a schedule, from tensors on any device to tensors on the GPU."""
    device = require_hopper()
    made = load(OURS).make(kernel, schedule)
    return lambda inputs, params: made({name: x.to(device, copy=True) for name, x in inputs.items()}, params)


def available() -> list[tuple[str, str, str, str]]:
    """(name, kernels, what it is, "yes" or why it cannot be imported here) of each adapter."""
    rows = []
    for name, adapter in ADAPTERS.items():
        state = "yes"
        if adapter.requires:
            try:
                need(name)
            except Missing as error:
                state = f"no: {str(error).partition(': ')[2]}"
        rows.append((name, ", ".join(adapter.kernels) or "all", adapter.what, state))
    return rows
