"""The suite is tested: each fault planted in k2 must change a committed golden's bits.

A fault is k2 with one step done otherwise; the copy of k2 below takes each step as a parameter, and
without a fault it is k2. Every fault fails against exact on at least one committed case, the plain ones
also against the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import store
from goldens.case import Case
from goldens.compare import against_exact
from goldens.judge import judge, select
from reference import fmha
from reference.numerics.formats import to_bf16, to_fp16
from reference.numerics.ieee import add_rn, fma_rn, mul_rn, rcp_rn, sub_rn
from reference.numerics.mufu import ex2_approx_ftz, rcp_approx_ftz
from reference.numerics.order import butterfly, chain_add, chain_matmul

KERNEL = goldens.KERNELS["fmha"]
LOG2_E = torch.tensor(fmha.LOG2_E)
COMMITTED = [case for case in KERNEL.cases if case.committed]
# The longest case adds nothing but time to these.
CASES = [case for case in COMMITTED if case.schedules and case.dims["n_k"] <= 128]


def exp(x: Tensor) -> Tensor:
    return ex2_approx_ftz(mul_rn(x, LOG2_E))


def row_sum(p: Tensor) -> Tensor:
    """One chain a thread over its 16 columns, then a butterfly."""
    return butterfly(chain_add(p.unflatten(-1, (16, 4)), dim=-2), (1, 2))[..., 0]


def inverse(l: Tensor) -> Tensor:
    return torch.where((l == 0) | (l != l), 1.0, rcp_approx_ftz(l))


@dataclass(frozen=True)
class Steps:
    """k2's steps; a fault replaces one."""

    visible: Callable[[int, int, bool, torch.device], Tensor] = fmha.visible
    scores: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda q, kt, scale: mul_rn(chain_matmul(q, kt), scale)
    maximum: Callable[[Tensor, Tensor], Tensor] = torch.maximum
    alpha: Callable[[Tensor, Tensor], Tensor] = lambda m, m_new: exp(sub_rn(m, m_new))
    weights: Callable[[Tensor, Tensor], Tensor] = lambda s, m: exp(sub_rn(s, m[..., None]))
    row_sum: Callable[[Tensor], Tensor] = row_sum
    carry: Callable[[Tensor, Tensor, Tensor], Tensor] = fma_rn  # alpha, l, sum
    values: Callable[[Tensor, Tensor], Tensor] = chain_matmul
    rescale: Callable[[Tensor, Tensor, Tensor], Tensor] = fma_rn  # acc, alpha, pv
    inverse: Callable[[Tensor], Tensor] = inverse
    store: Callable[[Tensor, Tensor], Tensor] = lambda acc, inv: to_bf16(mul_rn(acc, inv))
    tiles: Callable[[list[int]], list[int]] = lambda tiles: tiles
    value_tile: Callable[[int, int], int] = lambda j, n: j


def k2(inputs: Mapping[str, Tensor], params: Mapping[str, Any], steps: Steps) -> dict[str, Tensor]:
    q, k, v = (inputs[name].float() for name in ("q", "k", "v"))
    batch, n, d = q.shape
    scale = torch.tensor(fmha.scale_of(d, params))
    keep = steps.visible(n, n, params["causal"], q.device)
    m, l, acc = torch.full((batch, n), -torch.inf), torch.zeros(batch, n), torch.zeros(batch, n, d)
    for j in steps.tiles(list(range(0, n, 64))):
        s = torch.where(keep[:, j : j + 64], steps.scores(q, k[:, j : j + 64].transpose(1, 2), scale), -torch.inf)
        m_new = steps.maximum(m, torch.where(s != s, -torch.inf, s).amax(-1))
        alpha = steps.alpha(m, m_new)
        m = m_new
        p = steps.weights(s, m)
        l = steps.carry(alpha, l, steps.row_sum(p))
        at = steps.value_tile(j, n)
        acc = steps.rescale(acc, alpha[..., None], steps.values(p, v[:, at : at + 64]))
    return {"o": steps.store(acc, steps.inverse(l)[..., None])}


def shifted(by: int) -> Callable:
    def visible(n_q: int, n_k: int, causal: bool, device: torch.device) -> Tensor:
        full = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
        return full.tril(n_k - n_q + by) if causal else full

    return visible


def product_then_sum(a: Tensor, b: Tensor) -> Tensor:
    """A chain whose products and sums are rounded apart."""
    total = torch.zeros(a.shape[0], a.shape[1], b.shape[2])
    for i in range(a.shape[-1]):
        total = add_rn(total, mul_rn(a[..., i, None], b[:, i, None, :]))
    return total


