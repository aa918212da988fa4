"""``goldens.judge``: which outputs and elements are judged by what, whether a schedule is claimed or not."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import goldens
from goldens import store
from goldens.case import Case, Kernel, Tensors
from goldens.compare import Verdict
from goldens.judge import Judge, decided, judge, select
from reference.numerics.formats import E4M3 as E4M3_FORM
from reference.numerics.formats import encode, to_bf16

BF16, FP16, E4M3, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
COMMITTED = [case for kernel in goldens.KERNELS.values() for case in kernel.cases if case.committed]


def loaded(case_id: str) -> tuple[Kernel, Case, Tensors]:
    case = goldens.find(case_id)
    return goldens.KERNELS[case.kernel], case, store.obtain(goldens.KERNELS[case.kernel], case, store.read_manifest())


def failing(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return [(v.output, v.against) for v in verdicts if not v.passed]


def as_returned(kernel: Kernel, case: Case, values: Tensors) -> Tensors:
    """The model's outputs, or the oracle's, in the interface's types."""
    made = {}
    for name, x in values.items():
        dtype, x = kernel.outputs(case.params)[name].dtype, x.to(FP32)
        made[name] = to_bf16(x) if dtype == BF16 else encode(x, E4M3_FORM) if dtype == E4M3 else x
    return made


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    case = goldens.find("fmha/d64-causal-n64-normal")
    return store.load(case, store.read_manifest())


JUDGED = {
    "right": (lambda o: {"o": o}, ""),
    "missing": (lambda o: {}, "missing"),
    "extra": (lambda o: {"o": o, "p": o}, "extra"),
    "fp64": (lambda o: {"o": o.to(torch.float64)}, "dtype: got torch.float64, wanted torch.bfloat16"),
    "fp16": (lambda o: {"o": o.to(FP16)}, "dtype: got torch.float16, wanted torch.bfloat16"),
    "number": (lambda o: {"o": 1.0}, "got float, wanted a tensor"),
    "transposed": (lambda o: {"o": o.transpose(1, 2)}, "differ"),
    "negated": (lambda o: {"o": -o}, "differ"),
    "strided": (lambda o: {"o": o.repeat_interleave(2, -1)[..., ::2]}, ""),
}


@pytest.mark.parametrize(("outputs", "words"), JUDGED.values(), ids=JUDGED)
def test_judging_whatever_a_candidate_returns(
    golden: dict[str, Tensor], outputs: Callable[[Tensor], dict], words: str
) -> None:
    case = goldens.find("fmha/d64-causal-n64-normal")
    o = select(golden, "exact/k2/")["o"]
    verdicts = judge(goldens.KERNELS["fmha"], case, golden, outputs(o), "k2")
    assert verdicts
    assert all(v.passed for v in verdicts) == (words == "")
    assert words in "; ".join(v.reason for v in verdicts)


def test_judging_says_which_thread_made_an_element(golden: dict[str, Tensor]) -> None:
    case = goldens.find("fmha/d64-causal-n64-normal")
    o = select(golden, "exact/k2/")["o"].clone()
    o[0, 33, 50] = 7.0
    exact, model = judge(goldens.KERNELS["fmha"], case, golden, {"o": o}, "k2")
    place = {"tile": 0, "batch": 0, "warp": 4, "lane": 7, "register": 2}
    assert [e.where for e in exact.worst] == [place]
    assert [e.where for e in model.worst] == [place]


def test_bytes_are_judged_as_what_the_kernel_says_they_are() -> None:
    """0x01 beside 0x81 is two steps of e4m3, not 128 of a byte; a typed tensor is as good as bytes."""
    kernel, case = goldens.KERNELS["cache_insert"], goldens.find("cache_insert/b1-p1x1-unit")
    tensors = store.load(case, store.read_manifest())
    cache = select(tensors, "exact/insert/")["cache"]
    for typed in (cache, cache.view(E4M3)):
        verdicts = judge(kernel, case, tensors, {"cache": typed}, "insert")
        assert [(v.against, v.passed) for v in verdicts] == [("exact", True), ("model", True)]
    exact, model = judge(kernel, case, tensors, {"cache": cache ^ 0x80}, "insert")
    assert (exact.failing, exact.max_ulps, model.max_ulps) == (576, 2 * 0x30, 16.0)
    [refused] = [v for v in judge(kernel, case, tensors, {"cache": cache.int()}, "insert") if v.against == "exact"]
    assert refused.reason == "dtype: got torch.int32, wanted torch.float8_e4m3fn"


