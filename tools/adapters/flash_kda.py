"""FlashKDA (package flash_kda, built from github.com/MoonshotAI/FlashKDA) as a candidate for kda, of its interface."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Unsupported
from tools.adapters import need

fwd = need("flash_kda").fwd
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """out, and final_state [N, H, V, K] if it is asked for."""
    if not -5.0 <= params["lower_bound"] <= 0.0:
        raise Unsupported(f"lower_bound {params['lower_bound']:g}: it takes −5 … 0")
    if not all(x.is_contiguous() for x in inputs.values()):
        raise Unsupported("it takes contiguous tensors")
    x, state = dict(inputs), {}
    offsets = x.get("cu_seqlens")
    if offsets is not None:
        x["cu_seqlens"] = offsets.to(torch.int64)
    if params["final_state"] is not None:
        sequences = x["q"].shape[0] if offsets is None else len(offsets) - 1
        shape = (sequences, x["q"].shape[2], 128, 128)
        state["final_state"] = x["q"].new_empty(shape, dtype=STATES[params["final_state"]])
    out = torch.empty_like(x["v"])
    fwd(**x, out=out, scale=params["scale"], lower_bound=params["lower_bound"], **state)
    return {"out": out, **state}