def truncated(x: Tensor) -> Tensor:
    """fp32 to bf16 toward zero."""
    return (x.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def scale_first(q: Tensor, kt: Tensor, scale: Tensor) -> Tensor:
    return chain_matmul(mul_rn(q, scale), kt)


def wide_exp(s: Tensor, m: Tensor) -> Tensor:
    """ex2 of the product in fp64: log2 e and the product lose no bits before the unit's own cut."""
    return ex2_approx_ftz((sub_rn(s, m[..., None]).double() * fmha.LOG2_E).float())


def quotient(acc: Tensor, inv: Tensor) -> Tensor:
    return to_bf16(acc / inv)


@dataclass(frozen=True)
class Fault:
    """``steps``: k2 with the fault. ``plain``: whether it is gross enough to exceed the model's bound."""

    steps: Steps
    plain: bool = False


FAULTS = {
    "mask-one-key-more": Fault(Steps(visible=shifted(1)), plain=True),
    "mask-one-key-less": Fault(Steps(visible=shifted(-1)), plain=True),
    "mask-missing": Fault(Steps(visible=lambda n_q, n_k, causal, device: fmha.visible(n_q, n_k, False, device)), True),
    "mask-missing-below-the-diagonal": Fault(Steps(visible=lambda *a: shifted(0)(*a).flip(0, 1)), plain=True),
    "scale-before-the-sum": Fault(Steps(scores=scale_first)),
    "scale-missing": Fault(Steps(scores=lambda q, kt, scale: chain_matmul(q, kt)), plain=True),
    "scores-descending": Fault(Steps(scores=lambda q, kt, c: mul_rn(chain_matmul(q.flip(2), kt.flip(1)), c))),
    "scores-in-bf16": Fault(Steps(scores=lambda q, kt, c: to_bf16(mul_rn(chain_matmul(q, kt), c)).float()), True),
    "stale-maximum": Fault(Steps(maximum=lambda m, new: torch.where(m == -torch.inf, new, m))),
    "maximum-of-the-tile-alone": Fault(Steps(maximum=lambda m, new: new, alpha=lambda m, new: exp(sub_rn(new, new)))),
    "rescale-missing": Fault(Steps(rescale=lambda acc, alpha, pv: add_rn(acc, pv)), plain=True),
    "rescale-of-the-sum-missing": Fault(Steps(carry=lambda alpha, l, total: add_rn(l, total)), plain=True),
    "sum-ascending-over-64": Fault(Steps(row_sum=lambda p: chain_add(p))),
    "exp-without-rounding-its-argument": Fault(Steps(weights=wide_exp)),
    "exp-rounded-to-nearest": Fault(Steps(weights=lambda s, m: sub_rn(s, m[..., None]).double().exp().float())),
    "exp-to-the-base-2": Fault(Steps(weights=lambda s, m: ex2_approx_ftz(sub_rn(s, m[..., None]))), plain=True),
    "weights-in-bf16": Fault(Steps(values=lambda p, v: chain_matmul(to_bf16(p).float(), v)), plain=True),
    "values-without-fma": Fault(Steps(values=product_then_sum)),
    "values-descending": Fault(Steps(values=lambda p, v: chain_matmul(p.flip(2), v.flip(1)))),
    "values-by-the-library": Fault(Steps(values=lambda p, v: (p.double() @ v.double()).float())),
    "reciprocal-correctly-rounded": Fault(Steps(inverse=lambda l: torch.where((l == 0) | (l != l), 1.0, rcp_rn(l)))),
    "division-instead-of-reciprocal": Fault(Steps(inverse=lambda l: l, store=quotient)),
    "truncation-to-bf16": Fault(Steps(store=lambda acc, inv: truncated(mul_rn(acc, inv))), plain=True),
    "rounded-twice": Fault(Steps(store=lambda acc, inv: to_bf16(to_fp16(mul_rn(acc, inv)).float())), plain=True),
    "nan-of-the-library": Fault(Steps(store=lambda acc, inv: mul_rn(acc, inv).to(torch.bfloat16))),
    "subnormal-outputs-flushed": Fault(
        Steps(store=lambda acc, inv: to_bf16(torch.where(mul_rn(acc, inv).abs() < 2.0**-126, 0.0, mul_rn(acc, inv))))
    ),
    "tiles-descending": Fault(Steps(tiles=lambda tiles: tiles[::-1])),
    "first-tile-dropped": Fault(Steps(tiles=lambda tiles: tiles[1:] or tiles), plain=True),
    "last-tile-dropped": Fault(Steps(tiles=lambda tiles: tiles[:-1] or tiles), plain=True),
    "value-tiles-swapped": Fault(Steps(value_tile=lambda j, n: n - 64 - j), plain=True),
    # Faults of one fp32 rounding: the recipe "halfway" is there for them.
    "rescale-in-two-roundings": Fault(Steps(rescale=lambda acc, alpha, pv: add_rn(mul_rn(acc, alpha), pv))),
    "carry-in-two-roundings": Fault(Steps(carry=lambda alpha, l, total: add_rn(mul_rn(alpha, l), total))),
    "sum-in-blocks-of-16": Fault(
        Steps(row_sum=lambda p: row_sum(p.unflatten(-1, (4, 16)).transpose(-1, -2).flatten(-2)))
    ),
    "sum-descending": Fault(Steps(row_sum=lambda p: row_sum(p.flip(-1)))),
    "butterfly-2-then-1": Fault(
        Steps(row_sum=lambda p: butterfly(chain_add(p.unflatten(-1, (16, 4)), dim=-2), (2, 1))[..., 0])
    ),
}


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Tensor]]:
    manifest = store.read_manifest()
    return {case.id: store.load(case, manifest) for case in COMMITTED}


