"""``reference.kda``: the model against a naive recurrence, chunk16 against its page, both against literals.

Tolerances are ``goldens.kda.bound``, the derived ones, or measured relative errors (docs/kda.md) with a margin of a
quarter, where the worst case says nothing.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import goldens
from goldens import inputs as draw
from goldens import kda as room
from goldens import store
from goldens.compare import against_exact
from goldens.judge import judge, select
from reference import kda as kernel
from reference.kda import exact, model
from reference.numerics import ulp
from reference.numerics.formats import to_bf16
from reference.numerics.mufu import ex2_approx_ftz, rcp_approx_ftz, rsqrt_approx_ftz
from reference.numerics.order import butterfly
from reference.numerics.tensor_core import FORMS, Form, fused_sum, mma

KERNEL = goldens.KERNELS["kda"]
COMMITTED = [case for case in KERNEL.cases if case.committed]
BF16 = torch.bfloat16
D = 128
SCALE = room.SCALE
TORCH = {"bf16": BF16, "fp32": torch.float32}


def params(final: str | None = "fp32", lower_bound: float = -5.0, scale: float = SCALE) -> dict[str, Any]:
    return {"scale": scale, "lower_bound": lower_bound, "final_state": final}


def call(tokens: int, heads: int = 1, values: str = "normal", *, batch: int = 1, **more: Tensor) -> dict[str, Tensor]:
    """Inputs by a recipe of the goldens, with states or offsets of the test's."""
    return room.RECIPES[values].values(f"test_kda/{values}", (batch, tokens, heads)) | more


