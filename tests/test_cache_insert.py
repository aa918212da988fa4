"""``cache_insert``: model against PyTorch in FP64, exact against a simulation and bytes by hand, faults, refusals."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import goldens
from goldens import cache_insert as room
from goldens import invariance, store
from goldens.call import call as call_candidate
from goldens.compare import Verdict, against_exact
from goldens.judge import judge, select
from reference import cache_insert as kernel
from reference.cache_insert import LATENT, ROPE, WIDTH, exact, model
from reference.numerics.formats import to_bf16, to_e4m3
from reference.numerics.ieee import add_rn, fma_rn, mul_rn
from reference.numerics.mufu import rsqrt_approx, rsqrt_approx_ftz
from reference.numerics.order import butterfly, chain_fma
from tools.adapters import exact as adapter

KERNEL = goldens.KERNELS["cache_insert"]
COMMITTED = [case for case in KERNEL.cases if case.committed]
EPS = room.EPS
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def call(values: str = "normal", slots: str = "spread", rows: int = 3, pages: int = 2, page_size: int = 4) -> dict:
    recipe = room.RECIPES[values]
    return room.make_inputs(recipe, slots, f"test_cache_insert/{values}/{rows}", rows, pages, page_size)


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Tensor]]:
    manifest = store.read_manifest()
    return {case.id: store.load(case, manifest) for case in COMMITTED}


def straightforward(x: dict, eps: float) -> Tensor:
    """The rows in FP64 by PyTorch's own functions."""
    kv = x["kv"].double()
    normed = kv * torch.rsqrt(kv.square().mean(-1, keepdim=True) + eps) * x["w_kva"].double()
    return torch.cat([normed.to(BF16).double(), x["k_pe"].double()], 1) * x["k_scale_inv"].double()


