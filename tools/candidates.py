"""Candidates by what a user writes: an adapter's name, ``package.module:function`` or ``FILE.py:function``."""

import re

import torch

import goldens
from goldens.call import Candidate, clean
from tools.adapters import ADAPTERS, Missing, need
from tools.sandbox.load import BY_SCHEDULE, OURS, CandidateError, load

__all__ = ["BY_SCHEDULE", "OURS", "CandidateError", "HardwareMissing", "Missing", "load"]


class HardwareMissing(Exception):
    """What a run needs and this machine lacks."""


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


def check_claims(candidate: str, claims: tuple[str, ...]) -> None:
    """CandidateError if a schedule that a candidate claims is none of any kernel."""
    known = list(dict.fromkeys(s for kernel in goldens.KERNELS.values() for s in kernel.reference.SCHEDULES))
    for schedule in claims:
        if schedule not in known:
            name = candidate.rpartition(":")[2]
            raise CandidateError(f"{name}.schedules: got {clean(schedule)!r}, allowed are {', '.join(known)}")


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
