"""``mla_query``: model against PyTorch in FP64, schedules against a simulation, bytes by hand, faults, refusals."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import goldens
from goldens import cache_insert as insert
from goldens import invariance, store
from goldens import mla_query as room
from goldens.call import call as call_candidate
from goldens.compare import Verdict
from goldens.judge import judge, select
from goldens.mla_query import properties
from reference import cache_insert
from reference import mla_query as kernel
from reference.mla_query import HEAD, LATENT, NOPE, QUERY, exact, model, schedule_for, small_refusal
from reference.numerics.formats import to_bf16, to_e4m3
from reference.numerics.ieee import mul_rn, rcp_rn
from reference.numerics.mufu import rsqrt_approx, rsqrt_approx_ftz
from reference.numerics.order import butterfly, chain_add, chain_fma, pairwise, strided_fma
from reference.numerics.tensor_core import FORMS, Form, mma
from reference.numerics.ulp import key
from tools.adapters import exact as adapter

KERNEL = goldens.KERNELS["mla_query"]
COMMITTED = [case for case in KERNEL.cases if case.committed]
EPS = insert.EPS
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SMALL_AND_TILED = pytest.mark.parametrize("schedule", ["small", "tiled"])


def call(heads: int = 1, rows: int = 2, values: str = "normal", slots: str = "spread") -> tuple[dict, dict]:
    """Inputs and parameters."""
    case = room.make_case(heads, rows, values, slots, pages=2, page_size=4)
    return room.inputs(case), dict(case.params)


def straightforward(x: dict, params: dict) -> Tensor:
    """Values of output in FP64 by PyTorch's own functions."""
    heads = params["heads"]
    latent = x["qkv"][:, :QUERY].double()
    normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + params["eps"]) * x["w_qa"].double()
    q = (normed.to(BF16).double() @ x["w_qb"].double().t()).to(BF16).double().view(-1, heads, HEAD)
    absorbed = torch.einsum("bhp,hpl->bhl", q[..., :NOPE], x["w_uk"].double()).to(BF16).double()
    return torch.cat([absorbed, q[..., NOPE:]], -1) * x["q_scale_inv"].double()


@pytest.mark.parametrize("heads", [12, 6, 1])
@pytest.mark.parametrize("values", ["normal", "zeros", "wide", "ties", "scale-huge"])
def test_model_is_the_mathematics(heads: int, values: str) -> None:
    """The roundings to bf16 are part of it. FP64 agrees but for the last bits; FP32 also puts a bf16 in some thousands
    on the other side of a tie."""
    x, params = call(heads, 2, values)
    want = straightforward(x, params)
    torch.testing.assert_close(model(x, params, torch.float64)["output"], want, rtol=1e-10, atol=1e-40)
    got = model(x, params)["output"].double()
    assert float(((got - want).abs() > 1e-6 * want.abs()).double().mean()) < 0.02
    assert bool(((got - want).abs() <= room.bound(x, params, "model")["output"]).all())


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.name)
def test_committed_cases_are_within_their_bounds(case: goldens.Case) -> None:
    golden = store.load(case, store.read_manifest())
    for schedule in case.schedules:
        verdicts = judge(KERNEL, case, golden, select(golden, f"exact/{schedule}/"), schedule)
        assert [v.against for v in verdicts] == ["exact", "model"] * 2
        assert [v.reason for v in verdicts if not v.passed] == []


@pytest.mark.parametrize(("heads", "rows"), [(12, 3), (6, 5), (1, 5)])
@pytest.mark.parametrize("values", ["normal", "wide", "subnormal", "saturating", "halfway", "scale-huge"])
def test_the_schedules_agree_within_the_derived_steps(heads: int, rows: int, values: str) -> None:
    """Both with the oracle, and with each other, in e4m3 steps; nearly everywhere not one step apart."""
    x, params = call(heads, rows, values)
    oracle = model(x, params, torch.float64)["output"]
    codes = {}
    for schedule in ("small", "tiled"):
        limit = room.bound(x, params, schedule)["output"]
        low, high = (key(to_e4m3(end.float())) for end in (oracle - limit, oracle + limit))
        codes[schedule] = key(exact(x, params, schedule)["output"].view(E4M3))
        assert bool(((low <= codes[schedule]) & (codes[schedule] <= high)).all())
    apart, allowed = (codes["small"] - codes["tiled"]).abs(), room.agreement(x, params)
    assert bool((apart <= allowed).all())
    if values == "normal":
        assert float((allowed == 0).double().mean()) > 0.6
        assert float((allowed <= 1).double().mean()) > 0.9
        assert float((apart > 0).double().mean()) < 1e-3