def states(count: int, heads: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    x = draw.normal("test_kda/state", (count, heads, D, D))
    return to_bf16(x) if dtype == BF16 else x


def cu(*offsets: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(offsets, dtype=dtype)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for name, x in want.items():
        # A verdict on nothing is a failure.
        assert against_exact(name, got[name], x).passed if x.numel() else got[name].shape == x.shape, name


def relative(got: Tensor, want: Tensor) -> float:
    """RMS of the error over the RMS of what is wanted."""
    return float(((got.double() - want) ** 2).mean().sqrt() / (want**2).mean().sqrt())


# Mathematics.


def naive(x: dict[str, Tensor], p: dict[str, Any]) -> dict[str, Tensor]:
    """The recurrence in fp64 with torch's own functions, one sequence, head and token after the other."""
    wide = {n: t.double() for n, t in x.items() if n != "cu_seqlens"}
    out, final = torch.zeros_like(wide["v"]), []
    for n, (start, end) in enumerate(sequences(x)):
        for h in range(x["q"].shape[2]):
            s = wide["initial_state"][n, h] if "initial_state" in x else torch.zeros(D, D, dtype=torch.float64)
            for at in range(start, end):
                i = divmod(at, x["q"].shape[1])
                q, k, v, g = (wide[name][i][h] for name in ("q", "k", "v", "g"))
                q, k = (y / torch.sqrt(y @ y + 1e-6) for y in (q, k))
                gate = p["lower_bound"] * torch.sigmoid(torch.exp(wide["A_log"][h]) * (g + wide["dt_bias"][h]))
                s = s @ torch.diag(torch.exp(gate))
                s = s + torch.sigmoid(wide["beta"][i][h]) * torch.outer(v - s @ k, k)
                out[i][h] = p["scale"] * s @ q
            final.append(s)
    return {"out": out, "final_state": torch.stack(final).view(-1, x["q"].shape[2], D, D)}


def sequences(x: dict[str, Tensor]) -> list[tuple[int, int]]:
    if "cu_seqlens" in x:
        ends = x["cu_seqlens"].tolist()
        return list(pairwise(ends))
    batch, tokens = x["q"].shape[:2]
    return [(n * tokens, (n + 1) * tokens) for n in range(batch)]


NAIVE = {
    "two-heads": (call(19, 2), params()),
    "batch": (call(5, 2, batch=3, initial_state=states(3, 2)), params(lower_bound=-1.0)),
    "packed": (call(9, 1, cu_seqlens=cu(0, 2, 2, 9), initial_state=states(3, 1, BF16)), params("bf16", scale=1.0)),
    "growing": (call(7, 1), params(lower_bound=0.1)),
    "saturated": (call(12, 1, "saturated"), params()),
    "faint": (call(4, 1, "faint"), params(lower_bound=0.0)),
}


@pytest.mark.parametrize(("x", "p"), NAIVE.values(), ids=NAIVE)
def test_oracle_against_a_naive_recurrence(x: dict[str, Tensor], p: dict[str, Any]) -> None:
    got, want = model(x, p, torch.float64), naive(x, p)
    for name in ("out", "final_state"):
        assert got[name].dtype == torch.float64
        assert relative(got[name], want[name]) < 1e-7  # scale and 1e-6 are fp32 numbers in the model
        assert (got[name] - want[name]).abs().max() <= 1e-6 * want[name].abs().max()


@pytest.mark.parametrize("number", [{"scale": 0.1}, {"lower_bound": -0.3}], ids=["scale", "lower_bound"])
@pytest.mark.parametrize("run", [lambda x, p: exact(x, p, "chunk16"), model, lambda x, p: model(x, p, torch.float64)])
def test_scale_and_lower_bound_are_rounded_to_fp32(run: Callable, number: dict[str, float]) -> None:
    rounded = {name: float(np.float32(x)) for name, x in number.items()}
    got, want = (run(call(3), params() | x)["out"] for x in (number, rounded))
    assert number != rounded
    assert torch.equal(got, want)


HOSTILE = ("nan", "inf-state", "strange")  # recipes of which the oracle does not decide on all
JUDGED = [c for c in COMMITTED if c.exact_only is None and c.recipe.partition("@")[0] not in HOSTILE]


def assert_within(x: dict[str, Tensor], p: dict[str, Any], got: dict[str, Tensor], who: str) -> None:
    oracle, allowed = model(x, p, torch.float64), room.bound(x, p, who)
    for name, y in got.items():
        limit = allowed[name] + 0.5 * ulp.size(oracle[name].abs() + allowed[name], y.dtype)
        assert bool(((y.double() - oracle[name]).abs() <= limit).all()), name


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_committed_cases_are_within_their_bound_of_the_oracle(case: goldens.Case) -> None:
    tensors = store.load(case, store.read_manifest())
    x = select(tensors, "in/")
    assert_within(x, case.params, select(tensors, "model/"), "model")
    assert_within(x, case.params, select(tensors, "exact/chunk16/"), "chunk16")


@given(
    label=st.text("abcdef", min_size=1, max_size=8),
    values=st.sampled_from([name for name in room.RECIPES if name not in HOSTILE]),
    tokens=st.integers(1, 40),
    lower_bound=st.floats(-5.0, 0.5, width=32),
    state=st.sampled_from([None, "bf16", "fp32"]),
)
@settings(max_examples=12)
def test_drawn_calls_are_within_their_bound(
    label: str, values: str, tokens: int, lower_bound: float, state: str | None
) -> None:
    x = room.RECIPES[values].values(f"test_kda/{label}", (1, tokens, 1))
    p = params(state or "fp32", lower_bound)
    if state:
        x["initial_state"] = states(1, 1, TORCH[state])
    assert_within(x, p, model(x, p), "model")
    assert_within(x, p, exact(x, p, "chunk16"), "chunk16")


def uniform(label: str, shape: tuple[int, ...]) -> Tensor:
    """fp32 in −8 … 8, multiples of 2^-8."""
    return draw.integers(label, shape, -2048, 2048).to(torch.float32) / 256


GATES: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    **{f"{g:g}": (lambda shape, g=g: torch.full(shape, g)) for g in (-8.0, -4.0, 0.0, 8.0)},
    "uniform": lambda shape: uniform("test_kda/uniform", shape),
    "normal-8": lambda shape: draw.normal("test_kda/normal-8", shape) * 8,
}
BIASES = {name: gate for name, gate in GATES.items() if name != "0"} | {"4": lambda shape: torch.full(shape, 4.0)}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("gate", GATES)
def test_relative_error_is_below_that_of_public_kernels(gate: str, bias: str) -> None:
    x = call(96, 1)
    x |= {"g": to_bf16(GATES[gate](x["g"].shape)), "dt_bias": BIASES[bias]((1, D)), "A_log": torch.zeros(1)}
    got, oracle = exact(x, params(), "chunk16"), model(x, params(), torch.float64)
    for name in ("out", "final_state"):
        assert relative(got[name], oracle[name]) < 4.5e-3


def test_one_key_repeated_stays_finite_and_near() -> None:
    """What a series for (I + L)⁻¹ in half precision turns into NaN."""
    x = call(1024, 1, "repeated")
    got, oracle = exact(x, params(), "chunk16"), model(x, params(), torch.float64)
    for name, limit in (("out", 1.2e-2), ("final_state", 2.0e-2)):
        assert bool(got[name].isfinite().all())
        assert relative(got[name], oracle[name]) < limit


def rounded(x: Tensor, parts: int) -> Tensor:
    """fp64 in so many bf16 parts, or as it is with none."""
    if parts == 0:
        return x
    high = to_bf16(x.float()).double()
    return high if parts == 1 else high + to_bf16((x - high).float()).double()


def chunked(x: dict[str, Tensor], p: dict[str, Any], parts: dict[str, int]) -> Tensor:
    """out [T, H, V] of one sequence by the chunk form in fp64, operands in ``parts`` bf16 parts each or chunk16's.

    "b in T": T = (I + L)⁻¹ diag(b), and R without b.
    """
    q, k, v, g, beta = (x[n][0].double().unflatten(0, (-1, 16)).transpose(1, 2) for n in ("q", "k", "v", "g", "beta"))
    q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    rate, b = x["A_log"].double().exp()[:, None, None], torch.sigmoid(beta)
    total = (p["lower_bound"] * torch.sigmoid(rate * (g + x["dt_bias"].double()[:, None]))).cumsum(2)

    def operand(name: str, y: Tensor) -> Tensor:
        return rounded(y, ({"K⁻": 2, "Kᵉ": 2} | parts).get(name, 1))

    up, end = total.exp(), total[:, :, -1:]
    k_up, q_up = operand("K⁺", k * up), operand("Q⁺", p["scale"] * q * up)
    k_down, k_end = operand("K⁻", k / up), operand("Kᵉ", k * (end - total).exp())
    lower = torch.eye(16) + b[..., None] * (k_up @ k_down.mT).tril(-1)
    in_t, in_r = (b, torch.ones_like(b)) if "b in T" in parts else (torch.ones_like(b), b)
    t = operand("T", torch.linalg.inv(lower) * in_t[..., None, :])
    scores = operand("P", (q_up @ k_down.mT).tril())
    s, out = torch.zeros(q.shape[1], D, D, dtype=torch.float64), []
    for c in range(len(q)):
        s_operand = operand("S", s)
        r = operand("R", in_r[c][:, None] * (v[c].mT - s_operand @ k_up[c].mT))
        u = operand("U", r @ t[c].mT)
        out.append(operand("o", s_operand @ q_up[c].mT + u @ scores[c].mT))
        s = s * end[c].exp() + u @ k_end[c]
    return torch.cat([o.permute(2, 0, 1) for o in out])


def decay(gate: float, bias: Tensor | float) -> dict[str, Tensor]:
    x = call(256, 2)
    bias = torch.full((2, D), 1.0) * bias
    return x | {"g": torch.full_like(x["g"], gate), "dt_bias": bias, "A_log": torch.zeros(2)}


def either_sign() -> Tensor:
    return 1.0 - 2.0 * draw.integers("test_kda/sign", (2, D), 0, 2).to(torch.float32)


# docs/kda.md: what is otherwise, and the relative errors with fast decay, slow decay, normal inputs and a repeated key.
OPERANDS = ("S", "K⁺", "Q⁺", "K⁻", "Kᵉ", "T", "P", "R", "U")
BUDGET = {
    "": (3.3e-3, 4.0e-3, 3.5e-3, 9.8e-3),
    "Kᵉ in one": (3.3e-3, 4.3e-3, 3.5e-3, 1.5e-2),
    "K⁻ in one": (3.6e-3, 4.0e-3, 3.9e-3, 1.2e-2),
    "b in T": (3.7e-3, 4.3e-3, 3.7e-3, 9.7e-3),
    "b in T, K⁻ in one": (4.0e-3, 4.3e-3, 4.2e-3, 1.1e-2),
    "S": (3.3e-3, 3.6e-3, 3.5e-3, 9.7e-3),
    "K⁺": (3.3e-3, 3.9e-3, 3.5e-3, 8.9e-3),
    "Q⁺": (2.9e-3, 3.6e-3, 3.1e-3, 9.7e-3),
    "T": (3.3e-3, 4.0e-3, 3.5e-3, 7.7e-3),
    "P": (2.9e-3, 3.9e-3, 3.1e-3, 9.5e-3),
    "R": (3.3e-3, 3.6e-3, 3.3e-3, 1.0e-2),
    "U": (3.3e-3, 3.5e-3, 3.3e-3, 7.6e-3),
    "all": (1.7e-3, 1.6e-3, 1.6e-3, 1.7e-3),
}
OTHERWISE = {
    "": {},
    "Kᵉ in one": {"Kᵉ": 1},
    "K⁻ in one": {"K⁻": 1},
    "b in T": {"b in T": 1},
    "b in T, K⁻ in one": {"b in T": 1, "K⁻": 1},
    "all": dict.fromkeys(OPERANDS, 2),
}
BUDGET_INPUTS = {"fast": lambda: decay(8.0, 4 * either_sign()), "slow": lambda: decay(-8.0, -4.0)}
BUDGET_INPUTS |= {"normal": lambda: call(256, 2), "repeated": lambda: call(2048, 1, "repeated")}


@pytest.mark.parametrize(("column", "name"), list(enumerate(BUDGET_INPUTS)), ids=BUDGET_INPUTS)
def test_error_budget(column: int, name: str) -> None:
    x = BUDGET_INPUTS[name]()
    oracle = model(x, params(), torch.float64)["out"][0]
    for names, want in BUDGET.items():
        got = relative(chunked(x, params(), OTHERWISE.get(names, {names: 2})), oracle)
        assert got == pytest.approx(want[column], rel=0.05), names


@pytest.mark.parametrize(("parts", "want"), [(1, 2.9e-2), (2, 9.9e-3)])
def test_error_budget_of_16384_tokens_with_one_key(parts: int, want: float) -> None:
    """The roundings to bf16 alone; a golden on demand has the bits. The chunk form in fp64 is the oracle."""
    x = call(16384, 1, "repeated")
    oracle = chunked(x, params(), dict.fromkeys((*OPERANDS, "o"), 0))
    assert relative(chunked(x, params(), {"Kᵉ": parts}), oracle) == pytest.approx(want, rel=0.05)


# By hand.


def pointing(tokens: int, channel: int = 3, **more: Tensor) -> dict[str, Tensor]:
    """q = k = 1024 e_channel, v = 0, gates closed (no decay), b = 0."""
    x = {name: torch.zeros(1, tokens, 1, D, dtype=BF16) for name in ("q", "k", "v")}
    for name in ("q", "k"):
        x[name][..., channel] = 1024.0
    x |= {"g": torch.full((1, tokens, 1, D), -torch.inf, dtype=BF16)}
    x |= {"beta": torch.full((1, tokens, 1), -200.0, dtype=BF16)}
    return x | {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1, D)} | more


