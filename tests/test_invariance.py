"""Invariance: the exact models have every property, what depends on its neighbours or its batch does not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import goldens
from goldens import invariance, store
from goldens.call import CallFailed, Unsupported, call
from goldens.case import Case, Tensors
from goldens.compare import Verdict
from goldens.judge import Judge
from goldens.kda.properties import split
from goldens.store import read_manifest
from reference.numerics.formats import to_bf16
from reference.numerics.order import chain_add
from tools import cli
from tools.trial import Trial, run

CPU = torch.device("cpu")
PACKED = next(case.id for case in goldens.KERNELS["fmha"].cases if "packed" in case.name and case.committed)
HEADS, TOKENS = "fmha/d64-causal-n64-b2-normal", "attn_res/nb1-t2-half-nan"
ROWS, INSERTS = "mla_query/h1-b4-p2x3-alternate-padded", "cache_insert/b2-crossing-normal"
HOLDING = (HEADS, PACKED, TOKENS, "attn_res/nb5-t3-r7-slots2-cap6-w3-final-aux1-ties-s1", ROWS, INSERTS)


def found(case: Case, candidate: Callable[..., Any], schedule: str | None = None) -> list:
    """What ``check`` says of a candidate in this process."""
    kernel = goldens.KERNELS[case.kernel]
    return list(
        invariance.check(
            kernel,
            case,
            kernel.inputs(case),
            lambda inputs, params, graph: call(candidate, inputs, params, CPU, kernel.written(params)),
            schedule,
            graphs=False,
        )
    )


def exact(case: Case, schedule: str) -> Callable[..., Tensors]:
    reference = goldens.KERNELS[case.kernel].reference
    return lambda inputs, params: reference.exact(inputs, params, schedule)


@pytest.mark.parametrize("case_id", HOLDING)
def test_exact_models_have_every_property(case_id: str) -> None:
    case = goldens.find(case_id)
    for schedule in case.schedules:
        verdicts = found(case, exact(case, schedule), schedule)
        assert [v for v in verdicts if not (isinstance(v, Verdict) and v.passed)] == []
        assert {verdict.against for verdict in verdicts} == {"invariance"}
        tried = {verdict.output.split(":")[0] for verdict in verdicts}
        assert {"twice", "strides"} < tried
        assert len(tried) >= 4


SLOW = ("around-64", "beyond-416", "beyond-512")  # tests/test_kda_properties.py has shorter ones of these schedules
KDA = [c for c in goldens.KERNELS["kda"].cases if c.committed and not any(name in c.name for name in SLOW)]


@pytest.mark.parametrize("case", KDA, ids=lambda case: case.id)
def test_exact_models_of_kda_have_every_property(case: Case) -> None:
    for schedule in case.schedules:
        outcomes = found(case, exact(case, schedule), schedule)
        assert [v for v in outcomes if isinstance(v, Verdict) and not v.passed] == []
        assert {v.name for v in outcomes if not isinstance(v, Verdict)} <= {"strides"}


def test_some_case_of_kda_is_split() -> None:
    cut = [case for case in KDA if split(case, goldens.KERNELS["kda"].inputs(case), case.params)]
    assert cut


def failing(case: Case, candidate: Callable[..., Any]) -> set[str]:
    return {v.output for v in found(case, candidate) if isinstance(v, Verdict) and not v.passed}


def by_batch(inputs: Tensors, params: dict[str, Any]) -> Tensors:
    """AttnRes' norm of the new prefix, its sum split in more parts the more tokens there are."""
    p = inputs["prefix"].to(torch.float32) + inputs["delta"].to(torch.float32)
    total = chain_add(chain_add(p.square().unflatten(-1, (1 << min(len(p), 10), -1))))
    return {"output": p * (total[:, None] / p.shape[-1]).rsqrt()}


def test_a_sum_split_by_the_batch_is_noticed() -> None:
    case = goldens.attn_res.make_case(1, 5, "normal")
    assert {"token 0 alone: output", "behind others: output"} <= failing(case, by_batch)


