"""FlashAttention-4's Hopper kernel (package flash-attn-4) as a candidate for fmha.

``flash_attn_func`` takes [B, N, H, d], ``flash_attn_varlen_func`` packed sequences [ΣN, H, d]. Both align the causal
mask to the bottom right, as the interface does, and return o and the natural log-sum-exp, [B, H, N] or [H, ΣN] in fp32.
Keys are taken 128 at a time, as in the schedule ``wgmma128``.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tools.adapters import need

module = need("flash_attn_4")


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """o and lse of q [B·Hq, Nq, d], k and v [B·Hkv, Nk, d], or of packed sequences."""
    q, k, v = (inputs[name].transpose(0, 1).contiguous() for name in ("q", "k", "v"))
    options = {"softmax_scale": params["scale"], "causal": params["causal"], "return_lse": True}
    if "cu_seqlens_q" in inputs:
        offsets = {name: inputs[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        o, lse = module.flash_attn_varlen_func(q, k, v, **offsets, **options)
        return {"o": o.transpose(0, 1), "lse": lse}
    o, lse = module.flash_attn_func(q[None], k[None], v[None], **options)
    return {"o": o[0].transpose(0, 1), "lse": lse[0]}