@pytest.mark.parametrize("values", ["cancel", "cancel-latent"])
def test_the_schedules_differ_where_only_roundings_are_left(values: str) -> None:
    x, params = call(1, 2, values)
    small, tiled = (exact(x, params, schedule)["output"] for schedule in ("small", "tiled"))
    assert float((small != tiled).double().mean()) > 0.5


# By hand.


def chosen(values: list[float], heads: int = 1, scale: float = 0.5) -> tuple[dict, dict]:
    """A call whose q and latents are ``values`` in turn: x of ±1, eps 0, weights of one 1 in a row."""
    x, params = call(heads, 1, "ties")
    w = torch.tensor(values, dtype=BF16)[torch.arange(QUERY) % len(values)]
    w_uk = torch.zeros(heads, NOPE, LATENT, dtype=BF16)
    w_uk[:, torch.arange(LATENT) % NOPE, torch.arange(LATENT)] = 1.0
    w_qb = torch.zeros(heads * HEAD, QUERY, dtype=BF16)
    w_qb[torch.arange(heads * HEAD), torch.arange(heads * HEAD) % QUERY] = 1.0
    x["qkv"][:, :QUERY] = 1.0
    return x | {"w_qa": w, "w_qb": w_qb, "w_uk": w_uk, "q_scale_inv": torch.tensor([scale])}, params


@SMALL_AND_TILED
def test_pitfall_a_scale_of_two_gives_half(schedule: str) -> None:
    """Latent ±1, weight 1, scale 2 (inverse 0.5): 0x30 and 0xb0; the wrong direction would be 0x40 and 0xc0."""
    x, params = chosen([1.0, -1.0])
    got = exact(x, params, schedule)["output"][0, 0]
    assert got.tolist() == [0x30, 0xB0] * 288


@SMALL_AND_TILED
def test_saturation_and_ties_by_hand(schedule: str) -> None:
    values = {896.0: 0x7E, 928.0: 0x7E, 932.0: 0x7E, -2000.0: 0xFE, 2.0**-9: 0x00, -(2.0**-9): 0x80, 2.125: 0x38}
    values |= {2.375: 0x3A, 2.0**-8: 0x01, 1.5 * 2.0**-8: 0x02, 0.0: 0x00}
    x, params = chosen(list(values))
    got = exact(x, params, schedule)["output"][0, 0, LATENT:].tolist()
    want = [byte for _, byte in zip(range(HEAD), list(values.values()) * HEAD, strict=False)]
    # A sum that starts from +0 has no −0; −2^-10 rounds to one.
    assert got == want[NOPE:]


@SMALL_AND_TILED
def test_pitfall_only_slots_5_and_0_change(schedule: str) -> None:
    case = goldens.find("mla_query/h1-b4-p2x3-alternate-padded")
    x = room.inputs(case)
    assert x["slots"].tolist() == [5, -1, 0, -1]
    got = exact(x, case.params, schedule)
    assert bool((got["cache"].flatten(0, 1)[1:5] == 0xA5).all())
    nan = (got["output"] & 0x7F) == 0x7F
    assert bool(nan[1::2].all())
    assert bool((got["output"][1::2] == 0x7F).all())
    assert not bool(nan[0::2].any())


@SMALL_AND_TILED
def test_the_insert_is_the_stand_alone_one(schedule: str) -> None:
    x, params = call(6, 5, "wide", "crossing")
    want = cache_insert.exact(kernel.insert_inputs(x), {"eps": params["eps"]}, "insert")["cache"]
    assert torch.equal(exact(x, params, schedule)["cache"], want)


# A simulation from the specification.

# A number is an integer, in units of 2^-149 (fp32) or 2^-298 (products).
ONE = 1 << 149


def rounded(x: int, bits: int, step: int) -> int:
    """x to ``bits`` significant bits and multiples of ``step`` at least, to nearest, ties to even."""
    unit = max(step, 1 << max(0, abs(x).bit_length() - bits))
    quotient, rest = divmod(abs(x), unit)
    quotient += 2 * rest > unit or (2 * rest == unit and quotient % 2 == 1)
    return (quotient * unit) * (-1 if x < 0 else 1)


def fma(a: int, b: int, c: int) -> int:
    return rounded(a * b + (c << 149), 24, ONE) >> 149


def add(a: int, b: int) -> int:
    return rounded(a + b, 24, 1)


def bf16(x: int) -> int:
    return rounded(x, 8, 1 << 16)


