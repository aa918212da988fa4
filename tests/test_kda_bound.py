"""KDA's derived bounds, as candidates of no schedule meet them: legal kernels of other forms are within them,
kernels that keep, read or decay the state wrongly do not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import store
from goldens.judge import judge, select
from reference import kda as reference
from reference.numerics.formats import to_bf16

KERNEL = goldens.KERNELS["kda"]
JUDGED = [case for case in KERNEL.cases if case.committed and case.exact_only is None]
D, SUB = 128, 16
Tensors = dict[str, Tensor]


def same(x: Tensor) -> Tensor:
    return x


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(torch.float32)


def in_bf16(x: Tensor) -> Tensor:
    return to_bf16(x).to(torch.float32)


def in_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)


def by_tanh(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5


def by_root(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_reciprocal_root(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Form:
    """A chunked kernel in fp32 but for its operands.

    apart: T · diag(b) V and T · diag(b) K⁺ are rounded each for itself, as flash-linear-attention does, and not U's
    right side. The others are what may be wrong: kept, the state between chunks; gated, the gate; seen, S · k̂; first,
    the states that sequences begin with; delayed, decays that are the next token's.
    """

    chunk: int = 64
    operand: Callable[[Tensor], Tensor] = in_bf16
    apart: bool = False
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    norm: Callable[[Tensor], Tensor] = by_reciprocal_root
    kept: Callable[[Tensor], Tensor] = same
    gated: Callable[[Tensor], Tensor] = same
    seen: Callable[[Tensor], Tensor] = same
    first: Callable[[Tensor], Tensor] = same
    delayed: bool = False

    def __call__(self, inputs: Tensors, params: Any) -> Tensors:
        q, k, v, g, beta = (inputs[n].flatten(0, 1).float().transpose(0, 1) for n in ("q", "k", "v", "g", "beta"))
        rate = inputs["A_log"].exp()[:, None, None]
        gate = self.gated(params["lower_bound"] * self.sigmoid(rate * (g + inputs["dt_bias"][:, None])))
        if self.delayed:
            gate = torch.cat([gate[:, 1:], gate[:, -1:]], 1)
        tokens = (self.norm(q) * params["scale"], self.norm(k), v, gate, self.sigmoid(beta))
        starts = reference.offsets(inputs)
        states = self.first(inputs.get("initial_state", torch.zeros(len(starts) - 1, q.shape[0], D, D)).float())
        outs, finals = [], []
        for state, (start, end) in zip(states, pairwise(starts), strict=True):
            for at in range(start, end, self.chunk):
                part = [x[:, at : min(end, at + self.chunk)] for x in tokens]
                out, state = self._chunk(*part, state)
                outs.append(out)
                state = self.kept(state) if at + self.chunk < end else state
            finals.append(state)
        made = {"out": to_bf16(torch.cat(outs, 1).transpose(0, 1)).view(inputs["v"].shape)}
        if params["final_state"] is not None:
            final = torch.stack(finals)
            made["final_state"] = to_bf16(final) if params["final_state"] == "bf16" else final
        return made

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """[H, tokens, …] and the state [H, V, K]: out [H, tokens, V] and the next state."""
        total, operand, b = gate.cumsum(1), self.operand, b[..., None]
        k_up, q_up, k_end = k * total.exp(), q * total.exp(), k * (total[:, -1:] - total).exp()
        lower = b * self._scores(k, k, total).tril(-1)
        identity = torch.eye(k.shape[1]).expand_as(lower)
        t = torch.linalg.solve_triangular(identity + lower, identity, upper=False)
        read = operand(s).mT
        if self.apart:
            t = operand(t * b.mT)
            u = operand(operand(t @ operand(v)) - operand(t @ operand(k_up)) @ read)
        else:
            u = operand(operand(t) @ operand(b * (v - self.seen(operand(k_up) @ read))))
        out = operand(q_up) @ read + operand(self._scores(q, k, total).tril()) @ u
        return out, s * total[:, -1].exp()[:, None] + u.mT @ operand(k_end)

    def _scores(self, a: Tensor, k: Tensor, total: Tensor) -> Tensor:
        """Σ a_i k_j e^(G_i − G_j) over channels, 16 rows at a time, each part from the decay at these rows' begin."""
        made = torch.zeros(a.shape[0], a.shape[1], a.shape[1])
        for i in range(0, a.shape[1], SUB):
            rows, before = slice(i, i + SUB), slice(0, i + SUB)
            from_here = total[:, i - 1 : i] if i else torch.zeros_like(total[:, :1])
            up = self.operand(a[:, rows] * (total[:, rows] - from_here).exp())
            made[:, rows, before] = up @ self.operand(k[:, before] * (from_here - total[:, before]).exp()).mT
        return made


