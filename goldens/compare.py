"""From two tensors to a verdict: bits against exact, ULPs against the model, error against the oracle.

One comparator on integer bit patterns. The class of a number (finite, infinite, NaN) comes before any
distance: a finite value where inf is wanted fails whatever the tolerance. Missing, extra and misshapen
outputs fail with words of their own; an empty one of the right form passes.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from goldens.place import place
from reference.numerics import ulp
from reference.numerics.formats import BF16, E4M3, FP16, encode

_NARROW = {form.dtype: form for form in (BF16, FP16, E4M3)}
WORST = 10  # elements listed in a failing verdict
LOCATED = 4096  # failing elements that are located in the kernel, at most
PART_NUMBERS = 256  # numbers of a part that a kernel map keeps: a warp's lanes, a thread's registers
MAP_CELLS = (32, 64)  # rows and columns of a tensor map, at most
_SCAN_ELEMS = 1 << 16  # a block of a scan stays in the cache
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BUCKETS = (0, 1, 2, 4, 8, 16, 64, 256, 1 << 12, 1 << 16)
_LOG_ODDS = math.log(2 * 2.0**40)  # against a bias of either sign by chance


@dataclass(frozen=True)
class Element:
    """One failing element: its index, bit patterns, values, distance, and where the kernel made it.

    ulps: NaN where got or wanted has no distance from the other: a NaN; against the model an infinity too.
    """

    index: tuple[int, ...]
    got_bits: str
    want_bits: str
    got: float
    want: float
    ulps: float
    where: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorMap:
    """Where in a tensor its failing elements lie: counts in a grid laid over the tensor as a matrix.

    The matrix has all dimensions but the last as ``rows``, the last as ``columns``. A cell is ``cell_rows`` ×
    ``cell_columns`` of its elements; ``cells`` lists (row of cells, column of cells, failing elements), those of none
    left out.
    """

    rows: int
    columns: int
    cell_rows: int
    cell_columns: int
    cells: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class KernelMap:
    """Which parts of the kernel made the failing elements: by part (warp, lane, …) how many each number of it made.

    ``located`` failing elements were looked at: all, or LOCATED of them at even distances. ``parts`` keeps the
    PART_NUMBERS numbers with the most elements of each part; ``numbers`` says how many there were.
    """

    located: int
    parts: dict[str, dict[int, int]]
    numbers: dict[str, int]


@dataclass(frozen=True)
class Verdict:
    """What comparing one output with a golden says; ``reason`` is empty if it passed.

    against: "exact" or "model"; "invariance" where a candidate's calls are compared with each other.
    undecided: elements on which the model does not decide: their bound is infinite (model).
    failing: elements whose bits differ (exact), or that exceed their bound or differ from what they are copies of
    (model).
    wrong_class: those of them that are finite, infinite or NaN where another of these is wanted.
    only_zero_sign: those of them that differ in nothing but the sign of zero (exact).
    max_ulps: the largest distance in ULPs of the output's format; infinite where an element is wrong in class or the
    other infinity. Two NaNs are at none.
    histogram: elements by |ULPs|; the keys are the buckets' upper ends, the last one "inf".
    max_error_over_bound: the largest error as a share of what that element may have (model); infinite likewise.
    mean_ulps_away_from_zero: the mean of sign(want) · (got − want) in ULPs; truncation shows as −0.5 (model).
    bias, bias_limit: that mean over different rows of inexact results, and what rounding to nearest may give (model;
    None where nothing is narrowed).
    inexact_share: the share of elements off by anything (model).
    error_over_model_error: root-mean-square error against the oracle, over that of the model rounded to the same
    format (model; None if the model has no error).
    worst: the WORST worst elements. tensor_map, kernel_map: where all failing elements lie, None if there are none.
    place: the same in words by the output's dimensions, empty if there is nothing to say.
    """

    output: str
    against: str
    passed: bool
    reason: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = 0
    undecided: int = 0
    failing: int = 0
    wrong_class: int = 0
    only_zero_sign: int = 0
    max_ulps: float = 0.0
    histogram: dict[str, int] = field(default_factory=dict)
    max_error_over_bound: float | None = None
    mean_ulps_away_from_zero: float | None = None
    bias: float | None = None
    bias_limit: float | None = None
    inexact_share: float | None = None
    error_over_model_error: float | None = None
    worst: tuple[Element, ...] = ()
    tensor_map: TensorMap | None = None
    kernel_map: KernelMap | None = None
    place: str = ""

    @property
    def judged(self) -> int:
        """Elements that were decided on."""
        return self.elements - self.undecided


Locate = Callable[[tuple[int, ...]], dict[str, int]]


def check_names(outputs: Mapping[str, Any], wanted: Mapping[str, Tensor], against: str) -> list[Verdict]:
    """A failing verdict for each missing or extra output."""
    missing = [
        Verdict(n, against, False, "missing: the candidate returned no such output") for n in wanted if n not in outputs
    ]
    extra = [Verdict(n, against, False, "extra: the golden has no such output") for n in outputs if n not in wanted]
    return missing + extra


def check_form(output: str, against: str, got: Any, want: Tensor, dtype: torch.dtype) -> Verdict | None:
    """A failing verdict if ``got`` is no tensor of the right dtype and shape; else None."""
    if not isinstance(got, Tensor):
        return Verdict(output, against, False, f"got {type(got).__name__}, wanted a tensor")
    if got.dtype != dtype:
        return Verdict(output, against, False, f"dtype: got {got.dtype}, wanted {dtype}")
    if got.shape != want.shape:
        return Verdict(output, against, False, f"shape: got {tuple(got.shape)}, wanted {tuple(want.shape)}")
    return None


def against_exact(
    output: str,
    got: Tensor,
    want: Tensor,
    values: bool = False,
    locate: Locate | None = None,
    axes: tuple[str, ...] = (),
) -> Verdict:
    """Equal bits, or how many differ and by how much. ``values``: NaN equals NaN and −0 equals +0.

    axes: what the dimensions are called.
    """
    refused = check_form(output, "exact", got, want, want.dtype)
    if refused:
        return refused
    got = got.to(want.device)
    where = _differing(got, want)  # equal elements need no further look, and are most
    mine, theirs = _at(got, where), _at(want, where)
    number = want.dtype.is_floating_point  # of integers, every one is finite and 1 from the next
    distance = ulp.distance(mine, theirs) if number else (mine.to(torch.int64) - theirs.to(torch.int64)).abs()
    classes = [ulp.number_class(x) if number else torch.zeros_like(distance) for x in (mine, theirs)]
    if values:
        same = ((classes[0] == ulp.NAN) & (classes[1] == ulp.NAN)) | (distance == 0)
        where, mine, theirs, distance = (x[~same] for x in (where, mine, theirs, distance))
        classes = [x[~same] for x in classes]
    other_class, zeros = classes[0] != classes[1], int((distance == 0).sum())
    finite = (classes[0] == ulp.FINITE) & (classes[1] == ulp.FINITE)
    beyond = other_class | ((classes[0] == ulp.INFINITE) & (distance > 0))
    ulps = torch.where((classes[0] == ulp.NAN) | (classes[1] == ulp.NAN), torch.nan, distance.to(torch.float64))
    rank = torch.where(other_class, 1 << 62, distance)
    count, wrong = where.numel(), int(other_class.sum())
    reason = f"{count} of {got.numel()} elements differ" if count else ""
    return Verdict(
        output=output,
        against="exact",
        passed=count == 0,
        reason=reason + _of_them(wrong, "in class (finite, inf, NaN)") + _of_them(zeros, "only in the sign of zero"),
        dtype=_name(got.dtype),
        shape=tuple(got.shape),
        elements=got.numel(),
        failing=count,
        wrong_class=wrong,
        only_zero_sign=zeros,
        max_ulps=_largest(torch.where(finite, ulps, 0.0), beyond),
        histogram=_histogram(ulps[finite], equal=got.numel() - count),
        worst=_worst(got, want, where, rank, ulps, locate),
        tensor_map=_tensor_map(got.shape, where),
        kernel_map=_kernel_map(got.shape, where, locate),
        place=place(got.shape, where, axes),
    )


def against_model(
    output: str,
    got: Tensor,
    model: Tensor,
    oracle: Tensor,
    bound: Tensor,
    locate: Locate | None = None,
    copied: Tensor | None = None,
    axes: tuple[str, ...] = (),
    shared: int = 1,
) -> Verdict:
    """Held per element to |got − model| ≤ ½ ULP + bound, ULPs being those of ``got``'s format at that magnitude.

    model: fp32; oracle: fp64; bound: fp64, what candidate and model together may be apart before rounding: infinite
    where the model does not decide, 0 where the element is a copy of an input's. copied: like ``got``, the bits that
    such an element must have. axes, shared: as in ``goldens.case.Output``.

    What is narrowed from fp32 must also be without bias: see ``_bias``.
    """
    known = isinstance(got, Tensor) and got.dtype in (torch.float32, *_NARROW)
    refused = check_form(output, "model", got, model, got.dtype if known else torch.float32)
    if refused:
        return refused
    # A number beyond the format's largest becomes what the format makes of it: inf, or that number where it saturates.
    top = _top(got.dtype)
    model, oracle = model.clamp(-top, top), oracle.clamp(-top, top)
    got, wide, want = got.to(model.device), got.to(model.device, torch.float64), model.to(torch.float64)
    rounded = _rounded(model, got.dtype)
    got_class, want_class = ulp.number_class(got), ulp.number_class(rounded)
    finite = (got_class == ulp.FINITE) & (want_class == ulp.FINITE)
    wrong_class = (got_class != want_class) | ((want_class == ulp.INFINITE) & (wide.sign() != want.sign()))
    decided = bound != torch.inf
    unit = ulp.size(want, got.dtype)
    # The rounding may happen one binade up if the bound reaches there.
    allowed = 0.5 * ulp.size(want.abs() + bound, got.dtype) + bound
    finite, wrong_class = finite & decided, wrong_class & decided
    error = torch.where(finite, (wide - want).abs(), 0.0)
    exceeds = torch.where(finite, ~(error <= allowed), wrong_class)  # a bound that is NaN excuses nothing
    changed = torch.zeros_like(exceeds)
    if copied is not None:
        changed = (bound == 0) & (_words(got) != _words(copied.to(model.device))).view(bound.shape)
    signed = torch.where(finite, (wide - want) * want.sign() / unit, 0.0)
    ulps = error / unit
    apart = torch.where(finite, ulps, torch.nan)  # another class is at no distance
    failing = exceeds | changed
    count, classes, changes = (int(x.sum()) for x in (failing, wrong_class, changed))
    share = torch.where(finite, error / allowed, 0.0)
    where = failing.reshape(-1).nonzero().squeeze(1)
    rank = torch.where(wrong_class, torch.inf, error / allowed).reshape(-1)[where]
    bias, limit = _bias(wide, oracle, got.dtype, finite, shared)
    biased = bias is not None and limit is not None and abs(bias) > limit
    reasons = [f"{count} of {got.numel()} elements exceed their bound" if count > changes else ""]
    reasons[0] += _of_them(classes, "in class (finite, inf, NaN)")
    reasons += [f"{changes} of {int((bound == 0).sum())} copied elements have other bits" if changes else ""]
    reasons += [f"biased: {bias:+.3f} ULP away from zero in the mean, at most {limit:.3f} is chance" if biased else ""]
    return Verdict(
        output=output,
        against="model",
        passed=count == 0 and not biased,
        reason="; ".join(reason for reason in reasons if reason),
        dtype=_name(got.dtype),
        shape=tuple(got.shape),
        elements=got.numel(),
        undecided=int((~decided).sum()),
        failing=count,
        wrong_class=classes,
        max_ulps=_largest(ulps, wrong_class),
        histogram=_histogram(ulps[finite]),
        max_error_over_bound=_largest(share, wrong_class),
        mean_ulps_away_from_zero=_mean(signed[decided]),
        bias=bias,
        bias_limit=limit,
        inexact_share=_mean((error > 0)[decided]),
        error_over_model_error=_error_ratio(wide, rounded, oracle, finite),
        worst=_worst(got, model, where, rank, apart.reshape(-1)[where], locate),
        tensor_map=_tensor_map(got.shape, where),
        kernel_map=_kernel_map(got.shape, where, locate),
        place=place(got.shape, where, axes),
    )


# Rounding to nearest moves a value away from zero as often as towards it: the signed errors of a right candidate (from
# the oracle, as the model has errors of its own) are symmetric about 0, be they the last rounding's or those of the
# roundings before it. Elements of a row (of the last dimension, or the last ones) share the latter, a softmax weight's
# for one; two rows do not, unless they are equal, and then they count once. So, given their magnitudes, the means of n
# rows have random signs, and by Hoeffding's inequality their mean is beyond
#   sqrt(2 ln(2 / p) · mean(square) / n)
# with a probability of at most p, whatever the bound and however the errors are distributed. With p = 2^-40 a thousand
# verdicts give one false alarm in 2^30 runs. Truncation has −½ in every row, too much from n = 57 on (where the bound
# is small, elements exceed it one by one). Errors are cut at ±1 ULP, which keeps the symmetry, so that no result near 0
# outweighs its row. Elements that the format holds as they are tell nothing. An fp32 output is not narrowed; its errors
# are those of its terms, such as lg2.approx's, which have a sign: none is judged so.


def _bias(
    got: Tensor, oracle: Tensor, dtype: torch.dtype, finite: Tensor, shared: int
) -> tuple[float, float] | tuple[None, None]:
    """The mean signed error of fp64 ``got`` in ULPs of ``dtype``, over different rows of inexact results; its limit.

    shared: how many of the last dimensions are a row.
    """
    want = oracle.to(torch.float32)
    rounded = _rounded(want, dtype)
    chosen = finite & want.isfinite() & (rounded.to(torch.float32) != want)
    if dtype == torch.float32 or not bool(chosen.any()):
        return None, None
    signed = torch.where(chosen, (got - oracle) * oracle.sign() / ulp.size(oracle, dtype), 0.0)
    columns = got.shape[got.dim() - min(shared, got.dim()) :].numel()
    sums, counts = (x.reshape(-1, columns).sum(1) for x in (signed.clamp(-1.0, 1.0), chosen))
    of_row, some = sums / counts, counts > 0
    _, group, same = _bits(rounded).reshape(-1, columns)[some].unique(dim=0, return_inverse=True, return_counts=True)
    means = torch.zeros(len(same), dtype=of_row.dtype, device=of_row.device).index_add(0, group, of_row[some]) / same
    limit = (2 * _LOG_ODDS * means.square().mean() / len(same)).sqrt()
    return float(means.mean()), float(limit)


def _mean(x: Tensor) -> float | None:
    """The mean, None of nothing."""
    return float(x.to(torch.float64).mean()) if x.numel() else None


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Flat positions of the elements whose bits differ, ascending; int64."""
    a, b = (_words(x) for x in (a, b))
    if torch.equal(a, b):
        return torch.empty(0, dtype=torch.int64, device=a.device)
    pairs = zip(a.split(_SCAN_ELEMS), b.split(_SCAN_ELEMS), strict=True)
    return torch.cat([(x != y).nonzero().squeeze(1) + i * _SCAN_ELEMS for i, (x, y) in enumerate(pairs)])


