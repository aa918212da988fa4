"""kimi_delta_attention of cuDNN's frontend (package nvidia-cudnn-frontend) as a candidate for kda.

It takes packed tokens [ΣT, H, 128] with int32 offsets and an fp32 state [N, H, V, K]; ``batch_invariant`` asks for what
the interface promises: the bits of a sequence depend on that sequence alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Unsupported
from tools.adapters import need

kimi_delta_attention = need("cudnn_kda").kimi_delta_attention
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """out, and final_state [N, H, V, K] if it is asked for."""
    if not -5.0 <= params["lower_bound"] <= 0.0:
        raise Unsupported(f"lower_bound {params['lower_bound']:g}: its gate's decay is at most 1")
    batch, tokens = inputs["q"].shape[:2]
    offsets = inputs.get("cu_seqlens")
    if offsets is None:
        offsets = torch.arange(batch + 1, device=inputs["q"].device) * tokens
    state = inputs.get("initial_state")
    q, k, v, g, beta = (inputs[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    out, final = kimi_delta_attention(
        q,
        k,
        v,
        g.to(torch.float32),
        beta,
        offsets.to(torch.int32),
        scale=params["scale"],
        initial_state=None if state is None else state.to(torch.float32),
        output_final_state=params["final_state"] is not None,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        batch_invariant=True,
        safe_gate=True,
        gate_lower_bound=params["lower_bound"],
        a_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"],
    )
    outputs = {"out": out.view(inputs["v"].shape)}
    return (
        outputs if params["final_state"] is None else outputs | {"final_state": final.to(STATES[params["final_state"]])}
    )
