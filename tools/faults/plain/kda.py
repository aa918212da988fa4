"""kda in plain torch, FP32 throughout: the recurrence, token by token, or chunks of ``CHUNK`` tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CHUNK = 0  # 0: the recurrence
STATES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def candidate(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """out and final_state of the interface of ``reference.kda``."""
    with inputs["q"].device:
        return run(inputs, params)


def run(inputs: Mapping[str, Tensor], params: Mapping[str, Any]) -> dict[str, Tensor]:
    """``candidate`` on the device of the context."""
    batch, tokens, heads, _ = inputs["q"].shape
    q, k, v, g, beta = (inputs[name].flatten(0, 1).float() for name in ("q", "k", "v", "g", "beta"))
    q = q * torch.rsqrt((q * q).sum(2, keepdim=True) + 1e-6)
    k = k * torch.rsqrt((k * k).sum(2, keepdim=True) + 1e-6)
    rate = exp(inputs["A_log"])[:, None]
    gate = params["lower_bound"] * sigmoid(rate * (g + inputs["dt_bias"]))
    b = sigmoid(beta)[..., None]
    starts = inputs["cu_seqlens"].tolist() if "cu_seqlens" in inputs else [n * tokens for n in range(batch + 1)]
    sequences = len(starts) - 1
    if "initial_state" in inputs:
        states = inputs["initial_state"].float().clone()
    else:
        states = torch.zeros(sequences, heads, 128, 128)
    out = torch.zeros_like(v)
    step = chunked if CHUNK else recurrent
    for n in range(sequences):
        own = slice(starts[n], starts[n + 1])
        out[own], states[n] = step(states[n], q[own], k[own], v[own], gate[own], b[own], params["scale"])
    made = {"out": out.bfloat16().view(inputs["v"].shape)}
    if params["final_state"] is not None:
        made["final_state"] = states.to(STATES[params["final_state"]])
    return made


def recurrent(s: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, b: Tensor, scale: float) -> tuple[Tensor, ...]:
    """out [T, H, V] and the last state, from state s [H, V, K]."""
    out = torch.zeros_like(v)
    decay = exp(gate)
    for t in range(len(q)):
        s = s * decay[t][:, None]
        seen = (s @ k[t][..., None])[..., 0]
        u = b[t] * (v[t] - seen)
        s = s + u[..., None] * k[t][:, None]
        out[t] = (s @ q[t][..., None])[..., 0] * scale
    return out, s


def chunked(s: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, b: Tensor, scale: float) -> tuple[Tensor, ...]:
    """``recurrent`` in chunks: a triangular system of the updates u each."""
    out = torch.zeros_like(v)
    for start in range(0, len(q), CHUNK):
        part = slice(start, start + CHUNK)
        qc, kc, vc, gc, bc = (x[part].transpose(0, 1) for x in (q, k, v, gate, b))  # [H, C, …]
        sums = gc.cumsum(1)
        up, down = exp(sums), exp(-sums)
        k_up, q_up, k_down = kc * up, qc * up, kc * down
        lower = (bc * (k_up @ k_down.transpose(1, 2))).tril(-1)
        u = bc * (vc - k_up @ s.transpose(1, 2))
        for i in range(1, u.shape[1]):
            u[:, i] -= (lower[:, i, None, :i] @ u[:, :i])[:, 0]
        scores = (q_up @ k_down.transpose(1, 2)).tril()
        inter = q_up @ s.transpose(1, 2)
        intra = scores @ u
        out[part] = ((inter + intra) * scale).transpose(0, 1)
        last = up[:, -1]
        k_end = k_down * last[:, None]
        s = s * last[:, None] + u.transpose(1, 2) @ k_end
    return out, s


def exp(x: Tensor) -> Tensor:
    """By FP64: torch's in FP32 has other bits in the last few of a tensor."""
    return torch.exp(x.double()).float()


def sigmoid(x: Tensor) -> Tensor:
    """Likewise."""
    return torch.sigmoid(x.double()).float()
