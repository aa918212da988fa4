"""AttnRes: the model against torch, ``exact`` against a simulation of every thread, hand-written values, faults.

The simulation follows specs/attn_res.md one thread at a time, with numpy's fp32 scalars and an FMA in exact
rationals; of the suite it uses only the special-function unit, which has tests of its own.
"""

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import goldens
from goldens import attn_res as room
from goldens import store
from goldens.attn_res.cases import grid
from goldens.case import Case, Tensors
from goldens.judge import Judge
from reference import attn_res
from reference.attn_res import D
from reference.numerics import mufu, order, ulp
from reference.numerics.formats import to_bf16
from reference.numerics.ieee import add_rn, fma_rn, mul_rn, rcp_rn

KERNEL = goldens.KERNELS["attn_res"]
COMMITTED = [case for case in KERNEL.cases if case.committed]
GRID = [grid(i) for i in range(36)]
E6, E5 = (torch.tensor(x).item() for x in (1e-6, 1e-5))
PLAIN: dict[str, Any] = {
    "nb": 1,
    "slots": 0,
    "has_delta": True,
    "write": -1,
    "final": False,
    "eps": E6,
    "out_eps": E5,
    "aux": 0,
}
SCHEDULES = tuple(attn_res.SCHEDULES)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def case_of(nb: int, tokens: int, recipe: str = "normal", **options: Any) -> Case:
    return room.make_case(nb, tokens, recipe, committed=False, **options)


def constant(*shape: int, value: float = 0.0) -> Tensor:
    return torch.full(shape, value, dtype=torch.bfloat16)


def flat(tokens: int = 1, rows: int = 1, **given: Tensor) -> Tensors:
    """Zeros, with weights of 1."""
    x = {"delta": constant(tokens, D), "prefix": constant(tokens, D), "blocks": constant(tokens, rows, D)}
    return x | {name: constant(D, value=1.0) for name in ("norm", "query", "gamma")} | given


# The simulation


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    product, wide_c = float(a) * float(b), float(c)  # the product is exact in fp64
    naive = product + wide_c
    if not math.isfinite(naive):
        return np.float32(naive)
    true = Fraction(product) + Fraction(wide_c)
    if true == 0:
        return np.float32(naive)  # for its sign
    wide = float(true)  # correctly rounded; made odd, it rounds once more without harm
    if Fraction(wide) != true and struct.unpack("<q", struct.pack("<d", wide))[0] % 2 == 0:
        wide = math.nextafter(wide, math.inf if true > Fraction(wide) else -math.inf)
    return np.float32(wide)


def bf16(x: np.float32) -> np.float32:
    pattern = int(np.float32(x).view(np.uint32))
    if pattern & 0x7FFFFFFF > 0x7F800000:
        return np.float32(np.nan)
    rounded = (pattern + 0x7FFF + (pattern >> 16 & 1)) & 0xFFFF0000
    return np.array(rounded, dtype=np.uint32).view(np.float32)[()]


def unit(function: Callable[[Tensor], Tensor], x: np.float32) -> np.float32:
    return np.float32(function(torch.tensor([float(x)], dtype=torch.float32)).item())


def exp(x: np.float32) -> np.float32:
    return unit(mufu.ex2_approx_ftz, np.float32(x * np.float32(1.4426950408889634)))


def rstd(total: np.float32, eps: np.float32) -> np.float32:
    return unit(mufu.rsqrt_approx_ftz, fma(total, np.float32(1 / 7168), eps))


def dot8(a: np.ndarray, b: np.ndarray, thread: int) -> np.float32:
    total = np.float32(0)
    for column in range(8 * thread, 8 * thread + 8):
        total = fma(a[column], b[column], total)
    return total


def exchange(values: list[np.float32]) -> np.float32:
    ranks = []
    for rank in range(7):
        warps = []
        for warp in range(4):
            lanes = values[rank * 128 + warp * 32 :][:32]
            for offset in (16, 8, 4, 2, 1):
                lanes = [lanes[lane] + lanes[lane ^ offset] for lane in range(32)]
            assert len({lane.tobytes() for lane in lanes}) == 1
            warps.append(lanes[0])
        ranks.append((warps[0] + warps[1]) + (warps[2] + warps[3]))
    zero = np.float32(0)
    even = zero + ranks[0] + ranks[2] + ranks[4] + ranks[6]
    odd = zero + ranks[1] + ranks[3] + ranks[5]
    return even + odd


def total(a: np.ndarray, b: np.ndarray) -> np.float32:
    return exchange([dot8(a, b, thread) for thread in range(896)])