# What leaves elements to the bits of a schedule; any other recipe's are all decided by the model.
LEAVES_OUT = {
    "fmha": ("nan", "inf", "bits", "overflow", "far-below", "marks", "hidden"),
    "attn_res": ("overflow", "opposing-sources"),
    "cache_insert": ("underflow", "bits"),
    "mla_query": ("underflow", "bits"),
    "kda": ("nan", "inf-state", "strange"),
}


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.id)
def test_without_a_claim_every_schedule_passes_and_the_model_decides_what_it_can(case: Case) -> None:
    kernel, _, golden = loaded(case.id)
    judge = Judge(kernel, case, golden)
    calls = [select(golden, f"exact/{schedule}/") for schedule in case.schedules]
    for outputs in calls or [as_returned(kernel, case, judge.model)]:
        verdicts = judge(outputs, None)
        assert failing(verdicts) == [], [v.reason for v in verdicts]
        if case.recipe.partition("@")[0] not in LEAVES_OUT[case.kernel]:
            assert not any(v.undecided for v in verdicts)


UNDECIDED = {
    # 127 rows that do not see the last value, in the channel of its NaN.
    "fmha/d64-causal-n128-nan": {"o": 127},
    "fmha/d64-n64-overflow": {"o": 64 * 64},
    "cache_insert/b3-p1x3-bits": {"cache": 512},
    "cache_insert/b1-p1x1-underflow": {"cache": 512},
    "mla_query/h1-b1-p1x1-underflow": {"output": 576, "cache": 512},
    # Tokens of 4 in the chunk before a NaN of the key, and nothing of the other sequences.
    "kda/t21-thirds-nan": {"out": 512},
    # Two rows with infinities, of three tokens; the row with NaN is NaN.
    "kda/t3-from-fp32-inf-state": {"out": 6},
    "attn_res/nb1-t1-opposing-sources": {"output": 7168},
}


@pytest.mark.parametrize(("case_id", "wanted"), UNDECIDED.items(), ids=UNDECIDED)
def test_just_what_schedules_may_give_differently_is_left_out(case_id: str, wanted: dict[str, int]) -> None:
    kernel, case, golden = loaded(case_id)
    verdicts = judge(kernel, case, golden, Judge(kernel, case, golden).exact(None), None)
    assert {v.output: v.undecided for v in verdicts if v.undecided} == wanted


def test_a_masked_nan_may_reach_its_channel_and_nothing_else() -> None:
    """Whoever multiplies the masked key by 0 has NaN there; elsewhere NaN is a fault, and so is a number for NaN."""
    kernel, case, golden = loaded("fmha/d64-causal-n128-nan")
    judge = Judge(kernel, case, golden)
    o = as_returned(kernel, case, {"o": judge.model["o"]})["o"]
    poisoned = o.clone()
    poisoned[:, :, 5] = torch.nan
    for right in (o, poisoned):
        assert failing(judge({"o": right}, None)) == []
    [row] = judge.inputs["q"].isnan().any(-1).nonzero()[:, 1].tolist()
    for place, value in (((0, 3, 6), math.nan), ((0, row, 6), 1.0), ((0, 127, 5), 1.0), ((0, 3, 6), math.inf)):
        wrong = o.clone()
        wrong[place] = value
        [verdict] = judge({"o": wrong}, None)
        assert (verdict.passed, verdict.failing, verdict.wrong_class) == (False, 1, 1)


def test_a_run_whose_every_element_is_undecided_says_nothing() -> None:
    kernel, case, golden = loaded("fmha/d64-n64-overflow")
    verdicts = judge(kernel, case, golden, {"o": torch.zeros(1, 64, 64, dtype=BF16)}, None)
    assert [(v.passed, v.judged) for v in verdicts] == [(True, 0)]
    assert not decided(verdicts)
    assert decided(judge(kernel, case, golden, {"o": torch.zeros(1, 64, 64)}, None))  # a failure