def one_behind_reads_its_neighbour(inputs: Tensors, params: Any) -> Tensors:
    """A sequence of one token begins with the last state of the one before."""
    made = RIGHT(inputs, params | {"final_state": "fp32"})
    starts = reference.offsets(inputs)
    first = inputs.get("initial_state", torch.zeros_like(made["final_state"])).clone()
    for n, (start, end) in enumerate(pairwise(starts)):
        if n and end - start == 1:
            first[n] = made["final_state"][n - 1].to(first.dtype)
    return RIGHT(inputs | {"initial_state": first}, params)


RIGHT = Form(16)
LEGAL: dict[str, Callable[[Tensors, Any], Tensors]] = {
    "recurrence": lambda x, p: {n: y if n != "out" else to_bf16(y) for n, y in narrowed(reference.model(x, p), p)},
    "chunk-16": RIGHT,
    "chunk-32": Form(32),
    "chunk-64": Form(64),
    "chunk-32-fp32": Form(32, same, norm=by_root),
    "chunk-64-fp32": Form(64, same),
    "as-flash-linear-attention": Form(64, apart=True, norm=by_reciprocal_root),
    "as-flash-kda": Form(16, apart=True, sigmoid=by_tanh, norm=by_root),
}
WRONG: dict[str, Callable[[Tensors, Any], Tensors]] = {
    **{
        f"state-in-{name}-every-{chunk}": Form(chunk, kept=kept)
        for chunk in (16, 64)
        for name, kept in (("bf16", in_bf16), ("fp16", through(torch.float16)), ("e4m3", in_e4m3))
    },
    "gate-in-bf16": Form(64, gated=in_bf16),
    "seen-in-bf16": Form(16, seen=in_bf16),
    "decay-of-the-next-token": Form(64, delayed=True),
    "first-states-rolled": Form(64, first=lambda s: s.roll(1, 0)),
    "first-states-of-head-0": Form(64, first=lambda s: s[:, :1].expand_as(s)),
    "one-behind-reads-its-neighbour": one_behind_reads_its_neighbour,
}


def narrowed(made: Tensors, params: Any) -> Iterator[tuple[str, Tensor]]:
    for name, x in made.items():
        yield name, to_bf16(x) if name == "final_state" and params["final_state"] == "bf16" else x


@pytest.fixture(scope="module")
def stored() -> dict[str, tuple[goldens.Case, Tensors, goldens.case.Kernel]]:
    """Each judged case, its golden, and the kernel with bounds and oracle of this case, made once."""
    manifest, made = store.read_manifest(), {}
    for case in JUDGED:
        golden = store.load(case, manifest)
        made[case.id] = (case, golden, kept(case, golden))
    return made


def kept(case: goldens.Case, golden: Tensors) -> goldens.case.Kernel:
    inputs, whose = select(golden, "in/"), ("model", *reference.SCHEDULES)
    bounds = {who: KERNEL.bound(inputs, case.params, who) for who in whose}
    oracle = reference.model(inputs, case.params, torch.float64)

    class Once:
        SCHEDULES = reference.SCHEDULES
        model = staticmethod(lambda *_: oracle)

    return replace(KERNEL, reference=Once, bound=lambda _, __, who: bounds[who])


def refusing(stored: dict, candidate: Callable[[Tensors, Any], Tensors]) -> list[str]:
    """The judged cases of which a candidate has elements beyond their bound."""
    failed = []
    for case, golden, kernel in stored.values():
        outputs = candidate({n: x.clone() for n, x in select(golden, "in/").items()}, dict(case.params))
        if any(verdict.failing for verdict in judge(kernel, case, golden, outputs, None)):
            failed.append(case.name)
    return failed


@pytest.mark.parametrize("candidate", LEGAL.values(), ids=LEGAL)
def test_a_legal_kernel_of_another_form_is_within_the_bound_of_every_judged_case(
    stored: dict, candidate: Callable
) -> None:
    assert refusing(stored, candidate) == []


@pytest.mark.parametrize("candidate", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_exceeds_the_bound(stored: dict, candidate: Callable) -> None:
    assert refusing(stored, candidate) != []