def integers(x: Tensor) -> list:
    """fp32 or bf16 in units of 2^-149."""
    mantissa, exponent = np.frexp(x.double().numpy())
    whole = np.ldexp(mantissa, 53).astype(np.int64).astype(object)
    shift = (exponent.astype(np.int64) - 53 + 149).astype(object)
    return np.vectorize(lambda m, s: int(m) << s if s >= 0 else int(m) >> -s, otypes=[object])(whole, shift).tolist()


def number(x: int) -> np.float32:
    return np.float32(math.ldexp(x, -149)) if abs(x) < 1 << 1000 else np.float32(x / ONE)


def fused(pairs: list[tuple[int, int]], c: int) -> int:
    """One MMA of normal bf16: terms are cut toward zero to 2^-25 of the largest one's exponent, the sum to fp32."""
    if not any(a * b for a, b in pairs) and c == 0:
        return 0
    exponents = [abs(a).bit_length() + abs(b).bit_length() - 2 for a, b in pairs if a * b]
    exponents.append(abs(c).bit_length() - 1 + 149 if c else 16 + 149)
    unit = 1 << max(0, max(exponents) - 25)

    def cut(x: int, step: int) -> int:
        return abs(x) // step * step * (-1 if x < 0 else 1)

    total = sum(cut(a * b, unit) for a, b in pairs) + cut(c << 149, unit)
    return cut(total, max(ONE, 1 << max(0, abs(total).bit_length() - 24))) >> 149


def exchange(lanes: list[int]) -> int:
    for offset in (16, 8, 4, 2, 1):
        lanes = [add(lanes[j], lanes[j ^ offset]) for j in range(32)]
    return lanes[0]


def square_sum_small(x: list[int]) -> int:
    threads = []
    for t in range(192):
        total = 0
        for value in x[8 * t : 8 * t + 8]:
            total = fma(value, value, total)
        threads.append(total)
    total = 0
    for warp in range(8):
        total = add(total, exchange(threads[32 * warp : 32 * warp + 32]) if warp < 6 else 0)
    return total


def square_sum_tiled(x: list[int]) -> int:
    lanes = []
    for j in range(32):
        chains = [0, 0, 0, 0]
        for c in range(6):
            for i in range(8):
                value = x[256 * c + 8 * j + i]
                chains[(8 * c + i) % 4] = fma(value, value, chains[(8 * c + i) % 4])
        lanes.append(add(add(chains[0], chains[1]), add(chains[2], chains[3])))
    return exchange(lanes)


def normed(x: Tensor, w: Tensor, total: int, eps: float) -> list[int]:
    mean = np.float32(number(total)) / np.float32(1536) + np.float32(eps)
    rr = np.float32(rsqrt_approx(torch.tensor([float(mean)])).item())
    return integers(torch.from_numpy((x.float().numpy() * rr) * w.float().numpy()).to(BF16))


def q_row_small(w: list[int], x: list[int]) -> int:
    lanes = []
    for j in range(32):
        chains = [0, 0]
        for c in range(6):
            for i in range(8):
                k = (32 * c + j) * 8 + i
                chains[i % 2] = fma(w[k], x[k], chains[i % 2])
        lanes.append(add(*chains))
    return bf16(exchange(lanes))


def q_row_tiled(w: list[int], x: list[int]) -> int:
    total = 0
    for warp in range(8):
        partial = 0
        for block in range(192 * warp, 192 * warp + 192, 32):
            for upper in (False, True):
                ks = [k for k in range(block, block + 32) if (k % 8 >= 4) == upper]
                partial = fused([(w[k], x[k]) for k in ks], partial)
        total = add(total, partial)
    return bf16(total)


