"""Host checks of ``kda``: a ValueError names the argument, the given and the allowed."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_impl.kda import scan
from cute_impl.kda.chunk16 import CLUSTERS
from cute_impl.kda.layout import D

MAX_LOWER_BOUND = 5.0
MAX_INT = 2**31 - 1  # tokens, bytes of a token and CTAs are counted in 32 bits
ALIGN_BYTES = {"beta": 2, "A_log": 4, "cu_seqlens": 4}  # 16 where nothing is said
WORKSPACE_ALIGN_BYTES = 128
STATES = (torch.bfloat16, torch.float32)
OFFSETS = (torch.int64, torch.int32)


def check_schedule(schedule: Any, segments: Mapping[str, int]) -> int:
    """Tokens of a segment, 0 for none. ValueError unless the schedule is among ``segments``."""
    if not isinstance(schedule, str) or schedule not in segments:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(segments)}")
    return segments[schedule]


def check_call(
    tensors: Mapping[str, Tensor | None], scale: Any, lower_bound: Any, cluster: Any, segment: int = 0
) -> None:
    """ValueError unless the call is supported. ``tensors`` by the names of ``fwd``, None where left out.

    segment: tokens of a scan's segments, 0 for none.
    """
    q = tensors["q"]
    if not isinstance(q, Tensor) or q.dim() != 4 or q.shape[3] != D or 0 in (q.shape[0], q.shape[2]):
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"q: got {got}, allowed is [B, T, H, {D}] with B and H from 1 on")
    batch, tokens, heads, _ = q.shape
    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    for name in ("q", "k", "v", "g", "out"):
        check_form(name, tensors[name], q, tuple(q.shape), bf16)
    check_form("beta", tensors["beta"], q, (batch, tokens, heads), bf16)
    check_form("A_log", tensors["A_log"], q, (heads,), fp32)
    check_form("dt_bias", tensors["dt_bias"], q, (heads, D), fp32)
    sequences = check_offsets_form(tensors["cu_seqlens"], q)
    first, last = tensors["initial_state"], tensors["final_state"]
    for name, state in (("initial_state", first), ("final_state", last)):
        if state is not None:
            check_form(name, state, q, (sequences, heads, D, D), STATES)
    if first is not None and last is not None and first.dtype != last.dtype:
        raise ValueError(f"final_state: got {last.dtype}, initial_state is {first.dtype}; both must have one dtype")
    check_workspace(tensors["workspace"], q, scan.workspace_bytes(batch * tokens, heads, segment) if segment else 0)
    check_number("scale", scale, torch.finfo(torch.float32).max)
    check_number("lower_bound", lower_bound, MAX_LOWER_BOUND)
    if cluster is not None and (type(cluster) is not int or cluster not in CLUSTERS):
        raise ValueError(f"cluster: got {cluster!r}, allowed are None, {', '.join(map(str, CLUSTERS))}")
    runs = max(scan.grids(batch * tokens, sequences, segment)) if segment else sequences
    if tokens > MAX_INT - 2048 or 2 * D * heads > MAX_INT or runs * heads * max(CLUSTERS) > MAX_INT:
        raise ValueError(f"q: got T = {tokens}, H = {heads} for N = {sequences}; 32 bits must count tokens and CTAs")


def check_number(name: str, x: Any, limit: float) -> None:
    number = isinstance(x, (int, float)) and not isinstance(x, bool)
    if not (number and math.isfinite(x) and -limit <= x <= limit):
        raise ValueError(f"{name}: got {x!r}, allowed is a number from {-limit:g} to {limit:g}")


def check_form(name: str, x: Any, q: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Shape, dtype, device, contiguity, alignment."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {shape} (q has {tuple(q.shape)})")
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: got {x.dtype}, allowed is {' or '.join(str(dtype) for dtype in dtypes)}")
    if x.device != q.device:
        raise ValueError(f"{name}: is on {x.device}, q on {q.device}; all must be on one device")
    if not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")
    align = ALIGN_BYTES.get(name, 16)
    if x.numel() and x.data_ptr() % align:
        raise ValueError(f"{name}: got address {x.data_ptr():#x}, allowed are multiples of {align} bytes")


def check_offsets_form(cu_seqlens: Any, q: Tensor) -> int:
    """N, without a look at the offsets' values."""
    if cu_seqlens is None:
        return q.shape[0]
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens: got {got}, allowed is [N + 1] with N from 1 on")
    check_form("cu_seqlens", cu_seqlens, q, tuple(cu_seqlens.shape), OFFSETS)
    if cu_seqlens.data_ptr() % cu_seqlens.element_size():
        raise ValueError(f"cu_seqlens: got address {cu_seqlens.data_ptr():#x}, allowed are multiples of an offset")
    if q.shape[0] != 1:
        raise ValueError(f"q: got B = {q.shape[0]}, allowed with cu_seqlens is 1")
    return len(cu_seqlens) - 1


def check_offsets(cu_seqlens: Tensor, tokens: int) -> None:
    """ValueError unless offsets go from 0 to T and never decrease. Reads them back, so it waits for the GPU."""
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != tokens:
        raise ValueError(f"cu_seqlens: goes from {values[0]} to {values[-1]}, allowed is from 0 to T = {tokens}")
    for n in range(len(values) - 1):
        if values[n + 1] < values[n]:
            raise ValueError(f"cu_seqlens: decreases from {values[n]} at {n} to {values[n + 1]}, allowed is never")


def check_workspace(workspace: Any, q: Tensor, needed: int) -> None:
    """Contiguous bytes on q's device: any will do where none are needed, else as many at a multiple of 128."""
    if workspace is None:
        return
    if not isinstance(workspace, Tensor) or workspace.dtype != torch.uint8:
        got = workspace.dtype if isinstance(workspace, Tensor) else type(workspace).__name__
        raise ValueError(f"workspace: got {got}, allowed is a tensor of torch.uint8")
    if workspace.device != q.device:
        raise ValueError(f"workspace: is on {workspace.device}, q on {q.device}; all must be on one device")
    if not workspace.is_contiguous():
        raise ValueError(f"workspace: got strides {workspace.stride()}, allowed is contiguous")
    if workspace.numel() < needed:
        raise ValueError(f"workspace: got {workspace.numel()} bytes, allowed are {needed} or more")
    if needed and workspace.data_ptr() % WORKSPACE_ALIGN_BYTES:
        at = f"{workspace.data_ptr():#x}"
        raise ValueError(f"workspace: got address {at}, allowed are multiples of {WORKSPACE_ALIGN_BYTES} bytes")
