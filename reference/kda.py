"""KDA forward: Kimi Delta Attention, a linear attention with a decay per channel and a delta-rule update.

| input | shape, dtype | |
|---|---|---|
| q, k, v, g | [B, T, H, 128] bf16 | g is the gate before its activation |
| beta | [B, T, H] bf16 | logits |
| A_log, dt_bias | [H], [H, 128] fp32 | the gate's parameters |
| initial_state | [N, H, V, K] bf16 or fp32 | may be left out: zeros |
| cu_seqlens | [N + 1] int64 or int32 | may be left out, then N = B; else B = 1 |

Sequence n has the tokens from cu_seqlens[n] up to cu_seqlens[n + 1]. All are contiguous and on one device. Parameters:
``scale`` (a finite number), ``lower_bound`` (from −5 to 5; both are rounded to the nearest of fp32) and
``final_state``, which is "bf16", "fp32" (like initial_state, if there is one) or None: the type of the state that is
asked for. Outputs: out [B, T, H, 128], bf16 (the model's in its own type), and final_state [N, H, V, K] if asked for.
It is an output only: what a caller's tensor held before has no influence.

Per head, with S [V, K], q̂ = q / √(Σq² + 1e-6), k̂ likewise, b = sigmoid(beta) and, per channel and in natural log,
γ = lower_bound · sigmoid(exp(A_log) · (g + dt_bias)):

    S ← S · diag(exp γ); S ← S + b (v − S k̂) k̂ᵀ; o = scale · S q̂

The model is this recurrence; the schedules ``chunk16`` and ``chunk16_scan…`` are docs/kda.md. A sequence without tokens
returns its state.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from reference.numerics import portable
from reference.numerics.formats import canonical_nan, to_bf16
from reference.numerics.ieee import add_rn, fma_rn, mul_rn, require_subnormals, sub_rn
from reference.numerics.mufu import ex2_approx_ftz, rcp_approx_ftz, rsqrt_approx_ftz
from reference.numerics.order import butterfly
from reference.numerics.tensor_core import mma

Tensors = dict[str, Tensor]
Params = Mapping[str, Any]

D = 128  # channels of keys (K) and of values (V)
CHUNK = 16
LANES = 32
EPS = 1e-6
LOG2_E = 1.4426950408889634
MAX_LOWER_BOUND = 5.0
SEGMENTS = (64, 416, 512)  # tokens
STATE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CPU_PREPARED_ELEMS, CUDA_PREPARED_ELEMS = 1 << 15, 1 << 25  # of one operand, prepared at a time: a CPU's cache

_BY_TOKEN = ("q", "k", "v", "g", "beta")
_REQUIRED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
_OPTIONAL = ("initial_state", "cu_seqlens")
_PARAMS = ("scale", "lower_bound", "final_state")


def check(inputs: Mapping[str, Tensor], params: Params) -> None:
    """ValueError, naming the argument, if inputs or parameters are outside the interface."""
    _check_names(inputs, params)
    q = inputs["q"]
    if q.dim() != 4 or q.shape[3] != D:
        raise ValueError(f"q: got shape {tuple(q.shape)}, allowed is [B, T, H, {D}]")
    batch, tokens, heads, _ = q.shape
    if batch < 1 or heads < 1:
        raise ValueError(f"q: got B = {batch} and H = {heads}, allowed are both from 1 on")
    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    _check_form("q", q, q, tuple(q.shape), bf16)
    for name in ("k", "v", "g"):
        _check_form(name, inputs[name], q, tuple(q.shape), bf16)
    _check_form("beta", inputs["beta"], q, (batch, tokens, heads), bf16)
    _check_form("A_log", inputs["A_log"], q, (heads,), fp32)
    _check_form("dt_bias", inputs["dt_bias"], q, (heads, D), fp32)
    if "cu_seqlens" in inputs:
        _check_offsets(inputs["cu_seqlens"], q)
    if "initial_state" in inputs:
        state = inputs["initial_state"]
        _check_form("initial_state", state, q, (len(offsets(inputs)) - 1, heads, D, D), tuple(STATE_DTYPES.values()))
        final = params["final_state"]
        if final is not None and STATE_DTYPES[final] != state.dtype:
            raise ValueError(f"final_state: got {final!r}, initial_state is {state.dtype}; both must have one dtype")


def _check_names(inputs: Mapping[str, Tensor], params: Params) -> None:
    missing = [name for name in _REQUIRED if name not in inputs]
    unknown = sorted(set(inputs) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        what = f"{', '.join(missing)} missing" if missing else f"got {', '.join(unknown)}"
        raise ValueError(f"inputs: {what}; kda takes {', '.join(_REQUIRED)} and perhaps {', '.join(_OPTIONAL)}")
    if set(params) != set(_PARAMS):
        raise ValueError(f"params: got {', '.join(sorted(params)) or 'none'}; kda takes {', '.join(_PARAMS)}")
    for name, limit in (("scale", torch.finfo(torch.float32).max), ("lower_bound", MAX_LOWER_BOUND)):
        x = params[name]
        number = isinstance(x, (int, float)) and not isinstance(x, bool)
        if not (number and -limit <= x <= limit):
            raise ValueError(f"{name}: got {x!r}, allowed is a number from {-limit:g} to {limit:g}")
    if params["final_state"] not in (None, *STATE_DTYPES):
        allowed = ", ".join(map(repr, STATE_DTYPES))
        raise ValueError(f"final_state: got {params['final_state']!r}, allowed are None, {allowed}")


def _check_form(name: str, x: Tensor, q: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {shape} (q has {tuple(q.shape)})")
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: got {x.dtype}, allowed is {' or '.join(str(dtype) for dtype in dtypes)}")
    if x.device != q.device:
        raise ValueError(f"{name}: is on {x.device}, q on {q.device}; all must be on one device")
    if not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")


def _check_offsets(cu_seqlens: Tensor, q: Tensor) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, allowed is [N + 1] with N from 1 on")
    _check_form("cu_seqlens", cu_seqlens, q, tuple(cu_seqlens.shape), (torch.int64, torch.int32))
    if q.shape[0] != 1:
        raise ValueError(f"q: got B = {q.shape[0]}, allowed with cu_seqlens is 1")
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != q.shape[1]:
        raise ValueError(f"cu_seqlens: goes from {values[0]} to {values[-1]}, allowed is from 0 to T = {q.shape[1]}")
    for n, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(f"cu_seqlens: decreases from {start} at {n} to {end}, allowed is never")


def offsets(inputs: Mapping[str, Tensor]) -> list[int]:
    """Where each sequence starts among the B · T tokens, and where the last one ends: N + 1 numbers."""
    if "cu_seqlens" in inputs:
        return inputs["cu_seqlens"].tolist()
    batch, tokens = inputs["q"].shape[:2]
    return [n * tokens for n in range(batch + 1)]


def _longest_first(starts: list[int]) -> list[int]:
    """The sequences by falling length: those with a token (or chunk) of an index are then the first few."""
    return sorted(range(len(starts) - 1), key=lambda n: starts[n] - starts[n + 1])


def _first_state(inputs: Mapping[str, Tensor], order: list[int], dtype: torch.dtype) -> Tensor:
    """[N, H, V, K] of the sequences in ``order``, a copy."""
    q = inputs["q"]
    if "initial_state" in inputs:
        return inputs["initial_state"].index_select(0, torch.tensor(order, device=q.device)).to(dtype)
    return torch.zeros(len(order), q.shape[2], D, D, dtype=dtype, device=q.device)


def _back(state: Tensor, order: list[int]) -> Tensor:
    """The state of the sequences in ``order``, put back in theirs."""
    places = torch.tensor(order, device=state.device)
    return torch.empty_like(state).index_copy_(0, places, state)


def model(inputs: Mapping[str, Tensor], params: Params, dtype: torch.dtype = torch.float32) -> Tensors:
    """The recurrence without a schedule: out and final_state (if asked for) in ``dtype``, fp32 or fp64 as oracle."""
    check(inputs, params)
    require_subnormals()
    q, k, v, g, beta = (inputs[name].to(dtype).flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))  # [B · T, H, …]
    one, eps, scale, bound = (
        torch.tensor(x, dtype=torch.float32, device=q.device).to(dtype)
        for x in (1.0, EPS, params["scale"], params["lower_bound"])
    )
    q, k = (x / portable.sqrt(portable.total(x * x) + eps)[..., None] for x in (q, k))
    rate = portable.exp(inputs["A_log"].to(dtype))[:, None]
    gate = bound * (one / (one + portable.exp(-(rate * (g + inputs["dt_bias"].to(dtype))))))
    decay = portable.exp(gate)
    b = one / (one + portable.exp(-beta))

    starts = offsets(inputs)
    order = _longest_first(starts)
    lengths = [starts[n + 1] - starts[n] for n in order]
    first = torch.tensor([starts[n] for n in order], device=q.device)
    state = _first_state(inputs, order, dtype)
    out = torch.empty_like(v)
    for step in range(lengths[0]):
        living = sum(length > step for length in lengths)
        token = first[:living] + step
        q_t, k_t, decay_t = (x.index_select(0, token)[:, :, None] for x in (q, k, decay))  # [living, H, 1, K]
        s = state[:living].mul_(decay_t)
        seen = portable.total(s * k_t)  # [living, H, V]
        u = b.index_select(0, token)[..., None] * (v.index_select(0, token) - seen)
        s.add_(u[..., None] * k_t)
        out.index_copy_(0, token, scale * portable.total(s * q_t))
    made = {"out": out.view(inputs["v"].shape)}
    if params["final_state"] is not None:
        made["final_state"] = _back(state, order)
    return {name: canonical_nan(x) if dtype == torch.float32 else x for name, x in made.items()}


def exact(inputs: Mapping[str, Tensor], params: Params, schedule: str) -> Tensors:
    """The outputs of a schedule, bit for bit. ValueError if it does not support the call."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, allowed are {', '.join(SCHEDULES)}")
    check(inputs, params)
    require_subnormals()
    return SCHEDULES[schedule](inputs, params)


