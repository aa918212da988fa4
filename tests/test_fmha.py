"""``reference.fmha``: the model against independent attention, the schedules against their specification, all against
literals.

Tolerances are ``goldens.fmha.bound``, the derived ones; in fp64 they shrink by 2^-29, the ratio of the
formats' unit roundoffs.
"""

import math
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import goldens
from goldens import inputs as draw
from goldens import store
from goldens.fmha import RECIPES, WGMMA, bound, make_case
from goldens.judge import select
from reference.fmha import LOG2_E, exact, first_row, k2_refusal, model, scale_of
from reference.numerics import tensor_core, ulp
from reference.numerics.mufu import ex2_approx_ftz, lg2_approx_ftz, rcp_approx_ftz

KERNEL = goldens.KERNELS["fmha"]
FP64_OVER_FP32 = 2.0**-29
# fp64 errors of both sides, and portable.exp's 2 ULP where fp32's bound counts 1.
FP64_SHARE = 4 * FP64_OVER_FP32


def normal(label: str, n_q: int, n_k: int, d: int = 64, heads: tuple[int, int] = (1, 1)) -> dict[str, Tensor]:
    """q [Hq, Nq, d], k and v [Hkv, Nk, d]."""
    shapes = {"q": (heads[0], n_q, d), "k": (heads[1], n_k, d), "v": (heads[1], n_k, d)}
    return {name: draw.normal_bf16(f"test_fmha/{label}/{name}", shape) for name, shape in shapes.items()}


def assert_within(got: Tensor, want: Tensor, allowed: Tensor) -> None:
    excess = ((got.double() - want).abs() > allowed).nonzero()
    assert excess.numel() == 0, f"{len(excess)} beyond the bound, first {excess[0].tolist()}"


SHAPES = {
    "d64-n64": (64, 64, (1, 1)),
    "d64-n1": (64, 1, (1, 1)),
    "d64-n33-grouped": (64, 33, (4, 2)),
    "d128-n100": (128, 100, (2, 2)),
    "d128-n17-one-kv-head": (128, 17, (3, 1)),
}


@pytest.mark.parametrize("schedule", ["model", "oracle", "k2", "wgmma128"])
def test_the_scale_is_rounded_to_fp32(schedule: str) -> None:
    x, given = normal("rounded", 64, 64), {"causal": False, "scale": 0.3}
    rounded = given | {"scale": float(np.float32(0.3))}
    dtypes = {"model": torch.float32, "oracle": torch.float64}
    made = [model(x, p, dtypes[schedule]) if schedule in dtypes else exact(x, p, schedule) for p in (given, rounded)]
    assert given != rounded
    assert torch.equal(made[0]["o"], made[1]["o"])


@pytest.mark.parametrize(("d", "n", "heads"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3], ids=["default-scale", "scale-0.3"])
def test_oracle_against_torch_attention(
    d: int, n: int, heads: tuple[int, int], causal: bool, scale: float | None
) -> None:
    x, params = normal(f"sdpa-{d}-{n}", n, n, d, heads), {"causal": causal, "scale": scale}
    group = heads[0] // heads[1]
    wide = {name: t.double().repeat_interleave(1 if name == "q" else group, 0)[None] for name, t in x.items()}
    theirs = torch.nn.functional.scaled_dot_product_attention(
        wide["q"], wide["k"], wide["v"], is_causal=causal, scale=scale_of(d, params)
    )[0]
    ours = model(x, params, torch.float64)["o"]
    assert ours.dtype == torch.float64
    assert_within(ours, theirs, FP64_SHARE * bound(x, params, "model")["o"])