def simulate(x: Mapping[str, Tensor], params: Mapping[str, Any], direct: bool) -> tuple[list, list]:
    """Output and new prefix of the one token of ``x``, as fp32 numbers that bf16 holds."""
    fp32 = {name: t.to(torch.float32).numpy() for name, t in x.items()}
    nb, columns = params["nb"], range(D)
    eps, out_eps = np.float32(params["eps"]), np.float32(params["out_eps"])
    p = np.empty(D, np.float32)
    for i in columns:
        if params["slots"]:
            d = np.float32(0)
            for slot in range(params["slots"]):
                d = d + fp32["delta"][slot, 0, i]
            d = bf16(d) if params["slots"] > 1 else d
        else:
            d = fp32["delta"][0, i]
        p[i] = bf16(fp32["prefix"][0, i] + d) if params["has_delta"] else bf16(d)
    w, gamma = fp32["norm"] * fp32["query"], fp32["gamma"]
    if nb == 0:
        scale = rstd(total(p, p), out_eps)
        return [bf16((p[i] * scale) * gamma[i]) for i in columns], list(p)
    blocks = fp32["blocks"][0]
    logits = [total(blocks[b], w) * rstd(total(blocks[b], blocks[b]), eps) for b in range(nb)]
    m = max(logits)
    e_blocks = [exp(logit - m) for logit in logits]
    weights, mix = np.float32(0), np.zeros(D, np.float32)
    for b in range(nb):
        weights = weights + e_blocks[b]
        for i in columns:
            mix[i] = fma(e_blocks[b], blocks[b, i], mix[i])
    ss = total(p, p)
    logit = total(p, w) * rstd(ss, eps)
    top = max(m, logit)
    a, e = exp(m - top), exp(logit - top)
    den = fma(a, weights, e)
    if params["final"] or direct:
        inv = np.float32(1) / den
        r = np.array([fma(a * inv, mix[i], (e * inv) * p[i]) for i in columns])
        r = np.array([bf16(v) for v in r]) if params["final"] else r
        scale = rstd(total(r, r), out_eps)
        return [bf16((r[i] * scale) * gamma[i]) for i in columns], list(p)
    mp, mm = total(mix, p), total(mix, mix)
    quad = fma(a * a, mm, fma((np.float32(2) * a) * e, mp, (e * e) * ss))
    scale = rstd(quad, (out_eps * den) * den)
    return [bf16(fma(a * scale, mix[i], (e * scale) * p[i]) * gamma[i]) for i in columns], list(p)


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (case_of(0, 1, "cancel", slots=1), "cluster7"),
        (case_of(2, 1, "wide", slots=3, has_delta=False, write=1), "cluster7"),
        (case_of(2, 1, "normal"), "cluster7_direct"),
        (case_of(1, 1, "normal", slots=2, final=True), "cluster7"),
        (case_of(1, 1, "subnormal"), "cluster7"),
        (case_of(1, 1, "opposing-sources"), "cluster7"),
    ],
    ids=["nb0", "quad-three-slots", "direct", "final-two-slots", "subnormal", "opposing-nan"],
)
def test_exact_is_what_the_threads_compute(case: Case, schedule: str) -> None:
    x = room.inputs(case)
    got = attn_res.exact(x, case.params, schedule)
    with np.errstate(all="ignore"):
        output, prefix = simulate(x, case.params, schedule == "cluster7_direct")
    assert torch.equal(bits(got["output"]), bits(to_bf16(torch.tensor(np.array([output])))))
    assert torch.equal(bits(got["prefix"]), bits(to_bf16(torch.tensor(np.array([prefix])))))


def test_the_simulations_fma_rounds_once() -> None:
    c, a, b = np.float32(1 + 2**-23), np.float32((1 + 2**-23) / 4096), np.float32((1 - 2**-23) / 4096)
    assert fma(a, b, c) == np.float32(1 + 2**-23)
    assert np.float32(float(a) * float(b) + float(c)) != fma(a, b, c)


# The model


@pytest.mark.parametrize("recipe", ["normal", "small", "wide", "dominant", "cancel"])
@pytest.mark.parametrize("nb", [0, 1, 5])
@pytest.mark.parametrize(("slots", "final"), [(0, False), (2, True)])
def test_model_is_softmax_and_rmsnorm(recipe: str, nb: int, slots: int, final: bool) -> None:
    case = case_of(nb, 2, recipe, slots=slots, final=final)
    x = room.inputs(case)
    wide = {name: t.double() for name, t in x.items()}
    d = x["delta"].float().sum(0).bfloat16() if slots else x["delta"]
    p = (x["prefix"].float() + d.float()).bfloat16().double()
    sources = torch.cat([wide["blocks"][:, :nb], p[:, None]], 1)
    eps, out_eps = case.params["eps"], case.params["out_eps"]
    logit = (sources / (sources.square().mean(-1, keepdim=True) + eps).sqrt()) @ (wide["norm"] * wide["query"])
    mixture = (logit.softmax(1)[:, :, None] * sources).sum(1)
    mixture = mixture.float().bfloat16().double() if final else mixture
    want = mixture / (mixture.square().mean(-1, keepdim=True) + out_eps).sqrt() * wide["gamma"]
    oracle = attn_res.model(x, case.params, torch.float64)["output"]
    assert torch.allclose(oracle, want, rtol=1e-9, atol=1e-11)
    got = attn_res.model(x, case.params)["output"].double()
    # In fp32 a few elements of the mixture may round to the other side.
    assert float(((got - want).abs() <= 1e-4 * want.abs() + 1e-6).double().mean()) > (0.99 if final else 1 - 1e-9)


# Values by hand


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("nb", [0, 1])
def test_a_zero_row_gives_zero(nb: int, final: bool, schedule: str) -> None:
    params = {**PLAIN, "nb": nb, "final": final}
    assert int(bits(attn_res.exact(flat(), params, schedule)["output"]).abs().max()) == 0
    assert float(attn_res.model(flat(), params)["output"].abs().max()) == 0


def test_without_blocks_a_row_of_ones_is_itself() -> None:
    sign = 1 - 2 * (torch.arange(D) % 3 == 0).float()
    got = attn_res.exact(flat(prefix=to_bf16(sign)[None]), {**PLAIN, "nb": 0, "out_eps": E6}, "cluster7")
    assert torch.equal(got["output"][0].float(), sign)