def _words(x: Tensor) -> Tensor:
    """The elements' bit patterns, flat, as integers of their width."""
    flat = x.contiguous().view(-1)
    return flat.view(_WORDS[x.dtype.itemsize]) if x.dtype.is_floating_point else flat


def _at(x: Tensor, where: Tensor) -> Tensor:
    """The elements at flat positions."""
    return _words(x).index_select(0, where).view(x.dtype)


def _bits(x: Tensor) -> Tensor:
    """Bit patterns as int64; integers as they are."""
    return ulp.bits(x) if x.dtype.is_floating_point else x.to(torch.int64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_them(count: int, what: str) -> str:
    return f", {count} of them {what}" if count else ""


def _largest(figures: Tensor, beyond: Tensor) -> float:
    """The largest figure, 0 of none; infinite if any element is ``beyond`` all figures."""
    if bool(beyond.any()):
        return math.inf
    return float(figures.max()) if figures.numel() else 0.0


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 in a narrow format, or as it is."""
    return x if dtype == torch.float32 else encode(x, _NARROW[dtype])


def _top(dtype: torch.dtype) -> float:
    """The largest magnitude that a conversion to ``dtype`` gives: inf, in e4m3 448."""
    return float(_rounded(torch.tensor(torch.inf), dtype))


def _error_ratio(got: Tensor, model: Tensor, oracle: Tensor, finite: Tensor) -> float | None:
    """RMS error of ``got`` over that of the model in the same format; None if the model has no error."""
    truth = oracle[finite]
    own = ((model.to(torch.float64)[finite] - truth) ** 2).mean().sqrt()
    mine = ((got[finite] - truth) ** 2).mean().sqrt()
    return float(mine / own) if float(own) > 0 else None


def _histogram(ulps: Tensor, equal: int = 0) -> dict[str, int]:
    """Elements by upper end of their bucket of |ULPs|; the last bucket is open. ``equal`` more have 0."""
    result, low = {}, -1.0
    for high in (*_BUCKETS, math.inf):
        count = int(((ulps > low) & (ulps <= high)).sum()) + (equal if high == 0 else 0)
        if count:
            result[str(high)] = count
        low = high
    return result


def _worst(
    got: Tensor, want: Tensor, where: Tensor, rank: Tensor, ulps: Tensor, locate: Locate | None
) -> tuple[Element, ...]:
    """The elements of highest rank among those at flat positions ``where``, worst first; of equals the first."""
    result = []
    for i in rank.sort(descending=True, stable=True).indices[:WORST].tolist():
        index = tuple(int(n) for n in torch.unravel_index(where[i], got.shape))
        result.append(
            Element(
                index=index,
                got_bits=f"0x{int(_bits(got[index])):0{2 * got.dtype.itemsize}x}",
                want_bits=f"0x{int(_bits(want[index])):0{2 * want.dtype.itemsize}x}",
                got=float(got[index]),
                want=float(want[index]),
                ulps=float(ulps[i]),
                where=locate(index) if locate else {},
            )
        )
    return tuple(result)


def _tensor_map(shape: torch.Size, where: Tensor) -> TensorMap | None:
    """The grid of the failing elements at flat positions ``where``."""
    if not where.numel():
        return None
    columns = shape[-1] if shape else 1
    rows = shape.numel() // columns
    cell_rows, cell_columns = (-(-n // most) for n, most in zip((rows, columns), MAP_CELLS, strict=True))
    wide = -(-columns // cell_columns)
    cell = where // columns // cell_rows * wide + where % columns // cell_columns
    found, counts = cell.unique(return_counts=True)
    cells = ((*divmod(c, wide), n) for c, n in zip(found.tolist(), counts.tolist(), strict=True))
    return TensorMap(rows, columns, cell_rows, cell_columns, tuple(cells))


def _kernel_map(shape: torch.Size, where: Tensor, locate: Locate | None) -> KernelMap | None:
    """Counts by part of the kernel of the elements at flat positions ``where``."""
    if locate is None or not where.numel():
        return None
    count = where.numel()
    chosen = where if count <= LOCATED else where[torch.arange(LOCATED, device=where.device) * count // LOCATED]
    found: dict[str, Counter[int]] = {}
    axes = [axis.tolist() for axis in torch.unravel_index(chosen, shape)]
    for index in zip(*axes, strict=True) if axes else [()]:
        for part, number in locate(index).items():
            found.setdefault(part, Counter())[number] += 1
    if not found:
        return None
    kept = {part: dict(sorted(counts.most_common(PART_NUMBERS))) for part, counts in found.items()}
    return KernelMap(chosen.numel(), kept, {part: len(counts) for part, counts in found.items()})