@pytest.mark.parametrize("final", ["bf16", "fp32"])
def test_a_case_without_tokens_passes_and_its_states_are_copies(final: str) -> None:
    case_id = "kda/t0-h2-nothing-from-fp32-to-fp32-normal" if final == "fp32" else "kda/t0-h2-nothing-to-bf16-normal"
    kernel, case, golden = loaded(case_id)
    outputs = select(golden, "exact/chunk16/")
    for schedule in ("chunk16", None):
        verdicts = judge(kernel, case, golden, outputs, schedule)
        assert failing(verdicts) == []
        assert {v.output for v in verdicts} == {"out", "final_state"}
        assert decided(verdicts)
    state = outputs["final_state"].clone()
    state.view(torch.uint8)[0, 0, 3, -1] ^= 0x80  # a sign, of a zero if the states are zeros
    assert failing(judge(kernel, case, golden, outputs | {"final_state": state}, None)) == [("final_state", "model")]
    wrong = outputs | {"out": torch.zeros(1, 0, 2, 64, dtype=BF16)}
    assert failing(judge(kernel, case, golden, wrong, None)) == [("out", "model")]


TYPES = {
    "fp32-o": ("fmha/d64-q1-k65-normal", "o", FP32),
    "bf16-lse": ("fmha/d64-q1-k65-normal", "lse", BF16),
    "bf16-lse-that-no-schedule-makes": ("fmha/d64-n64-normal", "lse", BF16),
    "fp16-o": ("fmha/d64-n64-normal", "o", FP16),
    "fp32-state": ("kda/t1-to-bf16-normal", "final_state", FP32),
    "bf16-state": ("kda/t18-to-fp32-bound-beside-none", "final_state", BF16),
    "fp32-cache": ("cache_insert/b1-p1x1-unit", "cache", FP32),
}


@pytest.mark.parametrize(("case_id", "output", "dtype"), TYPES.values(), ids=TYPES)
def test_every_candidate_is_held_to_the_dtypes_of_the_interface(case_id: str, output: str, dtype: torch.dtype) -> None:
    kernel, case, golden = loaded(case_id)
    outputs = as_returned(kernel, case, select(golden, "model/"))
    assert failing(judge(kernel, case, golden, outputs, None)) == []
    wrong = outputs | {output: outputs[output].to(FP32).to(dtype)}
    [refused] = [v for v in judge(kernel, case, golden, wrong, None) if not v.passed]
    assert (refused.output, refused.reason) == (
        output,
        f"dtype: got {dtype}, wanted {kernel.outputs(case.params)[output].dtype}",
    )


@pytest.mark.parametrize("kernel", goldens.KERNELS.values(), ids=lambda kernel: kernel.name)
def test_goldens_have_the_interface_of_their_kernel(kernel: Kernel) -> None:
    for case in kernel.cases:
        if not case.committed or case.whole:
            continue
        interface = kernel.outputs(case.params)
        golden = store.load(case, store.read_manifest())
        for name, x in select(golden, "model/").items():
            assert len(interface[name].axes) == x.dim()
        for schedule in case.schedules:
            outputs = select(golden, f"exact/{schedule}/")
            assert set(outputs) <= set(interface)
            for name, x in outputs.items():
                assert x.dtype in (interface[name].dtype, torch.uint8)
                assert (x.dtype == torch.uint8) == (interface[name].dtype == E4M3)
                assert len(interface[name].axes) == x.dim()


UNTOUCHED = {
    "sign-of-zero": (lambda bytes_: (bytes_ & 0x7F) == 0, lambda byte: byte ^ 0x80),
    "sign-of-nan": (lambda bytes_: (bytes_ & 0x7F) == 0x7F, lambda byte: byte ^ 0x80),
    "below-a-power-of-two": (lambda bytes_: ((bytes_ & 7) == 0) & ((bytes_ & 0x7F) > 8), lambda byte: byte - 1),
}