@pytest.mark.parametrize(("eps", "want"), [(E5, 0.294921875), (E6, 0.69921875)], ids=["1e-5", "1e-6"])
def test_eps_is_added_once_to_the_mean_square(eps: float, want: float) -> None:
    """2^-10 / sqrt(2^-20 + eps), in bf16."""
    x = flat(prefix=constant(1, D, value=2.0**-10))
    got = attn_res.exact(x, {**PLAIN, "nb": 0, "out_eps": eps}, "cluster7")["output"]
    assert set(got.flatten().tolist()) == {want}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("final", [False, True])
def test_equal_scores_give_weights_of_one_half(final: bool, schedule: str) -> None:
    """Half of (1, 7) and (5, 5) is (3, 6), over its rms √22.5: 0.6325 and 1.2649."""
    case = case_of(1, 1, "half", final=final)
    x = room.inputs(case) | {"gamma": constant(D, value=1.0)}
    got = attn_res.exact(x, case.params, schedule)["output"].abs().view(-1, 2)
    assert set(got[:, 0].tolist()) == {0.6328125}
    assert set(got[:, 1].tolist()) == {1.265625}


def test_the_new_prefix_rounds_once_and_the_sum_of_slots_before_it() -> None:
    """1 + 2^-8 is a tie, to 1: with two slots it is rounded, then 2^-8 more is a tie again."""
    last = constant(1, D, value=2.0**-8)
    slots = torch.stack([constant(1, D, value=1.0), last])
    got = {
        "tensor": attn_res.exact(flat(prefix=last, delta=constant(1, D, value=1.0)), PLAIN, "cluster7"),
        "two": attn_res.exact(flat(prefix=last, delta=slots), {**PLAIN, "slots": 2}, "cluster7"),
        "one": attn_res.exact(flat(prefix=last * 2, delta=slots[:1]), {**PLAIN, "slots": 1}, "cluster7"),
    }
    assert {name: out["prefix"][0, 0].item() for name, out in got.items()} == {"tensor": 1, "two": 1, "one": 1 + 2**-7}


@pytest.mark.parametrize(
    ("slots", "prefix", "has_delta", "want"),
    [(0, -0.0, True, 0x8000), (0, 0.0, False, 0x8000), (1, -0.0, True, 0), (1, 0.0, False, 0), (2, -0.0, True, 0)],
)
def test_negative_zeros_of_the_new_prefix(slots: int, prefix: float, has_delta: bool, want: int) -> None:
    """A delta of −0 everywhere: kept from a tensor, but a mailbox is summed from +0."""
    delta = constant(slots, 1, D, value=-0.0) if slots else constant(1, D, value=-0.0)
    params = {**PLAIN, "slots": slots, "has_delta": has_delta}
    got = attn_res.exact(flat(delta=delta, prefix=constant(1, D, value=prefix)), params, "cluster7")["prefix"]
    assert set((bits(got).flatten().long() & 0xFFFF).tolist()) == {want}


def test_what_is_written_and_what_is_left() -> None:
    case = case_of(2, 3, slots=2, capacity=5, rows=4, write=1, aux=2)
    x = room.inputs(case)
    before = {name: t.clone() for name, t in x.items()}
    got = attn_res.exact(x, case.params, "cluster7")
    assert all(torch.equal(bits(x[name]), bits(before[name])) for name in x)
    assert set(got) == {"output", "prefix", "blocks", "aux0", "aux1", "delta"}
    for copy in (got["aux0"], got["aux1"], got["blocks"][:, 1]):
        assert torch.equal(bits(copy), bits(got["prefix"]))
    kept = [0, 2, 3]
    assert torch.equal(bits(got["blocks"][:, kept]), bits(x["blocks"][:, kept]))
    assert set((got["delta"][:, :3].view(torch.int32).long() & 0xFFFFFFFF).flatten().tolist()) == {0x80000000}
    assert torch.equal(bits(got["delta"][:, 3:]), bits(x["delta"][:, 3:]))


def test_nan_is_canonical_in_every_output() -> None:
    payload = torch.full((1, D), 0x7FC1, dtype=torch.int16).view(torch.bfloat16)
    params = {**PLAIN, "has_delta": False, "aux": 1, "write": 0}
    got = attn_res.exact(flat(delta=payload), params, "cluster7")
    assert all(set(bits(x).flatten().tolist()) == {0x7FFF} for x in got.values())


# Invariance


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_token_alone_is_that_token_in_a_batch(schedule: str) -> None:
    """Also beyond the 64 tokens that ``exact`` computes at once."""
    case = case_of(2, 67, slots=2, capacity=70)
    x = room.inputs(case)
    whole = attn_res.exact(x, case.params, schedule)["output"]
    for token in (0, 63, 64, 66):
        one = {n: t[..., token : token + 1, :] if n in ("delta", "prefix") else t for n, t in x.items()}
        one = {n: t.contiguous() for n, t in one.items()} | {"blocks": x["blocks"][token : token + 1]}
        assert torch.equal(bits(attn_res.exact(one, case.params, schedule)["output"][0]), bits(whole[token]))


