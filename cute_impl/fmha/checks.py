"""What FMHA's rungs take, checked before launch: ValueError with the name, what was given and what is allowed."""

from typing import Any

import torch
from torch import Tensor

MAX_GRID = 65535  # of a grid's second and third extent


def tensors(q: Any, k: Any, v: Any) -> None:
    """q, k, v are bf16 tensors of one device and width, [B·H, N, d] or [B, N, H, d], packed [ΣN, H, d]."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name}: got {x.dtype}, allowed is torch.bfloat16")
        if x.dim() not in (3, 4) or x.shape[-1] not in (64, 128):
            allowed = "[batch · heads, N, 64 or 128] and [batch, N, heads, 64 or 128]"
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {allowed}")
        if x.dim() != q.dim():
            raise ValueError(f"{name}: got {x.dim()} dimensions, q has {q.dim()}")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, q on {q.device}; all must be on one device")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: got d = {k.shape[-1]}, q has {q.shape[-1]}")
    if v.shape != k.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}, k has {tuple(k.shape)}")


def numbers(causal: Any, scale: Any) -> None:
    """causal is a bool, scale None or positive, finite and normal in fp32."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal: got {causal!r}, allowed are True and False")
    fp32 = torch.finfo(torch.float32)
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and fp32.tiny <= scale <= fp32.max):
        raise ValueError(f"scale: got {scale!r}, allowed is None or a number from {fp32.tiny} to {fp32.max}")


def offsets(q: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any) -> None:
    """Both offsets or none, int32 [B + 1] on q's device, with q [ΣN, H, d]; their values are not looked at."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name}: got {type(x).__name__}; packed sequences take both cu_seqlens_q and cu_seqlens_k"
            )
        if x.dtype != torch.int32 or x.dim() != 1 or x.numel() < 2 or not x.is_contiguous():
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, allowed is contiguous torch.int32 [B + 1]")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, q on {q.device}; all must be on one device")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(f"cu_seqlens_k: got shape {tuple(cu_seqlens_k.shape)}, q's has {tuple(cu_seqlens_q.shape)}")
    if q.dim() != 3:
        raise ValueError(f"q: got shape {tuple(q.shape)}, packed sequences take [ΣN, heads, d]")
    if not isinstance(max_seqlen_q, int) or isinstance(max_seqlen_q, bool) or max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q: got {max_seqlen_q!r}, packed sequences take the longest one's length")


def heads(q: int, k: int) -> None:
    """The query heads are a multiple of the key heads."""
    if k == 0 or q % k:
        raise ValueError(f"k: got {k} heads, q has {q}, which must be a multiple")


def scalar_rung(rung: str, q: Tensor, k: Tensor, packed: bool, lse: bool) -> None:
    """What k2 and k3 take: one shape, head-folded, N in multiples of 64."""
    if packed:
        raise ValueError(f"cu_seqlens_q: {rung} takes no packed sequences")
    if lse:
        raise ValueError(f"return_lse: {rung} makes no log-sum-exp")
    if q.dim() != 3:
        raise ValueError(f"q: got shape {tuple(q.shape)}, {rung} takes [batch · heads, N, d]")
    if k.shape != q.shape:
        raise ValueError(f"k: got shape {tuple(k.shape)}, {rung} takes that of q, {tuple(q.shape)}")
    if q.shape[0] == 0 or q.shape[1] == 0 or q.shape[1] % 64:
        raise ValueError(f"q: got shape {tuple(q.shape)}, {rung} takes N in positive multiples of 64")
    if q.shape[0] > MAX_GRID:
        raise ValueError(f"q: got {q.shape[0]} heads in all, {rung} takes at most {MAX_GRID}")


def strides(name: str, x: Tensor) -> None:
    """1 along d, otherwise positive multiples of 8; 16-byte aligned: what TMA takes."""
    others = [stride for stride, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True) if extent > 1]
    if x.stride(-1) != 1 or any(stride <= 0 or stride % 8 for stride in others):
        raise ValueError(f"{name}: got strides {x.stride()}, allowed is 1 along d, else positive multiples of 8")
    if x.data_ptr() % 16:
        raise ValueError(f"{name}: starts at an address that is no multiple of 16 bytes")
