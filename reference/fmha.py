"""FMHA forward: o = softmax(q kᵀ · scale) v, with grouped KV heads, causal masks and log-sum-exp.

Inputs (heads folded into the batch): q [B·Hq, Nq, d], k and v [B·Hkv, Nk, d], bf16.
Parameters: ``causal`` (bool, aligned to the bottom right as FlashAttention does since 2.1: query i sees
key j if j ≤ i + Nk − Nq) and ``scale`` (fp32(1/√d) if absent or None). The group Hq / Hkv follows from
the shapes. Outputs: o like q, bf16 (fp32 from the model); lse [B·Hq, Nq], natural log, fp32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference.numerics import portable
from reference.numerics.formats import canonical_nan, to_bf16
from reference.numerics.ieee import fma_rn, mul_rn, require_subnormals, sub_rn
from reference.numerics.mufu import ex2_approx_ftz, rcp_approx_ftz
from reference.numerics.order import butterfly, chain_add, chain_matmul

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]

LOG2_E = 1.4426950408889634


def check(inputs: Mapping[str, Tensor], params: Params) -> None:
    """ValueError, naming the argument, if inputs or parameters are outside the interface."""
    missing = [name for name in ("q", "k", "v") if name not in inputs]
    if missing:
        raise ValueError(f"inputs: {', '.join(missing)} missing; fmha takes q, k and v")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
        if x.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is [batch · heads, N, d]")
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name}: got {x.dtype}, allowed is torch.bfloat16")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, q on {q.device}; all must be on one device")
    if q.shape[2] not in (64, 128):
        raise ValueError(f"q: got d = {q.shape[2]}, allowed are 64 and 128")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: got d = {k.shape[2]}, q has {q.shape[2]}")
    if v.shape != k.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}, k has {tuple(k.shape)}")
    if k.shape[0] == 0 or q.shape[0] % k.shape[0]:
        raise ValueError(f"k: got {k.shape[0]} heads in all, q has {q.shape[0]}, which must be a multiple")
    unknown = sorted(set(params) - {"causal", "scale"})
    if unknown:
        raise ValueError(f"params: got {', '.join(unknown)}, allowed are causal and scale")
    if not isinstance(params.get("causal", False), bool):
        raise ValueError(f"causal: got {params['causal']!r}, allowed are True and False")
    scale = params.get("scale")
    fp32 = torch.finfo(torch.float32)
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and fp32.tiny <= scale <= fp32.max):
        raise ValueError(f"scale: got {scale!r}, allowed is None or a number from {fp32.tiny} to {fp32.max}")


def scale_of(d: int, params: Params) -> float:
    """The scale as a number that fp32 holds exactly: fp32(1/√d) unless given."""
    scale = params.get("scale")
    return torch.tensor(1.0 / math.sqrt(d) if scale is None else scale, dtype=torch.float32).item()


def visible(n_q: int, n_k: int, causal: bool, device: torch.device) -> Tensor:
    """bool [Nq, Nk]: which keys a query sees."""
    if not causal:
        return torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    query = torch.arange(n_q, device=device)[:, None]
    return torch.arange(n_k, device=device) <= query + (n_k - n_q)


def model(inputs: Mapping[str, Tensor], params: Params, dtype: torch.dtype = torch.float32) -> Tensors:
    """The mathematics without a schedule: o and lse in ``dtype`` (fp32, or fp64 as oracle).

    A row that sees no key has o = 0 and lse = −inf. Masked keys and values have no influence, NaN or not.
    """
    check(inputs, params)
    require_subnormals()
    q, k, v = (inputs[name].to(dtype) for name in ("q", "k", "v"))
    keep = visible(q.shape[1], k.shape[1], params.get("causal", False), q.device)
    mask = keep if params.get("causal", False) else None
    group = q.shape[0] // k.shape[0]
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=dtype, device=q.device)
    for head in range(q.shape[0]):
        kv = head // group
        s = portable.matmul(q[head], k[kv].t().contiguous()) * scale_of(q.shape[2], params)
        s = torch.where(keep, s, -torch.inf)
        # The empty row's maximum is −inf; 0 in its place keeps every weight at exp(−inf) = 0.
        m = torch.cat([s, torch.full((s.shape[0], 1), -torch.inf, dtype=dtype, device=s.device)], dim=1).amax(1)
        shift = torch.where(m == -torch.inf, 0.0, m)
        p = portable.exp(s - shift[:, None])
        total = portable.total(p, dim=1)
        o[head] = portable.matmul(p, v[kv], mask) / torch.where(total == 0, 1.0, total)[:, None]
        lse[head] = shift + portable.log(total)
    return {"o": _store(o), "lse": _store(lse)}


def _store(x: Tensor) -> Tensor:
    return canonical_nan(x) if x.dtype == torch.float32 else x


def exact(inputs: Mapping[str, Tensor], params: Params, schedule: str) -> Tensors:
    """The outputs of a schedule, bit for bit. ValueError if it does not support the call."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    check(inputs, params)
    require_subnormals()
    return SCHEDULES[schedule](inputs, params)


def k2_refusal(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str | None:
    """Why schedule ``k2`` does not support these shapes, or None."""
    if q_shape != k_shape:
        return f"k: got shape {tuple(k_shape)}, schedule k2 takes that of q, {tuple(q_shape)}"
    if q_shape[1] % 64 or q_shape[1] == 0:
        return f"q: got N = {q_shape[1]}, schedule k2 takes positive multiples of 64"
    return None


def _exp(x: Tensor) -> Tensor:
    return ex2_approx_ftz(mul_rn(x, torch.tensor(LOG2_E, dtype=torch.float32, device=x.device)))


def _k2(inputs: Mapping[str, Tensor], params: Params) -> Tensors:
    """Schedule ``k2``: 64 keys a step, four threads a row, scalar FP32 (``cute_impl.fmha.k2``)."""
    refusal = k2_refusal(inputs["q"].shape, inputs["k"].shape)
    if refusal:
        raise ValueError(refusal)
    q, k, v = (inputs[name].to(torch.float32) for name in ("q", "k", "v"))
    batch, n, d = q.shape
    scale = torch.tensor(scale_of(d, params), device=q.device)
    keep = visible(n, n, params.get("causal", False), q.device)
    m = torch.full((batch, n), -torch.inf, device=q.device)
    l = torch.zeros(batch, n, device=q.device)
    acc = torch.zeros(batch, n, d, device=q.device)
    for j in range(0, n, 64):
        tile = slice(j, j + 64)
        s = mul_rn(chain_matmul(q, k[:, tile].transpose(1, 2)), scale)
        s = torch.where(keep[:, tile], s, -torch.inf)
        # max.f32 drops NaN, and the order of a maximum does not matter.
        m_new = torch.maximum(m, torch.where(s != s, -torch.inf, s).amax(-1))
        alpha = _exp(sub_rn(m, m_new))
        m = m_new
        p = _exp(sub_rn(s, m[..., None]))
        threads = chain_add(p.unflatten(-1, (16, 4)), dim=-2)  # [batch, n, 4], one sum a thread
        l = fma_rn(alpha, l, butterfly(threads, (1, 2))[..., 0])
        acc = fma_rn(acc, alpha[..., None], chain_matmul(p, v[:, tile]))
    inv = torch.where((l == 0) | (l != l), 1.0, rcp_approx_ftz(l))
    return {"o": to_bf16(mul_rn(acc, inv[..., None]))}


SCHEDULES: dict[str, Callable[[Mapping[str, Tensor], Params], Tensors]] = {"k2": _k2}