def failing(stored: dict, outputs: Callable[[Case], dict[str, Tensor]]) -> Iterator[str]:
    """The cases on which a candidate's o differs from exact, one by one."""
    for case in CASES:
        if not against_exact("o", outputs(case)["o"], stored[case.id]["exact/k2/o"]).passed:
            yield case.id


def run(stored: dict, case: Case, steps: Steps) -> dict[str, Tensor]:
    return k2(select(stored[case.id], "in/"), case.params, steps)


def test_the_copy_without_a_fault_is_k2(stored: dict) -> None:
    assert CASES
    assert list(failing(stored, lambda case: run(stored, case, Steps()))) == []


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_k2_fails_a_committed_case(stored: dict, fault: Fault) -> None:
    assert next(failing(stored, lambda case: run(stored, case, fault.steps)), "")


def test_rounding_the_products_of_a_score_is_no_fault(stored: dict) -> None:
    """The product of two bf16 has 16 bits: fp32 holds it, so that a product and a sum are an FMA."""
    steps = Steps(scores=lambda q, kt, scale: mul_rn(product_then_sum(q, kt), scale))
    assert list(failing(stored, lambda case: run(stored, case, steps))) == []


PLAIN = {name: fault for name, fault in FAULTS.items() if fault.plain}


@pytest.mark.parametrize("fault", PLAIN.values(), ids=PLAIN)
def test_a_plain_fault_exceeds_the_derived_bound(stored: dict, fault: Fault) -> None:
    """Judged by ULPs alone, as a kernel without an exact model would be."""
    verdicts = (
        verdict
        for case in CASES
        if case.exact_only is None
        for verdict in judge(KERNEL, case, stored[case.id], run(stored, case, fault.steps), "k2")
    )
    assert any(not v.passed for v in verdicts if v.against == "model")


PLANTED = {
    "visible": ("visible", shifted(1)),
    "exp": ("_exp", ex2_approx_ftz),
    "reciprocal": ("rcp_approx_ftz", rcp_rn),
    "chain": ("chain_matmul", lambda a, b: (a.double() @ b.double()).float()),
    "to-bf16": ("to_bf16", truncated),
}


@pytest.mark.parametrize(("name", "fault"), PLANTED.values(), ids=PLANTED)
def test_a_fault_in_the_module_fails_a_committed_case(
    stored: dict, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable
) -> None:
    """The goldens watch ``reference.fmha`` itself, not only the copy of it above."""
    monkeypatch.setattr(fmha, name, fault)
    assert next(failing(stored, lambda c: fmha.exact(select(stored[c.id], "in/"), c.params, "k2")), "")


MODEL_FAULTS = {
    "top-left-alignment": lambda n_q, n_k, causal, device: (
        torch.ones(n_q, n_k, dtype=torch.bool).tril(0) if causal else torch.ones(n_q, n_k, dtype=torch.bool)
    ),
    "mask-one-key-more": shifted(1),
    "mask-one-key-less": shifted(-1),
}


@pytest.mark.parametrize("visible", MODEL_FAULTS.values(), ids=MODEL_FAULTS)
@pytest.mark.parametrize("output", ["o", "lse"])
def test_a_misaligned_mask_fails_the_model_only_cases(
    stored: dict, monkeypatch: pytest.MonkeyPatch, visible: Callable, output: str
) -> None:
    monkeypatch.setattr(fmha, "visible", visible)
    cases = [case for case in COMMITTED if case.params["causal"] and case.dims["n_q"] != case.dims["n_k"]]
    assert cases
    for case in cases:
        got = fmha.model(select(stored[case.id], "in/"), case.params)[output]
        assert not against_exact(output, got, stored[case.id][f"model/{output}"]).passed


def test_swapping_key_heads_fails_the_grouped_case(stored: dict) -> None:
    [case] = [case for case in COMMITTED if case.dims["heads_kv"] > 1]
    x = select(stored[case.id], "in/")
    got = fmha.model(x | {name: x[name].flip(0) for name in ("k", "v")}, case.params)["o"]
    assert not against_exact("o", got, stored[case.id]["model/o"]).passed