def _chunk16(inputs: Mapping[str, Tensor], params: Params) -> Tensors:
    """Schedule ``chunk16`` of docs/kda.md, whose numbered roundings the comments name."""
    starts = offsets(inputs)
    order = _longest_first(starts)
    v = inputs["v"].flatten(0, 1)
    tokens, counts = _chunks([(starts[n], starts[n + 1]) for n in order], v.device)
    prepared = _prepare(inputs, params, tokens)

    state = _first_state(inputs, order, torch.float32)
    out = torch.empty_like(v)
    first = 0
    for living in counts:
        part = slice(first, first + living)
        s, o = _step(state[:living], {name: x[part] for name, x in prepared.items()}, _rows(v, tokens[part]))
        state[:living] = s
        used = tokens[part].flatten()
        inside = (used >= 0).nonzero().squeeze(1)
        out.index_copy_(0, used.index_select(0, inside), o.flatten(0, 1).index_select(0, inside))
        first += living
    made = {"out": out.view(inputs["v"].shape)}
    if params["final_state"] is not None:
        state = _back(state, order)
        made["final_state"] = to_bf16(state) if params["final_state"] == "bf16" else state
    return made


def _chunks(sequences: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """All chunks, the first of every sequence, then the second of those that have one, …

    sequences: (start, end) by falling length. Returns the tokens [chunks, 16], −1 beyond a sequence's end, and how many
    sequences have a first chunk, a second, …
    """
    bounds: list[tuple[int, int]] = []
    counts = []
    for step in range(0, max(end - start for start, end in sequences), CHUNK):
        living = [(start + step, end) for start, end in sequences if start + step < end]
        bounds += living
        counts.append(len(living))
    first, end = torch.tensor(bounds, dtype=torch.int64, device=device).view(-1, 2).split(1, 1)
    token = first + torch.arange(CHUNK, device=device)
    return torch.where(token < end, token, -1), counts


def _rows(x: Tensor, tokens: Tensor) -> Tensor:
    """x [B · T, H, …] of tokens [chunks, 16] as [chunks, 16, H, …]; 0 where there is no token."""
    rows = x.index_select(0, tokens.clamp(min=0).flatten()).unflatten(0, (-1, CHUNK))
    return torch.where(_inside(tokens, rows), rows, 0.0)


def _inside(tokens: Tensor, like: Tensor) -> Tensor:
    return (tokens >= 0).view(*tokens.shape, *[1] * (like.dim() - 2))


def _prepare(inputs: Mapping[str, Tensor], params: Params, tokens: Tensor) -> Tensors:
    """What a step needs of each chunk beside v: [chunks, H, …], in parts of bounded size."""
    heads = inputs["q"].shape[2]
    elems = CUDA_PREPARED_ELEMS if tokens.is_cuda else CPU_PREPARED_ELEMS
    parts = tokens.split(max(1, elems // (CHUNK * heads * D)))
    made = [_prepare_part(inputs, params, part) for part in parts]
    return {name: torch.cat([x[name] for x in made]) for name in made[0]}


def _prepare_part(inputs: Mapping[str, Tensor], params: Params, tokens: Tensor) -> Tensors:
    q, k, g, beta = (_rows(inputs[name].flatten(0, 1), tokens).to(torch.float32) for name in ("q", "k", "g", "beta"))
    eps, scale, log2e, lower_bound = (
        torch.tensor(x, dtype=torch.float32, device=q.device)
        for x in (EPS, params["scale"], LOG2_E, params["lower_bound"])
    )
    a = mul_rn(ex2_approx_ftz(mul_rn(inputs["A_log"], log2e)), -log2e)[:, None]
    bound = mul_rn(lower_bound, log2e)

    r_q, r_k = (rsqrt_approx_ftz(add_rn(_squares(x), eps))[..., None] for x in (q, k))  # 1, 2
    q, k = mul_rn(q, mul_rn(r_q, scale)), mul_rn(k, r_k)
    gate = mul_rn(bound, _sigmoid(mul_rn(a, add_rn(g, inputs["dt_bias"]))))  # 3
    b = _sigmoid(mul_rn(beta, -log2e))  # 6
    q, k, gate, b = (
        torch.where(_inside(tokens, x), x, 0.0).transpose(1, 2) for x in (q, k, gate, b)
    )  # [chunks, H, 16, …]

    total = torch.stack(list(_running_sums(gate)), 2)
    up, down = ex2_approx_ftz(total), ex2_approx_ftz(-total)  # 4
    decay = up[:, :, -1]
    k_up, q_up, k_down = to_bf16(mul_rn(k, up)), to_bf16(mul_rn(q, up)), mul_rn(k, down)  # 5
    k_end = mul_rn(k_down, decay[:, :, None])
    k_low, k_high = _two_parts(k_end)

    scored = _by_block(*_two_parts(k_down))
    position = torch.arange(CHUNK, device=q.device)
    before = position[:, None] > position
    lower = torch.where(before, mul_rn(b[..., None], mma(_by_block(k_up, k_up), scored)), 0.0)  # 7, 8
    scores = torch.where(before | (position[:, None] == position), to_bf16(mma(_by_block(q_up, q_up), scored)), 0.0)
    made = {"k_up": k_up, "q_up": q_up, "k_high": k_high, "k_low": k_low, "decay": decay}
    return made | {"t": _inverse(lower), "b": b, "p": scores}


def _two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high part in bf16 of fp32."""
    high = to_bf16(x)
    return to_bf16(sub_rn(x, high.to(torch.float32))), high


def _by_block(first: Tensor, second: Tensor) -> Tensor:
    """[…, 256] of two […, 128]: 16 channels of the first, the same 16 of the second, …"""
    return torch.stack([x.unflatten(-1, (-1, CHUNK)) for x in (first, second)], -2).flatten(-3)


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + 2^x)."""
    return rcp_approx_ftz(add_rn(torch.ones_like(x), ex2_approx_ftz(x)))


def _squares(x: Tensor) -> Tensor:
    """Σ of squares of […, 128]: two channels a thread, two warps."""
    pairs = x.unflatten(-1, (2, LANES, 2))
    even, odd = pairs.unbind(-1)
    warps = butterfly(fma_rn(odd, odd, mul_rn(even, even)), (16, 8, 4, 2, 1))[..., 0]
    return add_rn(warps[..., 0], warps[..., 1])


def _running_sums(gate: Tensor) -> Iterator[Tensor]:
    """G of each token of [chunks, H, 16, 128]."""
    total, *rest = gate.unbind(2)
    yield total
    for x in rest:
        total = add_rn(total, x)
        yield total


def _identity(size: int, device: torch.device) -> Tensor:
    position = torch.arange(size, device=device)
    return (position[:, None] == position).to(torch.float32)


def _inverse(lower: Tensor) -> Tensor:
    """T = (I + L)⁻¹ by substitution, bf16 […, 16, 16]: row i takes the rows l < i in ascending order."""
    t = _identity(CHUNK, lower.device).expand_as(lower).clone()
    for l in range(CHUNK - 1):
        t[..., l + 1 :, :] = fma_rn(-lower[..., l + 1 :, l, None], t[..., l, None, :], t[..., l + 1 :, :])
    return to_bf16(t)


def _step(state: Tensor, x: Tensors, v: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of some sequences: state [n, H, V, K] fp32, ``x`` of _prepare, v [n, 16, H, V]; the next state, and out
    [n, 16, H, V]."""
    s = to_bf16(state)
    halves = (y.unflatten(-1, (2, -1)).movedim(-2, 0) for y in (s, x["k_up"]))  # [2, n, H, …, 64]
    low, high = mma(*halves)
    rest = sub_rn(v.to(torch.float32).permute(0, 2, 3, 1), add_rn(low, high))
    r = to_bf16(mul_rn(x["b"][:, :, None], rest))  # 9: [n, H, V, 16]
    u = to_bf16(mma(r, x["t"]))  # 10
    o = to_bf16(mma(u, x["p"], mma(s, x["q_up"])))  # 11
    return _update(state, u, x), o.permute(0, 3, 1, 2)


def _update(state: Tensor, u: Tensor, x: Tensors) -> Tensor:
    """The next state from U [n, H, V, 16]."""
    state = mul_rn(state, x["decay"][:, :, None])  # 12
    for k_end in (x["k_low"], x["k_high"]):
        state = mma(u, k_end.transpose(-1, -2), state)
    return state


def _scan(inputs: Mapping[str, Tensor], params: Params, segment: int) -> Tensors:
    """Schedules ``chunk16_scan…`` of docs/kda.md: chunk16 on segments of so many tokens, and a scan between."""
    starts = offsets(inputs)
    edges = [list(range(a, max(b, a + 1), segment)) for a, b in pairwise(starts)]  # a segment if there are no tokens
    rows = {name: inputs[name].flatten(0, 1)[None] for name in _BY_TOKEN}
    shared = {name: inputs[name] for name in ("A_log", "dt_bias")}
    fp32 = dict(params, final_state="fp32")
    firsts = _first_states(inputs, edges, _operators(rows, shared, fp32, edges, segment))

    ends = torch.tensor([a for own in edges for a in own] + starts[-1:], device=inputs["q"].device)
    made = _chunk16(rows | shared | {"initial_state": firsts, "cu_seqlens": ends}, fp32)
    outputs = {"out": made["out"].view(inputs["v"].shape)}
    if params["final_state"] is not None:
        last = torch.tensor([len(own) for own in edges], device=ends.device).cumsum(0) - 1
        state = made["final_state"].index_select(0, last)
        outputs["final_state"] = to_bf16(state) if params["final_state"] == "bf16" else state
    return outputs


def _operators(
    rows: Tensors, shared: Tensors, params: Params, edges: list[list[int]], segment: int
) -> tuple[Tensor, Tensor]:
    """C and M [n, H, V, K] of all segments that have a successor, sequence after sequence."""
    device, heads = rows["q"].device, rows["q"].shape[2]
    begin = torch.tensor([a for own in edges for a in own[:-1]], dtype=torch.int64, device=device)
    token = (begin[:, None] + torch.arange(segment, device=device)).flatten()
    part = shared | {name: x[0].index_select(0, token).unflatten(0, (-1, segment)) for name, x in rows.items()}
    if not len(begin):
        return (torch.zeros(0, heads, D, D, device=device),) * 2
    unit = _identity(D, device).expand(len(begin), heads, -1, -1).contiguous()
    sources = (part, part | {"v": torch.zeros_like(part["v"]), "initial_state": unit})
    c, m = (_chunk16(x, params)["final_state"] for x in sources)
    return c, m


def _first_states(inputs: Mapping[str, Tensor], edges: list[list[int]], operators: tuple[Tensor, Tensor]) -> Tensor:
    """S of all segments [n, H, V, K]: a sequence's first state, then S · M + C of the segment before."""
    state = _first_state(inputs, list(range(len(edges))), torch.float32)
    counts = torch.tensor([len(own) for own in edges], device=state.device)
    place = counts.cumsum(0) - counts  # of a sequence's first segment
    slot = place - torch.arange(len(edges), device=state.device)  # of its first operators: one less a sequence before
    firsts = torch.empty(sum(map(len, edges)), *state.shape[1:], device=state.device)
    firsts.index_copy_(0, place, state)
    for j in range(1, max(map(len, edges))):
        living = (counts > j).nonzero().squeeze(1)
        c, m = (x.index_select(0, slot.index_select(0, living) + (j - 1)) for x in operators)
        before = firsts.index_select(0, place.index_select(0, living) + (j - 1))
        for k in range(D):
            c = fma_rn(before[..., k, None], m[..., k, None, :], c)
        firsts.index_copy_(0, place.index_select(0, living) + j, c)
    return firsts


SCHEDULES: dict[str, Callable[[Mapping[str, Tensor], Params], Tensors]] = {
    "chunk16": _chunk16,
    **{f"chunk16_scan{segment}": partial(_scan, segment=segment) for segment in SEGMENTS},
}
