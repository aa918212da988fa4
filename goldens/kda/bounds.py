"""How far KDA's outputs may be from the oracle's, for the model and for each schedule: derived, element by element."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goldens.case import Tensors
from goldens.kda.undecided import undecided
from reference import kda as reference

D, CHUNK = reference.D, reference.CHUNK

# One step maps a row s of S to s·diag(decay)·(I − b k̂ k̂ᵀ) + …, and b ≤ 1, |k̂| ≤ 1: in the 2-norm over K no error of a
# row grows by more than the largest decay. So a row's error e (2-norm) becomes at most d·e + |what the step adds|, d
# being the product of the tokens' largest decays; an output errs by what its own sums add, and by |scale q̂|·d·e.
# What a step adds is bounded element by element from the oracle's values, each kept apart from its error. The
# schedule's own S differs from the oracle's by up to e: Σ|S|·w over K becomes Σ|S|·w + e·|w|, w's 2-norm.
# Roundings are U = 2^-24 (fp32) and B = 2^-8 (bf16), half an ULP of 1, plus 2^-149 or 2^-134 below the normal ranges.
# In units of U:
#   norm: half of the sum's (model: a product, 7 halvings, eps; chunk16: 2, 5 + 1, eps), its root (rsqrt.approx: 3), a
#         quotient or a product, and one with scale
#   gate: of its argument x 3 (chunk16: 2|A_log| for log2e times it, 8 more), which sigmoid passes on times
#         x(1 − sigmoid); of exp 2 (ex2.approx 4) times (1 − sigmoid); sum, quotient (rcp.approx: 2), product with the
#         bound (chunk16: log2e itself and its product too)
#   b:    of sigmoid as for the gate, of its argument 1 (chunk16: 2, log2e itself and the product)
#   mma:  one cuts 17 terms to multiples of 2^(E − 25) and the sum to fp32: 17/2 + 2 units of Σ|terms|
# With T = (I + L)⁻¹ and X = |T|·|δL|, an error of L moves T by at most (I − X)⁻¹ X |T|, whatever its size, as X is
# strictly lower triangular. Substitution itself is a relative error of 17 units in L; T's diagonal is exactly 1.

_U, _B = 2.0**-24, 2.0**-8
_LEAST, _LEAST_BF16, _SMALLEST_NORMAL = 2.0**-149, 2.0**-134, 2.0**-126
_MMA = 17 / 2 + 2
_NORM = {"model": 8, "chunk16": 10}


class _Activated(NamedTuple):
    """The oracle's values of one sequence, [T, H, …] fp64: q has scale in it, the gate is in natural log; and the
    absolute errors of gate and b."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    b: Tensor
    gate_error: Tensor
    b_error: Tensor


def _activated(x: Mapping[str, Tensor], params: Mapping[str, Any], part: slice, schedule: str) -> _Activated:
    q, k, v, g, beta = (x[n].flatten(0, 1)[part].to(torch.float64) for n in ("q", "k", "v", "g", "beta"))
    a_log, dt_bias = (x[n].to(torch.float64) for n in ("A_log", "dt_bias"))
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + reference.EPS) for y in (q, k))
    scale, lower_bound = (float(torch.tensor(params[n], dtype=torch.float32)) for n in ("scale", "lower_bound"))
    argument = torch.exp(a_log)[:, None] * (g + dt_bias)
    open_, b = torch.sigmoid(argument), torch.sigmoid(beta)
    of_beta, of_exp, rest = (1.0, 2.0, 4.0) if schedule == "model" else (2.0, 4.0, 7.0)
    of_argument = torch.full_like(a_log, 3.0) if schedule == "model" else 8.0 + 2 * a_log.abs()
    gate = lower_bound * open_
    # Beyond ±1000 the sigmoid is 0 or 1 to the last bit, and what its argument errs by is nothing.
    moved = (of_argument[:, None] * argument.abs().clamp(max=1000.0) + of_exp) * (1 - open_) + rest
    gate_error = 1.01 * _U * moved * gate.abs() + 8 * _SMALLEST_NORMAL
    b_moved = (of_beta * beta.abs().clamp(max=1000.0) + of_exp) * (1 - b) + rest
    return _Activated(q * scale, k, v, gate, b, gate_error, 1.01 * _U * b_moved * b + _SMALLEST_NORMAL)


