"""A candidate for fmha in plain torch, for the CPU or a GPU: FP32 throughout, one rounding at the end.

goldens verify --candidate docs/examples/torch_attention.py:attention --kernel fmha --device cpu
"""

import math

import torch

from goldens.judge import Unsupported


def attention(inputs, params):
    """o like q, bf16, and lse [B · Hq, Nq], fp32, of q [B · Hq, Nq, d], k and v [B · Hkv, Nk, d]."""
    if "cu_seqlens_q" in inputs:
        raise Unsupported("packed sequences of several lengths")
    q, k, v = (inputs[name].float() for name in ("q", "k", "v"))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scale = params["scale"] or 1 / math.sqrt(q.shape[2])
    scores = q @ k.transpose(1, 2) * scale
    if params["causal"]:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])  # all 0 in a row without keys
    return {"o": (weights @ v).bfloat16(), "lse": lse}