def latent_small(w: list[int], q: list[int], ctas: int) -> int:
    columns = 512 // ctas
    total = 0
    for group in range(256 // columns):
        first = group * columns // 2
        chains = [0, 0]
        for position in range(columns // 2):
            p = first + position
            chains[position % 2] = fma(w[p], q[p], chains[position % 2])
        total = add(total, add(*chains))
    return bf16(total)


def latent_tiled(w: list[int], q: list[int], ctas: int) -> int:
    total = 0
    for step in range(8):
        total = fused([(w[p], q[p]) for p in range(16 * step, 16 * step + 16)], total)
    return bf16(total)


def byte(x: int, scale: float) -> int:
    scaled = np.clip(number(x) * np.float32(scale), -448, 448)
    return int(np.array(scaled).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


SIMULATED = {
    "small": (square_sum_small, q_row_small, latent_small),
    "tiled": (square_sum_tiled, q_row_tiled, latent_tiled),
}


@pytest.mark.parametrize(("heads", "head", "values"), [(1, 0, "cancel"), (6, 5, "cancel-latent"), (12, 7, "halfway")])
@SMALL_AND_TILED
def test_exact_against_its_specification_thread_by_thread(schedule: str, heads: int, head: int, values: str) -> None:
    """One row of requests: four elements from q alone, four of the latent, with all that they are made of."""
    square_sum, q_row, latent_column = SIMULATED[schedule]
    x, params = call(heads, 2, values)
    got = exact(x, params, schedule)["output"][1, head].tolist()
    query, scale = x["qkv"][1, :QUERY], x["q_scale_inv"].item()
    x_hat = normed(query, x["w_qa"], square_sum(integers(query)), params["eps"])
    w_qb = integers(x["w_qb"][head * HEAD : (head + 1) * HEAD])
    for rope in (0, 1, 40, 63):
        assert byte(q_row(w_qb[NOPE + rope], x_hat), scale) == got[LATENT + rope]
    q = [q_row(w_qb[p], x_hat) for p in range(NOPE)]
    for column in (0, 33, 300, 511):
        w_uk = integers(x["w_uk"][head, :, column])
        assert byte(latent_column(w_uk, q, kernel.CLUSTER[heads]), scale) == got[column]


# Properties.


@pytest.mark.parametrize(("heads", "rows", "schedule"), [(1, 5, "small"), (6, 5, "tiled"), (12, 3, "small")])
def test_rows_do_not_meet(heads: int, rows: int, schedule: str) -> None:
    """A row alone, in another place, and beside rows of NaN has the same bytes; the inputs stay as they are."""
    x, params = call(heads, rows)
    before = {name: t.clone() for name, t in x.items()}
    whole = exact(x, params, schedule)["output"]
    assert all(torch.equal(x[name], before[name]) for name in x)
    flipped = x | {name: x[name].flip(0) for name in ("qkv", "slots")}
    assert torch.equal(exact(flipped, params, schedule)["output"].flip(0), whole)
    for row in {0, rows - 1}:
        alone = x | {name: x[name][row : row + 1] for name in ("qkv", "slots")}
        assert torch.equal(exact(alone, params, schedule)["output"][0], whole[row])
        poisoned = x["qkv"].clone()
        poisoned[torch.arange(rows) != row] = torch.nan
        assert torch.equal(exact(x | {"qkv": poisoned}, params, schedule)["output"][row], whole[row])


@SMALL_AND_TILED
def test_row_pitch_and_what_lies_beyond_the_columns_do_not_matter(schedule: str) -> None:
    x, params = call()
    wide = torch.full((2, 3000), torch.nan, dtype=BF16)
    wide[:, : kernel.QKV] = x["qkv"]
    want = exact(x, params, schedule)
    for qkv in (wide, wide[:, : kernel.QKV], wide[:, :2200]):
        got = exact(x | {"qkv": qkv}, params, schedule)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_heads_do_not_meet() -> None:
    x, params = call(6, 2)
    whole = exact(x, params, "tiled")["output"]
    one = x | {"w_qb": x["w_qb"][2 * HEAD : 3 * HEAD], "w_uk": x["w_uk"][2:3]}
    assert torch.equal(exact(one, params | {"heads": 1}, "tiled")["output"][:, 0], whole[:, 2])


def test_the_switch_between_the_schedules() -> None:
    assert [schedule_for(12, rows) for rows in (1, 3, 4, 64)] == ["small", "small", "tiled", "tiled"]
    assert [schedule_for(6, rows) for rows in (1, 5, 6, 64)] == ["small", "small", "tiled", "tiled"]
    assert [schedule_for(1, rows) for rows in (5, 6)] == ["small", "tiled"]


def test_q_b_order_takes_each_k_once_the_lower_four_of_eight_first() -> None:
    order = kernel.q_b_order(torch.device("cpu"))
    assert order.shape == (12, 16)
    assert sorted(order.flatten().tolist()) == list(range(192))
    assert order[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    assert order[1].tolist() == [k + 4 for k in order[0].tolist()]
    assert order[2].tolist() == [k + 32 for k in order[0].tolist()]


# Faults.


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Tensor]]:
    manifest = store.read_manifest()
    return {case.id: store.load(case, manifest) for case in COMMITTED}


TO_BYTES = kernel._to_bytes


def merged_if(wrong: Callable[[Tensor, int], bool]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """One chain in the place of several, where told by the first factor and the number of ways."""
    return lambda a, b, ways: chain_fma(a, b) if wrong(a, ways) else strided_fma(a, b, ways)


def by_fractions(bits: int) -> Callable[..., Tensor]:
    """Tensor cores that keep another number of bits."""
    form = Form(FORMS["bf16"].source, FORMS["bf16"].operand, fraction_bits=bits)
    return lambda a, b, k_order=None: mma(a, b, form=form, k_order=k_order)


def one_chain(a: Tensor, b: Tensor, k_order: Tensor | None = None) -> Tensor:
    """The k of Q_B's eight warps one after the other, in one chain of 96."""
    if k_order is None:
        return mma(a, b)
    a, b = (x.transpose(0, 1).flatten(1) for x in (a, b))
    whole = (torch.arange(8)[:, None, None] * 192 + k_order).flatten(0, 1)
    return mma(a, b, k_order=whole)[None]


FAULTS: dict[str, tuple[str, str, Any]] = {
    "scale-inverted": ("both", "_to_bytes", lambda latent, q, scale: TO_BYTES(latent, q, 1 / scale)),
    "key-scale-for-query-scale": ("both", "_to_bytes", lambda latent, q, scale: TO_BYTES(latent, q, scale * 0 + 20)),
    "rope-unscaled": (
        "both",
        "_to_bytes",
        lambda latent, q, scale: TO_BYTES(latent, (q.float() / scale).to(BF16), scale),
    ),
    "no-saturation": ("both", "to_e4m3", lambda x: to_e4m3(torch.where(x.abs() > 464, torch.nan, x))),
    "rounded-twice": ("both", "to_e4m3", lambda x: to_e4m3(to_bf16(x).float())),
    "e4m3-subnormals-flushed": ("both", "to_e4m3", lambda x: to_e4m3(torch.where(x.abs() < 2.0**-6, x * 0, x))),
    "truncation-to-bf16": ("both", "to_bf16", lambda x: (x.view(torch.int32) & -65536).view(torch.float32).to(BF16)),
    "rsqrt-with-ftz": ("both", "rsqrt_approx", rsqrt_approx_ftz),
    "rsqrt-correctly-rounded": ("both", "rsqrt_approx", lambda x: torch.rsqrt(x.double()).float()),
    "mean-by-multiplication": ("both", "div_rn", lambda a, b: mul_rn(a, rcp_rn(b))),
    "eps-missing": ("both", "add_rn", lambda a, b: a),
    "sum-over-other-width": ("both", "div_rn", lambda a, b: a / 1535),
    "butterfly-ascending": ("both", "butterfly", lambda x, offsets: butterfly(x, offsets[::-1])),
    "square-sum-merged": ("tiled", "strided_fma", merged_if(lambda a, ways: ways == 4)),
    "square-sum-by-parity": ("tiled", "strided_fma", lambda a, b, ways: strided_fma(a, b, 2)),
    "q-b-chains-merged": ("small", "strided_fma", merged_if(lambda a, ways: a.shape[0] == 48)),
    "absorption-chains-merged": ("small", "strided_fma", merged_if(lambda a, ways: a.shape[0] != 48)),
    "q-b-ascending-k": ("tiled", "q_b_order", lambda device: torch.arange(192).view(12, 16)),
    "q-b-in-one-chain": ("tiled", "mma", one_chain),
    "partial-sums-pairwise": ("tiled", "chain_add", pairwise),
    "groups-pairwise": ("small", "chain_add", lambda x, dim=-1: pairwise(x, dim) if dim == -2 else chain_add(x)),
    "mma-of-24-bits": ("tiled", "mma", by_fractions(24)),
    "mma-of-26-bits": ("tiled", "mma", by_fractions(26)),
    "mma-is-a-chain-of-fma": (
        "tiled",
        "mma",
        lambda a, b, k_order=None: chain_fma(
            *(x.float().movedim(-1, 0).contiguous() for x in (a[..., :, None, :], b[..., None, :, :]))
        ),
    ),
}


def failing(stored: dict, schedules: tuple[str, ...]) -> set[str]:
    """The schedules that no longer make some committed case's bytes."""

    def differs(case: goldens.Case, schedule: str) -> bool:
        golden = stored[case.id]
        made = exact(select(golden, "in/"), case.params, schedule)
        return any(not torch.equal(got, golden[f"exact/{schedule}/{name}"]) for name, got in made.items())

    return {name for name in schedules if any(differs(case, name) for case in COMMITTED if name in case.schedules)}


def test_without_a_fault_no_case_fails(stored: dict) -> None:
    assert failing(stored, ("small", "tiled")) == set()


@pytest.mark.parametrize(("where", "name", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_fails_a_committed_case(
    stored: dict, monkeypatch: pytest.MonkeyPatch, where: str, name: str, fault: Any
) -> None:
    schedules = ("small", "tiled") if where == "both" else (where,)
    monkeypatch.setattr(kernel, name, fault)
    assert failing(stored, schedules) == set(schedules)


def test_minus_one_not_skipped_fails_a_committed_case(stored: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    original = cache_insert.write
    monkeypatch.setattr(cache_insert, "write", lambda cache, slots, rows: original(cache, slots.clamp(min=0), rows))
    monkeypatch.setattr(kernel, "check_slots", lambda slots: None)
    assert failing(stored, ("small", "tiled")) == {"small", "tiled"}


@pytest.mark.parametrize("fault", ["scale-inverted", "rope-unscaled", "sum-over-other-width", "truncation-to-bf16"])
@SMALL_AND_TILED
def test_a_plain_fault_exceeds_the_derived_bound(
    stored: dict, monkeypatch: pytest.MonkeyPatch, fault: str, schedule: str
) -> None:
    """Judged by e4m3 steps alone, as a schedule without an exact model would be."""

    def refused(case: goldens.Case) -> bool:
        golden = stored[case.id]
        with monkeypatch.context() as patched:
            patched.setattr(kernel, *FAULTS[fault][1:])
            outputs = exact(select(golden, "in/"), case.params, schedule)
        return any(not v.passed for v in judge(KERNEL, case, golden, outputs, schedule) if v.against == "model")

    assert any(refused(case) for case in COMMITTED if schedule in case.schedules)


# Refusals.

GOOD, PARAMS = call()
REFUSED = {
    "missing": (
        {n: x for n, x in GOOD.items() if n != "w_uk"},
        PARAMS,
        r"inputs: w_uk missing; mla_query takes qkv, w_q",
    ),
    "unknown": (GOOD | {"rank": GOOD["slots"]}, PARAMS, r"inputs: rank unknown; mla_query takes qkv"),
    "params": (GOOD, PARAMS | {"dcp": 1}, r"params: dcp unknown; mla_query takes heads, eps"),
    "heads-8": (GOOD, PARAMS | {"heads": 8}, r"heads: got 8, allowed are 12, 6, 1"),
    "heads-true": (GOOD, PARAMS | {"heads": True}, r"heads: got True, allowed are 12, 6, 1"),
    "heads-differ": (GOOD, PARAMS | {"heads": 6}, r"w_qb: got shape \(192, 1536\), allowed is \[1152, 1536\]"),
    "eps": (GOOD, PARAMS | {"eps": -1e-6}, r"eps: got -1e-06, allowed is a finite number from 0 on"),
    "width": (GOOD | {"qkv": GOOD["qkv"][:, :2111]}, PARAMS, r"qkv: got W = 2111, allowed is from 2112 on"),
    "rank": (GOOD | {"qkv": GOOD["qkv"][0]}, PARAMS, r"qkv: got shape \(2112,\), allowed is \[B, W\]"),
    "no-rows": (GOOD | {"qkv": GOOD["qkv"][:0]}, PARAMS, r"qkv: got shape \(0, 2112\), allowed are extents from 1 on"),
    "many-rows": (
        GOOD | {"qkv": GOOD["qkv"].repeat(40, 1), "slots": torch.full((80,), -1)},
        PARAMS,
        r"qkv: got B = 80, allowed are 1 … 64",
    ),
    "columns-apart": (
        GOOD | {"qkv": GOOD["qkv"].repeat(1, 2)[:, ::2]},
        PARAMS,
        r"qkv: got strides \(4224, 2\) for sha",
    ),
    "fp32": (GOOD | {"w_qa": GOOD["w_qa"].float()}, PARAMS, r"w_qa: got torch.float32, allowed is torch.bfloat16"),
    "w_uk": (GOOD | {"w_uk": GOOD["w_uk"].mT}, PARAMS, r"w_uk: got shape \(1, 512, 128\), allowed is \[1, 128, 512\]"),
    "cache": (
        GOOD | {"cache": GOOD["cache"].int()},
        PARAMS,
        r"cache: got torch.int32, allowed is torch.uint8 or torch.f",
    ),
    "slots": (GOOD | {"slots": GOOD["slots"][:1]}, PARAMS, r"slots: got B = 1, qkv has 2"),
    "twice": (GOOD | {"slots": torch.tensor([3, 3])}, PARAMS, r"slots: rows 0, 1 all have slot 3, and would race"),
    "scale": (GOOD | {"q_scale_inv": torch.ones(())}, PARAMS, r"q_scale_inv: got shape \(\), allowed is \[1\]"),
    "device": (GOOD | {"w_qb": GOOD["w_qb"].to("meta")}, PARAMS, r"w_qb: is on meta, qkv on cpu; all must be on one"),
}


@pytest.mark.parametrize(("x", "params", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("function", [model, lambda x, p: exact(x, p, "tiled")], ids=["model", "exact"])
def test_what_is_outside_the_interface_is_refused(function: Callable, x: dict, params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(x, params)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.3])
def test_eps_is_rounded_to_fp32(eps: float) -> None:
    """Model, oracle, exact and bound take the nearest fp32 number, whichever of the two is given."""
    given, rounded = PARAMS | {"eps": eps}, PARAMS | {"eps": float(np.float32(eps))}
    assert given != rounded
    for made in (
        lambda p: exact(GOOD, p, "small"),
        lambda p: exact(GOOD, p, "tiled"),
        lambda p: model(GOOD, p),
        lambda p: model(GOOD, p, torch.float64),
        lambda p: KERNEL.bound(GOOD, p, "tiled"),
    ):
        want = made(rounded)
        assert all(torch.equal(x.view(torch.uint8), want[name].view(torch.uint8)) for name, x in made(given).items())


@pytest.mark.parametrize(("heads", "rows", "most"), [(12, 4, 3), (6, 6, 5), (1, 6, 5)])
def test_small_refuses_what_it_does_not_support(heads: int, rows: int, most: int) -> None:
    x, params = call(heads, rows)
    message = f"qkv: got B = {rows}, schedule small takes 1 … {most} with {heads} heads"
    with pytest.raises(ValueError, match=message):
        exact(x, params, "small")
    assert small_refusal(heads, rows) == message
    assert small_refusal(heads, most) is None
    exact(x, params, "tiled")


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule: got 'large', allowed are small, tiled"):
        exact(GOOD, PARAMS, "large")
    with pytest.raises(ValueError, match=r"schedule: got 'large', a bound is derived for small, tiled, model"):
        room.bound(GOOD, PARAMS, "large")


# Cases.


def test_cases_cover_heads_and_the_switch_and_are_named_after_what_they_are() -> None:
    assert len({case.id for case in KERNEL.cases}) == len(KERNEL.cases)
    dims = {(case.params["heads"], case.dims["rows"]) for case in KERNEL.cases}
    for heads, most in kernel.SMALL_B.items():
        assert {(heads, rows) for rows in (1, most, most + 1, 64)} <= dims
    assert {case.recipe.split("@")[0] for case in KERNEL.cases} == set(room.RECIPES)
    case = room.make_case(6, 7, "wide", "none", pages=3, page_size=5, width=2200, seed=9)
    assert case.id == "mla_query/h6-b7-w2200-p3x5-none-wide-s9"
    assert case.schedules == ("tiled",)
    assert room.make_case(6, 5).schedules == ("small", "tiled")


def test_query_and_cache_scales_differ_in_every_case() -> None:
    for recipe in room.RECIPES.values():
        own = insert.RECIPES[recipe.insert]
        assert recipe.scale != own.scale
    x = room.inputs(goldens.find("mla_query/h1-b1-p1x1-halfway-s990"))
    assert x["q_scale_inv"] != x["k_scale_inv"]


def test_cases_share_their_weights() -> None:
    manifest = store.read_manifest()
    first, second = ("mla_query/h1-b1-normal", "mla_query/h1-b4-p2x3-alternate-padded")
    for name in ("in/w_qb", "in/w_uk"):
        assert manifest[first]["sha256"][name] == manifest[second]["sha256"][name]


def test_elements_are_located() -> None:
    case = room.make_case(6, 5)
    assert room.locate(case, "small", "output", (4, 5, 511)) == {"row": 4, "head": 5, "rank": 15}
    assert room.locate(case, "small", "output", (4, 5, 512)) == {"row": 4, "head": 5, "rank": 10}
    assert room.locate(case, "small", "output", (4, 5, 575)) == {"row": 4, "head": 5, "rank": 15}
    assert room.locate(case, "tiled", "output", (4, 5, 1)) == {"row": 4, "head": 5}
    assert room.locate(case, "tiled", "cache", (0, 2, 9)) == {"slot": 2, "thread": 1}


# Properties.

SEVERAL = goldens.find("mla_query/h6-b2-w2176-p2x3-page-normal")


def broken(candidate: Callable[..., Any], *tried: Any) -> set[str]:
    """Which variants of the properties ``tried`` a candidate fails on a case of several heads."""
    outcomes = invariance.check(
        dataclasses.replace(KERNEL, properties=tried),
        SEVERAL,
        KERNEL.inputs(SEVERAL),
        lambda x, params, graph: call_candidate(candidate, x, params, torch.device("cpu"), KERNEL.written(params)),
        None,
        graphs=False,
    )
    return {v.output.split(":")[0] for v in outcomes if isinstance(v, Verdict) and not v.passed}


@SMALL_AND_TILED
def test_exact_models_have_every_property(schedule: str) -> None:
    assert broken(adapter.make("mla_query", schedule), *KERNEL.properties) == set()


def tiled_of(changed: Callable[[dict], dict]) -> Callable[..., dict]:
    """A candidate: ``tiled`` of other inputs."""
    return lambda x, params: exact(dict(x) | changed(x), params, "tiled")


def wide_rope(x: dict) -> dict:
    """k_pe from the last columns of qkv, not from 2048 on."""
    qkv = x["qkv"].clone()
    qkv[:, 2048:2112] = x["qkv"][:, -64:]
    return {"qkv": qkv}


LACKING = {
    "w_uk-of-head-0": (
        lambda x: {"w_uk": x["w_uk"][:1].expand_as(x["w_uk"]).contiguous()},
        properties.heads,
        {"heads reversed", "head 5 amid NaN"},
    ),
    "a-zero-times-the-next-head": (
        lambda x: {"w_qb": x["w_qb"] + 0 * x["w_qb"].roll(HEAD, 0)},
        properties.heads,
        {"head 0 amid NaN", "head 5 amid NaN"},
    ),
    "one-scale": (lambda x: {"k_scale_inv": x["q_scale_inv"]}, properties.scales, {"another q_scale_inv"}),
    "the-cache's-scale": (lambda x: {"q_scale_inv": x["k_scale_inv"]}, properties.scales, {"another k_scale_inv"}),
    "rope-from-the-end": (wide_rope, properties.unread, {"unread columns NaN"}),
}


@pytest.mark.parametrize(("changed", "tried", "fails"), LACKING.values(), ids=LACKING)
def test_a_candidate_that_lacks_a_property_is_noticed(changed: Callable, tried: Any, fails: set[str]) -> None:
    assert broken(tiled_of(changed), tried) == fails


# Bounds.


def by_bound(case: goldens.Case, stored: dict, outputs: dict[str, Tensor]) -> set[str]:
    """The outputs that are refused of a candidate that claims no schedule."""
    return {v.output for v in judge(KERNEL, case, stored[case.id], outputs, None) if not v.passed}


def without_eps(monkeypatch: pytest.MonkeyPatch, root: Callable[[Tensor], Tensor]) -> None:
    """1/rms by ``root`` of the mean square alone."""
    monkeypatch.setattr(kernel, "add_rn", lambda mean, eps: mean)
    monkeypatch.setattr(kernel, "rsqrt_approx", root)


ROOTS = {
    "eps-missing": lambda mean: torch.rsqrt(mean),
    "eps-twice": lambda mean: torch.rsqrt(mean + 2 * EPS),
    "eps-outside-the-root": lambda mean: 1.0 / (torch.sqrt(mean) + EPS),
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_another_place_of_eps_exceeds_the_bound_where_rows_are_faint(
    stored: dict, monkeypatch: pytest.MonkeyPatch, root: Callable
) -> None:
    case = goldens.find("mla_query/h1-b2-p1x2-page-faint")
    assert by_bound(case, stored, exact(select(stored[case.id], "in/"), case.params, "tiled")) == set()
    without_eps(monkeypatch, root)
    assert "output" in by_bound(case, stored, exact(select(stored[case.id], "in/"), case.params, "tiled"))


def test_weights_of_another_head_exceed_the_bound(stored: dict) -> None:
    x = select(stored[SEVERAL.id], "in/")
    assert by_bound(SEVERAL, stored, exact(x, SEVERAL.params, "tiled")) == set()
    for name in ("w_uk", "w_qb"):
        for order in ([0] * 6, [1, 0, 2, 3, 4, 5]):
            wrong = x | {name: x[name].unflatten(0, (6, -1))[order].flatten(0, 1).contiguous()}
            assert "output" in by_bound(SEVERAL, stored, exact(wrong, SEVERAL.params, "tiled")), (name, order)


@pytest.mark.parametrize("byte", [0x7E, 0x00])
def test_rows_of_nan_are_nan_in_the_cache(stored: dict, byte: int) -> None:
    case = goldens.find("mla_query/h1-b17-p2x8-page-padded")
    right = exact(select(stored[case.id], "in/"), case.params, "tiled")
    assert by_bound(case, stored, right) == set()
    nan = (right["cache"] == 0x7F) & (stored[case.id]["in/cache"] != 0x7F)
    assert bool(nan.any())
    assert by_bound(case, stored, right | {"cache": torch.where(nan, byte, right["cache"])}) == {"cache"}
