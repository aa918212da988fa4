"""AttnRes as it is judged: the exact models have its properties; what lacks one fails, and so does, by the bound, plain
torch that computes something else."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import invariance, store
from goldens.call import Candidate, call
from goldens.case import Case, Tensors
from goldens.compare import Verdict
from goldens.judge import judge, select
from reference import attn_res
from tools.adapters import exact

KERNEL = goldens.KERNELS["attn_res"]
COMMITTED = [case for case in KERNEL.cases if case.committed]
CPU = torch.device("cpu")
QUAD = "nb8-t3-r9-replace-eps1e-05-1e-06-ties-s2"
MAILBOX = "nb5-t3-r7-slots2-cap6-w3-final-aux1-ties-s1"
SMALL = "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634"
HOLDING = (QUAD, MAILBOX, SMALL, "nb1-t1-slots1-w0-aux1-zeros", "nb0-t2-replace-final-ties-s2")


def found(name: str) -> Case:
    return goldens.find(f"attn_res/{name}")


# Properties


def outcomes(case: Case, candidate: Candidate, schedule: str | None = None) -> list[Any]:
    """What is said of a candidate in this process."""

    def run(inputs: Tensors, params: Mapping[str, Any], graph: bool) -> Tensors:
        return call(candidate, inputs, params, CPU, KERNEL.written(params))

    return list(invariance.check(KERNEL, case, KERNEL.inputs(case), run, schedule, graphs=False))


@pytest.mark.parametrize("name", HOLDING)
def test_exact_models_have_every_property(name: str) -> None:
    case = found(name)
    for schedule in case.schedules:
        verdicts = outcomes(case, exact.make("attn_res", schedule), schedule)
        assert [v for v in verdicts if not (isinstance(v, Verdict) and v.passed)] == []
        tried = {verdict.output.split(":")[0] for verdict in verdicts}
        assert {"twice", "strides", "behind many others", "unread rows NaN"} <= tried


def first_token_alone(x: Tensors, params: Mapping[str, Any], out: Tensors) -> None:
    out["output"][0] *= 2


def many_tokens(x: Tensors, params: Mapping[str, Any], out: Tensors) -> None:
    if x["prefix"].shape[0] > 32:
        out["output"] *= 2


def unread_row(x: Tensors, params: Mapping[str, Any], out: Tensors) -> None:
    out["output"] += 0 * x["blocks"][:, -1]


def one_kept_row(x: Tensors, params: Mapping[str, Any], out: Tensors) -> None:
    out["blocks"][:, -1] = out["blocks"][:, params["nb"]]


def written_before_read(x: Tensors, params: Mapping[str, Any], out: Tensors) -> None:
    made = attn_res.exact(x | {"blocks": out["blocks"]}, params, "cluster7")
    out["output"] = made["output"]


@pytest.mark.parametrize(
    ("variant", "spoil"),
    [
        ("tokens reversed", first_token_alone),
        ("behind many others", many_tokens),
        ("unread rows NaN", unread_row),
        ("kept rows reversed", one_kept_row),
        ("nothing written besides", written_before_read),
    ],
)
def test_what_lacks_a_property_fails(
    variant: str, spoil: Callable[[Tensors, Mapping[str, Any], Tensors], None]
) -> None:
    def candidate(x: Mapping[str, Tensor], params: Mapping[str, Any]) -> Tensors:
        outputs = attn_res.exact(x, params, "cluster7")
        spoil(dict(x), params, outputs)
        return outputs

    verdicts = outcomes(found(MAILBOX), candidate)
    failed = {v.output.split(":")[0] for v in verdicts if isinstance(v, Verdict) and not v.passed}
    assert variant in failed
    assert "twice" not in failed


# By the bound


def same(x: Tensor) -> Tensor:
    return x


def plain(
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Any],
    *,
    blocks: Callable[[Tensor], Tensor] = same,
    centred: Callable[[Tensor], Tensor] = same,
    eps: Callable[[Tensor, float], Tensor] = lambda square, eps: 1 / (square + eps).sqrt(),
    weight: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(1),
    mixed: Callable[[Tensor], Tensor] = same,
    out_eps: Callable[[Tensor, float], Tensor] = lambda square, eps: 1 / (square + eps).sqrt(),
    normed: Callable[[Tensor], Tensor] = same,
    rounded: Callable[[Tensor], Tensor] = lambda y: y.to(torch.bfloat16),
) -> Tensor:
    """The output in plain torch and fp64, each step open to another."""
    p = attn_res.new_prefix(inputs, params)[:, None]
    rows = torch.cat([blocks(inputs["blocks"][:, : params["nb"]]), p], 1).double()
    norms = attn_res.epsilons(params)
    own = centred(rows)
    scores = (own * eps(own.square().mean(-1), norms[0])[..., None]) @ (
        inputs["norm"].double() * inputs["query"].double()
    )
    mixture = mixed((weight(scores)[..., None] * rows).sum(1))
    if params["final"]:
        mixture = mixture.float().bfloat16().double()
    y = normed(mixture * out_eps(mixture.square().mean(-1), norms[1])[:, None]) * inputs["gamma"].double()
    return rounded(y.float())


def verdict(golden: Tensors, case: Case, **changes: Any) -> bool:
    """Whether plain torch passes, beside the right other outputs and without a schedule."""
    inputs = select(golden, "in/")
    outputs = select(golden, f"exact/{case.schedules[0]}/") | {"output": plain(inputs, case.params, **changes)}
    verdicts = judge(KERNEL, case, golden, outputs, None)
    assert {v.output for v in verdicts if not v.passed} <= {"output"}
    return all(v.passed for v in verdicts)


def narrowed(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def without(maximum: Callable[[Tensor], Tensor | float]) -> Callable[[Tensor], Tensor]:
    """A softmax whose exponentials, in fp32, are of the distances to something else than the largest score."""

    def weight(scores: Tensor) -> Tensor:
        e = (scores - maximum(scores)).float().exp()
        return (e / e.sum(1, keepdim=True)).double()

    return weight


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "last-of-eight-stale": (QUAD, {"blocks": lambda x: x[:, [0, 1, 2, 3, 4, 5, 6, 3]] if x.shape[1] == 8 else x}),
    "four-blocks": (MAILBOX, {"blocks": lambda x: x[:, :4]}),
    "source-layernorm": (QUAD, {"centred": lambda x: x - x.mean(-1, keepdim=True)}),
    "output-layernorm": (QUAD, {"mixed": lambda x: x - x.mean(-1, keepdim=True)}),
    "no-eps": (QUAD, {"eps": lambda square, eps: square.rsqrt()}),
    "eps-twice": (QUAD, {"eps": lambda square, eps: (square + 2 * eps).rsqrt()}),
    "eps-outside-the-root": (QUAD, {"eps": lambda square, eps: 1 / (square.sqrt() + eps)}),
    "no-out-eps": (QUAD, {"out_eps": lambda square, eps: square.rsqrt()}),
    "out-eps-twice": (QUAD, {"out_eps": lambda square, eps: (square + 2 * eps).rsqrt()}),
    "out-eps-outside-the-root": (QUAD, {"out_eps": lambda square, eps: 1 / (square.sqrt() + eps)}),
    "scores-in-bf16": (QUAD, {"weight": lambda scores: narrowed(scores).softmax(1)}),
    "weights-in-bf16": (QUAD, {"weight": lambda scores: narrowed(scores.softmax(1))}),
    "weights-in-fp16": (QUAD, {"weight": lambda scores: scores.softmax(1).half().double()}),
    "maximum-of-the-first": ("nb2-t2-replace-edge-of-flush", {"weight": without(lambda s: s[:, :1])}),
    "maximum-of-the-blocks": ("nb2-t2-replace-edge-of-flush", {"weight": without(lambda s: s[:, :-1].amax(1, True))}),
    "no-maximum": ("nb2-t1-replace-far-below", {"weight": without(lambda s: 0.0)}),
    "scores-floored": ("nb2-t1-replace-far-below", {"weight": lambda scores: scores.clamp(min=-5e4).softmax(1)}),
    "mixture-always-rounded": (QUAD, {"mixed": narrowed}),
    "normed-row-rounded": (QUAD, {"normed": narrowed}),
    "output-truncated": (QUAD, {"rounded": lambda y: (y.view(torch.int32) & -65536).view(torch.float32).bfloat16()}),
}


@pytest.fixture(scope="module")
def golden() -> Callable[[Case], Tensors]:
    manifest = store.read_manifest()
    return lambda case: store.load(case, manifest)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_beyond_the_bound(name: str, golden: Callable[[Case], Tensors]) -> None:
    case_name, changes = WRONG[name]
    case = found(case_name)
    assert not verdict(golden(case), case, **changes)


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.name)
def test_a_right_candidate_is_within_the_bound(case: Case, golden: Callable[[Case], Tensors]) -> None:
    assert verdict(golden(case), case)
