"""mla_query in plain torch: FP32 sums, bf16 where the mathematics rounds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """output and cache of the interface of ``reference.mla_query``."""
    return {"output": query(inputs, params), "cache": insert(inputs, params["eps"])}


def query(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensor:
    """The bytes [B, heads, 576]."""
    heads, eps = params["heads"], params["eps"]
    x = inputs["qkv"][:, :1536].float()
    power = (x * x).sum(1, keepdim=True) / 1536
    normed = (x * torch.rsqrt(power + eps) * inputs["w_qa"].float()).bfloat16()
    q = rows_apart(normed, inputs["w_qb"]).bfloat16()
    q = q.view(-1, heads, 192)
    nope, rope = q[..., :128], q[..., 128:]
    latent = absorbed(nope, inputs["w_uk"])
    latent = latent.bfloat16()
    values = torch.cat([latent, rope], 2).float()
    return to_e4m3(values * inputs["q_scale_inv"])


def rows_apart(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ in FP32, request by request: torch's product has other bits for other numbers of them."""
    w = w.float()
    return torch.stack([w @ row for row in x.float()])


def absorbed(q: Tensor, w: Tensor) -> Tensor:
    """q [B, heads, P] times w [heads, P, 512] in FP32, likewise."""
    w = w.float()
    return torch.stack([torch.einsum("hp,hpl->hl", row, w) for row in q.float()])


def insert(inputs: Mapping[str, Tensor], eps: float) -> Tensor:
    """The cache after the call, in bytes."""
    kv, k_pe = inputs["qkv"][:, 1536:2048].float(), inputs["qkv"][:, 2048:2112].float()
    mean = (kv * kv).sum(1, keepdim=True) / 512
    kv_normed = (kv * torch.rsqrt(mean + eps) * inputs["w_kva"].float()).bfloat16()
    codes = to_e4m3(torch.cat([kv_normed.float(), k_pe], 1) * inputs["k_scale_inv"])
    cache = inputs["cache"].view(torch.uint8).clone()
    flat, slots = cache.view(-1, 576), inputs["slots"]
    inside = (slots >= 0) & (slots < len(flat))
    flat[slots[inside]] = codes[inside]
    return cache


def to_e4m3(x: Tensor) -> Tensor:
    """The codes: to nearest even, saturating, NaN 0x7f."""
    code = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code)