def test_strides_of_blocks_do_not_matter() -> None:
    case = case_of(3, 2, write=1)
    x = room.inputs(case)
    wide = torch.full((7, 2, D + 24), torch.nan, dtype=torch.bfloat16)
    strided = wide[1:7:2, :, 8 : D + 8].transpose(0, 1)
    strided.copy_(x["blocks"])
    want = attn_res.exact(x, case.params, "cluster7")
    got = attn_res.exact(x | {"blocks": strided}, case.params, "cluster7")
    assert all(torch.equal(bits(got[name]), bits(want[name])) for name in want)
    model, other = (attn_res.model(i, case.params)["output"] for i in (x, x | {"blocks": strided}))
    assert torch.equal(model, other)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "model"])
def test_nan_stays_in_its_token_and_unread_rows_do_not_matter(schedule: str) -> None:
    case = case_of(2, 3, slots=2, capacity=4, rows=3, has_delta=False)
    x = room.inputs(case)

    def run(inputs: Tensors) -> Tensor:
        if schedule == "model":
            return attn_res.model(inputs, case.params)["output"]
        return attn_res.exact(inputs, case.params, schedule)["output"]

    want = run(x)
    assert bool(want.isfinite().all())
    for name, where in (("blocks", (1, 0)), ("delta", (0, 1)), ("blocks", (1, 1))):
        poisoned = {n: t.clone() for n, t in x.items()}
        poisoned[name][where][3] = torch.nan
        got = run(poisoned)
        assert bool(got[1].isnan().all())
        assert torch.equal(got[[0, 2]], want[[0, 2]])
    clean = {n: t.clone() for n, t in x.items()}
    clean["prefix"].zero_()
    clean["blocks"][:, 2] = 1
    clean["delta"][:, 3] = 1
    assert torch.equal(run(clean), want)


def test_no_tokens() -> None:
    for schedule, nb, slots in itertools.product(SCHEDULES, (0, 2), (0, 2)):
        x = flat(tokens=0, rows=3, delta=constant(2, 5, D) if slots else constant(0, D))
        params = {**PLAIN, "nb": nb, "slots": slots, "aux": 1, "write": 1}
        got = attn_res.exact(x, params, schedule)
        assert got["output"].shape == got["prefix"].shape == got["aux0"].shape == (0, D)
        assert got["blocks"].shape == (0, 3, D)
        assert slots == 0 or torch.equal(bits(got["delta"]), bits(x["delta"]))
        assert attn_res.model(x, params)["output"].shape == (0, D)


@pytest.mark.parametrize("rms", [10.0, 30.0, 100.0])
def test_direct_is_finite_where_sources_oppose_each_other(rms: float) -> None:
    case = case_of(1, 96, "opposing-sources")
    x = room.inputs(case)
    for name in ("blocks", "prefix"):
        x[name] = to_bf16(x[name].float() * (rms / 100.0))
    model = attn_res.model(x, case.params)["output"]
    assert bool(model.isfinite().all())
    assert bool(attn_res.exact(x, case.params, "cluster7_direct")["output"].isfinite().all())
    assert bool(attn_res.exact(x, case.params, "cluster7")["output"].isnan().any()) == (rms == 100.0)


# Bad input


def test_inputs_must_be_the_interfaces() -> None:
    x = flat()
    del x["gamma"]
    with pytest.raises(ValueError, match="inputs: gamma missing; attn_res takes delta, prefix, blocks"):
        attn_res.model(x, PLAIN)
    with pytest.raises(ValueError, match="inputs: bias unknown"):
        attn_res.model(flat(bias=constant(D)), PLAIN)
    with pytest.raises(ValueError, match="schedule: got 'k2', allowed are cluster7, cluster7_direct"):
        attn_res.exact(flat(), PLAIN, "k2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 1}, "params: scale unknown; attn_res takes nb, slots"),
        ({"nb": 9}, "nb: got 9, allowed are whole numbers 0 … 8"),
        ({"nb": -1}, "nb: got -1, allowed are whole numbers 0 … 8"),
        ({"nb": True}, "nb: got True, allowed"),
        ({"nb": 2}, "nb: got 2, blocks has R = 1 rows"),
        ({"slots": -1}, "slots: got -1, allowed are whole numbers from 0 on"),
        ({"write": 1}, "write: got 1, blocks has R = 1 rows: allowed are −1 … R − 1"),
        ({"write": -2}, "write: got -2, allowed are whole numbers from -1 on"),
        ({"aux": -1}, "aux: got -1, allowed are whole numbers 0 … 64"),
        ({"has_delta": 1}, "has_delta: got 1, allowed are True and False"),
        ({"final": None}, "final: got None, allowed are True and False"),
        ({"eps": 0.0}, "eps: got 0.0, allowed is a number from 1.17"),
        ({"eps": 1e-40}, "eps: got 1e-40, allowed is a number from 1.17"),
        ({"eps": 1e39}, "eps: got 1e\\+39, allowed is a finite number"),
        ({"out_eps": math.nan}, "out_eps: got nan, allowed is a finite number"),
        ({"slots": 2}, r"delta: got shape \(1, 7168\), allowed is \[slots, capacity, D\]"),
    ],
)
def test_parameters_outside_the_interface_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attn_res.exact(flat(), {**PLAIN, **given}, "cluster7")


