"""cache_insert in plain torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """The cache of the interface of ``reference.cache_insert``."""
    kv, k_pe, w = inputs["kv"].float(), inputs["k_pe"].float(), inputs["w_kva"].float()
    cache = inputs["cache"].view(torch.uint8).clone()
    slots = inputs["slots"]
    scale = inputs["k_scale_inv"]
    mean = (kv * kv).sum(1, keepdim=True) / 512
    rstd = torch.rsqrt(mean + params["eps"])
    latent = (kv * rstd * w).bfloat16().float()
    values = torch.cat([latent, k_pe], 1) * scale
    codes = to_e4m3(values)
    flat = cache.view(-1, 576)
    inside = (slots >= 0) & (slots < len(flat))
    flat[slots[inside]] = codes[inside]
    return {"cache": cache}


def to_e4m3(x: Tensor) -> Tensor:
    """The codes: to nearest even, saturating, NaN 0x7f."""
    code = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code)
