"""vLLM's decode front end of multi-head latent attention as a candidate for mla_query.

There is no one public kernel of this interface: ``vllm/models/kimi_k3/nvidia/mla.py`` runs ``fused_q_kv_rmsnorm``, a
linear layer, a batched product with W_UK, and ``fused_mla_decode_q_concat_kv_cache_insert``. This is that chain, the
two products being cuBLAS's through torch. The insert skips negative slots alone and would write a slot beyond the cache
where that points to: such a case is refused.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Unsupported
from tools.adapters import need

insert = need("vllm_mla_query").fused_mla_decode_q_concat_kv_cache_insert
norms = importlib.import_module("vllm.models.common.ops").fused_q_kv_rmsnorm


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """output and cache, as bytes."""
    pages, size, _ = inputs["cache"].shape
    if int(inputs["slots"].max()) >= pages * size:
        raise Unsupported("a slot beyond the cache: it would be written")
    return chain(inputs, params)


def chain(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same without the check, which waits for the GPU."""
    query, kv, k_pe = inputs["qkv"][:, :2112].split((1536, 512, 64), dim=1)
    x, latent = norms(query, kv, inputs["w_qa"], inputs["w_kva"], params["eps"])
    q = torch.nn.functional.linear(x, inputs["w_qb"]).view(-1, params["heads"], 192)
    nope, rope = q.split((128, 64), dim=-1)
    absorbed = torch.bmm(nope.transpose(0, 1), inputs["w_uk"]).transpose(0, 1)
    cache = inputs["cache"].view(torch.float8_e4m3fn)
    scales = {"q_scale_inv": inputs["q_scale_inv"], "cache_scale_inv": inputs["k_scale_inv"]}
    output = insert(absorbed, rope, latent, k_pe, cache, inputs["slots"], **scales)
    return {"output": output.view(torch.uint8), "cache": cache.view(torch.uint8)}


candidate.capturable = chain  # type: ignore[attr-defined]