@pytest.mark.parametrize("nb", [0, 1])
def test_epsilons_are_rounded_to_fp32_wherever_they_are_used(nb: int) -> None:
    """1e-6 and 1e-5 are no fp32 numbers; in the oracle the difference would show."""
    case = case_of(nb, 1, "normal")
    x = room.inputs(case)
    for name in ("blocks", "prefix", "delta"):
        x[name] = to_bf16(x[name].float() * 2.0**-12)
    given, held = case.params | {"eps": 1e-6, "out_eps": 1e-5}, case.params | {"eps": E6, "out_eps": E5}
    beside = {n: np.nextafter(held[n], 1.0).item() for n in ("eps", "out_eps")}
    assert attn_res.epsilons(given) == (E6, E5) != (1e-6, 1e-5)
    for dtype in (torch.float32, torch.float64):
        got, want = (attn_res.model(x, params, dtype)["output"] for params in (given, held))
        assert torch.equal(got, want)
        assert torch.equal(attn_res.model(x, held | beside, dtype)["output"], want)
    for schedule in SCHEDULES:
        got, want = (attn_res.exact(x, params, schedule)["output"] for params in (given, held))
        assert torch.equal(bits(got), bits(want))
        assert torch.equal(room.bound(x, given, schedule)["output"], room.bound(x, held, schedule)["output"])


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="params: final, nb missing; attn_res takes nb, slots, has_delta"):
        attn_res.check(flat(), {n: v for n, v in PLAIN.items() if n not in ("nb", "final")})


@pytest.mark.parametrize(
    ("given", "slots", "message"),
    [
        ({"prefix": constant(1, 7160)}, 0, "prefix: got width 7160, allowed is D = 7168"),
        ({"norm": constant(7169)}, 0, "norm: got width 7169, allowed is D = 7168"),
        ({"query": constant(1, D)}, 0, r"query: got shape \(1, 7168\), allowed is \[D\]"),
        ({"gamma": constant(D).float()}, 0, "gamma: got torch.float32, allowed is torch.bfloat16"),
        ({"blocks": constant(1, 1, D).half()}, 0, "blocks: got torch.float16, allowed is torch.bfloat16"),
        ({"blocks": constant(1, 1, 2 * D)[..., ::2]}, 0, r"blocks: got strides \(14336, 14336, 2\), the last one"),
        ({"blocks": constant(2, 1, D)}, 0, "blocks: got 2 tokens, prefix has 1"),
        ({"delta": constant(2, D)}, 0, "delta: got 2 tokens, prefix has 1"),
        (
            {"delta": constant(1, 2 * D)[:, ::2]},
            0,
            r"delta: got strides \(14336, 2\) for shape \(1, 7168\), allowed is c",
        ),
        ({"norm": constant(2 * D)[::2]}, 0, r"norm: got strides \(2,\) for shape \(7168,\), allowed is contiguous"),
        ({"delta": constant(1, 1, D)}, 0, r"delta: got shape \(1, 1, 7168\), allowed is \[T, D\]"),
        ({"delta": constant(3, 1, D)}, 2, "delta: got 3 slots, the parameter slots is 2"),
        ({"delta": constant(2, 0, D)}, 2, "delta: got capacity 0, prefix has 1 tokens"),
        ({"prefix": constant(1, D).to("meta")}, 0, "delta: is on cpu, prefix on meta; all must be on one device"),
    ],
)
def test_tensors_outside_the_interface_are_refused(given: Tensors, slots: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attn_res.check(flat(**given), {**PLAIN, "slots": slots})


def test_a_mailbox_row_that_was_never_published_is_refused() -> None:
    mailbox = constant(2, 3, D, value=1.0)
    mailbox.view(torch.int32)[:, 2] = attn_res.SENTINEL
    x, params = flat(tokens=2, delta=mailbox), {**PLAIN, "slots": 2}
    attn_res.check(x, params)
    for word in (0x80010000 - (1 << 32), 0x00008000, 0x80008000 - (1 << 32)):  # near it, but data
        mailbox.view(torch.int32)[1, 1, 77] = word
        attn_res.check(x, params)
    mailbox.view(torch.int32)[1, 1, 77] = attn_res.SENTINEL
    with pytest.raises(ValueError, match="delta: got a word 0x80000000, the sentinel of what is not published"):
        attn_res.check(x, params)


def test_pairwise_takes_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="x: got 6 values along dimension 0, pairwise takes a power of two"):
        order.pairwise(torch.ones(6, 2), 0)


# Cases, bounds, places


def test_the_grid_holds_every_pair_of_values() -> None:
    def facts(case: Case) -> dict[str, Any]:
        p, dims = case.params, case.dims
        write = "none" if p["write"] < 0 else ("source" if p["write"] < p["nb"] else "other")
        spare = p["slots"] == 0 or dims["capacity"] > dims["tokens"]
        return {n: p[n] for n in ("nb", "slots", "has_delta", "final", "aux")} | {
            "write": write,
            "eps": p["eps"],
            "tokens": dims["tokens"],
            "spare": spare,
        }

    cases = [facts(case) for case in GRID]
    assert len(cases) == 36
    for a, b in itertools.combinations(cases[0], 2):
        met = {(case[a], case[b]) for case in cases}
        wanted = set(itertools.product({case[a] for case in cases}, {case[b] for case in cases}))
        impossible = {
            pair for pair in wanted if dict(zip((a, b), pair, strict=True)) in ({"nb": 0, "write": "source"},)
        }
        impossible |= {pair for pair in wanted if dict(zip((a, b), pair, strict=True)) == {"slots": 0, "spare": False}}
        assert met == wanted - impossible, (a, b)


def test_the_committed_goldens_fit_their_budget() -> None:
    assert sum(store.path_of(case).stat().st_size for case in COMMITTED) <= 2_000_000