@pytest.mark.parametrize(("chosen", "change"), UNTOUCHED.values(), ids=UNTOUCHED)
def test_rows_that_are_not_written_keep_their_bytes(
    chosen: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    kernel, case, golden = loaded("cache_insert/b2-crossing-normal")
    cache = select(golden, "exact/insert/")["cache"]
    kept = (select(golden, "in/")["cache"] == cache).all(-1)
    index = (chosen(cache) & kept[..., None]).nonzero()[0].tolist()
    wrong = cache.clone()
    wrong[tuple(index)] = change(wrong[tuple(index)])
    [verdict] = judge(kernel, case, golden, {"cache": wrong}, None)
    assert (verdict.passed, verdict.failing) == (False, 1)
    assert "1 of 1152 copied elements have other bits" in verdict.reason
    assert failing(judge(kernel, case, golden, {"cache": cache}, None)) == []


@pytest.mark.parametrize("byte", [0x7E, 0x00], ids=["448", "0"])
def test_a_row_of_nan_is_written_as_nan(byte: int) -> None:
    kernel, case, golden = loaded("cache_insert/b3-p1x3-bits")
    cache = select(golden, "exact/insert/")["cache"].clone()
    nan = (cache & 0x7F) == 0x7F
    assert bool(nan.any())
    cache[nan] = byte
    [verdict] = judge(kernel, case, golden, {"cache": cache}, None)
    assert (verdict.passed, verdict.wrong_class) == (False, int(nan.sum()))


def truncated(x: Tensor) -> Tensor:
    """fp64 to bf16 towards zero."""
    return (x.to(FP32).view(torch.int32) & -65536).view(FP32).to(BF16)


NARROWED = (
    "fmha/d64-n64-normal",
    "fmha/d64-causal-n64-negative",
    "fmha/d128-causal-n64-wide",
    "kda/t71-one-behind-from-fp32-to-fp32-lb-0.25-resting",
)


@pytest.mark.parametrize("case_id", NARROWED)
def test_truncation_within_every_bound_is_a_bias(case_id: str) -> None:
    kernel, case, golden = loaded(case_id)
    judge = Judge(kernel, case, golden)
    name = "o" if case.kernel == "fmha" else "out"
    [verdict] = judge({name: truncated(judge.oracle[name])}, None, (name,))
    assert not verdict.passed
    assert "biased: -0." in verdict.reason
    [rounded] = judge({name: to_bf16(judge.oracle[name].to(FP32))}, None, (name,))
    assert rounded.passed


def test_opposing_sources_are_no_false_alarm() -> None:
    """cluster7's square of the mixture cancels, down to NaN: without a claim too, no bound holds for it."""
    kernel, case, golden = loaded("attn_res/nb1-t1-opposing-sources")
    for schedule in case.schedules:
        outputs = select(golden, f"exact/{schedule}/")
        assert failing(judge(kernel, case, golden, outputs, None)) == []
    direct = select(golden, "exact/cluster7_direct/")
    direct["output"] = -direct["output"]
    assert ("output", "model") in failing(judge(kernel, case, golden, direct, "cluster7_direct"))


def test_oracle_and_bounds_are_computed_once() -> None:
    kernel, case, golden = loaded("fmha/d64-n64-normal")
    asked: list[Any] = []

    def bound(*arguments: Any) -> Tensors:
        asked.append(arguments[2])
        return kernel.bound(*arguments)

    judge = Judge(dataclasses.replace(kernel, bound=bound), case, golden)
    outputs = select(golden, "exact/k2/")
    first = judge(outputs, "k2")
    assert sorted(asked) == ["k2", "model"]
    assert judge.oracle is judge.oracle
    assert judge(outputs, "k2") == first
    judge(outputs, None)
    judge(outputs, None)
    assert sorted(asked) == sorted(["model", *kernel.reference.SCHEDULES, *kernel.legal])


def test_verdicts_name_the_place_by_the_interfaces_dimensions() -> None:
    kernel, case, golden = loaded("kda/t20-normal")
    out = select(golden, "exact/chunk16/")["out"].clone()
    out[0, 6, 0, 40:48] += 1.0
    words = "all 8 failures in token 6, channels 40 to 47, every element there"
    assert [v.place for v in judge(kernel, case, golden, {"out": out}, "chunk16")] == [words] * 2