def naive(x: dict[str, Tensor], causal: bool, scale: float) -> tuple[list, list]:
    """o and lse in Python floats, one row at a time: query i sees key j if j ≤ i + Nk − Nq."""
    q, k, v = (x[name].double().tolist() for name in ("q", "k", "v"))
    group, o, lse = len(q) // len(k), [], []
    for head, rows in enumerate(q):
        keys, values = k[head // group], v[head // group]
        for i, row in enumerate(rows):
            seen = [j for j in range(len(keys)) if not causal or j <= i + len(keys) - len(rows)]
            scores = [math.fsum(a * b for a, b in zip(row, keys[j], strict=True)) * scale for j in seen]
            top = max(scores, default=0.0)
            weights = [math.exp(s - top) for s in scores]
            total = math.fsum(weights)
            columns = range(len(row))
            o.append([math.fsum(w * values[j][c] for w, j in zip(weights, seen, strict=True)) for c in columns])
            o[-1] = [y / total if seen else 0.0 for y in o[-1]]
            lse.append(top + math.log(total) if seen else -math.inf)
    return o, lse


LENGTHS = {
    "q65-k64": (65, 64, (1, 1)),
    "q17-k80": (17, 80, (1, 1)),
    "q1-k65": (1, 65, (1, 1)),
    "q5-k1": (5, 1, (1, 1)),
    "q9-k7-grouped": (9, 7, (4, 2)),
}


@pytest.mark.parametrize(("n_q", "n_k", "heads"), LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_oracle_against_a_naive_loop(n_q: int, n_k: int, heads: tuple[int, int], causal: bool) -> None:
    x, params = normal(f"naive-{n_q}-{n_k}", n_q, n_k, heads=heads), {"causal": causal}
    got, allowed = model(x, params, torch.float64), bound(x, params, "model")
    o, lse = (torch.tensor(rows, dtype=torch.float64) for rows in naive(x, causal, 0.125))
    o, lse = o.view(got["o"].shape), lse.view(got["lse"].shape)
    assert_within(got["o"], o, FP64_SHARE * allowed["o"])
    empty = lse == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    assert_within(got["lse"][~empty], lse[~empty], FP64_SHARE * allowed["lse"][~empty])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["model", "oracle"])
def test_a_row_that_sees_no_key_is_zero(dtype: torch.dtype) -> None:
    """seqlen_q 65, seqlen_k 64: the mask is aligned to the bottom right, so row 0 is empty and row 1 sees key 0."""
    x = normal("empty-row", 65, 64)
    got = model(x, {"causal": True}, dtype)
    assert torch.equal(got["o"][0, 0], torch.zeros(64, dtype=dtype))
    assert got["lse"][0, 0] == -torch.inf
    assert torch.equal(got["o"][0, 1], x["v"][0, 0].to(dtype))
    assert got["o"].isfinite().all()
    assert got["lse"][0, 1:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_without_keys_every_row_is_empty(causal: bool) -> None:
    got = model(normal("no-keys", 3, 0), {"causal": causal})
    assert torch.equal(got["o"], torch.zeros(1, 3, 64))
    assert torch.equal(got["lse"], torch.full((1, 3), -torch.inf))


def test_without_queries_there_is_no_output() -> None:
    got = model(normal("no-queries", 0, 3), {})
    assert (got["o"].shape, got["lse"].shape) == ((1, 0, 64), (1, 0))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_lies_beyond_the_used_rows_of_a_buffer_is_not_read(causal: bool) -> None:
    """Buffers of 128 rows of which 65 are used, NaN or zeros beyond."""
    used = normal("buffer", 65, 65)

    def run(filler: float) -> dict[str, Tensor]:
        buffers = {name: torch.full((1, 128, 64), filler, dtype=torch.bfloat16) for name in used}
        for name, x in used.items():
            buffers[name][:, :65] = x
        return model({name: x[:, :65] for name, x in buffers.items()}, {"causal": causal})

    poisoned, clean = run(math.nan), run(0.0)
    for name in ("o", "lse"):
        assert poisoned[name].isfinite().all()
        assert torch.equal(ulp.bits(poisoned[name]), ulp.bits(clean[name]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_masked_keys_and_values_have_no_influence(name: str, value: float) -> None:
    x = normal("masked", 40, 40)
    clean = model(x, {"causal": True})
    x[name][:, 30:] = value
    got = model(x, {"causal": True})
    assert torch.equal(got["o"][:, :30], clean["o"][:, :30])
    assert torch.equal(got["lse"][:, :30], clean["lse"][:, :30])
    assert not torch.equal(got["o"][:, 30:], clean["o"][:, 30:])


def test_grouped_heads_are_repeated_heads() -> None:
    x = normal("grouped", 20, 30, heads=(6, 2))
    repeated = x | {name: x[name].repeat_interleave(3, 0) for name in ("k", "v")}
    got, want = model(x, {"causal": True}), model(repeated, {"causal": True})
    assert torch.equal(got["o"], want["o"])
    assert torch.equal(got["lse"], want["lse"])


# Those of whose elements the oracle decides on all.
UNJUDGED = ("nan", "inf", "bits", "overflow", "far-below", "marks", "hidden")
JUDGED = [case for case in KERNEL.cases if case.committed and case.recipe not in UNJUDGED]


def assert_model_within(x: dict[str, Tensor], params: dict, got: dict[str, Tensor], oracle: dict[str, Tensor]) -> None:
    allowed = bound(x, params, "model")
    for name in ("o", "lse"):
        seen = oracle[name].isfinite()
        assert torch.equal(got[name].isfinite(), seen)
        assert_within(got[name][seen], oracle[name][seen], allowed[name][seen])


def assert_schedule_within(x: dict[str, Tensor], params: dict, schedule: str, o: Tensor, oracle: Tensor) -> None:
    """The bound before the last rounding, then ½ ULP of bf16."""
    limit = bound(x, params, schedule)["o"]
    assert_within(o, oracle, limit + 0.5 * ulp.size(oracle.abs() + limit, torch.bfloat16))


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_committed_cases_are_within_their_bound_of_the_oracle(case: goldens.Case) -> None:
    tensors = store.load(case, store.read_manifest())
    x = select(tensors, "in/")
    oracle = model(x, case.params, torch.float64)
    assert_model_within(x, case.params, select(tensors, "model/"), oracle)
    for schedule in case.schedules:
        assert_schedule_within(x, case.params, schedule, tensors[f"exact/{schedule}/o"], oracle["o"])
        if schedule != "k2":
            lse, seen = tensors[f"exact/{schedule}/lse"], oracle["lse"].isfinite()
            assert torch.equal(lse[~seen].double(), oracle["lse"][~seen])
            assert_within(lse[seen], oracle["lse"][seen], bound(x, case.params, schedule)["lse"][seen])


@given(
    label=st.text("abcdef", min_size=1, max_size=8),
    recipe=st.sampled_from(["normal", "wide", "cancel", "subnormal", "negative", "dominant", "constant"]),
    d=st.sampled_from([64, 128]),
    tiles=st.integers(1, 2),
    causal=st.booleans(),
    scale=st.none() | st.floats(2.0**-10, 1.0, width=32),
)
@settings(max_examples=15)
def test_drawn_calls_are_within_their_bound(
    label: str, recipe: str, d: int, tiles: int, causal: bool, scale: float | None
) -> None:
    shape, params = (1, 64 * tiles, d), {"causal": causal, "scale": scale}
    x = RECIPES[recipe](f"test_fmha/{label}", shape, shape)
    oracle = model(x, params, torch.float64)
    assert_model_within(x, params, model(x, params), oracle)
    for schedule in ("k2", *WGMMA):
        assert_schedule_within(x, params, schedule, exact(x, params, schedule)["o"], oracle["o"])


# By hand: every operation but the last rounding is exact, or an exponential that is 0 or 1.
def zeros(n: int) -> dict[str, Tensor]:
    return {name: torch.zeros(1, n, 64, dtype=torch.bfloat16) for name in ("q", "k", "v")}


def counting(n: int) -> dict[str, Tensor]:
    """q = 0, and value row j holds j."""
    return zeros(n) | {"v": torch.arange(n, dtype=torch.bfloat16)[None, :, None].expand(1, n, 64).contiguous()}


def pointing(n: int, keys: list[int]) -> dict[str, Tensor]:
    """Every query scores 16 · 64 · 0.125 = 128 with the keys, 0 with the others; e^-128 is 0 in fp32."""
    x = counting(n)
    x["q"][..., 5] = 16.0
    x["k"][:, keys, 5] = 64.0
    return x


def half_way(n: int) -> dict[str, Tensor]:
    """q = 0; value columns are constant but for row 0, whose excess makes the mean 128.5 or 129.5."""
    x = zeros(n)
    x["v"][..., 0::2], x["v"][..., 1::2] = 128.0, 129.0
    x["v"][:, 0] += 32.0  # 160 and 161: the mean grows by ½
    return x


LN_64 = 4.1588830947875977  # fp32 nearest to ln 64
BY_HAND = {
    "mean-of-0-to-63": (counting(64), False, 31.5, LN_64),
    "mean-of-what-is-seen": (counting(64), True, torch.arange(64)[:, None] / 2, None),
    "identity": (zeros(64) | {"v": torch.eye(64, dtype=torch.bfloat16)[None]}, False, 1 / 64, LN_64),
    "one-key": (pointing(64, [7]), False, 7.0, 128.0),
    "one-key-in-the-second-tile": (pointing(128, [100]), False, 100.0, 128.0),
    "one-key-in-the-first-tile": (pointing(128, [3]), False, 3.0, 128.0),
    "two-equal-keys": (pointing(64, [3, 60]), False, 31.5, 128.69314575195312),
    "two-equal-keys-of-two-tiles": (pointing(128, [3, 100]), False, 51.5, 128.69314575195312),
    "ties-to-even": (half_way(64), False, torch.tensor([128.0, 130.0]).repeat(32), LN_64),
}


@pytest.mark.parametrize(("x", "causal", "o", "lse"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(x: dict[str, Tensor], causal: bool, o: float | Tensor, lse: float | None) -> None:
    params = {"causal": causal}
    want = torch.as_tensor(o, dtype=torch.float32).expand(x["q"].shape)
    assert torch.equal(exact(x, params, "k2")["o"].float(), want)
    for schedule in WGMMA:
        assert torch.equal(exact(x, params, schedule)["o"].float(), want)
    got = model(x, params)
    assert torch.equal(got["o"].to(torch.bfloat16).float(), want)
    if lse is not None:
        assert (got["lse"] == lse).all()


def test_a_masked_key_does_not_dominate() -> None:
    """Key 7 outweighs all others, but rows 0 … 6 do not see it: they have the mean of the keys before."""
    o = exact(pointing(64, [7]), {"causal": True}, "k2")["o"][0, :, 0].float()
    assert o.tolist() == [i / 2 for i in range(7)] + [7.0] * 57


def round_to_fp32(x: Fraction) -> np.float32:
    """Nearest, ties to even, of a rational in fp32's normal or subnormal range."""
    if x == 0:
        return np.float32(0)
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    return np.float32(float(round(x / quantum) * quantum))


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return round_to_fp32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def mufu(function: Callable[[Tensor], Tensor], x: np.float32) -> np.float32:
    return np.float32(function(torch.tensor([float(x)]))[0].item())


def exp(x: np.float32) -> np.float32:
    return mufu(ex2_approx_ftz, x * np.float32(1.44269504088896340736))


def k2_row(q: np.ndarray, k: np.ndarray, v: np.ndarray, row: int, causal: bool) -> list[np.float32]:
    """One row of O before its rounding to bf16, by the four threads that serve it; q [d], k and v [N, d], fp32."""
    d, zero = len(q), np.float32(0)
    scale = np.float32(1.0 / math.sqrt(d))
    m, l = [np.float32(-np.inf)] * 4, [zero] * 4
    acc = [[zero] * (d // 4) for _ in range(4)]
    for tile in range(0, len(k), 64):
        s = []
        for key in range(tile, tile + 64):
            total = zero
            for a, b in zip(q, k[key], strict=True):
                total = fma(a, b, total)
            s.append(np.float32(-np.inf) if causal and key > row else total * scale)
        own_max = [max(s[g::4]) for g in range(4)]
        new = [max(m[g], *own_max) for g in range(4)]
        alpha = [exp(m[g] - new[g]) for g in range(4)]
        p = [exp(s[j] - new[j % 4]) for j in range(64)]
        sums = []
        for g in range(4):
            total = zero
            for x in p[g::4]:
                total = total + x
            sums.append(total)
        for offset in (1, 2):
            sums = [sums[g] + sums[g ^ offset] for g in range(4)]
        for g in range(4):
            l[g] = fma(alpha[g], l[g], sums[g])
            for c in range(d // 4):
                pv = zero
                for j in range(64):
                    pv = fma(p[j], v[tile + j][g * (d // 4) + c], pv)
                acc[g][c] = fma(acc[g][c], alpha[g], pv)
        m = new
    assert len(set(map(float, l))) == len(set(map(float, m))) == 1  # the four threads agree
    inverse = mufu(rcp_approx_ftz, l[0])
    return [x * inverse for columns in acc for x in columns]


SIMULATED = {"full-n64": (64, False, (0, 41)), "causal-n64": (64, True, (0, 63)), "causal-n128": (128, True, (63, 100))}


@pytest.mark.parametrize(("n", "causal", "rows"), SIMULATED.values(), ids=SIMULATED)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # −inf − m of a row's first tile
def test_k2_against_its_specification_thread_by_thread(n: int, causal: bool, rows: tuple[int, ...]) -> None:
    x = normal(f"threads-{n}-{causal}", n, n)
    o = exact(x, {"causal": causal}, "k2")["o"]
    q, k, v = (x[name][0].float().numpy() for name in ("q", "k", "v"))
    for row in rows:
        slow = torch.tensor(np.array(k2_row(q[row], k, v, row, causal)))
        assert ulp.bits(slow.to(torch.bfloat16)).tolist() == ulp.bits(o[0, row]).tolist()


def wgmma_row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: int, tiles: int, bc: int
) -> tuple[list[np.float32], np.float32]:
    """One row of O before its rounding and its lse, by the four threads that serve it, register by register.

    q [d], k and v [N, d], fp32 holding bf16; the row sees keys 0 … visible − 1 and visits ``tiles`` tiles of bc keys.
    """
    d, zero = len(q), np.float32(0)
    scale = np.float32(1.0 / math.sqrt(d))
    c = np.float32(float(scale) * LOG2_E)
    m, l, o = np.float32(-np.inf), [zero] * 4, [zero] * d
    pad = np.zeros((tiles * bc, d), dtype=np.float32)
    keys, values = pad.copy(), pad.copy()
    count = min(len(k), tiles * bc)
    keys[:count], values[:count] = k[:count], v[:count]
    for tile in reversed(range(tiles)):
        s = []
        for key in range(tile * bc, (tile + 1) * bc):
            total = zero
            for step in range(0, d, 16):
                total = fused(q[step : step + 16], keys[key, step : step + 16], total)
            s.append(total if key < visible else np.float32(-np.inf))
        new = max(m, max(s))
        shift = zero if new == -np.inf else new
        alpha = mufu(ex2_approx_ftz, (m - shift) * c)
        p = [mufu(ex2_approx_ftz, fma(x, c, -(shift * c)) if x > -np.inf else x) for x in s]
        for thread in range(4):
            total = zero
            for eight in range(0, bc, 8):
                for column in (eight + 2 * thread, eight + 2 * thread + 1):
                    total = total + p[column]
            l[thread] = fma(l[thread], alpha, total)
        narrow = torch.tensor(np.array(p)).to(torch.bfloat16).float().numpy()
        for column in range(d):
            total = o[column] * alpha
            for step in range(0, bc, 16):
                own = slice(tile * bc + step, tile * bc + step + 16)
                total = fused(narrow[step : step + 16], values[own, column], total)
            o[column] = total
        m = new
    total = (l[0] + l[1]) + (l[2] + l[3])
    inverse = np.float32(1.0) if total == 0 else mufu(rcp_approx_ftz, total)
    ln_2 = np.float32(0.6931471805599453)
    lse = np.float32(-np.inf) if total == 0 else fma(mufu(lg2_approx_ftz, total), ln_2, m * scale)
    return [x * inverse for x in o], lse


def fused(a: np.ndarray, b: np.ndarray, c: np.float32) -> np.float32:
    """One instruction's sum of 16 products and the accumulator."""
    rows = (torch.tensor(np.asarray(x)).to(torch.bfloat16) for x in (a, b))
    return np.float32(tensor_core.fused_sum(*rows, torch.tensor(float(c))).item())


WGMMA_SIMULATED = {
    "full-q2-k130": (2, 130, False, (0, 1)),
    "causal-q70-k134": (70, 134, True, (3, 63, 64)),
    "causal-q6-k4": (6, 4, True, (1, 2, 5)),
}


@pytest.mark.parametrize("bc", [128, 176])
@pytest.mark.parametrize(("n_q", "n_k", "causal", "rows"), WGMMA_SIMULATED.values(), ids=WGMMA_SIMULATED)
def test_wgmma_against_its_specification_thread_by_thread(
    n_q: int, n_k: int, causal: bool, rows: tuple[int, ...], bc: int
) -> None:
    x = normal(f"wgmma-{n_q}-{n_k}", n_q, n_k)
    got = exact(x, {"causal": causal}, f"wgmma{bc}")
    q, k, v = (x[name][0].float().numpy() for name in ("q", "k", "v"))
    for row in rows:
        last = row // 64 * 64 + 63  # of the rows that visit tiles together
        visible, seen = (min(n_k, max(0, i + 1 + n_k - n_q)) if causal else n_k for i in (row, last))
        o, lse = wgmma_row(q[row], k, v, visible, -(-seen // bc), bc)
        slow = torch.tensor(np.array(o)).to(torch.bfloat16)
        assert ulp.bits(slow).tolist() == ulp.bits(got["o"][0, row]).tolist()
        assert lse.view(np.uint32) == ulp.bits(got["lse"])[0, row]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (64, 64), (65, 64), (200, 129), (129, 200), (300, 5), (5, 300)])
def test_rows_visit_the_tiles_of_their_64(n_q: int, n_k: int, causal: bool) -> None:
    """The first row of a tile is that of the first 64 of which one, existing or not, sees one of its keys."""
    for start in range(0, n_k, 128):
        groups = range(0, n_q, 64)
        visits = [g for g in groups if not causal or any(start <= g + i + n_k - n_q for i in range(64))]
        assert min(first_row(start, n_q, n_k, causal), n_q) == min([*visits, n_q])


@pytest.mark.parametrize("schedule", WGMMA)
def test_rows_without_keys(schedule: str) -> None:
    got = exact(normal("empty-row", 65, 64), {"causal": True}, schedule)
    assert torch.equal(ulp.bits(got["o"][0, 0]), torch.zeros(64, dtype=ulp.bits(got["o"]).dtype))
    assert got["lse"][0, 0] == -torch.inf
    assert got["o"].isfinite().all()
    none = exact(normal("no-keys", 3, 0), {}, schedule)
    assert torch.equal(none["o"], torch.zeros(1, 3, 64, dtype=torch.bfloat16))
    assert torch.equal(none["lse"], torch.full((1, 3), -torch.inf))


@pytest.mark.parametrize("schedule", WGMMA)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_wgmma_does_not_read_beyond_the_used_rows(schedule: str, causal: bool) -> None:
    """Buffers of 128 rows of which 65 are used, the rest NaN: the bits are those of the rows alone."""
    used = normal("buffer", 65, 65)
    buffers = {name: torch.full((1, 128, 64), torch.nan, dtype=torch.bfloat16) for name in used}
    for name, x in used.items():
        buffers[name][:, :65] = x
    got = exact({name: x[:, :65] for name, x in buffers.items()}, {"causal": causal}, schedule)
    want = exact(used, {"causal": causal}, schedule)
    for name, x in want.items():
        assert torch.equal(ulp.bits(got[name]), ulp.bits(x))


PACKED = ((5, 9), (1, 1), (0, 4), (7, 0), (13, 46))


def packed(label: str) -> dict[str, Tensor]:
    """q [2, ΣNq, 64], k and v [1, ΣNk, 64], with offsets; keys that no query sees are NaN."""
    total_q, total_k = (sum(lengths) for lengths in zip(*PACKED, strict=True))
    x = normal(label, total_q, total_k, heads=(2, 1))
    for name, part in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
        ends = np.cumsum([0, *(lengths[part] for lengths in PACKED)])
        x[name] = torch.tensor(ends, dtype=torch.int32)
    for name in ("k", "v"):
        x[name][:, 10:14] = torch.nan
    return x


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_are_sequences_alone(causal: bool) -> None:
    x, params = packed("packed"), {"causal": causal}
    for call in (model, *(lambda t, p, s=s: exact(t, p, s) for s in WGMMA)):
        got, q_start, k_start = call(x, params), 0, 0
        for n_q, n_k in PACKED:
            rows, keys = slice(q_start, q_start + n_q), slice(k_start, k_start + n_k)
            want = call({"q": x["q"][:, rows], "k": x["k"][:, keys], "v": x["v"][:, keys]}, params)
            for name in want:
                assert torch.equal(ulp.bits(got[name][:, rows]), ulp.bits(want[name]))
                assert not want[name].isnan().any()
            q_start, k_start = q_start + n_q, k_start + n_k


OFFSETS_REFUSED = {
    "one-missing": ({"cu_seqlens_k": None}, r"inputs: cu_seqlens_k missing; packed sequences take cu_seqlens_q and"),
    "dtype": ({"cu_seqlens_q": torch.tensor([0, 26])}, r"cu_seqlens_q: got torch.int64 \(2,\), allowed is torch.int32"),
    "start": ({"cu_seqlens_q": torch.tensor([1, 26], dtype=torch.int32)}, r"cu_seqlens_q: got \[1, 26\], allowed are"),
    "end": ({"cu_seqlens_k": torch.tensor([0, 61], dtype=torch.int32)}, r"cu_seqlens_k: got \[0, 61\], allowed are"),
    "order": ({"cu_seqlens_k": torch.tensor([0, 9, 5, 60], dtype=torch.int32)}, r"cu_seqlens_k: got \[0, 9, 5, 60\]"),
    "count": ({"cu_seqlens_k": torch.tensor([0, 60], dtype=torch.int32)}, r"cu_seqlens_k: got 1 sequences"),
}


@pytest.mark.parametrize(("change", "message"), OFFSETS_REFUSED.values(), ids=OFFSETS_REFUSED)
def test_offsets_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    x = {name: t for name, t in (packed("refused") | change).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        model(x, {})


def test_k2_refuses_packed_sequences() -> None:
    with pytest.raises(ValueError, match="cu_seqlens_q: schedule k2 takes no packed sequences"):
        exact(packed("k2"), {}, "k2")


def test_an_exact_head_of_1024_takes_seconds() -> None:
    """What makes the goldens of large cases affordable: N = 1024, d = 128 in under 10 s on one core."""
    x = normal("speed", 1024, 1024, 128)
    start = time.process_time()
    exact(x, {}, "wgmma128")
    assert time.process_time() - start < 10


def tensors(
    q: tuple = (2, 64, 64), k: tuple = (2, 64, 64), v: tuple | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in (("q", q), ("k", k), ("v", v or k))}


GOOD = tensors()
REFUSED = {
    "missing": ({"q": GOOD["q"]}, {}, r"inputs: k, v missing; fmha takes q, k and v"),
    "rank": (tensors(q=(1, 2, 64, 64)), {}, r"q: got shape \(1, 2, 64, 64\), allowed is \[batch · heads, N, d\]"),
    "fp16": (tensors(dtype=torch.float16), {}, r"q: got torch.float16, allowed is torch.bfloat16"),
    "fp32-values": (GOOD | {"v": torch.zeros(2, 64, 64)}, {}, r"v: got torch.float32, allowed is torch.bfloat16"),
    "device": (GOOD | {"k": GOOD["k"].to("meta")}, {}, r"k: is on meta, q on cpu; all must be on one device"),
    "width": (tensors((2, 64, 96), (2, 64, 96)), {}, r"q: got d = 96, allowed are 64 and 128"),
    "widths-differ": (tensors(k=(2, 64, 128)), {}, r"k: got d = 128, q has 64"),
    "values-of-other-shape": (tensors(v=(2, 63, 64)), {}, r"v: got shape \(2, 63, 64\), k has \(2, 64, 64\)"),
    "heads": (tensors(q=(3, 64, 64)), {}, r"k: got 2 heads in all, q has 3, which must be a multiple"),
    "no-heads": (tensors(k=(0, 64, 64)), {}, r"k: got 0 heads in all, q has 2, which must be a multiple"),
    "window": (GOOD, {"window": 3}, r"params: got window, allowed are causal and scale"),
    "several": (GOOD, {"softcap": 1.0, "dropout": 0.1}, r"params: got dropout, softcap, allowed are"),
    "causal": (GOOD, {"causal": 1}, r"causal: got 1, allowed are True and False"),
    "scale-zero": (GOOD, {"scale": 0.0}, r"scale: got 0.0, allowed is None or a number from 1.17"),
    "scale-negative": (GOOD, {"scale": -1.0}, r"scale: got -1.0, allowed is None or a number"),
    "scale-inf": (GOOD, {"scale": math.inf}, r"scale: got inf, allowed is None or a number"),
    "scale-nan": (GOOD, {"scale": math.nan}, r"scale: got nan, allowed is None or a number"),
    "scale-subnormal": (GOOD, {"scale": 1e-40}, r"scale: got 1e-40, allowed is None or a number"),
    "scale-text": (GOOD, {"scale": "1"}, r"scale: got '1', allowed is None or a number"),
}


@pytest.mark.parametrize(("x", "params", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("call", [model, lambda x, p: exact(x, p, "k2")], ids=["model", "exact"])
def test_what_is_outside_the_interface_is_refused(call: Callable, x: dict, params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(x, params)


K2_REFUSED = {
    "ragged": ((1, 65, 64), (1, 65, 64), r"q: got N = 65, schedule k2 takes positive multiples of 64"),
    "no-rows": ((1, 0, 64), (1, 0, 64), r"q: got N = 0, schedule k2 takes positive multiples of 64"),
    "lengths-differ": ((1, 64, 64), (1, 128, 64), r"k: got shape \(1, 128, 64\), schedule k2 takes that of q, \(1, 64"),
    "grouped-heads": ((4, 64, 64), (2, 64, 64), r"k: got shape \(2, 64, 64\), schedule k2 takes that of q, \(4, 64"),
}


@pytest.mark.parametrize(("q", "k", "message"), K2_REFUSED.values(), ids=K2_REFUSED)
def test_k2_refuses_what_it_does_not_support(q: tuple, k: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact(tensors(q, k), {}, "k2")
    assert k2_refusal(q, k)
    model(tensors(q, k), {})


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule: got 'k99', allowed are k2"):
        exact(GOOD, {}, "k99")


def test_cases_are_named_after_what_they_are() -> None:
    assert make_case(64, True, 64, "normal").id == "fmha/d64-causal-n64-normal"
    assert make_case(128, False, (3, 5), "wide", batch=2, heads=(4, 2), scale=0.5, seed=7).name == (
        "d128-q3-k5-b2-h4-2-scale0.5-wide-s7"
    )


def test_k2_leaves_its_inputs_alone_and_repeats_itself() -> None:
    x = normal("pure", 64, 64, heads=(2, 2))
    before = {name: t.clone() for name, t in x.items()}
    first, second = (exact(x, {"causal": True}, "k2")["o"] for _ in range(2))
    assert torch.equal(ulp.bits(first), ulp.bits(second))
    assert all(torch.equal(x[name], before[name]) for name in x)
    alone = exact({name: t[1:] for name, t in x.items()}, {"causal": True}, "k2")["o"]
    assert torch.equal(ulp.bits(first[1:]), ulp.bits(alone))
