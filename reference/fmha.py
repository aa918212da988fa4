"""FMHA forward: o = softmax(q kᵀ · scale) v, with grouped KV heads, causal masks and log-sum-exp.

Inputs (heads folded into the batch): q [B·Hq, Nq, d], k and v [B·Hkv, Nk, d], bf16. Packed sequences of other
lengths: q [Hq, ΣNq, d], k and v [Hkv, ΣNk, d], and ``cu_seqlens_q``, ``cu_seqlens_k`` int32 [B + 1], where each
sequence starts, its last entry the number of rows.
Parameters: ``causal`` (bool, aligned to the bottom right as FlashAttention does since 2.1: query i sees key j if j ≤ i
+ Nk − Nq) and ``scale`` (a number > 0, rounded to the nearest of fp32; 1/√d if absent or None). The group Hq / Hkv
follows from the shapes. Outputs: o like q, bf16 (fp32 from the model); lse [B·Hq, Nq], natural log, fp32.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from reference.numerics import portable, tensor_core
from reference.numerics.formats import canonical_nan, fp32_number, to_bf16
from reference.numerics.ieee import fma_rn, mul_rn, require_subnormals, sub_rn
from reference.numerics.mufu import ex2_approx_ftz, lg2_approx_ftz, rcp_approx_ftz
from reference.numerics.order import butterfly, chain_add, chain_matmul

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
WARPGROUP_ROWS = 64  # query rows that schedules ``wgmma`` decide on together
TILE_KEYS = (128, 176)  # the Bc of schedules ``wgmma``
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


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
    _check_offsets(inputs)
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


def _check_offsets(inputs: Mapping[str, Tensor]) -> None:
    """ValueError if one of ``OFFSETS`` is missing or does not divide the rows of its tensor into sequences."""
    if not any(name in inputs for name in OFFSETS):
        return
    missing = [name for name in OFFSETS if name not in inputs]
    if missing:
        raise ValueError(f"inputs: {missing[0]} missing; packed sequences take {' and '.join(OFFSETS)}")
    for name, rows in zip(OFFSETS, (inputs["q"].shape[1], inputs["k"].shape[1]), strict=True):
        x = inputs[name]
        if x.dtype != torch.int32 or x.dim() != 1 or x.numel() < 2:
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, allowed is torch.int32 [B + 1]")
        starts = x.tolist()
        if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
            raise ValueError(f"{name}: got {starts}, allowed are ascending offsets from 0 to {rows}")
    if inputs[OFFSETS[0]].shape != inputs[OFFSETS[1]].shape:
        raise ValueError(f"{OFFSETS[1]}: got {inputs[OFFSETS[1]].numel() - 1} sequences, {OFFSETS[0]} has others")


def sequences(inputs: Mapping[str, Tensor]) -> Iterator[tuple[slice, Tensors]]:
    """Where each packed sequence's rows lie in q, and its own q, k and v; one of all rows without offsets."""
    if OFFSETS[0] not in inputs:
        yield slice(None), {name: inputs[name] for name in ("q", "k", "v")}
        return
    starts_q, starts_k = (inputs[name].tolist() for name in OFFSETS)
    for i in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        yield rows, {"q": inputs["q"][:, rows], "k": inputs["k"][:, keys], "v": inputs["v"][:, keys]}


def by_sequence(function: Callable[[Tensors], Tensors], inputs: Mapping[str, Tensor]) -> Tensors:
    """``function`` of each sequence, its outputs joined along the rows."""
    made = [function(own) for _, own in sequences(inputs)]
    return {name: torch.cat([outputs[name] for outputs in made], dim=1) for name in made[0]}


def scale_of(d: int, params: Params) -> float:
    """The scale, 1/√d unless given, as fp32 holds it."""
    scale = params.get("scale")
    return fp32_number("scale", 1.0 / math.sqrt(d) if scale is None else scale)


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
    return by_sequence(lambda own: _model(own, params, dtype), inputs)


def _model(inputs: Mapping[str, Tensor], params: Params, dtype: torch.dtype) -> Tensors:
    """``model`` of one sequence length."""
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
    if OFFSETS[0] in inputs:
        raise ValueError(f"{OFFSETS[0]}: schedule k2 takes no packed sequences")
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