@pytest.mark.parametrize("recipe", [r for r in room.RECIPES if r != "overflow"])
@pytest.mark.parametrize(("nb", "final"), [(0, False), (1, False), (3, True), (8, False)])
def test_schedules_and_model_stay_within_their_bounds(recipe: str, nb: int, final: bool) -> None:
    if nb == 0 and recipe in ("opposing-sources", "half", "half-nan", "nan", "inf"):
        nb = 2  # these set a block
    case = case_of(nb, 2, recipe, final=final)
    x = room.inputs(case)
    oracle = attn_res.model(x, case.params, torch.float64)["output"]
    model = attn_res.model(x, case.params)["output"]
    outputs = {s: attn_res.exact(x, case.params, s)["output"] for s in SCHEDULES}
    for who, got in {"model": model, **outputs}.items():
        allowed = room.bound(x, case.params, who)
        if who == "cluster7" and not allowed:
            assert recipe == "opposing-sources"
            continue
        bound = allowed["output"]
        error, finite = (got.double() - oracle).abs(), oracle.isfinite()
        half = 0.0 if who == "model" else 0.5 * ulp.size(oracle.abs() + bound, torch.bfloat16)
        assert torch.equal(got.isnan(), oracle.isnan())
        assert bool((error <= half + bound)[finite].all()), (who, float((error / (half + bound))[finite].max()))


def test_the_bound_is_a_small_part_of_an_ulp() -> None:
    """A bound that allows everything would pass every test above."""
    for nb, final, limit in ((0, False, 0.001), (1, False, 0.2), (8, False, 0.2), (8, True, 1.0)):
        case = case_of(nb, 2, "normal", final=final)
        x = room.inputs(case)
        unit_of = ulp.size(attn_res.model(x, case.params, torch.float64)["output"], torch.bfloat16)
        for who in (*SCHEDULES, "model"):
            assert float((room.bound(x, case.params, who)["output"] / unit_of).median()) < limit


def test_cluster7_has_no_bound_where_its_norm_cancels() -> None:
    case = case_of(1, 2, "opposing-sources")
    x = room.inputs(case)
    assert bool(room.bound(x, case.params, "cluster7")["output"].isinf().all())
    for who in ("cluster7_direct", "model"):
        assert bool(room.bound(x, case.params, who)["output"].isfinite().all())


def test_sums_of_squares_that_may_overflow_leave_their_token_out() -> None:
    """Squares that add up to 2^127 in one token, half of that in the other; an infinity is one in any order."""
    case = case_of(1, 2, "normal")
    x = room.inputs(case)
    x["blocks"][1, 0] = 0.0
    x["blocks"][1, 0, :2] = 2.0**63
    x["blocks"][0, 0] = 0.0
    x["blocks"][0, 0, 0] = 2.0**62
    for who in (*SCHEDULES, "model"):
        assert room.bound(x, case.params, who)["output"].isinf().all(1).tolist() == [False, True]
    x["blocks"][1, 0, 2] = torch.inf
    assert not bool(room.bound(x, case.params, "model")["output"].isinf().any())


def test_a_bound_is_derived_for_schedules_alone() -> None:
    case = case_of(1, 2)
    x = room.inputs(case)
    with pytest.raises(ValueError, match="schedule: got 'k2', a bound is derived for cluster7, cluster7_direct and mo"):
        room.bound(x, case.params, "k2")


@pytest.mark.parametrize(
    ("output", "index", "want"),
    [
        ("output", (3, 0), (3, 0, 0, 0, 0)),
        ("aux0", (3, 1023), (3, 0, 3, 31, 7)),
        ("prefix", (0, 1024), (0, 1, 0, 0, 0)),
        ("blocks", (2, 7, 7167), (2, 6, 3, 31, 7)),
        ("delta", (1, 2, 6 * 1024 + 8 * 33 + 5), (2, 6, 1, 1, 5)),
    ],
)
def test_locate_names_the_thread(output: str, index: tuple[int, ...], want: tuple[int, ...]) -> None:
    got = KERNEL.locate(COMMITTED[0], "cluster7", output, index)
    assert got == dict(zip(("cluster", "rank", "warp", "lane", "register"), want, strict=True))


# Faults


@pytest.fixture(scope="session")
def judges() -> list[Judge]:
    """Of every committed case, the one with the fewest elements first."""
    manifest = store.read_manifest()
    made = [Judge(KERNEL, case, store.load(case, manifest)) for case in COMMITTED]
    return sorted(made, key=lambda judge: sum(x.numel() for x in judge.inputs.values()))


Run = Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Tensors]


def failures(judges: list[Judge], run: Run) -> Iterator[str]:
    """The committed cases that notice ``run``, one by one."""
    for judge in judges:
        case = judge.case
        for schedule in case.schedules:
            x = {name: x.clone() for name, x in judge.inputs.items()}
            if not all(verdict.passed for verdict in judge(run(x, case.params, schedule), schedule)):
                yield case.id


def test_without_a_fault_every_golden_passes(judges: list[Judge]) -> None:
    assert list(failures(judges, attn_res.exact)) == []


def rstd_with(mean: Callable[[Tensor, Tensor], Tensor], root: Callable = mufu.rsqrt_approx_ftz) -> Callable:
    return lambda s, eps: root(mean(s, eps))


def exchange_with(
    offsets: tuple[int, ...] = (16, 8, 4, 2, 1),
    warps: Callable = order.pairwise,
    ctas: Callable = order.strided,
) -> Callable:
    return lambda x: ctas(warps(order.butterfly(x.unflatten(-1, (7, 4, 32)), offsets)[..., 0]))


