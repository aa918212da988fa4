"""Our kernels as candidates, by kernel and schedule."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.judge import Candidate, Unsupported
from tools.adapters import Missing

Tensors = dict[str, Tensor]


def make(kernel: str, schedule: str | None) -> Candidate:
    """``run`` of a kernel's module in cute_impl with its schedule. Missing without the CuTe DSL."""
    try:
        module = importlib.import_module(f"cute_impl.{kernel}")
    except ModuleNotFoundError as error:
        raise Missing(f"module {error.name} is missing; `goldens doctor` says what to install") from None

    def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        if schedule is None:
            raise Unsupported("no schedule of ours takes these inputs")
        return module.run(inputs, params, schedule)

    candidate.capturable = _capturable(kernel, schedule) or candidate  # type: ignore[attr-defined]
    return candidate


def _capturable(kernel: str, schedule: str | None) -> Candidate | None:
    """The launch without the checks that wait for the GPU, where ``run`` has some: for CUDA graphs."""

    def fmha(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        from cute_impl import fmha as module

        if "cu_seqlens_q" not in inputs:
            return module.run(inputs, params, schedule)
        q, k, v = (inputs[name].transpose(0, 1) for name in ("q", "k", "v"))
        causal, scale = params["causal"], params["scale"]
        rung, named = module.resolve(None, schedule)
        options: dict[str, Any] = {name: inputs[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options["max_seqlen_q"] = q.shape[0]  # an upper bound, which needs no look at the offsets
        o, lse = module.attention(q, k, v, causal, scale, rung, named, return_lse=True, **options)
        return {"o": o.transpose(0, 1), "lse": lse}

    def attn_res(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        from cute_impl.attn_res import BOUNDED_POLLS
        from cute_impl.attn_res import attn_res as launch

        tensors: dict[str, Any] = dict(inputs)
        aux = [inputs["prefix"].new_empty(inputs["prefix"].shape) for _ in range(params["aux"])]
        options = {name: x for name, x in params.items() if name != "aux"}
        output = launch(**tensors, **options, aux=aux, schedule=schedule or "", polls=BOUNDED_POLLS)
        outputs = {"output": output, "prefix": inputs["prefix"], "blocks": inputs["blocks"]}
        outputs |= {f"aux{i}": x for i, x in enumerate(aux)}
        return outputs | ({"delta": inputs["delta"]} if params["slots"] else {})

    def mla_query(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        from cute_impl.mla_query import mla_query as launch

        tensors: dict[str, Any] = dict(inputs)
        output = launch(**tensors, eps=params["eps"], schedule=schedule)
        return {"output": output, "cache": inputs["cache"]}

    def cache_insert(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        from cute_impl.cache_insert import cache_insert as launch

        tensors: dict[str, Any] = dict(inputs)
        launch(**tensors, eps=params["eps"])
        return {"cache": inputs["cache"]}

    def kda(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        from cute_impl.kda import fwd as launch

        made: dict[str, Any] = {"out": inputs["v"].new_empty(inputs["v"].shape)}
        if params["final_state"] is not None:
            batch, heads = inputs["q"].shape[0], inputs["q"].shape[2]
            sequences = len(inputs["cu_seqlens"]) - 1 if "cu_seqlens" in inputs else batch
            dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[params["final_state"]]
            made["final_state"] = inputs["q"].new_empty((sequences, heads, 128, 128), dtype=dtype)
        options = {name: params[name] for name in ("scale", "lower_bound")}
        tensors: dict[str, Any] = dict(inputs)
        launch(**tensors, **made, **options, schedule=schedule or "chunk16")
        return made

    launches = {"fmha": fmha, "attn_res": attn_res, "mla_query": mla_query, "cache_insert": cache_insert, "kda": kda}
    return launches.get(kernel)