def _wgmma(inputs: Mapping[str, Tensor], params: Params, bc: int) -> Tensors:
    """Schedules ``wgmma128`` and ``wgmma176``: tiles of ``bc`` keys on the tensor cores, o and lse.

    What the rungs k4, k5 and k6 of ``cute_impl.fmha`` share. Query rows 64 g … 64 g + 63 visit the tiles that hold a
    key visible to the last of them (row 64 g + 63, whether it exists or not), in descending order.
    """
    return by_sequence(lambda own: _wgmma_sequence(own, params, bc), inputs)


def first_row(start: int, n_q: int, n_k: int, causal: bool) -> int:
    """The first query row that visits the tile of keys from ``start`` on: a multiple of 64, all later rows do too."""
    if not causal:
        return 0
    hidden = start - (n_k - n_q)  # rows before this one see no key of the tile
    return max(0, hidden // WARPGROUP_ROWS * WARPGROUP_ROWS)


def _wgmma_sequence(inputs: Mapping[str, Tensor], params: Params, bc: int) -> Tensors:
    q = inputs["q"]
    (heads, n_q, d), n_k, device = q.shape, inputs["k"].shape[1], q.device
    # Keys and values beyond the last are zeros: TMA fills in, or the kernel clears.
    padding = (0, 0, 0, -n_k % bc)
    k, v = (torch.nn.functional.pad(inputs[name], padding) for name in ("k", "v"))
    k, v = (x.repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
    causal = params.get("causal", False)
    last = torch.arange(n_q, device=device) + (n_k - n_q) if causal else torch.full((n_q,), n_k - 1, device=device)
    number = scale_of(d, params)
    scale, c, ln_2 = (torch.tensor(x, dtype=torch.float32, device=device) for x in (number, number * LOG2_E, LN_2))
    m = torch.full((heads, n_q), -torch.inf, device=device)
    l = torch.zeros(heads, n_q, 4, device=device)  # one of each thread of a row
    o = torch.zeros(heads, n_q, d, device=device)
    for start in reversed(range(0, n_k, bc)):
        rows, keys = slice(first_row(start, n_q, n_k, causal), n_q), slice(start, start + bc)
        if rows.start >= n_q:
            continue
        keep = torch.arange(start, start + bc, device=device) <= last[rows, None]
        s = torch.where(keep, tensor_core.mma(q[:, rows], k[:, keys], form="wgmma_bf16"), -torch.inf)
        m_old = m[:, rows]
        # max.f32 drops NaN, and the order of a maximum does not matter.
        m_new = torch.maximum(m_old, torch.where(s != s, -torch.inf, s).amax(-1))
        shift = torch.where(m_new == -torch.inf, 0.0, m_new)
        alpha = ex2_approx_ftz(mul_rn(sub_rn(m_old, shift), c))[..., None]
        p = ex2_approx_ftz(fma_rn(s, c, -mul_rn(shift, c)[..., None]))
        # The accumulator's layout: thread t of a row holds columns 8 j + 2 t and 8 j + 2 t + 1.
        threads = p.unflatten(-1, (bc // 8, 4, 2)).transpose(-3, -2).flatten(-2)
        m[:, rows] = m_new
        l[:, rows] = fma_rn(l[:, rows], alpha, chain_add(threads))
        values = v[:, keys].transpose(1, 2)
        o[:, rows] = tensor_core.mma(to_bf16(p), values, mul_rn(o[:, rows], alpha), form="wgmma_bf16")
    total = butterfly(l, (1, 2))[..., 0]
    inv = torch.where((total == 0) | (total != total), 1.0, rcp_approx_ftz(total))
    lse = torch.where(total == 0, -torch.inf, fma_rn(lg2_approx_ftz(total), ln_2, mul_rn(m, scale)))
    return {"o": to_bf16(mul_rn(o, inv[..., None])), "lse": canonical_nan(lse)}


SCHEDULES: dict[str, Callable[[Mapping[str, Tensor], Params], Tensors]] = {
    "k2": _k2,
    **{f"wgmma{bc}": functools.partial(_wgmma, bc=bc) for bc in TILE_KEYS},
}