def _model_bound(x: _Activated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on out [T, H, V] and on the rows of the last state [H, V], from the first state [H, V, K]."""
    norm = _NORM["model"]
    error = torch.zeros(state.shape[:2], dtype=torch.float64)
    out = torch.empty(x.v.shape, dtype=torch.float64)
    for t, decay in enumerate(x.gate.exp()):
        k, q = x.k[t][:, None], x.q[t][:, None]
        state = state * decay[:, None]
        bar = state.abs() + error[..., None]
        own = bar * (x.gate_error[t] + 3 * _U)[:, None]
        seen_error = (bar * k.abs()).sum(-1) * (norm + 8) * _U + (own * k.abs()).sum(-1)
        rest, b = x.v[t] - (state * k).sum(-1), x.b[t][:, None]
        u, bar_u = b * rest, b * (rest.abs() + error)
        u_error = b * seen_error + bar_u * 3 * _U + x.b_error[t][:, None] * (rest.abs() + error + seen_error)
        state = state + u[..., None] * k
        own = (
            own
            + (u_error[..., None] + bar_u[..., None] * (norm + 1) * _U) * k.abs()
            + (state.abs() + error[..., None]) * _U
        )
        error = decay.amax(-1, keepdim=True) * error + torch.linalg.vector_norm(own + 4 * _LEAST, dim=-1)
        length = torch.linalg.vector_norm(x.q[t], dim=-1, keepdim=True)
        out[t] = length * error + ((state.abs() + error[..., None]) * q.abs()).sum(-1) * (norm + 10) * _U + D * _LEAST
    return 1.01 * out, 1.01 * error


def _product(a: Tensor, a_error: Tensor, b: Tensor, b_error: Tensor, instructions: int) -> Tensor:
    """|error| of a · bᵀ by a chain of mma: |a| […, M, K] and |b| […, N, K] with their errors."""
    a_all, b_all = a + a_error, (b + b_error).transpose(-1, -2)
    moved = a_error @ b_all + a @ b_error.transpose(-1, -2)
    return moved + 1.01 * _U * _MMA * instructions * (a_all @ b_all) + a.shape[-1] * _LEAST


def _state_product(state: Tensor, far: Tensor, b: Tensor, b_error: Tensor, instructions: int) -> Tensor:
    """|error| of bf16(S) · bᵀ: |S| [H, V, K] of the oracle, ``far`` [H, V, 1] from it, and |b| [H, N, K]."""
    w = _B * b + (1.0 + _B) * (b_error + 1.01 * _U * _MMA * instructions * (b + b_error))
    all_b = (b + b_error).sum(-1)[:, None] * _LEAST_BF16
    return state @ w.transpose(-1, -2) + far * torch.linalg.vector_norm(w, dim=-1)[:, None] + all_b + D * _LEAST


def _to_bf16(x: Tensor, error: Tensor) -> Tensor:
    """|error| after rounding to bf16 of |x| that has ``error``."""
    return error + _B * (x + error) + _LEAST_BF16


def _to_two_parts(x: Tensor, error: Tensor) -> Tensor:
    """|error| of a sum of two bf16 parts: what is left over is exact in fp32."""
    return error + _to_bf16(_B * (x + error) + _LEAST_BF16, torch.zeros_like(x))


def _chunked(x: Tensor) -> Tensor:
    """[T, H, …] to [chunks, H, 16, …], zeros at the end."""
    padding = x.new_zeros(-len(x) % CHUNK, *x.shape[1:])
    return torch.cat([x, padding]).unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _chunk16_bound(sequence: _Activated, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on out [T, H, V] and on the rows of the last state [H, V], from the first state [H, V, K]."""
    out, error, _ = _chunks_bound(sequence, state, torch.zeros(state.shape[:2], dtype=torch.float64))
    return 1.01 * out, 1.01 * error


def _chunks_bound(sequence: _Activated, state: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, not enlarged, from a first state whose rows have an error [H, V]; and the oracle's last state."""
    norm = _NORM["chunk16"] * _U
    x = _Activated(*(_chunked(y) for y in sequence))
    total = x.gate.cumsum(2)
    off = x.gate_error.cumsum(2) + 17 * _U * x.gate.abs().cumsum(2) + 5 * _U  # relative errors of E⁺ and E⁻
    end, end_off = total[:, :, -1:], off[:, :, -1:]
    k_up, q_up, k_down, k_end = x.k * total.exp(), x.q * total.exp(), x.k * (-total).exp(), x.k * (end - total).exp()
    bars = [y.abs() for y in (k_up, q_up, k_down, k_end)]
    errors = [_to_bf16(bar, bar * (norm + off) + _LEAST) for bar in bars[:2]]
    errors.append(_to_two_parts(bars[2], bars[2] * (norm + off) + _LEAST))
    errors.append(_to_two_parts(bars[3], bars[3] * (norm + off + end_off) + _LEAST * end.exp()))

    lower = (x.b[..., None] * (k_up @ k_down.transpose(-1, -2))).tril(-1)
    bar = (k_up @ k_down.transpose(-1, -2)).abs()
    bar_error = _product(bars[0], errors[0], bars[2], errors[2], 16)
    lower_error = (x.b + x.b_error)[..., None] * bar_error + x.b_error[..., None] * bar + _LEAST
    lower_error = (lower_error + 18 * _U * (lower.abs() + lower_error)).tril(-1)
    identity = torch.eye(CHUNK, dtype=torch.float64)
    t = torch.linalg.solve_triangular(identity + lower, identity.expand_as(lower), upper=False)
    moved = t.abs() @ lower_error  # X
    t_error = torch.linalg.solve_triangular(identity - moved, moved @ t.abs(), upper=False)
    t_error = _to_bf16(t.abs(), t_error).tril(-1)
    p = (q_up @ k_down.transpose(-1, -2)).tril()
    p_error = _to_bf16(p.abs(), _product(bars[1], errors[1], bars[2], errors[2], 16)).tril()

    largest = x.gate.amax(-1).cumsum(2).exp()  # [chunks, H, 16]
    b_k_up = x.b[..., None] * k_up
    k_length, u_length, q_length = (torch.linalg.vector_norm(y, dim=-1) for y in (k_up, t @ b_k_up, x.q))
    out = []
    for c in range(len(total)):
        far = error[..., None]
        bar_s = state.abs()
        rest = x.v[c].transpose(-1, -2) - state @ k_up[c].transpose(-1, -2)  # [H, V, 16]
        b, b_error = x.b[c][:, None], x.b_error[c][:, None]
        r = b * rest
        u = r @ t[c].transpose(-1, -2)
        bar_rest, bar_u = rest.abs() + far * k_length[c][:, None], u.abs() + far * u_length[c][:, None]
        rest_error = _state_product(bar_s, far, bars[0][c], errors[0][c], 9) + 2 * _U * bar_rest
        bar_r = b * bar_rest
        r_error = (b + b_error) * rest_error + b_error * bar_rest
        r_error = _to_bf16(bar_r, r_error + 2 * _U * (bar_r + r_error) + _LEAST)
        u_error = _to_bf16(bar_u, _product(bar_r, r_error, t[c].abs(), t_error[c], 1))
        o_error = _state_product(bar_s, far, bars[1][c], errors[1][c], 9)
        o_error = o_error + _product(bar_u, u_error, p[c].abs(), p_error[c], 1)
        out.append((o_error + far * (largest[c] * q_length[c])[:, None]).permute(2, 0, 1))
        end_bars, end_errors = (y[3][c].transpose(-1, -2) for y in (bars, errors))
        own = _product(bar_u, u_error, end_bars, end_errors, 2)
        own = own + (bar_s + far) * (end[c].exp() * (end_off[c] + (2 * _MMA + 1) * _U)) + _LEAST
        state = state * end[c].exp() + u @ k_end[c]
        error = largest[c][:, -1:] * error + torch.linalg.vector_norm(own, dim=-1)
    errors_out = torch.cat(out)[: len(sequence.v)] if out else sequence.v
    return errors_out, error, state


def _scan_bound(sequence: _Activated, state: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """As ``_chunk16_bound``, for a scan over segments.

    With errors (2-norms of rows over K) e of S, c of C and m of M, S · M + C errs by d · e, d being the segment's
    product of largest decays, by Σ_k |S_k| m_k + e · |m|, by c, and by what 128 roundings of Σ|S_k||M_k| + |C| add.
    S, M and C themselves are the oracle's.
    """
    first = torch.zeros(state.shape[:2], dtype=torch.float64)
    outs = []
    for begin in range(0, max(len(sequence.v), 1), segment):
        part = _Activated(*(x[begin : begin + segment] for x in sequence))
        out, error, last = _chunks_bound(part, state, first)
        outs.append(out)
        if begin + segment < len(sequence.v):
            first = _carried_error(part, state, first)
            state = last
    return 1.01 * torch.cat(outs), 1.01 * error


def _carried_error(part: _Activated, state: Tensor, error: Tensor) -> Tensor:
    """Of the rows of S · M + C [H, V], from the oracle's S and its error."""
    none = torch.zeros_like(error)
    _, c_error, c = _chunks_bound(part, torch.zeros_like(state), none)
    _, m_error, m = _chunks_bound(
        part._replace(v=torch.zeros_like(part.v)), torch.eye(D).to(state).expand_as(state), none
    )
    c_error, m_error = 1.01 * c_error, 1.01 * m_error
    decay = part.gate.amax(-1).sum(0).exp()[:, None]
    m_all = torch.linalg.vector_norm(m, dim=-1) + m_error
    products = (state.abs() @ m_all[..., None])[..., 0] + error * torch.linalg.vector_norm(m_all, dim=-1, keepdim=True)
    rounded = D * _U * (products + torch.linalg.vector_norm(c, dim=-1) + c_error) + D * D * _LEAST
    moved = (state.abs() @ m_error[..., None])[..., 0] + error * torch.linalg.vector_norm(m_error, dim=-1, keepdim=True)
    return 1.01 * (decay * error + moved + c_error + rounded)


_BOUNDS: dict[str, Callable[[_Activated, Tensor], tuple[Tensor, Tensor]]] = {
    "model": _model_bound,
    "chunk16": _chunk16_bound,
    **{f"chunk16_scan{segment}": partial(_scan_bound, segment=segment) for segment in reference.SEGMENTS},
}


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |out − oracle| and |final_state − oracle| before they are rounded to their formats; infinite where
    the oracle does not decide (``goldens.kda.undecided``)."""
    if schedule not in _BOUNDS:
        raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {', '.join(_BOUNDS)}")
    starts, heads = reference.offsets(tensors), tensors["q"].shape[2]
    states = tensors.get("initial_state", torch.zeros(len(starts) - 1, heads, D, D)).to(torch.float64)
    out, rows = [], []
    for start, end, state in zip(starts, starts[1:], states, strict=False):
        made = _BOUNDS[schedule](_activated(tensors, params, slice(start, end), schedule), state)
        out.append(made[0])
        rows.append(made[1])
    result = {"out": torch.cat(out).view(tensors["v"].shape)}
    if params["final_state"] is not None:
        result["final_state"] = torch.stack(rows)[..., None].expand(states.shape).contiguous()
    left_out = undecided(tensors)
    return {name: torch.where(left_out[name], torch.inf, x) for name, x in result.items()}
