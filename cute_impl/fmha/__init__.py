"""FMHA forward on sm_90a: one module a schedule, one function for torch tensors.

``attention(q, k, v)`` is the plain function, ``torch.ops.goldens.fmha`` the same as a custom operator,
``run(inputs, params, schedule)`` the same as a candidate for the suite.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from cutlass import Float32
from torch import Tensor

from cute_impl import runtime
from cute_impl.fmha import k2

SCHEDULES = ("k2",)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, schedule: str = "k2"
) -> Tensor:
    """softmax(q kᵀ · scale) v for bf16 [batch · heads, N, d] on an sm_90 GPU; returns o like q.

    d is 64 or 128, scale fp32(1/√d) unless given. Schedule ``k2``: q, k and v of one shape, N a positive
    multiple of 64. ValueError names the argument that is not supported, RuntimeError a missing GPU.
    """
    _check(q, k, v, causal, scale, schedule)
    runtime.require_hopper(q.device)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    return torch.ops.goldens.fmha(q.contiguous(), k.contiguous(), v.contiguous(), causal, scale)


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str = "k2") -> dict[str, Tensor]:
    """The kernel as a candidate: inputs q, k, v and parameters causal, scale in, o out."""
    runtime.require_names("inputs", inputs, ("q", "k", "v"))
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    return {"o": attention(q, k, v, params.get("causal", False), params.get("scale"), schedule)}


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name}: got {x.dtype}, allowed is torch.bfloat16")
        if x.dim() != 3 or x.shape[2] not in (64, 128):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is [batch · heads, N, 64 or 128]")
        if x.shape != q.shape:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, schedule {schedule} takes that of q, {tuple(q.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, q on {q.device}; all must be on one device")
    if q.shape[0] == 0 or q.shape[1] == 0 or q.shape[1] % k2.TILE:
        raise ValueError(f"q: got shape {tuple(q.shape)}, schedule {schedule} takes N in positive multiples of 64")
    if q.shape[0] > 65535:
        raise ValueError(f"q: got {q.shape[0]} heads in all, schedule {schedule} takes at most 65535")
    if not isinstance(causal, bool):
        raise ValueError(f"causal: got {causal!r}, allowed are True and False")
    fp32 = torch.finfo(torch.float32)
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and fp32.tiny <= scale <= fp32.max):
        raise ValueError(f"scale: got {scale!r}, allowed is None or a number from {fp32.tiny} to {fp32.max}")


@torch.library.custom_op("goldens::fmha", mutates_args=())
def _fmha(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    o = torch.empty_like(q)
    views = [runtime.view(x.permute(1, 2, 0), {0: k2.TILE, 2: 1}, order=k2.ORDER) for x in (q, k, v, o)]
    with torch.cuda.device(q.device):
        k2.compile_variant(q.shape[2], causal)(*views, Float32(scale), runtime.stream())
    return o


@_fmha.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return torch.empty_like(q)
