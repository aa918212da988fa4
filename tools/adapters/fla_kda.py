"""chunk_kda of flash-linear-attention (package fla-core) as a candidate for kda.

Its state is [N, H, K, V] in fp32, the interface's [N, H, V, K]: it is transposed on the way in and out. The environment
variable FLA_FLASH_KDA=0 keeps it from handing the call to FlashKDA where that is installed.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Unsupported
from tools.adapters import need

os.environ["FLA_FLASH_KDA"] = "0"
chunk_kda = need("fla_kda").chunk_kda
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """out, and final_state [N, H, V, K] if it is asked for."""
    return run(inputs, params)


def capturable(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same with the list of chunks made on the device, as a CUDA graph needs it of packed sequences."""
    return run(inputs, params, use_graph=True) if "cu_seqlens" in inputs else run(inputs, params)


candidate.capturable = capturable  # type: ignore[attr-defined]


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    """The call, with further options of ``chunk_kda``."""
    if not -5.0 <= params["lower_bound"] < 0.0:
        raise Unsupported(f"lower_bound {params['lower_bound']:g}: it takes −5 … 0, without 0")
    x = dict(inputs)
    if "cu_seqlens" in x:
        x["cu_seqlens"] = x["cu_seqlens"].to(torch.int64)
    if "initial_state" in x:
        x["initial_state"] = x["initial_state"].to(torch.float32).transpose(2, 3).contiguous()
    x["dt_bias"] = x["dt_bias"].flatten()
    with torch.inference_mode():
        out, state = chunk_kda(
            **x,
            scale=params["scale"],
            lower_bound=params["lower_bound"],
            safe_gate=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            output_final_state=params["final_state"] is not None,
            **options,
        )
    if params["final_state"] is None:
        return {"out": out}
    return {"out": out, "final_state": state.transpose(2, 3).to(STATES[params["final_state"]])}