def both(x: dict[str, Tensor], p: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    yield model(x, p)
    yield exact(x, p, "chunk16")


def test_one_entry_of_the_state_is_read_and_returned() -> None:
    state = torch.zeros(1, 1, D, D)
    state[0, 0, 7, 3] = 1.0
    want = torch.zeros(D)
    want[7] = SCALE
    for got in both(pointing(1, initial_state=state), params()):
        assert torch.equal(got["out"][0, 0, 0].float(), to_bf16(want).float() if got["out"].dtype == BF16 else want)
        assert torch.equal(got["final_state"], state)


def test_an_update_below_the_half_precision_of_the_state() -> None:
    """S = 4098, v = 4096, b = ½: the recurrence gives 4097; bf16(4098) is 4096, as an operand of the tensor cores."""
    state = torch.zeros(1, 1, D, D)
    state[0, 0, 0, 0] = 4098.0
    x = pointing(1, 0, initial_state=state)
    x["v"][..., 0], x["beta"][...] = 4096.0, 0.0
    recurrence, chunk16 = both(x, params(scale=1.0))
    assert recurrence["final_state"][0, 0, 0, 0] == 4097.0
    assert chunk16["final_state"][0, 0, 0, 0] == 4098.0


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 63, 64, 65])
def test_decay_of_a_factor_e_a_token(tokens: int) -> None:
    """A last chunk whose decay is read at a padded position gives another power of e."""
    x = pointing(tokens, initial_state=torch.ones(1, 1, D, D))
    x["g"][...] = torch.inf
    for got in both(x, params(lower_bound=-1.0)):
        want = torch.exp(torch.tensor(-float(tokens), dtype=torch.float64))
        assert ((got["final_state"].double() / want - 1).abs() < 1e-5).all()