def products_then_sums(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    return order.chain_add(mul_rn(*torch.broadcast_tensors(a, b)), 0)


INVERSE_D, LOG2_E = torch.tensor(1.0 / D), torch.tensor(attn_res.LOG2_E)
MIXTURE = attn_res._mixture


def scores_in_bf16(x: Tensor, p: Tensor, w: Tensor, eps: Tensor, *rest: Any) -> Tensor:
    """The rows are normalised and rounded before the score; their mixture is right."""
    real = attn_res._sum_of_products

    def sums(a: Tensor, b: Tensor) -> Tensor:
        if b.shape[1] == 1 and b.shape[-1] == a.shape[-1] and a is not b:  # against w
            scale = attn_res._rstd(real(a, a), eps)
            return real(to_bf16(a * scale[..., None]).float(), b) / scale
        return real(a, b)

    attn_res._sum_of_products = sums
    try:
        return MIXTURE(x, p, w, eps, *rest)
    finally:
        attn_res._sum_of_products = real


def no_maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.zeros_like(a)


# What replaces a function of reference.attn_res.
REPLACED: dict[str, dict[str, Any]] = {
    "eps-outside-the-mean": {"_rstd": rstd_with(lambda s, eps: mul_rn(add_rn(s, eps), INVERSE_D))},
    "eps-after-the-root": {"_rstd": lambda s, eps: rcp_rn(add_rn(torch.sqrt(mul_rn(s, INVERSE_D)), eps))},
    "eps-added-twice": {"_rstd": rstd_with(lambda s, eps: fma_rn(s, INVERSE_D, eps + eps))},
    "eps-missing": {"_rstd": rstd_with(lambda s, eps: mul_rn(s, INVERSE_D))},
    "mean-and-eps-rounded-apart": {"_rstd": rstd_with(lambda s, eps: add_rn(mul_rn(s, INVERSE_D), eps))},
    "mean-by-division": {"_rstd": rstd_with(lambda s, eps: add_rn(s / torch.tensor(float(D)), eps))},
    "root-correctly-rounded": {
        "_rstd": rstd_with(
            lambda s, eps: fma_rn(s, INVERSE_D, eps), lambda x: (1 / x.double().sqrt()).to(torch.float32)
        )
    },
    "butterfly-ascending": {"_exchange": exchange_with(offsets=(1, 2, 4, 8, 16))},
    "warps-in-a-chain": {"_exchange": exchange_with(warps=order.chain_add)},
    "ctas-in-a-chain": {"_exchange": exchange_with(ctas=order.chain_add)},
    "dot-descending": {"_sum_of_products": lambda a, b: attn_res._exchange(order.chain_fma(a.flip(0), b.flip(0)))},
    "dot-without-fma": {"_sum_of_products": lambda a, b: attn_res._exchange(products_then_sums(a, b))},
    "exp-correctly-rounded": {"_exp": lambda x: torch.exp2(x.double() * attn_res.LOG2_E).to(torch.float32)},
    "exp-with-a-wide-product": {"_exp": lambda x: mufu.ex2_approx_ftz((x.double() * attn_res.LOG2_E).float())},
    "exp-base-two": {"_exp": mufu.ex2_approx_ftz},
    "maximum-missing": {"max_f32": no_maximum},
    "inverse-approximate": {"rcp_rn": mufu.rcp_approx_ftz},
    "mixture-without-fma": {"chain_fma": products_then_sums},
    "scores-in-bf16": {"_mixture": scores_in_bf16},
    "output-truncated": {
        "to_bf16": lambda x: torch.where(x.isfinite(), (x.view(torch.int32) & -65536).view(torch.float32), x).to(
            torch.bfloat16
        )
    },
    "final-not-rounded": {
        "_mixture": lambda x, p, w, a, b, final, direct: MIXTURE(x, p, w, a, b, False, direct or final)
    },
    "always-final": {"_mixture": lambda x, p, w, a, b, final, direct: MIXTURE(x, p, w, a, b, True, direct)},
    "direct-is-the-quad": {"_mixture": lambda x, p, w, a, b, final, direct: MIXTURE(x, p, w, a, b, final, False)},
    "quad-is-direct": {"_mixture": lambda x, p, w, a, b, final, direct: MIXTURE(x, p, w, a, b, final, True)},
    "epsilons-swapped": {"_mixture": lambda x, p, w, a, b, *rest: MIXTURE(x, p, w, b, a, *rest)},
    "gamma-before-the-norm": {"_mixture": lambda x, p, w, *rest: to_bf16(MIXTURE(x, p, w, *rest)).float()},
}


# Faults of one rounding, which reach one bf16 output in ten thousand: they take more outputs than are committed.
SUBTLE = {
    "mean-and-eps-rounded-apart",
    "mean-by-division",
    "root-correctly-rounded",
    "dot-without-fma",
    "exp-with-a-wide-product",
    "inverse-approximate",
    "mixture-without-fma",
}


def with_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(x: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
        with monkeypatch.context() as patch:
            for function, other in REPLACED[name].items():
                patch.setattr(attn_res, function, other)
            return attn_res.exact(x, params, schedule)

    return run


@pytest.mark.parametrize("name", sorted(REPLACED.keys() - SUBTLE))
def test_a_fault_in_the_arithmetic_fails(name: str, judges: list[Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(failures(judges, with_fault(name, monkeypatch)), None)


@pytest.fixture(scope="session")
def larger() -> list[tuple[Case, Tensors, dict[str, Tensor]]]:
    """Two of the on-demand cases: inputs, and each schedule's output."""
    made = []
    for case_id in ("attn_res/nb3-t64-final-normal", "attn_res/nb2-t64-normal-s1"):
        case = goldens.find(case_id)
        x = room.inputs(case)
        made.append((case, x, {s: attn_res.exact(x, case.params, s)["output"] for s in case.schedules}))
    return made


@pytest.mark.parametrize("name", sorted(SUBTLE))
def test_a_fault_of_one_rounding_fails_on_a_larger_case(
    name: str, larger: list[tuple[Case, Tensors, dict[str, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_fault(name, monkeypatch)
    assert any(
        not torch.equal(bits(run(x, case.params, schedule)["output"]), bits(want))
        for case, x, wanted in larger
        for schedule, want in wanted.items()
    )


def moved(name: str, up: bool) -> Run:
    def run(x: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
        value = float(np.nextafter(np.float32(params[name]), np.float32(up)))
        return attn_res.exact(x, {**params, name: value}, schedule)

    return run


def fed(change: Callable[[Tensors, dict[str, Any]], None]) -> Run:
    """``change`` alters the tensors that the output comes from; what is not computed from them stays as it was."""

    def run(x: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
        other, given = {n: t.clone() for n, t in x.items()}, dict(params)
        change(other, given)
        return attn_res.exact(x, params, schedule) | {
            n: t for n, t in attn_res.exact(other, given, schedule).items() if n in ("output", "prefix")
        }

    return run


def made(change: Callable[[Mapping[str, Tensor], Mapping[str, Any], Tensors], None]) -> Run:
    """``change`` alters the outputs."""

    def run(x: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
        outputs = attn_res.exact(x, params, schedule)
        change(x, params, outputs)
        return outputs

    return run


def write_first(x: Tensors, params: dict[str, Any]) -> None:
    if params["write"] >= 0:
        x["blocks"][:, params["write"]] = attn_res.new_prefix(x, params)


def drop_last_slot(x: Tensors, params: dict[str, Any]) -> None:
    if params["slots"] > 1:
        x["delta"][-1] = 0


def reverse_slots(x: Tensors, params: dict[str, Any]) -> None:
    if params["slots"]:
        x["delta"] = x["delta"].flip(0)


def slots_unrounded(x: Tensors, params: dict[str, Any]) -> None:
    if params["slots"] > 1 and params["has_delta"]:
        x["prefix"] = to_bf16(x["prefix"].float() + x["delta"][:, : x["prefix"].shape[0]].float().sum(0))
        x["delta"].zero_()


def old_prefix_added(x: Tensors, params: dict[str, Any]) -> None:
    params["has_delta"] = True


def old_prefix_lost(x: Tensors, params: dict[str, Any]) -> None:
    params["has_delta"] = False


def block_missing(x: Tensors, params: dict[str, Any]) -> None:
    params["nb"] = max(params["nb"] - 1, 0)


def block_too_many(x: Tensors, params: dict[str, Any]) -> None:
    params["nb"] = min(params["nb"] + 1, x["blocks"].shape[1])


def not_written(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    out["blocks"] = x["blocks"].clone()


def wrong_row(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    if params["write"] >= 0:
        out["blocks"] = x["blocks"].clone()
        out["blocks"][:, params["write"] - 1] = out["prefix"]


def not_armed(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    if params["slots"]:
        out["delta"] = x["delta"].clone()


def all_armed(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    if params["slots"]:
        out["delta"].view(torch.int32)[:] = attn_res.SENTINEL


def armed_backwards(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    """The bytes of −0 in the lower half of the word."""
    if params["slots"]:
        out["delta"].view(torch.int32)[:, : x["prefix"].shape[0]] = 0x8000


def nan_of_another_kind(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    nan = torch.tensor(0x7FC0, dtype=torch.int16).view(torch.bfloat16)
    out["prefix"] = torch.where(out["prefix"].isnan(), nan, out["prefix"])


def copies_output(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    if params["aux"]:
        out[f"aux{params['aux'] - 1}"] = out["output"].clone()


def old_prefix_kept(x: Mapping[str, Tensor], params: Mapping[str, Any], out: Tensors) -> None:
    out["prefix"] = x["prefix"].clone()


RUNS: dict[str, Run] = {
    "eps-one-ulp-more": moved("eps", True),
    "eps-one-ulp-less": moved("eps", False),
    "out-eps-one-ulp-more": moved("out_eps", True),
    "written-before-read": fed(write_first),
    "last-slot-missing": fed(drop_last_slot),
    "slots-in-reverse": fed(reverse_slots),
    "sum-of-slots-not-rounded": fed(slots_unrounded),
    "old-prefix-added": fed(old_prefix_added),
    "old-prefix-not-added": fed(old_prefix_lost),
    "one-block-missing": fed(block_missing),
    "one-block-too-many": fed(block_too_many),
    "row-not-written": made(not_written),
    "wrong-row-written": made(wrong_row),
    "mailbox-not-armed": made(not_armed),
    "mailbox-armed-beyond-t": made(all_armed),
    "mailbox-armed-with-swapped-halves": made(armed_backwards),
    "nan-not-canonical": made(nan_of_another_kind),
    "aux-is-the-output": made(copies_output),
    "prefix-not-updated": made(old_prefix_kept),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_fault_in_the_data_fails(name: str, judges: list[Judge]) -> None:
    assert next(failures(judges, RUNS[name]), None)
