"""fmha in plain torch: FP32 sums, tiles of 64 keys, the online softmax; no head depends on another."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TILE = 64


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """o and lse of the interface of ``reference.fmha``."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    with q.device:
        o = torch.zeros(q.shape, dtype=torch.bfloat16)
        lse = torch.zeros(q.shape[:2], dtype=torch.float32)
        scale = params.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(q.shape[2])
        causal = params.get("causal", False)
        starts_q = inputs["cu_seqlens_q"].tolist() if "cu_seqlens_q" in inputs else [0, q.shape[1]]
        starts_k = inputs["cu_seqlens_k"].tolist() if "cu_seqlens_k" in inputs else [0, k.shape[1]]
        for n in range(len(starts_q) - 1):
            rows = slice(starts_q[n], starts_q[n + 1])
            keys = slice(starts_k[n], starts_k[n + 1])
            o[:, rows], lse[:, rows] = attention(q[:, rows], k[:, keys], v[:, keys], scale, causal)
        return {"o": o, "lse": lse}


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """o in bf16 and lse of one sequence."""
    heads, n_q, d = q.shape
    n_k = k.shape[1]
    kv_head = torch.arange(heads) // (heads // k.shape[0])
    q = q.float()
    k = k.float()[kv_head]
    v = v.float()[kv_head]
    query = torch.arange(n_q)[:, None]
    m = torch.full((heads, n_q), -torch.inf)
    total = torch.zeros(heads, n_q)
    acc = torch.zeros(heads, n_q, d)
    for start in range(0, n_k, TILE):
        key = torch.arange(start, min(start + TILE, n_k))
        keep = key <= query + (n_k - n_q)
        keep = keep if causal else torch.ones_like(keep)
        s = product(q, k[:, key].transpose(1, 2)) * scale
        s = torch.where(keep, s, -torch.inf)
        m_new = torch.maximum(m, s.amax(2))
        shift = torch.where(m_new == -torch.inf, 0.0, m_new)
        alpha = exp(m - shift)
        p = exp(s - shift[..., None])
        total = total * alpha + p.sum(2)
        acc = acc * alpha[..., None] + weighted(p, v[:, key], keep)
        m = m_new
    empty = total == 0
    o = acc / torch.where(empty, 1.0, total)[..., None]
    lse = torch.where(empty, -torch.inf, m + log(total))
    lse = torch.where(lse.isnan(), torch.nan, lse)
    return o.bfloat16(), lse


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, matrix by matrix: torch's batched product has other bits for other batches."""
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)])


def weighted(p: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """p v; what is not kept has no influence, not even 0 · NaN."""
    return torch.stack([weighted_head(*head, keep) for head in zip(p, v, strict=True)])


def weighted_head(p: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """``weighted`` of one head."""
    if v.isfinite().all():
        return p @ v
    return torch.where(keep[..., None], p[..., None] * v, 0.0).sum(1)


def exp(x: Tensor) -> Tensor:
    """By FP64: torch's in FP32 has other bits in the last few of a tensor."""
    return torch.exp(x.double()).float()


def log(x: Tensor) -> Tensor:
    """Likewise."""
    return torch.log(x.double()).float()
