"""attn_res in plain torch, FP32 throughout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

D = 7168
SENTINEL = -0x80000000


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """All outputs of the interface of ``reference.attn_res``."""
    with inputs["prefix"].device:
        return run(inputs, params)


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """``candidate`` on the device of the context."""
    prefix, blocks, delta = inputs["prefix"], inputs["blocks"], inputs["delta"]
    tokens, slots, nb = prefix.shape[0], params["slots"], params["nb"]
    if slots:
        d = torch.zeros(tokens, D)
        for slot in range(slots):
            d = d + delta[slot, :tokens].float()
        if slots > 1:
            d = d.bfloat16().float()
    else:
        d = delta.float()
    p = to_bf16(prefix.float() + d if params["has_delta"] else d)
    sources = torch.cat([blocks[:, :nb], p[:, None]], 1).float()
    made = {"output": to_bf16(mixed(sources, inputs, params)), "prefix": p}
    rows = blocks.contiguous().clone()
    if params["write"] >= 0:
        rows[:, params["write"]] = p
    made["blocks"] = rows
    for i in range(params["aux"]):
        made[f"aux{i}"] = p.clone()
    if slots:
        made["delta"] = delta.clone()
        made["delta"].view(torch.int32)[:, :tokens] = SENTINEL
    return made


def mixed(x: Tensor, inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensor:
    """The output before its rounding, of sources x [T, nb + 1, D]."""
    w = inputs["norm"].float() * inputs["query"].float()
    square = (x * x).sum(2) / D
    rstd = torch.rsqrt(square + params["eps"])
    logit = (x * w).sum(2) * rstd
    weight = torch.softmax(logit, 1)
    mixture = (weight[..., None] * x).sum(1)
    if params["final"]:
        mixture = mixture.bfloat16().float()
    power = (mixture * mixture).sum(1) / D
    norm = torch.rsqrt(power + params["out_eps"])
    return mixture * norm[:, None] * inputs["gamma"].float()


def to_bf16(x: Tensor) -> Tensor:
    """To nearest even; every NaN is 0x7fff."""
    y = x.bfloat16()
    y.view(torch.int16)[x.isnan()] = 0x7FFF
    return y
