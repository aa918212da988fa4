"""vLLM's fused AttnRes (``vllm.models.kimi_k3.nvidia.ops.attn_res.attn_res``) as a candidate for attn_res.

It adds delta to the prefix in place and writes row ``block_write_idx`` of blocks before it reads the sources, so a
row that is a source cannot be written. The mixture of the final layer leaves it unnormalised, for a kernel of its own.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from goldens.judge import Unsupported
from tools.adapters import need

attn_res = need("vllm_attn_res").attn_res


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """output, prefix, blocks; without has_delta, delta is the prefix that vLLM is given."""
    if params["slots"]:
        raise Unsupported("a mailbox: it takes delta as a tensor")
    if params["final"]:
        raise Unsupported("final: the mixture is normalised by another kernel")
    if 0 <= params["write"] < params["nb"]:
        raise Unsupported("write < nb: it writes the row before it reads it as a source")
    if params["aux"]:
        raise Unsupported("aux: it makes no further copies of the prefix")
    has_delta = params["has_delta"]
    prefix = inputs["prefix"] if has_delta else inputs["delta"].clone()  # it is written to
    output = attn_res(
        prefix,
        inputs["delta"] if has_delta else None,
        inputs["blocks"],
        inputs["norm"],
        inputs["query"],
        inputs["gamma"],
        params["nb"],
        params["write"],
        params["eps"],
        params["out_eps"],
    )
    return {"output": output, "prefix": prefix, "blocks": inputs["blocks"]}
