"""``goldens.compare``: what a verdict calls equal, how far apart, and in which words it fails.

Against exact, bits decide. Against the model, ½ ULP plus a derived bound decides, per element. The class of
a number comes before any distance, and no statistic over a whole tensor is ever a verdict.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from goldens import inputs
from goldens.compare import WORST, Verdict, against_exact, against_model, check_names
from reference.numerics.formats import to_bf16

BF16, FP16, E4M3, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
Codes = Callable[..., Tensor]


def model_verdict(got: Tensor, model: Tensor, bound: float | Tensor = 0.0, oracle: Tensor | None = None) -> Verdict:
    """against_model with a bound that may be one number, and the model as its own oracle."""
    wide = model.to(torch.float64)
    limit = torch.as_tensor(bound, dtype=torch.float64).expand(model.shape)
    return against_model("o", got, model, wide if oracle is None else oracle, limit)


# dtype, code, code, whether class differs, distance among finite numbers
PAIRS = {
    "smallest-subnormals-of-either-sign": (BF16, 0x0001, 0x8001, False, 2),
    "zeros": (BF16, 0x0000, 0x8000, False, 0),
    "largest-of-either-sign": (BF16, 0x7F7F, 0xFF7F, False, 65278),
    "neighbours": (BF16, 0x3F80, 0x3F81, False, 1),
    "across-a-binade": (BF16, 0x3F7F, 0x3F80, False, 1),
    "fp32-64-bit-distance": (FP32, 0x7F7FFFFF, 0xFF7FFFFF, False, 2 * 0x7F7FFFFF),
    "fp32-3e38": (FP32, 0x7F61B1E6, 0xFF61B1E6, False, 2 * 0x7F61B1E6),
    "fp16-zero-to-one": (FP16, 0x0000, 0x3C00, False, 0x3C00),
    "e4m3-neighbours": (E4M3, 0x38, 0x39, False, 1),
    "bf16-largest-and-inf": (BF16, 0x7F7F, 0x7F80, True, 0),
    "bf16-inf-and-nan": (BF16, 0x7F80, 0x7F81, True, 0),
    "e4m3-448-and-nan": (E4M3, 0x7E, 0x7F, True, 0),
    "fp32-one-and-nan": (FP32, 0x3F800000, 0x7FFFFFFF, True, 0),
}


@pytest.mark.parametrize(("dtype", "first", "second", "other_class", "ulps"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("swapped", [False, True], ids=["got-want", "want-got"])
def test_one_code_apart_or_many(
    from_codes: Codes, dtype: torch.dtype, first: int, second: int, other_class: bool, ulps: int, swapped: bool
) -> None:
    pair = (second, first) if swapped else (first, second)
    got, want = (from_codes(dtype, code) for code in pair)
    verdict = against_exact("o", got, want)
    assert not verdict.passed
    largest = math.inf if other_class else ulps
    assert (verdict.failing, verdict.wrong_class, verdict.max_ulps) == (1, int(other_class), largest)
    assert verdict.only_zero_sign == int(ulps == 0 and not other_class)
    assert verdict.reason.startswith("1 of 1 elements differ")
    assert ("in class" in verdict.reason) == other_class
    assert against_exact("o", want, want).passed


# code, code, equal bits, equal values
MODES = {
    "nan-payloads": (0x7FC0, 0x7FFF, False, True),
    "nan-signs": (0xFFFF, 0x7FFF, False, True),
    "same-nan": (0x7FFF, 0x7FFF, True, True),
    "zero-signs": (0x8000, 0x0000, False, True),
    "same-negative-zero": (0x8000, 0x8000, True, True),
    "nan-and-inf": (0x7FFF, 0x7F80, False, False),
    "nan-and-number": (0x7FFF, 0x3F80, False, False),
    "number-and-nan": (0x3F80, 0x7FFF, False, False),
    "infinities": (0x7F80, 0xFF80, False, False),
    "smallest-and-zero": (0x0001, 0x0000, False, False),
}


@pytest.mark.parametrize(("got", "want", "bits", "values"), MODES.values(), ids=MODES)
def test_bits_and_values_mode(from_codes: Codes, got: int, want: int, bits: bool, values: bool) -> None:
    got, want = from_codes(BF16, got), from_codes(BF16, want)
    assert against_exact("o", got, want).passed == bits
    assert against_exact("o", got, want, values=True).passed == values


def test_signs_of_zero_are_counted_apart(from_codes: Codes) -> None:
    verdict = against_exact("o", from_codes(BF16, 0x8000, 0x0000, 0x3F81), from_codes(BF16, 0x0000, 0x8000, 0x3F80))
    assert verdict.reason == "3 of 3 elements differ, 2 of them only in the sign of zero"
    assert (verdict.failing, verdict.only_zero_sign, verdict.max_ulps) == (3, 2, 1)


FORMS = {
    "dtype": (torch.zeros(2, 3, dtype=FP16), "dtype: got torch.float16, wanted torch.bfloat16"),
    "shape": (torch.zeros(3, 2, dtype=BF16), "shape: got (3, 2), wanted (2, 3)"),
    "rank": (torch.zeros(6, dtype=BF16), "shape: got (6,), wanted (2, 3)"),
    "empty": (torch.zeros(0, 3, dtype=BF16), "shape: got (0, 3), wanted (2, 3)"),
    "none": (None, "got NoneType, wanted a tensor"),
    "list": ([[0.0]], "got list, wanted a tensor"),
}


@pytest.mark.parametrize(("got", "reason"), FORMS.values(), ids=FORMS)
def test_a_wrong_form_has_its_own_words(got: object, reason: str) -> None:
    verdict = against_exact("o", got, torch.zeros(2, 3, dtype=BF16))
    assert (verdict.passed, verdict.reason, verdict.elements) == (False, reason, 0)


MODEL_FORMS = {
    "shape": (torch.zeros(3, 2, dtype=BF16), "shape: got (3, 2), wanted (2, 3)"),
    "fp64": (torch.zeros(2, 3, dtype=torch.float64), "dtype: got torch.float64"),
    "int": (torch.zeros(2, 3, dtype=torch.int32), "dtype: got torch.int32"),
    "bool": (torch.zeros(2, 3, dtype=torch.bool), "dtype: got torch.bool"),
    "none": (None, "got NoneType, wanted a tensor"),
}


@pytest.mark.parametrize(("got", "reason"), MODEL_FORMS.values(), ids=MODEL_FORMS)
def test_a_wrong_form_against_the_model(got: object, reason: str) -> None:
    verdict = model_verdict(got, torch.zeros(2, 3))
    assert not verdict.passed
    assert verdict.reason.startswith(reason)


def test_an_empty_tensor_of_the_right_form_passes() -> None:
    empty = torch.zeros(0, 3, dtype=BF16)
    for verdict in (against_exact("o", empty, empty), model_verdict(empty, empty.float())):
        assert (verdict.passed, verdict.elements, verdict.judged, verdict.shape) == (True, 0, 0, (0, 3))
        assert verdict.mean_ulps_away_from_zero is None or verdict.against == "exact"
    for wrong in (torch.zeros(0, 2, dtype=BF16), torch.zeros(0, 3, dtype=FP16), torch.zeros(1, 3, dtype=BF16)):
        assert not against_exact("o", wrong, empty).passed


def test_missing_and_extra_outputs() -> None:
    wanted, outputs = {"o": torch.zeros(1), "lse": torch.zeros(1)}, {"o": torch.zeros(1), "weights": torch.zeros(1)}
    verdicts = check_names(outputs, wanted, "exact")
    assert [(v.output, v.passed, v.reason.split(":")[0]) for v in verdicts] == [
        ("lse", False, "missing"),
        ("weights", False, "extra"),
    ]
    assert check_names(wanted, wanted, "exact") == []


@pytest.mark.parametrize("got", [30.0, 30.125], ids=["even-side", "odd-side"])
def test_both_sides_of_a_midpoint_pass(got: float) -> None:
    """An absolute tolerance of 0.06 fails them; ½ ULP is 0.0625."""
    verdict = model_verdict(torch.tensor([got], dtype=BF16), torch.tensor([30.0625]))
    assert verdict.passed
    assert verdict.max_error_over_bound == 1.0


@pytest.mark.parametrize("got", [29.875, 30.25], ids=["below", "above"])
def test_one_ulp_beyond_a_midpoint_fails(got: float) -> None:
    assert not model_verdict(torch.tensor([got], dtype=BF16), torch.tensor([30.0625])).passed


# model, got, the bound that is met exactly
LIMITS = {
    "above-one": (1.0, 1.0078125, 2.0**-8),
    "two-ulps": (-1.5, -1.515625, 1.5 * 2.0**-7),
    "subnormal": (0.0, 2.0**-133, 2.0**-134),
}


@pytest.mark.parametrize(("model", "got", "bound"), LIMITS.values(), ids=LIMITS)
def test_a_tolerance_met_exactly_and_exceeded_by_one_step(model: float, got: float, bound: float) -> None:
    got, model = torch.tensor([got], dtype=BF16), torch.tensor([model])
    met = model_verdict(got, model, bound)
    assert met.passed
    assert met.max_error_over_bound == 1.0
    exceeded = model_verdict(got, model, bound * (1 - 2.0**-50))
    assert not exceeded.passed
    assert exceeded.reason == "1 of 1 elements exceed their bound"


def test_the_bound_is_each_elements_own() -> None:
    """A generous neighbour does not pay for an element that exceeds its bound."""
    got, model = torch.tensor([1.125, 1.125], dtype=BF16), torch.ones(2)
    verdict = model_verdict(got, model, torch.tensor([1.0, 0.01]))
    assert verdict.failing == 1
    assert [e.index for e in verdict.worst] == [(1,)]


def test_rounding_one_binade_up_is_allowed_its_ulp() -> None:
    """At 1.99 ½ ULP is 2^-8, but a bound that reaches 2 allows the ½ ULP of there, 2^-7."""
    model, bound = torch.tensor([1.9931640625]), 0.0078125
    assert model_verdict(torch.tensor([2.0078125], dtype=FP32), model, bound).failing == 1
    assert model_verdict(torch.tensor([2.0], dtype=BF16), model, bound).passed
    assert model_verdict(torch.tensor([2.015625], dtype=BF16), model, 0.0147).passed


WRONG = {
    "times-1.07": lambda x: to_bf16(x * 1.07),
    "zeros": lambda x: torch.zeros_like(x, dtype=BF16),
    "constant": lambda x: torch.full_like(x, float(x.mean()), dtype=BF16),
    "negated": lambda x: to_bf16(-x),
    "shuffled": lambda x: to_bf16(x.flip(0)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_correlation_is_no_verdict(wrong: Callable[[Tensor], Tensor]) -> None:
    x = inputs.normal("compare/correlation", (4096,)) + 4.0
    verdict = model_verdict(wrong(x), x)
    assert not verdict.passed
    assert verdict.failing > 3000
    assert len(verdict.worst) == WORST
    assert not against_exact("o", wrong(x), to_bf16(x)).passed
    assert model_verdict(to_bf16(x), x).passed


def test_truncation_shows_in_the_mean_error_away_from_zero() -> None:
    """Every element stays within 1 ULP, half of them move, all toward zero."""
    x = inputs.normal("compare/truncation", (1 << 14,))
    cut = (x.view(torch.int32) & -65536).view(FP32).to(BF16)
    truncated, rounded = model_verdict(cut, x), model_verdict(to_bf16(x), x)
    assert rounded.passed
    assert abs(rounded.mean_ulps_away_from_zero) < 0.01
    assert rounded.max_error_over_bound <= 1.0
    assert not truncated.passed
    assert truncated.max_ulps < 1.0
    assert truncated.mean_ulps_away_from_zero == pytest.approx(-0.5, abs=0.01)
    assert truncated.inexact_share > 0.99
    assert truncated.error_over_model_error == pytest.approx(2.0, abs=0.1)
    moved = against_exact("o", cut, to_bf16(x))
    assert moved.max_ulps == 1.0
    assert moved.failing / moved.elements == pytest.approx(0.5, abs=0.02)


def truncated(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(FP32).to(BF16)


def test_a_bias_within_every_bound_fails() -> None:
    """Truncation has −½ ULP, and here a bound that excuses each element."""
    x = inputs.normal("compare/bias", (64, 64))
    bound = 2.0**-7 * x.abs().double()
    cut, rounded = model_verdict(truncated(x), x, bound), model_verdict(to_bf16(x), x, bound)
    assert rounded.passed
    assert (cut.passed, cut.failing) == (False, 0)
    assert cut.bias == pytest.approx(-0.5, abs=0.05)
    assert cut.reason.startswith("biased: -0.")
    away = model_verdict(to_bf16(x * (1 + 2.0**-8)), x, bound)
    assert (away.passed, away.failing, away.bias > 0.3) == (False, 0, True)
    few = model_verdict(truncated(x[:50]), x[:50], bound[:50])
    assert (few.passed, few.bias_limit > 0.5) == (True, True)


def test_what_rows_share_is_no_bias_unless_they_share_its_sign() -> None:
    """Row i off by a third of an ULP, either way: 64 elements of one sign each, as a rounded weight makes them."""
    x = inputs.normal("compare/rows", (256, 64)) + 8.0
    sign = 1.0 - 2.0 * inputs.integers("compare/signs", (256, 1), 0, 2).float()
    bound = torch.full(x.shape, 2.0**-4, dtype=torch.float64)
    assert model_verdict(to_bf16(x + sign * 2.0**-6), x, bound).passed
    assert not model_verdict(to_bf16(x + 2.0**-6), x, bound).passed


def test_equal_rows_count_once() -> None:
    """One row truncated is chance; 512 copies of it are no more than that."""
    x = inputs.normal("compare/one", (1, 8)).expand(512, 8)
    bound = 2.0**-7 * x.abs().double()
    assert model_verdict(truncated(x), x, bound).passed


def test_what_several_dimensions_share_counts_once() -> None:
    """One factor of a whole matrix is off: a bias by rows, none by matrices, of which there is one."""
    x = inputs.normal("compare/shared", (1, 64, 64)).abs() + 0.5
    got = to_bf16(x * (1 - 2.0**-9))
    oracle = x.to(torch.float64)
    bound = oracle * 2.0**-8
    by_rows, by_matrix = (against_model("o", got, x, oracle, bound, shared=shared) for shared in (1, 2))
    assert (by_rows.passed, by_rows.failing) == (False, 0)
    assert by_matrix.passed


def test_ties_to_even_are_no_bias() -> None:
    x = torch.arange(128.0, 256.0) + 0.5
    assert model_verdict(to_bf16(x), x).passed


def test_fp32_is_not_narrowed_and_has_no_bias() -> None:
    x = inputs.normal("compare/fp32", (128, 64))
    verdict = model_verdict(x * (1 - 2.0**-23), x, 2.0**-22 * x.abs().double())
    assert (verdict.passed, verdict.bias, verdict.bias_limit) == (True, None, None)


CLASSES = {
    "number-for-nan": (1.0, math.nan),
    "nan-for-number": (math.nan, 1.0),
    "inf-for-nan": (math.inf, math.nan),
    "largest-for-inf": (3.3895313892515355e38, math.inf),
    "inf-for-number": (math.inf, 1.0),
    "inf-for-minus-inf": (math.inf, -math.inf),
    "minus-inf-for-inf": (-math.inf, math.inf),
}


@pytest.mark.parametrize(("got", "model"), CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_no_budget_excuses_a_wrong_class(got: float, model: float, dtype: torch.dtype) -> None:
    verdict = model_verdict(torch.tensor([got, 1.0], dtype=dtype), torch.tensor([model, 1.0]), 1e300)
    assert not verdict.passed
    assert (verdict.failing, verdict.wrong_class) == (1, 1)
    assert (verdict.max_ulps, verdict.max_error_over_bound) == (math.inf, math.inf)
    assert verdict.worst[0].index == (0,)


def test_nothing_but_nan_is_at_an_infinite_distance() -> None:
    got, want = torch.full((2, 3), math.nan, dtype=BF16), torch.ones(2, 3)
    exact, model = against_exact("o", got, want.to(BF16)), model_verdict(got, want, 1.0)
    assert (exact.wrong_class, model.wrong_class) == (6, 6)
    assert (exact.max_ulps, model.max_ulps, model.max_error_over_bound) == (math.inf, math.inf, math.inf)


def test_the_other_infinity_is_infinitely_far_and_another_nan_is_not(from_codes: Codes) -> None:
    assert against_exact("o", from_codes(BF16, 0x7F80), from_codes(BF16, 0xFF80)).max_ulps == math.inf
    assert against_exact("o", from_codes(BF16, 0x7FC0), from_codes(BF16, 0x7FFF)).max_ulps == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
def test_the_wanted_class_passes_without_distance(value: float) -> None:
    verdict = model_verdict(torch.tensor([value, 1.0], dtype=BF16), torch.tensor([value, 1.0]))
    assert verdict.passed
    assert (verdict.max_ulps, verdict.mean_ulps_away_from_zero) == (0.0, 0.0)


def test_a_number_beyond_the_format_may_be_its_infinity() -> None:
    model = torch.tensor([3.4e38, -3.4e38])
    assert model_verdict(to_bf16(model), model).passed
    assert not model_verdict(-to_bf16(model), model).passed


def test_a_bound_that_is_nan_excuses_nothing() -> None:
    assert not model_verdict(torch.tensor([2.0], dtype=BF16), torch.tensor([1.0]), math.nan).passed


def test_an_infinite_bound_leaves_an_element_out_and_no_other() -> None:
    got = torch.tensor([math.nan, 7.0, -math.inf, 1.0, math.nan, 1.0], dtype=BF16)
    model = torch.tensor([1.0, math.nan, 1.0, 1.0, math.nan, 1.0])
    left_out = torch.tensor([math.inf] * 3 + [1e-3] * 3)
    verdict = model_verdict(got, model, left_out)
    assert (verdict.passed, verdict.elements, verdict.undecided, verdict.judged) == (True, 6, 3, 3)
    assert (verdict.wrong_class, verdict.max_ulps, verdict.inexact_share) == (0, 0.0, 0.0)
    for place, wrong in ((3, math.nan), (3, 1.5), (4, 1.0), (4, math.inf)):
        changed = got.clone()
        changed[place] = wrong
        found = model_verdict(changed, model, left_out)
        assert (found.passed, [e.index for e in found.worst]) == (False, [(place,)])


# dtype, the copied bits, other bits that have a value within ½ ULP of the model's, or NaN like it
COPIES = {
    "sign-of-zero": (E4M3, 0x00, 0x80),
    "sign-of-nan": (E4M3, 0x7F, 0xFF),
    "below-a-power-of-two": (E4M3, 0x38, 0x37),
    "nan-as-448": (E4M3, 0x7F, 0x7E),
    "nan-as-0": (E4M3, 0x7F, 0x00),
    "payload": (BF16, 0x7F81, 0x7FC0),
    "payload-of-fp32": (FP32, 0x7F800001, 0x7FC00000),
}


@pytest.mark.parametrize(("dtype", "bits", "other"), COPIES.values(), ids=COPIES)
def test_an_element_without_a_bound_is_a_copy_down_to_its_bits(
    from_codes: Codes, dtype: torch.dtype, bits: int, other: int
) -> None:
    copied, got = from_codes(dtype, bits, bits, bits), from_codes(dtype, bits, other, other)
    model, bound = copied.float(), torch.tensor([0.0, 0.0, 1e300], dtype=torch.float64)
    arguments = (model, model.double(), bound)
    assert against_model("o", copied, *arguments, copied=copied).passed
    verdict = against_model("o", got, *arguments, copied=copied)
    assert not verdict.passed
    assert (1,) in [e.index for e in verdict.worst]
    assert "1 of 2 copied elements have other bits" in verdict.reason


def test_zero_signs_are_equal_against_the_model() -> None:
    verdict = model_verdict(torch.tensor([-0.0, 0.0], dtype=BF16), torch.tensor([0.0, -0.0]))
    assert verdict.passed
    assert verdict.inexact_share == 0.0


@pytest.mark.parametrize(("error", "ratio"), [(1, 1.0), (3, 3.0)], ids=["as-good", "three-times"])
def test_ratio_is_the_error_over_the_models_own(error: int, ratio: float) -> None:
    oracle, step = torch.ones(8, dtype=torch.float64), 2.0**-23
    verdict = model_verdict(torch.full((8,), 1 + error * step), torch.full((8,), 1 + step), 1.0, oracle)
    assert verdict.error_over_model_error == ratio


def test_there_is_no_ratio_to_a_model_without_error() -> None:
    assert model_verdict(torch.full((8,), 2.0), torch.ones(8), 1.0).error_over_model_error is None


def test_worst_elements_come_first_with_index_bits_and_place(from_codes: Codes) -> None:
    want = from_codes(BF16, *[0x3F80] * 6).view(2, 3)
    got = from_codes(BF16, 0x3F80, 0x3F82, 0x7FFF, 0x3F80, 0xBF80, 0x3F7F).view(2, 3)
    verdict = against_exact("o", got, want, locate=lambda index: {"row": index[0], "column": index[1]})
    nan, negative, two, one = verdict.worst
    assert (nan.index, nan.got_bits, nan.want_bits) == ((0, 2), "0x7fff", "0x3f80")
    assert math.isnan(nan.ulps)
    assert (negative.index, negative.got, negative.want, negative.ulps) == ((1, 1), -1.0, 1.0, 2 * 0x3F80)
    assert (two.index, two.ulps, two.where) == ((0, 1), 2.0, {"row": 0, "column": 1})
    assert (one.index, one.got_bits, one.ulps) == ((1, 2), "0x3f7f", 1.0)
    assert verdict.histogram == {"0": 2, "1": 1, "2": 1, "65536": 1}


@pytest.mark.parametrize(
    ("dtype", "digits"), [(E4M3, 2), (FP16, 4), (BF16, 4), (FP32, 8)], ids=["e4m3", "fp16", "bf16", "fp32"]
)
def test_bits_are_printed_in_the_formats_width(dtype: torch.dtype, digits: int) -> None:
    element = against_exact("o", torch.tensor([-0.0]).to(dtype), torch.tensor([0.0]).to(dtype)).worst[0]
    assert element.got_bits == "0x8" + "0" * (digits - 1)
    assert element.want_bits == "0x" + "0" * digits


def test_thousands_of_failures_list_the_first_of_the_worst() -> None:
    want = torch.ones(100, 100)
    got = want + 2.0**-23
    got[70, 7] = 2.0
    verdict = against_exact("o", got, want)
    assert (verdict.failing, verdict.reason) == (10000, "10000 of 10000 elements differ")
    assert [e.index for e in verdict.worst] == [(70, 7), *((0, i) for i in range(WORST - 1))]
    assert verdict.histogram == {"1": 9999, "inf": 1}


def test_a_0_dim_tensor_and_a_view_are_compared_like_others() -> None:
    assert against_exact("o", torch.tensor(1.0), torch.tensor(2.0)).worst[0].index == ()
    x = torch.arange(6.0).view(2, 3)
    assert against_exact("o", x.t().contiguous().t(), x).passed


# model, got, whether it passes
SATURATED = {
    "largest": (1000.0, 448.0, True),
    "infinite": (math.inf, 448.0, True),
    "other-sign": (-1000.0, 448.0, False),
    "one-step-below": (1000.0, 416.0, False),
    "halfway-to-the-largest": (432.0, 448.0, True),
    "nan": (1000.0, math.nan, False),
}


@pytest.mark.parametrize(("model", "got", "passed"), SATURATED.values(), ids=SATURATED)
def test_what_a_saturating_format_cuts_counts_as_its_largest(model: float, got: float, passed: bool) -> None:
    verdict = model_verdict(torch.tensor([got, 1.0]).to(E4M3), torch.tensor([model, 1.0]))
    assert verdict.passed == passed


INTEGERS = {
    "uint8": (torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([0, 250], dtype=torch.uint8), 5, "0xff"),
    "int64": (torch.tensor([-1, 1 << 40]), torch.tensor([-1, 1]), (1 << 40) - 1, "0x0000010000000000"),
}


@pytest.mark.parametrize(("got", "want", "steps", "bits"), INTEGERS.values(), ids=INTEGERS)
def test_integers_are_compared_as_such(got: Tensor, want: Tensor, steps: int, bits: str) -> None:
    verdict = against_exact("o", got, want)
    assert (verdict.failing, verdict.wrong_class, verdict.max_ulps) == (1, 0, steps)
    assert [(e.index, e.got_bits) for e in verdict.worst] == [((1,), bits)]
    assert against_exact("o", want, want).passed