@pytest.mark.parametrize("values", ["normal", "zeros", "wide", "ties", "subnormal", "scale-huge", "scale-zero"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_model_is_the_mathematics(values: str, dtype: torch.dtype, tolerance: float) -> None:
    x, eps = call(values), room.RECIPES[values].eps
    got = model(x, {"eps": eps}, dtype)["cache"].flatten(0, 1)
    assert got.dtype == dtype
    torch.testing.assert_close(got[x["slots"]].double(), straightforward(x, eps), rtol=tolerance, atol=1e-45)


def test_model_gives_the_values_of_untouched_bytes() -> None:
    x = call(slots="none")
    x["cache"].view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    got = model(x, {"eps": EPS})["cache"].view(-1)[:256]
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(got.numpy(), want, equal_nan=True)


@pytest.mark.parametrize("case", KERNEL.cases, ids=lambda case: case.name)
def test_every_case_is_within_its_bound(case: goldens.Case) -> None:
    golden = store.compute(KERNEL, case)
    verdicts = judge(KERNEL, case, golden, select(golden, "exact/insert/"), "insert")
    assert [v.against for v in verdicts] == ["exact", "model"]
    assert [v.reason for v in verdicts if not v.passed] == []


# By hand and by simulation.


def test_pitfall_a_scale_of_two_gives_half() -> None:
    """Latent ±1, weight 1, scale 2 (inverse 0.5): 0x30 and 0xb0; the wrong direction would be 0x40 and 0xc0."""
    x = call("unit", rows=1)
    row = exact(x, {"eps": 0.0}, "insert")["cache"].flatten(0, 1)[int(x["slots"][0])]
    values = torch.cat([x["kv"], x["k_pe"]], 1)[0]
    assert torch.equal(row, torch.where(values > 0, 0x30, 0xB0).to(torch.uint8))


def test_pitfall_only_slots_5_and_0_change() -> None:
    x = call("padded", "alternate", rows=4, pages=3, page_size=2)
    assert x["slots"].tolist() == [5, -1, 0, -1]
    assert bool(x["kv"][1::2].isnan().all() and x["k_pe"][1::2].isnan().all())
    rows = exact(x, {"eps": EPS}, "insert")["cache"].flatten(0, 1)
    assert bool((rows[1:5] == 0xA5).all())
    assert not bool((rows[[0, 5]] & 0x7F == 0x7F).any())
    assert (rows[[0, 5]] != 0xA5).double().mean() > 0.9


# k_pe, k_scale_inv, byte
CONVERTED = {
    "448": (448.0, 1.0, 0x7E),
    "464": (464.0, 1.0, 0x7E),
    "466": (466.0, 1.0, 0x7E),
    "1000": (1000.0, 1.0, 0x7E),
    "inf": (math.inf, 1.0, 0x7E),
    "minus-1000": (-1000.0, 1.0, 0xFE),
    "nan": (math.nan, 1.0, 0x7F),
    "inf-by-zero": (math.inf, 0.0, 0x7F),
    "minus-zero": (-0.0, 3.0, 0x80),
    "product-just-above-a-tie": (1.0, 1.0625 + 2.0**-10, 0x39),  # 0x38 by way of bf16
    "smallest-tie": (1.0, 2.0**-10, 0x00),
    "above-the-smallest-tie": (1.0, 1.001 * 2.0**-10, 0x01),
    "minus-below": (-1.0, 2.0**-11, 0x80),
    "inverse-of-seven": (0.1708984375, 1 / 7, 0x0D),  # divided by 7 it is 0x0c
    "subnormal-scale": (2.0**127, 2.0**-136, 0x01),
}


@pytest.mark.parametrize(("value", "scale", "byte"), CONVERTED.values(), ids=CONVERTED)
def test_conversion_by_hand(value: float, scale: float, byte: int) -> None:
    x = call(rows=1, pages=1, page_size=1) | {"k_scale_inv": torch.tensor([scale])}
    x["k_pe"][0, 3] = value
    assert int(exact(x, {"eps": EPS}, "insert")["cache"][0, 0, LATENT + 3]) == byte


def fp32(x: float) -> np.float32:
    return np.float32(x)


def simulate(kv: np.ndarray, w: np.ndarray, scale: float, eps: float) -> list[int]:
    """One latent by 64 threads, straight from the specification. Squares of bf16 are exact in fp32, so a product and a
    sum are an FMA; 1/512 is a power of two, and so is its product with the sum."""
    threads = []
    for t in range(64):
        total = fp32(0)
        for value in kv[8 * t : 8 * t + 8]:
            total = total + value * value
        threads.append(total)
    warps = []
    for warp in (threads[:32], threads[32:]):
        for offset in (16, 8, 4, 2, 1):
            warp = [warp[j] + warp[j ^ offset] for j in range(32)]
        warps.append(warp[0])
    rr = fp32(rsqrt_approx_ftz(torch.tensor([float((warps[0] + warps[1]) * fp32(1 / 512) + fp32(eps))])).item())
    normed = (kv * rr * w).astype(ml_dtypes.bfloat16).astype(np.float32)
    scaled = np.clip(normed * fp32(scale), -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()


@pytest.mark.parametrize("values", ["normal", "halfway", "subnormal", "ties", "saturating", "wide"])
def test_exact_against_its_specification_thread_by_thread(values: str) -> None:
    x, eps = call(values), room.RECIPES[values].eps
    if values == "saturating":
        x["w_kva"] = x["w_kva"].nan_to_num(posinf=2.0**100)
    rows = exact(x, {"eps": eps}, "insert")["cache"].flatten(0, 1)
    for row, slot in enumerate(x["slots"].tolist()):
        kv, w = x["kv"][row].float().numpy(), x["w_kva"].float().numpy()
        assert simulate(kv, w, x["k_scale_inv"].item(), eps) == rows[slot, :LATENT].tolist()


# Slots.


@pytest.mark.parametrize("slot", [-1, -2, -8, -(1 << 63), 8, 9, 1 << 31, 1 << 32, (1 << 63) - 1])
def test_a_slot_outside_the_cache_is_skipped(slot: int) -> None:
    x = call(rows=1) | {"slots": torch.tensor([slot])}
    assert torch.equal(exact(x, {"eps": EPS}, "insert")["cache"], x["cache"])


@pytest.mark.parametrize("slot", [0, 3, 4, 7])
def test_a_slot_is_page_and_offset(slot: int) -> None:
    x = call(rows=1) | {"slots": torch.tensor([slot])}
    changed = (exact(x, {"eps": EPS}, "insert")["cache"] != x["cache"]).any(-1)
    assert changed.nonzero().tolist() == [[slot // 4, slot % 4]]


def test_rows_do_not_meet() -> None:
    """A row alone, in any order, and beside rows of NaN has the same bytes; the inputs stay as they are."""
    x = call(rows=4)
    before = {name: t.clone() for name, t in x.items()}
    whole = exact(x, {"eps": EPS}, "insert")["cache"].flatten(0, 1)
    assert all(torch.equal(x[name], before[name]) for name in x)
    for row in range(4):
        alone = x | {name: x[name][row : row + 1] for name in ("kv", "k_pe", "slots")}
        poisoned = x | {name: x[name].clone() for name in ("kv", "k_pe")}
        for name in ("kv", "k_pe"):
            poisoned[name][torch.arange(4) != row] = torch.nan
        flipped = x | {name: x[name].flip(0) for name in ("kv", "k_pe", "slots")}
        for other in (alone, poisoned, flipped):
            got = exact(other, {"eps": EPS}, "insert")["cache"].flatten(0, 1)
            assert torch.equal(got[x["slots"][row]], whole[x["slots"][row]])


def test_strided_rows_and_typed_caches_give_the_same_bytes() -> None:
    x = call()
    want = exact(x, {"eps": EPS}, "insert")["cache"]
    qkv = torch.cat([x["k_pe"], x["kv"], x["k_pe"]], 1)
    views = {"kv": qkv[:, ROPE : ROPE + LATENT], "k_pe": qkv[:, ROPE + LATENT :], "cache": x["cache"].view(E4M3)}
    got = exact(x | views, {"eps": EPS}, "insert")["cache"]
    assert (got.dtype, want.dtype) == (torch.uint8, torch.uint8)
    assert torch.equal(got, want)


# Faults.

ORIGINAL_ROWS, ORIGINAL_WRITE = kernel.insert_rows, kernel.write


def to_slot(slots: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """write() with other slots, the last of equal ones winning."""

    def write(cache: Tensor, given: Tensor, rows: Tensor) -> Tensor:
        flat = cache.flatten(0, 1).clone()
        for slot, row in zip(slots(given, flat.shape[0]).tolist(), rows, strict=True):
            if 0 <= slot < flat.shape[0]:
                flat[slot] = row
        return flat.view(cache.shape)

    return write


def norm_by(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A root in fp64, rounded once."""
    return lambda x: function(x.double()).float()


FAULTS: dict[str, tuple[str, Any]] = {
    "no-saturation": ("to_e4m3", lambda x: to_e4m3(torch.where(x.abs() > 464, torch.nan, x))),
    "infinity-is-nan": ("to_e4m3", lambda x: to_e4m3(torch.where(x.isinf(), torch.nan, x))),
    "rounded-twice": ("to_e4m3", lambda x: to_e4m3(to_bf16(x).float())),
    "bytes-of-subnormals-flushed": ("to_e4m3", lambda x: to_e4m3(torch.where(x.abs() < 2.0**-6, x * 0, x))),
    "product-flushed": ("mul_rn", lambda a, b: mul_rn(a * (a.abs() >= 2.0**-126), b * (b.abs() >= 2.0**-126))),
    "latent-not-rounded": ("to_bf16", lambda x: x),
    "latent-truncated": ("to_bf16", lambda x: (x.view(torch.int32) & -65536).view(torch.float32)),
    "rsqrt-without-ftz": ("rsqrt_approx_ftz", rsqrt_approx),
    "rsqrt-correctly-rounded": ("rsqrt_approx_ftz", norm_by(torch.rsqrt)),
    "eps-missing": ("fma_rn", lambda a, b, c: mul_rn(a, b)),
    "butterfly-ascending": ("butterfly", lambda x, offsets: butterfly(x, offsets[::-1])),
    "chains-descending": ("chain_fma", lambda a, b: chain_fma(a.flip(0), b.flip(0))),
    "minus-one-is-the-last-row": ("write", to_slot(lambda slots, total: torch.where(slots < 0, slots + total, slots))),
    "minus-one-is-the-first-row": ("write", to_slot(lambda slots, total: slots.clamp(min=0))),
    "beyond-is-the-last-row": ("write", to_slot(lambda slots, total: slots.clamp(max=total - 1))),
    "slots-in-32-bits": ("write", to_slot(lambda slots, total: slots.to(torch.int32))),
    "slot-0-is-none": ("write", lambda cache, slots, rows: ORIGINAL_WRITE(cache, slots - (slots == 0).int(), rows)),
}


def inverted(x: dict, eps: float) -> Tensor:
    return ORIGINAL_ROWS(dict(x) | {"k_scale_inv": 1 / x["k_scale_inv"]}, eps)


def weight_first(x: dict, eps: float) -> Tensor:
    """kv · (rr · w)."""
    kv, k_pe, w = (x[name].float() for name in ("kv", "k_pe", "w_kva"))
    threads = kv.unflatten(1, (2, 32, 8)).movedim(3, 0)
    warps = butterfly(chain_fma(threads, threads), (16, 8, 4, 2, 1))[..., 0]
    rr = rsqrt_approx_ftz(fma_rn(add_rn(warps[:, 0], warps[:, 1]), torch.tensor(1 / 512), torch.tensor(eps)))
    latent = to_bf16(mul_rn(kv, mul_rn(rr[:, None], w))).float()
    return to_e4m3(mul_rn(torch.cat([latent, k_pe], 1), x["k_scale_inv"])).view(torch.uint8)


def rope_unscaled(x: dict, eps: float) -> Tensor:
    rows = ORIGINAL_ROWS(x, eps)
    rows[:, LATENT:] = to_e4m3(x["k_pe"].float()).view(torch.uint8)
    return rows


ROW_FAULTS = {"scale-inverted": inverted, "weight-first": weight_first, "rope-unscaled": rope_unscaled}


def failing(stored: dict) -> list[str]:
    """The committed cases whose bytes are no longer made."""
    outputs = {c.id: exact(select(stored[c.id], "in/"), c.params, "insert")["cache"] for c in COMMITTED}
    return [name for name, got in outputs.items() if not against(got, stored[name])]


def against(got: Tensor, golden: dict[str, Tensor]) -> bool:
    return against_exact("cache", got.view(E4M3), golden["exact/insert/cache"].view(E4M3)).passed


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_fails_a_committed_case(stored: dict, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    assert failing(stored) == []
    monkeypatch.setattr(kernel, name, fault)
    assert failing(stored)


@pytest.mark.parametrize("fault", ROW_FAULTS.values(), ids=ROW_FAULTS)
def test_a_fault_in_the_rows_fails_a_committed_case(
    stored: dict, monkeypatch: pytest.MonkeyPatch, fault: Callable
) -> None:
    monkeypatch.setitem(kernel.SCHEDULES, "insert", fault)
    assert failing(stored)


@pytest.mark.parametrize("fault", [inverted, rope_unscaled], ids=["scale-inverted", "rope-unscaled"])
def test_a_plain_fault_exceeds_the_derived_bound(
    stored: dict, monkeypatch: pytest.MonkeyPatch, fault: Callable
) -> None:
    case = goldens.find("cache_insert/b2-crossing-normal")
    golden = stored[case.id]
    monkeypatch.setitem(kernel.SCHEDULES, "insert", fault)
    outputs = exact(select(golden, "in/"), case.params, "insert")
    assert not any(v.passed for v in judge(KERNEL, case, golden, outputs, "insert"))


# Refusals.

GOOD = call()
REFUSED = {
    "missing": (GOOD | {}, {}, r"params: eps missing; cache_insert takes eps"),
    "unknown": (GOOD | {"w": GOOD["w_kva"]}, {"eps": EPS}, r"inputs: w unknown; cache_insert takes kv, k_pe, w_kva, c"),
    "eps-negative": (GOOD, {"eps": -1e-6}, r"eps: got -1e-06, allowed is a finite number from 0 on"),
    "eps-inf": (GOOD, {"eps": math.inf}, r"eps: got inf, allowed is a finite number"),
    "eps-nan": (GOOD, {"eps": math.nan}, r"eps: got nan, allowed is a finite number"),
    "eps-bool": (GOOD, {"eps": True}, r"eps: got True, allowed is a finite number"),
    "rank": (GOOD | {"kv": GOOD["kv"][0]}, {"eps": EPS}, r"kv: got shape \(512,\), allowed is \[B, 512\]"),
    "width": (GOOD | {"kv": GOOD["k_pe"]}, {"eps": EPS}, r"kv: got shape \(3, 64\), allowed is \[B, 512\]"),
    "rows": (GOOD | {"k_pe": GOOD["k_pe"][:2]}, {"eps": EPS}, r"k_pe: got B = 2, kv has 3"),
    "no-rows": (
        GOOD | {"kv": GOOD["kv"][:0]},
        {"eps": EPS},
        r"kv: got shape \(0, 512\), allowed are extents from 1 on",
    ),
    "fp16": (GOOD | {"kv": GOOD["kv"].half()}, {"eps": EPS}, r"kv: got torch.float16, allowed is torch.bfloat16"),
    "cache-int8": (
        GOOD | {"cache": GOOD["cache"].view(torch.int8)},
        {"eps": EPS},
        r"cache: got torch.int8, allowed is torch.uint8 or torch.float8_e4m3fn",
    ),
    "cache-width": (
        GOOD | {"cache": GOOD["cache"][..., :512]},
        {"eps": EPS},
        r"cache: got shape \(2, 4, 512\), allowed is \[pages, page_size, 576\]",
    ),
    "cache-strided": (
        GOOD | {"cache": GOOD["cache"].expand(2, 4, WIDTH).transpose(0, 1)},
        {"eps": EPS},
        r"cache: got strides \(576, 2304, 1\) for shape \(4, 2, 576\), allowed is contiguous",
    ),
    "columns-apart": (
        GOOD | {"kv": GOOD["kv"].repeat_interleave(2, 1)[:, ::2]},
        {"eps": EPS},
        r"kv: got strides \(1024, 2\)",
    ),
    "slots-int32": (GOOD | {"slots": GOOD["slots"].int()}, {"eps": EPS}, r"slots: got torch.int32, allowed is torch.i"),
    "scale-shape": (GOOD | {"k_scale_inv": torch.ones(2)}, {"eps": EPS}, r"k_scale_inv: got shape \(2,\), allowed is"),
    "scale-fp64": (
        GOOD | {"k_scale_inv": torch.ones(1).double()},
        {"eps": EPS},
        r"k_scale_inv: got torch.float64, all",
    ),
    "device": (
        GOOD | {"w_kva": GOOD["w_kva"].to("meta")},
        {"eps": EPS},
        r"w_kva: is on meta, kv on cpu; all must be on",
    ),
    "twice": (
        GOOD | {"slots": torch.tensor([4, -1, 4])},
        {"eps": EPS},
        r"slots: rows 0, 2 all have slot 4, and would race",
    ),
}


@pytest.mark.parametrize(("x", "params", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("function", [model, lambda x, p: exact(x, p, "insert")], ids=["model", "exact"])
def test_what_is_outside_the_interface_is_refused(function: Callable, x: dict, params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(x, params)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.3])
def test_eps_is_rounded_to_fp32(eps: float) -> None:
    """Model, oracle, exact and bound take the nearest fp32 number, whichever of the two is given."""
    x, given, rounded = call("faint-halfway"), {"eps": eps}, {"eps": float(np.float32(eps))}
    assert given != rounded
    for made in (
        lambda p: exact(x, p, "insert")["cache"],
        lambda p: model(x, p)["cache"],
        lambda p: model(x, p, torch.float64)["cache"],
        lambda p: KERNEL.bound(x, p, "insert")["cache"],
    ):
        assert torch.equal(made(given).view(torch.uint8), made(rounded).view(torch.uint8))


def test_many_rows_may_have_no_slot() -> None:
    exact(call() | {"slots": torch.tensor([-1, -1, -1])}, {"eps": EPS}, "insert")


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule: got 'small', allowed are insert"):
        exact(GOOD, {"eps": EPS}, "small")
    with pytest.raises(ValueError, match=r"schedule: got 'small', a bound is derived for insert and model"):
        room.bound(GOOD, {"eps": EPS}, "small")


def test_scales_differ_from_case_to_case_and_elements_are_located() -> None:
    assert len({float(room.inputs(case)["k_scale_inv"]) for case in COMMITTED}) > 8
    case = goldens.find("cache_insert/b2-crossing-normal")
    assert room.locate(case, "insert", "cache", (1, 0, 511)) == {"slot": 2, "thread": 63}


def test_a_failing_verdict_is_in_e4m3_steps_and_says_which_thread(stored: dict) -> None:
    case = goldens.find("cache_insert/b2-crossing-normal")
    cache = stored[case.id]["exact/insert/cache"].clone()
    cache[1, 0, 17] ^= 0x80
    verdicts = judge(KERNEL, case, stored[case.id], {"cache": cache}, "insert")
    [element] = verdicts[0].worst
    assert (element.index, element.where) == ((1, 0, 17), {"slot": 2, "thread": 2})
    assert element.ulps == 2 * (int(cache[1, 0, 17]) & 0x7F)
    typed = judge(KERNEL, case, stored[case.id], {"cache": cache.view(E4M3)}, "insert")
    assert [v.reason for v in typed] == [v.reason for v in verdicts]


# Properties.

MIXED = goldens.find("cache_insert/b16-p4x4-mixed-normal")


def broken(candidate: Callable[..., Any]) -> set[str]:
    """Which variants of the kernel's properties a candidate fails, on rows inside the cache between others outside."""
    outcomes = invariance.check(
        KERNEL,
        MIXED,
        KERNEL.inputs(MIXED),
        lambda x, params, graph: call_candidate(candidate, x, params, torch.device("cpu"), KERNEL.written(params)),
        None,
        graphs=False,
    )
    return {v.output.split(":")[0] for v in outcomes if isinstance(v, Verdict) and not v.passed}


def test_the_exact_model_has_every_property() -> None:
    assert broken(adapter.make("cache_insert", "insert")) == set()


LACKING = {
    "one-slot-further": (lambda slot, pages, size: (slot + 1) % (pages * size), {"cache reversed"}),
    "page-and-offset-exchanged": (lambda slot, pages, size: slot % size * pages + slot // size, {"one page"}),
}


@pytest.mark.parametrize(("moved", "fails"), LACKING.values(), ids=LACKING)
def test_a_candidate_that_writes_elsewhere_is_noticed(moved: Callable, fails: set[str]) -> None:
    def candidate(x: dict, params: dict) -> dict:
        pages, size, _ = x["cache"].shape
        inside = (x["slots"] >= 0) & (x["slots"] < pages * size)
        slots = torch.where(inside, moved(x["slots"], pages, size), x["slots"])
        return exact(dict(x) | {"slots": slots}, params, "insert")

    assert fails <= broken(candidate)


# Bounds.


@pytest.mark.parametrize("byte", [0x7E, 0x00])
def test_rows_of_nan_are_nan_in_the_cache(stored: dict, byte: int) -> None:
    case = goldens.find("cache_insert/b3-p1x3-page-padded")
    right = stored[case.id]["exact/insert/cache"]
    nan = (right == 0x7F) & (stored[case.id]["in/cache"] != 0x7F)
    for cache, passes in ((right, True), (torch.where(nan, byte, right), False)):
        verdicts = judge(KERNEL, case, stored[case.id], {"cache": cache}, None)
        assert [v.passed for v in verdicts] == [passes]


ROOTS = {
    "eps-missing": lambda mean: torch.rsqrt(mean),
    "eps-twice": lambda mean: torch.rsqrt(mean + 2 * EPS),
    "eps-outside-the-root": lambda mean: 1.0 / (torch.sqrt(mean) + EPS),
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_another_place_of_eps_exceeds_the_bound_where_a_row_is_faint(
    stored: dict, monkeypatch: pytest.MonkeyPatch, root: Callable
) -> None:
    case = goldens.find("cache_insert/b1-p1x1-faint-halfway-s109")
    monkeypatch.setattr(kernel, "fma_rn", lambda total, share, eps: total * share)
    monkeypatch.setattr(kernel, "rsqrt_approx_ftz", root)
    outputs = exact(select(stored[case.id], "in/"), case.params, "insert")
    monkeypatch.undo()
    assert [v.passed for v in judge(KERNEL, case, stored[case.id], outputs, None)] == [False]