@pytest.mark.parametrize("offsets", [(0, 0, 64, 64), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", TORCH)
def test_a_sequence_without_tokens_returns_its_state(offsets: tuple[int, ...], dtype: str) -> None:
    state = states(len(offsets) - 1, 2, TORCH[dtype])
    x = call(offsets[-1], 2, cu_seqlens=cu(*offsets))
    for given_state in (True, False):
        own = x | ({"initial_state": state} if given_state else {})
        for got in both(own, params(dtype)):
            want = state if given_state else torch.zeros_like(state)
            for n, (start, end) in enumerate(pairwise(offsets)):
                assert torch.equal(got["final_state"][n].float(), want[n].float()) == (start == end)


def test_rows_of_v_and_columns_of_k_are_not_confused() -> None:
    """Column 3 of the state is read, whose rows all differ; then a key is written to one row."""
    state = torch.zeros(1, 1, D, D)
    state[0, 0, :, 3] = torch.arange(D, dtype=torch.float32)
    for got in both(pointing(1, initial_state=state), params(scale=1.0)):
        assert torch.equal(got["out"][0, 0, 0].float(), torch.arange(D, dtype=torch.float32))
    x = pointing(1)
    x["v"][..., 9], x["beta"][...] = 2.0, 200.0
    want = torch.zeros(D, D)
    want[9, 3] = 2.0
    for got in both(x, params()):
        assert torch.equal(got["final_state"][0, 0], want)


# The schedule, from its page.


def fp32(x: Any) -> np.float32:
    return np.float32(float(x))


def unit(function: Callable[[Tensor], Tensor]) -> Callable[[Any], np.ndarray]:
    return lambda x: function(torch.tensor(np.atleast_1d(np.asarray(x, dtype=np.float32)))).numpy()


ex2, rcp, rsqrt = (unit(function) for function in (ex2_approx_ftz, rcp_approx_ftz, rsqrt_approx_ftz))


def narrow(x: Any) -> np.ndarray:
    return to_bf16(torch.tensor(np.asarray(x, dtype=np.float32))).float().numpy()


def chain(a: Any, b: Any, c: Any = 0.0) -> np.ndarray:
    """For each row of b [n, k] the chain of instructions over its k products with a [k] or [n, k], from c."""
    total = torch.tensor(np.broadcast_to(np.float32(c), len(b)).copy())
    a, b = (torch.tensor(np.asarray(x)).to(BF16) for x in (a, b))
    for i in range(0, b.shape[1], 16):
        total = fused_sum(a[..., i : i + 16], b[:, i : i + 16], total)
    return total.numpy()


def in_turn(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """16 channels of the first, the same 16 of the second, …"""
    return np.stack([first.reshape(8, 16), second.reshape(8, 16)], 1).reshape(256)


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return fp32(kernel.fma_rn(*(torch.tensor([float(x)]) for x in (a, b, c)))[0])


def sum_of_squares(x: np.ndarray) -> np.float32:
    warps = []
    for warp in (x[:64], x[64:]):
        lanes = [fma(warp[2 * u + 1], warp[2 * u + 1], warp[2 * u] * warp[2 * u]) for u in range(32)]
        for offset in (16, 8, 4, 2, 1):
            lanes = [lanes[u] + lanes[u ^ offset] for u in range(32)]
        warps.append(lanes[0])
    return warps[0] + warps[1]


def row_of_v(x: dict[str, Tensor], p: dict[str, Any], row: int) -> tuple[np.ndarray, np.ndarray]:
    """Row ``row`` of out [T] and of the state [K] of one head, from its first state, by docs/kda.md step by step."""
    q, k, g = (x[name][0, :, 0].float().numpy() for name in ("q", "k", "g"))
    v, beta = x["v"][0, :, 0, row].float().numpy(), x["beta"][0, :, 0].float().numpy()
    s, dt_bias = x["initial_state"][0, 0, row].float().numpy().copy(), x["dt_bias"][0].numpy()
    log2e, one, out = np.float32(1.44269504088896340736), np.float32(1), []
    a = ex2(x["A_log"].numpy()[0] * log2e) * -log2e
    bound, scale, eps = fp32(p["lower_bound"]) * log2e, fp32(p["scale"]), np.float32(1e-6)
    for first in range(0, len(q), 16):
        total = np.zeros(D, dtype=np.float32)
        k_up, q_up, k_down, b = [], [], [], []
        used = min(16, len(q) - first)
        for i in range(first, first + used):
            r_k, r_q = (rsqrt(sum_of_squares(y[i]) + eps)[0] for y in (k, q))
            total = total + bound * rcp(one + ex2(a * (g[i] + dt_bias)))
            k_hat, q_hat, up, down = k[i] * r_k, q[i] * (r_q * scale), ex2(total), ex2(-total)
            k_up.append(narrow(k_hat * up))
            q_up.append(narrow(q_hat * up))
            k_down.append(k_hat * down)
            b.append(rcp(one + ex2(beta[i] * -log2e))[0])
        decay = ex2(total)
        k_end = [y * decay for y in k_down] + [np.zeros(D, dtype=np.float32)] * (16 - used)
        k_high = [narrow(y) for y in k_end]
        k_low = [narrow(y - high) for y, high in zip(k_end, k_high, strict=True)]
        k_down = [in_turn(narrow(y - narrow(y)), narrow(y)) for y in k_down]
        t, scores = np.zeros((2, 16, 16), dtype=np.float32)
        for i in range(used):
            scores[i, : i + 1] = chain(in_turn(q_up[i], q_up[i]), k_down[: i + 1])
            lower = b[i] * chain(in_turn(k_up[i], k_up[i]), k_down[: i + 1])
            t[i, i] = one
            for j in range(i):
                for l in range(i):
                    t[i, j] = fma(-lower[l], t[l, j], t[i, j])
        operand, k_up = narrow(s), np.stack(k_up)
        r = np.zeros(16, dtype=np.float32)
        seen = chain(operand[:64], k_up[:, :64]) + chain(operand[64:], k_up[:, 64:])
        r[:used] = narrow(np.array(b) * (v[first : first + used] - seen))
        u = narrow(chain(r, narrow(t)))
        out += narrow(chain(u, narrow(scores)[:used], chain(operand, q_up))).tolist()
        s = chain(u, np.stack(k_high, axis=1), chain(u, np.stack(k_low, axis=1), s * decay))
    return np.array(out, dtype=np.float32), s


@pytest.mark.parametrize(("values", "row"), [("normal", 3), ("repeated", 77)])
def test_chunk16_against_its_page_step_by_step(values: str, row: int) -> None:
    x = call(19, 1, values, initial_state=states(1))
    got = exact(x, params(), "chunk16")
    out, state = row_of_v(x, params(), row)
    assert ulp.bits(torch.tensor(out).to(BF16)).tolist() == ulp.bits(got["out"][0, :, 0, row]).tolist()
    assert ulp.bits(torch.tensor(state)).tolist() == ulp.bits(got["final_state"][0, 0, row]).tolist()


# What the schedule owes whatever its numbers.


@pytest.mark.parametrize("at", [16, 32, 48])
def test_split_at_a_chunk_with_an_fp32_state_changes_no_bit(at: int) -> None:
    x = call(53, 2, initial_state=states(1, 2))
    whole = exact(x, params(), "chunk16")
    rows = ("q", "k", "v", "g", "beta")
    head, tail = (
        {n: t[:, part].contiguous() if n in rows else t for n, t in x.items()}
        for part in (slice(0, at), slice(at, None))
    )
    first = exact(head, params(), "chunk16")
    second = exact(tail | {"initial_state": first["final_state"]}, params(), "chunk16")
    assert_same(second | {"out": torch.cat([first["out"], second["out"]], 1)}, whole)


LENGTHS = (5, 0, 33, 16, 1, 48)


def packed(dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)
    return call(sum(LENGTHS), 2, cu_seqlens=ends, initial_state=states(len(LENGTHS), 2))


def alone(x: dict[str, Tensor], n: int, head: int | None = None) -> dict[str, Tensor]:
    """Sequence n of a packed batch (and one head of it) as a call of its own."""
    start, end = x["cu_seqlens"][n : n + 2].tolist()
    heads = slice(None) if head is None else slice(head, head + 1)
    own = {name: x[name][:, start:end, heads].contiguous() for name in ("q", "k", "v", "g", "beta")}
    own |= {name: x[name][heads].contiguous() for name in ("A_log", "dt_bias")}
    return own | {"initial_state": x["initial_state"][n : n + 1, heads].contiguous()}


@pytest.mark.parametrize("n", range(len(LENGTHS)))
@pytest.mark.parametrize("run", [lambda x: exact(x, params(), "chunk16"), lambda x: model(x, params())], ids=["e", "m"])
def test_a_sequence_and_a_head_have_the_same_bits_alone(n: int, run: Callable) -> None:
    x = packed()
    whole = run(x)
    start, end = x["cu_seqlens"][n : n + 2].tolist()
    want = {"out": whole["out"][:, start:end], "final_state": whole["final_state"][n : n + 1]}
    assert_same(run(alone(x, n)), want)
    assert_same(run(alone(x, n, head=1)), {"out": want["out"][:, :, 1:], "final_state": want["final_state"][:, 1:]})


def test_a_batch_is_its_sequences_packed() -> None:
    x = call(21, 2, batch=3, initial_state=states(3, 2))
    rows = ("q", "k", "v", "g", "beta")
    flat = {n: t.flatten(0, 1)[None] if n in rows else t for n, t in x.items()} | {"cu_seqlens": cu(0, 21, 42, 63)}
    got, want = exact(flat, params(), "chunk16"), exact(x, params(), "chunk16")
    assert_same(got | {"out": got["out"].view(want["out"].shape)}, want)


def test_offsets_of_either_width() -> None:
    assert_same(exact(packed(torch.int32), params(), "chunk16"), exact(packed(), params(), "chunk16"))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_what_is_no_number_stays_in_its_sequence(name: str, value: float) -> None:
    x = packed()
    clean = exact(x, params(), "chunk16")
    start, end = x["cu_seqlens"][2:4].tolist()
    x[name] = x[name].clone()
    x[name][(slice(2, 3) if name == "initial_state" else (slice(None), slice(start, end)))] = value
    got = exact(x, params(), "chunk16")
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[start:end] = False
    assert torch.equal(got["out"][:, others], clean["out"][:, others])
    keep = [n for n in range(len(LENGTHS)) if n != 2]
    assert torch.equal(got["final_state"][keep], clean["final_state"][keep])
    assert not torch.equal(got["out"][:, ~others], clean["out"][:, ~others])


def test_preparation_in_parts_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = packed()
    whole = exact(x, params(), "chunk16")
    monkeypatch.setattr(kernel, "CPU_PREPARED_ELEMS", 1)
    assert_same(exact(x, params(), "chunk16"), whole)


def test_the_state_is_asked_for_or_not() -> None:
    x = call(3, initial_state=states(1))
    for run in (lambda p: model(x, p), lambda p: exact(x, p, "chunk16")):
        assert set(run(params(None))) == {"out"}
        assert torch.equal(run(params(None))["out"], run(params())["out"])
    got = exact(call(3), params("bf16"), "chunk16")["final_state"]
    assert torch.equal(got, to_bf16(exact(call(3), params(), "chunk16")["final_state"]))


def test_inputs_stay_as_they_are() -> None:
    x = packed()
    before = {name: t.clone() for name, t in x.items()}
    for got in both(x, params()):
        assert got["final_state"].data_ptr() != x["initial_state"].data_ptr()
    assert all(torch.equal(x[name], t) for name, t in before.items())


# Bad input.


def without(name: str) -> dict[str, Tensor]:
    return {n: t for n, t in call(4, 2).items() if n != name}


SHORT = call(4, 2)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": (without("beta"), params(), "inputs: beta missing"),
    "unknown": (SHORT | {"w": SHORT["q"]}, params(), "inputs: got w"),
    "no-scale": (SHORT, {"lower_bound": -5.0, "final_state": None}, "params: got final_state, lower_bound"),
    "keys-of-64": ({n: t[..., :64].contiguous() if t.dim() == 4 else t for n, t in SHORT.items()}, params(), "q: got"),
    "values-of-64": (SHORT | {"v": SHORT["v"][..., :64].contiguous()}, params(), r"v: got shape \(1, 4, 2, 64\)"),
    "heads": (SHORT | {"k": SHORT["k"][:, :, :1].contiguous()}, params(), r"k: got shape \(1, 4, 1, 128\)"),
    "no-heads": ({n: t[:, :, :0] if t.dim() >= 3 else t for n, t in SHORT.items()}, params(), "q: got B = 1 and H = 0"),
    "beta-shape": (SHORT | {"beta": SHORT["beta"][:, :3].contiguous()}, params(), "beta: got shape"),
    "a-log-shape": (SHORT | {"A_log": torch.zeros(3)}, params(), "A_log: got shape"),
    "dt-bias-dtype": (SHORT | {"dt_bias": SHORT["dt_bias"].to(BF16)}, params(), "dt_bias: got torch.bfloat16"),
    "dtype": (SHORT | {"g": SHORT["g"].float()}, params(), "g: got torch.float32, allowed is torch.bfloat16"),
    "strides": (SHORT | {"v": SHORT["v"].transpose(1, 2).contiguous().transpose(1, 2)}, params(), "v: got strides"),
    "device": (SHORT | {"k": SHORT["k"].to("meta")}, params(), "k: is on meta, q on cpu"),
    "state-shape": (SHORT | {"initial_state": states(2, 2)}, params(), "initial_state: got shape"),
    "state-dtype": (SHORT | {"initial_state": states(1, 2).double()}, params(), "initial_state: got torch.float64"),
    "states-differ": (
        SHORT | {"initial_state": states(1, 2)},
        params("bf16"),
        "final_state: got 'bf16', initial_state",
    ),
    "final-dtype": (SHORT, params("fp16"), "final_state: got 'fp16'"),
    "bound-beyond": (SHORT, params(lower_bound=-5.5), "lower_bound: got -5.5, allowed is a number from -5 to 5"),
    "bound-nan": (SHORT, params(lower_bound=float("nan")), "lower_bound: got nan"),
    "scale-inf": (SHORT, params(scale=float("inf")), "scale: got inf"),
    "scale-bool": (SHORT, params(scale=True), "scale: got True"),
    "batch-and-offsets": (
        call(4, batch=2, cu_seqlens=cu(0, 4)),
        params(),
        "q: got B = 2, allowed with cu_seqlens is 1",
    ),
    "offsets-start": (SHORT | {"cu_seqlens": cu(1, 4)}, params(), "cu_seqlens: goes from 1 to 4"),
    "offsets-end": (SHORT | {"cu_seqlens": cu(0, 3)}, params(), "cu_seqlens: goes from 0 to 3, .* 0 to T = 4"),
    "offsets-decrease": (SHORT | {"cu_seqlens": cu(0, 3, 2, 4)}, params(), "cu_seqlens: decreases from 3 at 1 to 2"),
    "offsets-dtype": (SHORT | {"cu_seqlens": cu(0, 4, dtype=torch.int16)}, params(), "cu_seqlens: got torch.int16"),
    "offsets-alone": (SHORT | {"cu_seqlens": cu(0)}, params(), r"cu_seqlens: got shape \(1,\)"),
}


@pytest.mark.parametrize(("x", "p", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_by_name(x: dict[str, Any], p: dict[str, Any], message: str) -> None:
    for run in (lambda: model(x, p), lambda: exact(x, p, "chunk16")):
        with pytest.raises(ValueError, match=message):
            run()


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule: got 'chunk64', allowed are chunk16"):
        exact(SHORT, params(), "chunk64")
    with pytest.raises(ValueError, match="schedule: got 'chunk64', a bound is derived for model, chunk16"):
        room.bound(SHORT, params(), "chunk64")


# Cases.


@pytest.mark.parametrize("lower_bound", [0.1, -5.0, 0.0])
def test_committed_cases_cover_every_bound(lower_bound: float) -> None:
    assert any(case.params["lower_bound"] == lower_bound for case in COMMITTED)


def test_committed_cases_cover_every_tail_recipe_and_state() -> None:
    recipes = [room.split(case.recipe) for case in COMMITTED]
    assert {values for values, _, _ in recipes} == set(room.RECIPES)
    pairs = {(state, case.params["final_state"]) for (_, _, state), case in zip(recipes, COMMITTED, strict=True)}
    assert pairs == {("-", None), ("-", "bf16"), ("-", "fp32"), *((s, f) for s in TORCH for f in (None, s))}
    assert {end - start for start, end in pairwise(room.OFFSETS["tails"])} == set(range(1, 17))


def test_places_are_those_of_the_accumulators() -> None:
    """Every element of a chunk and of a state has a place of its own: 8 slabs, 32 lanes, 8 or 64 registers."""
    [case] = [case for case in COMMITTED if case.name == "t281-lengths-normal"]
    where = room.locate(case, "chunk16", "out", (0, 65 + 16 + 9, 0, 21))
    assert where == {"sequence": 1, "head": 0, "chunk": 1, "slab": 1, "lane": 20, "register": 5}
    spots = {tuple(room.locate(case, "chunk16", "out", (0, t, 0, v)).values()) for t in range(16) for v in range(D)}
    assert len(spots) == 16 * D
    states_ = {
        tuple(room.locate(case, "chunk16", "final_state", (0, 0, v, k)).values()) for v in range(D) for k in range(D)
    }
    assert len(states_) == D * D
    assert max(register for *_, register in states_) == 63


# Faults.


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Tensor]]:
    manifest = store.read_manifest()
    return {case.id: store.load(case, manifest) for case in COMMITTED if "chunk16" in case.schedules}


ORIGINAL = {
    name: getattr(kernel, name)
    for name in ("_step", "_prepare", "_chunks", "_inside", "_first_state", "_inverse", "_update", "_by_block")
}


def forgetting() -> dict[str, Callable]:
    """No history from before the last multiple of 64 tokens."""
    chunk = [0]

    def chunks(*a: Any) -> Any:
        chunk[0] = 0
        return ORIGINAL["_chunks"](*a)

    def step(state: Tensor, x: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
        chunk[0] += 1
        return ORIGINAL["_step"](state * (0.0 if chunk[0] % 4 == 1 and chunk[0] > 1 else 1.0), x, v)

    return {"_chunks": chunks, "_step": step}


def prepared(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Callable]:
    """A fault in what is prepared of a chunk."""
    return {"_prepare": lambda *a: (lambda x: x | change(x))(ORIGINAL["_prepare"](*a))}


def called(change: Callable[[Any, Any], tuple[Any, Any]]) -> dict[str, Callable]:
    """A fault in what the preparation takes."""
    return {"_prepare": lambda x, p, tokens: ORIGINAL["_prepare"](*change(x, p), tokens)}


def stepping(before: Callable = lambda s: s, after: Callable = lambda s: s) -> dict[str, Callable]:
    """A fault in the state between chunks."""

    def step(state: Tensor, x: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
        s, o = ORIGINAL["_step"](before(state), x, v)
        return after(s), o

    return {"_step": step}


def one_chain(state: Tensor, x: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """_step with W as one chain of eight."""
    s = to_bf16(state)
    r = to_bf16(x["b"][:, :, None] * (v.float().permute(0, 2, 3, 1) - mma(s, x["k_up"])))
    u = to_bf16(mma(r, x["t"]))
    o = to_bf16(mma(u, x["p"], mma(s, x["q_up"])))
    return ORIGINAL["_update"](state, u, x), o.permute(0, 3, 1, 2)


def scores_first(state: Tensor, x: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """_step with U · Pᵀ as the first of o's instructions."""
    s = to_bf16(state)
    low, high = mma(*(y.unflatten(-1, (2, -1)).movedim(-2, 0) for y in (s, x["k_up"])))
    u = to_bf16(mma(to_bf16(x["b"][:, :, None] * (v.float().permute(0, 2, 3, 1) - (low + high))), x["t"]))
    o = to_bf16(mma(s, x["q_up"], mma(u, x["p"])))
    return ORIGINAL["_update"](state, u, x), o.permute(0, 3, 1, 2)


def decay_of_the_last_position(gate: Tensor) -> Iterator[Tensor]:
    """G is 0 at padded positions."""
    total = gate.cumsum(2)
    yield from torch.where(gate == 0, 0.0, total).unbind(2)


def by_series(lower: Tensor) -> Tensor:
    """(I − L)(I + L²)(I + L⁴)(I + L⁸), rounded to bf16 after each product."""
    identity = torch.eye(16)
    power, total = lower, identity - lower
    for _ in range(3):
        power = to_bf16(power @ power).float()
        total = to_bf16(total @ (identity + power)).float()
    return to_bf16(total)


def by_fractions(bits: int) -> dict[str, Any]:
    form = Form(FORMS["bf16"].source, FORMS["bf16"].operand, fraction_bits=bits)
    return {"mma": lambda a, b, c=None: mma(a, b, c, form)}


FAULTS: dict[str, dict[str, Any]] = {
    "state-transposed": {"_first_state": lambda *a: ORIGINAL["_first_state"](*a).transpose(-1, -2).contiguous()},
    "first-state-ignored": {"_first_state": lambda *a: torch.zeros_like(ORIGINAL["_first_state"](*a))},
    "states-by-length": {"_back": lambda state, order: state},
    "history-dropped-after-64-tokens": forgetting(),
    "state-rounded-between-chunks": stepping(after=lambda s: to_bf16(s).float()),
    "sequences-not-told-apart": {"offsets": lambda x: [0, x["q"].shape[0] * x["q"].shape[1]]},
    "padded-gate-not-masked": {
        "_inside": lambda tokens, like: ORIGINAL["_inside"](tokens, like) | torch.tensor(like.dtype != BF16)
    },
    "decay-at-a-padded-position": {"_running_sums": decay_of_the_last_position},
    "decay-missing": prepared(lambda x: {"decay": torch.ones_like(x["decay"])}),
    "scale-missing": called(lambda x, p: (x, p | {"scale": 1.0})),
    "scale-twice": called(lambda x, p: (x, p | {"scale": p["scale"] ** 2})),
    "bound-of-5-always": called(lambda x, p: (x, p | {"lower_bound": -5.0})),
    "bound-positive": called(lambda x, p: (x, p | {"lower_bound": -p["lower_bound"]})),
    "beta-not-activated": {
        "_sigmoid": lambda x: rcp_approx_ftz(1 + ex2_approx_ftz(x)) if x.dim() == 4 else -x / 1.442695
    },
    "gate-not-activated": {
        "_sigmoid": lambda x: -x / 1.442695 if x.dim() == 4 else rcp_approx_ftz(1 + ex2_approx_ftz(x))
    },
    "bias-missing": called(lambda x, p: (x | {"dt_bias": torch.zeros_like(x["dt_bias"])}, p)),
    "rate-missing": called(lambda x, p: (x | {"A_log": torch.zeros_like(x["A_log"])}, p)),
    "base-2-for-base-e": {"LOG2_E": 1.0},
    "eps-1e-5": {"EPS": 1e-5},
    "eps-missing": {"EPS": 0.0},
    "keys-swapped-with-queries": called(lambda x, p: (x | {"q": x["k"], "k": x["q"]}, p)),
    "own-token-not-seen": prepared(lambda x: {"p": torch.where(torch.eye(16, dtype=torch.bool), 0.0, x["p"])}),
    "next-token-seen": prepared(
        lambda x: {"p": x["p"] + torch.diag_embed(x["p"].diagonal(dim1=-2, dim2=-1)[..., :15], 1)}
    ),
    "chunk-without-corrections": {"_inverse": lambda lower: ORIGINAL["_inverse"](lower * 0)},
    "inverse-transposed": prepared(lambda x: {"t": x["t"].transpose(-1, -2)}),
    "inverse-by-a-series": {"_inverse": by_series},
    "keys-of-the-scores-in-one-part": {
        "_by_block": lambda low, high: ORIGINAL["_by_block"](low * (1.0 if low is high else 0.0), high)
    },
    "high-parts-of-the-scores-first": {"_by_block": lambda low, high: ORIGINAL["_by_block"](high, low)},
    "parts-of-the-scores-one-after-the-other": {"_by_block": lambda low, high: torch.cat([low, high], -1)},
    "inverse-times-b": prepared(
        lambda x: {"t": to_bf16(x["t"].float() * x["b"][..., None, :]), "b": torch.ones_like(x["b"])}
    ),
    "keys-of-the-update-in-one-part": prepared(lambda x: {"k_low": torch.zeros_like(x["k_low"])}),
    "high-parts-first": prepared(lambda x: {"k_low": x["k_high"], "k_high": x["k_low"]}),
    "w-in-one-chain": {"_step": one_chain},
    "scores-first": {"_step": scores_first},
    "aligned-to-24-bits": by_fractions(24),
    "aligned-to-26-bits": by_fractions(26),
    "butterfly-ascending": {"butterfly": lambda x, offsets: butterfly(x, offsets[::-1])},
    "rsqrt-correctly-rounded": {"rsqrt_approx_ftz": lambda x: torch.rsqrt(x.double()).float()},
    "rcp-correctly-rounded": {"rcp_approx_ftz": lambda x: (1 / x.double()).float()},
    "ex2-correctly-rounded": {"ex2_approx_ftz": lambda x: torch.exp2(x.double()).float()},
    "truncation-to-bf16": {"to_bf16": lambda x: (x.view(torch.int32) & -65536).view(torch.float32).to(BF16)},
    "nan-of-the-library": {"to_bf16": lambda x: x.to(BF16)},
    "bf16-subnormals-flushed": {"to_bf16": lambda x: to_bf16(torch.where(x.abs() < 2.0**-126, x * 0, x))},
}


def failing(stored: dict) -> Iterator[goldens.Case]:
    """The committed cases whose bits the reference does not give now, one by one."""
    for case in (case for case in COMMITTED if case.id in stored):
        tensors = stored[case.id]
        got = exact(select(tensors, "in/"), case.params, "chunk16")
        want = select(tensors, "exact/chunk16/")
        if any(not against_exact(name, got[name], x).passed for name, x in want.items()):
            yield case


def test_without_a_fault_every_committed_case_passes(stored: dict) -> None:
    assert [case.id for case in failing(stored)] == []


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_fails_a_committed_case(stored: dict, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]) -> None:
    for name, planted in fault.items():
        monkeypatch.setattr(kernel, name, planted)
    assert next(failing(stored), None) is not None


PLAIN = [
    "state-transposed",
    "decay-missing",
    "scale-missing",
    "bound-positive",
    "keys-swapped-with-queries",
    "own-token-not-seen",
    "inverse-transposed",
]


@pytest.mark.parametrize("fault", PLAIN)
def test_a_plain_fault_exceeds_the_derived_bound(stored: dict, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Judged by ULPs alone, as a kernel without an exact model would be."""
    outputs = {}
    with monkeypatch.context() as patched:
        for name, planted in FAULTS[fault].items():
            patched.setattr(kernel, name, planted)
        for case in JUDGED:
            outputs[case.id] = exact(select(stored[case.id], "in/"), case.params, "chunk16")
    verdicts = (v for case in JUDGED for v in judge(KERNEL, case, stored[case.id], outputs[case.id], "chunk16"))
    assert any(not v.passed for v in verdicts if v.against == "model")
