"""The bound on fmha's o admits a bf16 FlashAttention with fp32 sums, and no rounding more.

``attention`` has torch's CPU kernel's roundings: scores and sums in fp32, the weights in bf16 for their product with V,
their sum taken before that rounding, one division and one rounding at the end.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import store
from goldens.compare import Verdict
from goldens.fmha import bounds
from goldens.judge import Judge
from reference import fmha as reference
from reference.fmha import scale_of, visible
from reference.numerics.formats import to_bf16

KERNEL = goldens.KERNELS["fmha"]
# Recipes of which the oracle does not decide on all.
LEFT_OUT = ("nan", "inf", "bits", "overflow", "far-below", "marks", "hidden")
JUDGED = {c.name: c for c in KERNEL.cases if c.committed and c.recipe not in LEFT_OUT and "n_q0" not in c.dims}
TELLING = "d128-causal-n64-wide"  # where one or two keys decide, so that nothing averages out
Rounding = Callable[[Tensor], Tensor]
LOG2_E = 1.4426950408889634


def unrounded(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    return to_bf16(x).to(torch.float32)


def truncated(x: Tensor) -> Tensor:
    """To bf16 towards zero."""
    return (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


def attention(
    x: Mapping[str, Tensor],
    params: Mapping[str, Any],
    *,
    tile: int = 1 << 30,
    score: Rounding = unrounded,
    weight: Rounding = bf16,
    product: Rounding = unrounded,
    total: Rounding = unrounded,
    last: Rounding = bf16,
    exp2: Callable[[Tensor], Tensor] = torch.exp2,
    sum_of_rounded: bool = False,
    lazily: bool = False,
) -> dict[str, Tensor]:
    """o and lse of q, k and v by tiles of keys; each of the first arguments rounds one intermediate result.

    exp2: of the weights. lazily: the maximum moves only where it has grown by more than 8.
    """
    q, k, v = (x[name].to(torch.float32) for name in ("q", "k", "v"))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    keep = visible(q.shape[1], k.shape[1], params["causal"], q.device)
    largest, sums = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1])
    o = torch.zeros_like(q)
    for keys in (slice(first, first + tile) for first in range(0, k.shape[1], tile)):
        s = score(q @ k[:, keys].transpose(1, 2)) * scale_of(q.shape[2], params)
        s = torch.where(keep[:, keys], s, -torch.inf)
        before, new = largest, torch.maximum(largest, s.amax(-1, keepdim=True))
        largest = torch.where(new > before + 8, new, before) if lazily else new
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        again, p = torch.exp(before - shift), exp2((s - shift) * LOG2_E)
        sums = sums * again + (weight(p) if sum_of_rounded else p).sum(-1, keepdim=True)
        o = o * again + product(weight(p) @ v[:, keys])
    none = sums == 0
    lse = torch.where(none, -torch.inf, shift + torch.log(torch.where(none, 1.0, sums)))[..., 0]
    return {"o": to_bf16(last(o / torch.where(none, 1.0, total(sums)))), "lse": lse}


@cache
def judge_of(name: str) -> Judge:
    return Judge(KERNEL, JUDGED[name], store.obtain(KERNEL, JUDGED[name], store.read_manifest()))


def verdict(name: str, **roundings: Any) -> Verdict:
    """By the model, of a candidate that claims no schedule."""
    case = JUDGED[name]
    outputs = attention(judge_of(name).inputs, case.params, **roundings)
    [found] = judge_of(name)({"o": outputs["o"]}, None, ("o",))
    return found


@pytest.mark.parametrize("tile", [64, 1 << 30], ids=["tiles-of-64", "one-tile"])
@pytest.mark.parametrize("name", JUDGED)
def test_bf16_attention_with_fp32_sums_passes(name: str, tile: int) -> None:
    found = verdict(name, tile=tile)
    assert found.passed, found.reason


def cubic(x: Tensor) -> Tensor:
    """2^x, its fraction by a polynomial of degree 3 through four Chebyshev points: relative error 1.1e-4."""
    whole = x.clamp(min=-126.0).floor()
    f = x.clamp(min=-126.0) - whole
    points = 0.5 + 0.5 * torch.cos((2 * torch.arange(4, dtype=torch.float64) + 1) * torch.pi / 8)
    coefficients = torch.linalg.solve(points[:, None] ** torch.arange(4), 2.0**points).to(torch.float32)
    value = ((coefficients[3] * f + coefficients[2]) * f + coefficients[1]) * f + coefficients[0]
    return torch.where(x < -126, 0.0, value * torch.exp2(whole))


LEGAL: dict[str, dict[str, Any]] = {
    "unrounded": {"weight": unrounded},
    "sum-of-the-rounded-weights": {"sum_of_rounded": True},
    "sum-of-the-rounded-weights-by-tiles": {"sum_of_rounded": True, "tile": 64},
    "cubic": {"exp2": cubic},
    "cubic-and-sum-of-the-rounded": {"exp2": cubic, "sum_of_rounded": True, "tile": 128},
    "lazily-rescaled": {"lazily": True, "tile": 64},
    "lazily-rescaled-sum-of-the-rounded": {"lazily": True, "tile": 64, "sum_of_rounded": True, "exp2": cubic},
}


@pytest.mark.parametrize("options", LEGAL.values(), ids=LEGAL)
def test_what_public_kernels_do_passes(options: dict[str, Any]) -> None:
    """o and lse, on every case."""
    for name, case in JUDGED.items():
        outputs = attention(judge_of(name).inputs, case.params, **options)
        failed = [v for v in judge_of(name)(outputs, None) if not v.passed]
        assert failed == [], (name, failed[0].reason)


def test_the_cubic_is_as_good_as_what_is_taken_as_legal() -> None:
    x = torch.linspace(-20.0, 0.0, 100_001)
    error = (cubic(x).to(torch.float64) / torch.exp2(x.to(torch.float64)) - 1).abs()
    assert 2.0**-14 < float(error.max()) < 2.0**-13


WRONG_LSE: dict[str, Callable[[Tensor], Tensor]] = {
    "in-bf16": bf16,
    "base-2": lambda lse: lse * LOG2_E,
    "off-by-one-key-of-sixteen": lambda lse: lse + torch.log1p(torch.tensor(1 / 16)),
    "plus-infinity-for-nothing": lambda lse: torch.where(lse == -torch.inf, torch.inf, lse),
}


@pytest.mark.parametrize("change", WRONG_LSE.values(), ids=WRONG_LSE)
def test_a_wrong_lse_fails(change: Callable[[Tensor], Tensor]) -> None:
    noticed = False
    for name, case in JUDGED.items():
        outputs = attention(judge_of(name).inputs, case.params)
        outputs["lse"] = change(outputs["lse"])
        noticed |= any(not v.passed for v in judge_of(name)(outputs, None) if v.output == "lse")
    assert noticed


BEYOND: dict[str, dict[str, Rounding]] = {
    "scores-in-bf16": {"score": bf16},
    "weights-truncated": {"weight": truncated},
    "product-in-bf16-before-the-division": {"product": bf16},
    "sum-in-bf16": {"total": bf16},
    "o-truncated": {"last": truncated},
}


@pytest.mark.parametrize("roundings", BEYOND.values(), ids=BEYOND)
def test_one_rounding_more_fails(roundings: dict[str, Rounding]) -> None:
    found = verdict(TELLING, **roundings)
    assert not found.passed
    assert "bound" in found.reason


def test_half_the_weights_rounding_would_fail_a_legal_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 keeps 8 bits, so half an ULP of 1 is 2^-8: with 2^-9 in its place the attention above would not pass."""
    assert bf16(torch.tensor(1 + 2.0**-8)).item() == 1.0
    monkeypatch.setattr(bounds, "_BF16_OVER_FP32", 2.0**15)
    judge_of.cache_clear()
    try:
        assert not verdict(TELLING).passed
    finally:
        judge_of.cache_clear()


@pytest.mark.parametrize("schedule", ["k2", "wgmma128", "wgmma176"])
@pytest.mark.parametrize(("scale", "decided"), [(1e3, True), (1e9, False), (1e10, False), (1e20, False), (1e38, False)])
def test_a_steep_scale_leaves_rows_out_before_a_schedule_overflows(scale: float, decided: bool, schedule: str) -> None:
    case = goldens.fmha.make_case(64, True, 64, "normal", scale=scale)
    x = KERNEL.inputs(case)
    oracle, got = reference.model(x, case.params, torch.float64), reference.exact(x, case.params, schedule)
    for name, limit in bounds.bound(x, case.params, schedule).items():
        held = limit.isfinite()
        assert bool(held.all()) == decided
        assert torch.equal(got[name].isfinite()[held], oracle[name].isfinite()[held])