def test_what_declares_that_the_batch_matters_is_held_to_the_bound_there() -> None:
    """A token is off by a little in a larger batch: within the bound of the outputs; by much, or by NaN: not."""
    kernel, case = goldens.KERNELS["attn_res"], goldens.attn_res.make_case(1, 5, "normal")
    within = Judge(kernel, case, store.compute(kernel, case)).bound(None)

    def refused(error: float, bound: Tensors | None) -> set[str]:
        def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
            outputs = kernel.reference.exact(inputs, params, "cluster7")
            if len(inputs["prefix"]) > 5:
                outputs["output"] = to_bf16(outputs["output"].to(torch.float32) * (1 + error))
            return outputs

        on_cpu = lambda x, params, graph: call(candidate, x, params, CPU, kernel.written(params))  # noqa: E731
        found = invariance.check(kernel, case, kernel.inputs(case), on_cpu, None, graphs=False, within=bound)
        return {v.output for v in found if isinstance(v, Verdict) and not v.passed}

    assert refused(2.0**-8, None) >= {"behind others: output"}
    assert refused(2.0**-8, within) == set()
    assert refused(2.0**-5, within) >= {"behind others: output"}
    assert refused(math.nan, within) >= {"behind others: output"}


def inexact(inputs: Tensors, params: dict[str, Any]) -> Tensors:
    """Attention in bf16 all the way: far from the model, but each head on its own."""
    if "cu_seqlens_q" in inputs:
        raise Unsupported("packed sequences")
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    group = q.shape[0] // k.shape[0]
    heads = []
    for h in range(q.shape[0]):
        scores = (q[h] @ k[h // group].T).tril()
        heads.append(scores @ v[h // group])
    return {"o": torch.stack(heads)}


def test_a_candidate_may_be_inexact_and_invariant() -> None:
    case = goldens.find(HEADS)
    assert failing(case, inexact) == set()
    model = goldens.KERNELS["fmha"].reference.model(goldens.KERNELS["fmha"].inputs(case), case.params)["o"]
    got = inexact(goldens.KERNELS["fmha"].inputs(case), case.params)["o"]
    assert float((got.float() - model).abs().max()) > 1.0


def leaking(rows: Tensor) -> Tensor:
    """Rows, each with a zero times its neighbour: right unless that one is NaN."""
    return rows + 0 * rows.roll(1, 0)


def test_a_neighbours_nan_is_noticed() -> None:
    case = goldens.cache_insert.make_case(3, "normal", pages=1, page_size=4)

    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        mixed = dict(inputs) | {"kv": leaking(inputs["kv"])}
        return exact(case, "insert")(mixed, params)

    wrong = failing(case, candidate)
    assert wrong
    assert all("amid NaN" in output for output in wrong)


@pytest.mark.parametrize("change", ["k", "v", "q"])
def test_a_token_from_the_future_is_noticed(change: str) -> None:
    case = goldens.find("fmha/d64-causal-q6-k33-h4-2-scale0.3-normal")

    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        x = inputs[change]
        return exact(case, "wgmma128")(inputs | {change: x + x.mean(1, keepdim=True)}, params)

    wanted = "other queries before the last" if change == "q" else "another last key"
    assert wanted in {output.split(":")[0] for output in failing(case, candidate)}


def test_a_state_between_calls_is_noticed() -> None:
    case, count = goldens.find(INSERTS), iter(range(100))

    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        cache = exact(case, "insert")(inputs, params)["cache"]
        cache[0, 0, 0] = next(count)
        return {"cache": cache}

    assert "twice: cache" in failing(case, candidate)


def test_memory_read_as_if_it_were_contiguous_is_noticed() -> None:
    case = goldens.cache_insert.make_case(3, "normal", pages=1, page_size=4)

    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        kv = inputs["kv"]
        misread = kv.as_strided(kv.shape, (kv.shape[1], 1))
        return exact(case, "insert")(dict(inputs) | {"kv": misread}, params)

    assert failing(case, candidate) == {"strides: cache"}


def test_a_position_that_matters_is_noticed() -> None:
    case = goldens.cache_insert.make_case(3, "normal", pages=1, page_size=4)

    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        scaled = inputs["k_pe"].clone()
        scaled[1:2] *= 2
        return exact(case, "insert")(dict(inputs) | {"k_pe": scaled}, params)

    assert {"behind another: cache"} <= failing(case, candidate)


def test_strides_may_be_refused_but_by_a_value_error_alone() -> None:
    case = goldens.cache_insert.make_case(3, "normal", pages=1, page_size=4)

    def candidate(error: type[Exception]) -> Callable[..., Tensors]:
        def refuse(inputs: Tensors, params: dict[str, Any]) -> Tensors:
            if not inputs["kv"].is_contiguous():
                raise error("kv: got strides")
            return exact(case, "insert")(inputs, params)

        return refuse

    outcomes = found(case, candidate(ValueError))
    [skipped] = [outcome for outcome in outcomes if not isinstance(outcome, Verdict)]
    assert (skipped.name, "kv: got strides" in skipped.reason) == ("strides", True)
    assert failing(case, candidate(ValueError)) == set()
    assert failing(case, candidate(RuntimeError)) == {"strides: call"}


def test_a_variant_that_is_not_supported_is_listed_and_one_that_fails_fails() -> None:
    case = goldens.find(INSERTS)

    def candidate(error: Exception) -> Callable[..., Tensors]:
        def refuse(inputs: Tensors, params: dict[str, Any]) -> Tensors:
            if inputs["kv"].shape[0] == 1:
                raise error
            return exact(case, "insert")(inputs, params)

        return refuse

    names = [x.name for x in found(case, candidate(Unsupported("one row"))) if not isinstance(x, Verdict)]
    assert names == ["row 0 alone", "row 1 alone"]
    assert failing(case, candidate(RuntimeError("one row"))) == {"row 0 alone: call", "row 1 alone: call"}


def test_the_case_itself_must_be_done() -> None:
    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        raise RuntimeError("never")

    with pytest.raises(CallFailed, match="never"):
        found(goldens.find(INSERTS), candidate)


def test_a_state_in_another_order_is_noticed_by_the_split() -> None:
    """V and K exchanged on the way out: everything else holds."""
    case = next(c for c in KDA if split(c, goldens.KERNELS["kda"].inputs(c), c.params))

    def candidate(inputs: Tensors, params: dict[str, Any]) -> Tensors:
        outputs = exact(case, case.schedules[0])(inputs, params)
        return {name: x.transpose(2, 3) if name == "final_state" else x for name, x in outputs.items()}

    wrong = failing(case, candidate)
    assert wrong
    assert all("the rest after" in output for output in wrong)


def test_every_kernel_declares_its_properties() -> None:
    assert {invariance.twice, invariance.graph_replay} == set(invariance.EVERY)
    for kernel in goldens.KERNELS.values():
        assert len(kernel.properties) >= 2


@pytest.mark.usefixtures("in_process")
def test_the_command_tries_them_and_says_so() -> None:
    options = ["verify", "--candidate", "exact", "--device", "cpu", "--invariance"]
    result = CliRunner().invoke(cli.app, [*options, "--case", INSERTS])
    assert result.exit_code == 0
    assert "Invariance: exact on the CPU" in result.stdout
    assert "row 0 amid NaN: cache" in result.stdout


@pytest.mark.usefixtures("in_process")
def test_a_failing_property_has_its_command() -> None:
    with Trial("exact", "cpu") as trial:
        trial._held.call = lambda *_: {"cache": torch.rand(2, 2, 576)}
        [result] = run(trial, goldens.find(INSERTS), read_manifest(), invariant=True)
    assert not result.passed
    assert result.command == (
        f"goldens verify --case {INSERTS} --candidate exact --device cpu --schedule insert --invariance"
    )
