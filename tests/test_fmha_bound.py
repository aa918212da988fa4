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
from goldens.judge import judge, select
from reference.fmha import scale_of, visible
from reference.numerics.formats import to_bf16

KERNEL = goldens.KERNELS["fmha"]
LEFT_OUT = ("nan", "inf", "bits", "overflow")  # recipes of which the oracle does not decide on all
JUDGED = {c.name: c for c in KERNEL.cases if c.committed and c.recipe not in LEFT_OUT and "n_q0" not in c.dims}
TELLING = "d128-causal-n64-wide"  # where one or two keys decide, so that nothing averages out
Rounding = Callable[[Tensor], Tensor]


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
) -> Tensor:
    """o of q, k and v by tiles of keys; each argument rounds one intermediate result."""
    q, k, v = (x[name].to(torch.float32) for name in ("q", "k", "v"))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    keep = visible(q.shape[1], k.shape[1], params["causal"], q.device)
    largest, sums = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1])
    o = torch.zeros_like(q)
    for keys in (slice(first, first + tile) for first in range(0, k.shape[1], tile)):
        s = score(q @ k[:, keys].transpose(1, 2)) * scale_of(q.shape[2], params)
        s = torch.where(keep[:, keys], s, -torch.inf)
        before, largest = largest, torch.maximum(largest, s.amax(-1, keepdim=True))
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        again, p = torch.exp(before - shift), torch.exp(s - shift)
        sums = sums * again + p.sum(-1, keepdim=True)
        o = o * again + product(weight(p) @ v[:, keys])
    return to_bf16(last(o / torch.where(sums == 0, 1.0, total(sums))))


@cache
def golden(name: str) -> dict[str, Tensor]:
    return store.obtain(KERNEL, JUDGED[name], store.read_manifest())


def verdict(name: str, **roundings: Any) -> Verdict:
    """By the model, of a candidate that claims no schedule."""
    case = JUDGED[name]
    o = attention(select(golden(name), "in/"), case.params, **roundings)
    [found] = judge(KERNEL, case, golden(name), {"o": o}, None, ("o",))
    return found


@pytest.mark.parametrize("tile", [64, 1 << 30], ids=["tiles-of-64", "one-tile"])
@pytest.mark.parametrize("name", JUDGED)
def test_bf16_attention_with_fp32_sums_passes(name: str, tile: int) -> None:
    found = verdict(name, tile=tile)
    assert found.passed, found.reason


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
    assert not verdict(TELLING).passed
