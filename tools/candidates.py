"""Our kernels as candidates, found by name; imported only when one is asked for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Candidate = Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]]


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


def ours(kernel: str, schedule: str) -> Candidate:
    """cute_impl's implementation of a schedule, from tensors on any device to tensors on the GPU."""
    device = require_hopper()
    try:
        run = importlib.import_module(f"cute_impl.{kernel}").run
    except ModuleNotFoundError as error:
        raise HardwareMissing(f"module {error.name} is missing; `goldens doctor` says what to install") from None

    def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
        return run({name: x.to(device, copy=True) for name, x in inputs.items()}, params, schedule)

    return candidate
