"""torch.nn.functional.scaled_dot_product_attention as a candidate for fmha, on the CPU or a GPU.

Its own causal mask is aligned to the top left, the interface's to the bottom right: with other lengths of q than of k
the mask is passed as a tensor. It returns no log-sum-exp. A row that sees no key is NaN or 0 by backend.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Unsupported

OUTPUTS = {"fmha": ("o",)}


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """o of q [B·Hq, Nq, d], k and v [B·Hkv, Nk, d]."""
    if "cu_seqlens_q" in inputs:
        raise Unsupported("packed sequences of several lengths")
    q, k, v = (inputs[name][None] for name in ("q", "k", "v"))  # the heads of one batch
    n_q, n_k = q.shape[2], k.shape[2]
    mask = None
    if params["causal"] and n_q != n_k:
        mask = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril(n_k - n_q)
    o = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=params["causal"] and mask is None,
        scale=params["scale"],
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return {"o": o[0]}
