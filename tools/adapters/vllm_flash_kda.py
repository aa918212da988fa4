"""FlashKDA as vLLM builds and ships it (``torch.ops._flashkda_C``) as a candidate for kda.

The kernels are FlashKDA's; vLLM's operator takes the workspace from its caller, and could store the state midway, which
is not asked for. Packed offsets may be int32 or int64.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Unsupported
from tools.adapters import need

need("vllm_flash_kda")
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """out, and final_state [N, H, V, K] if it is asked for."""
    if not -5.0 <= params["lower_bound"] <= 0.0:
        raise Unsupported(f"lower_bound {params['lower_bound']:g}: it takes −5 … 0")
    if not all(x.is_contiguous() for x in inputs.values()):
        raise Unsupported("it takes contiguous tensors")
    x, made = dict(inputs), {"out": torch.empty_like(inputs["v"])}
    batch, tokens, heads, _ = x["q"].shape
    sequences = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else batch
    if params["final_state"] is not None:
        shape = (sequences, heads, 128, 128)
        made["final_state"] = x["q"].new_empty(shape, dtype=STATES[params["final_state"]])
    size = torch.ops._flashkda_C.get_workspace_size(batch * tokens, heads, sequences)
    workspace = torch.empty(size, dtype=torch.uint8, device=x["q"].device)
    options = {name: params[name] for name in ("scale", "lower_bound")}
    torch.ops._flashkda_C.fwd(**x, **made, **options, workspace=workspace)
    return made
