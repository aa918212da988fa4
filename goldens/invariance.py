"""What a kernel owes bit for bit whatever its schedule, as functions of a case, and the trial of it.

A property is a function of a case and its inputs that lists further calls, and which part of their outputs must equal
which part of the case's own call by the same candidate: the same call twice, a row, token or sequence alone or among
others, neighbours full of NaN, other strides, graph replay, a sequence in two parts. Those of one kernel are in its
room. A candidate may be inexact and yet invariant, or the reverse.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from goldens.call import CallFailed, Unsupported
from goldens.case import Case, Kernel, Output, Params, Part, Property, Tensors, Variant
from goldens.compare import Verdict, against_exact
from reference.numerics import ulp

AGAINST = "invariance"


@dataclass(frozen=True)
class Skipped:
    """A variant that the candidate does not do, and its words; ``allowed``: nobody need do it."""

    name: str
    reason: str
    allowed: bool


Call = Callable[[Tensors, Params, bool], Tensors]


def check(
    kernel: Kernel,
    case: Case,
    inputs: Tensors,
    call: Call,
    schedule: str | None,
    graphs: bool,
    within: Tensors | None = None,
) -> Iterator[Verdict | Skipped]:
    """Every property of the case's kernel, tried on ``call(inputs, params, graph)``; graphs only if asked for.

    within: of a candidate that does not have the same bits in every batch, how far an output may be from the oracle
    before it is rounded; in another batch it may be twice that from itself. CallFailed or Unsupported if the case's own
    call fails.
    """
    base = call(inputs, case.params, False)
    for tried in (*EVERY, *kernel.properties):
        before: Tensors | None = None
        for variant in tried(case, inputs, case.params):
            if (variant.graph and not graphs) or schedule in variant.not_owed_by:
                continue
            if callable(variant.inputs):
                if before is None:
                    continue
                made = variant.inputs(before)
            else:
                made = variant.inputs
            before = None
            try:
                before = call(made, variant.params, variant.graph)
            except Unsupported as refused:
                yield Skipped(variant.name, str(refused), variant.may_refuse)
                continue
            except CallFailed as error:
                if variant.may_refuse and error.refusal:
                    yield Skipped(variant.name, str(error), True)
                else:
                    yield Verdict(f"{variant.name}: call", AGAINST, False, str(error))
                continue
            near = {name: x for name, x in (within or {}).items() if variant.batch}
            yield from _compared(kernel.outputs(case.params), variant, before, base, near)


def _compared(
    interface: Mapping[str, Output], variant: Variant, outputs: Tensors, base: Tensors, within: Tensors
) -> Iterator[Verdict]:
    for part in variant.parts or tuple(Part(name) for name in base):
        if part.output not in base:
            continue
        name, want = f"{variant.name}: {part.output}", base[part.output][part.base]
        if part.output not in outputs:
            yield Verdict(name, AGAINST, False, "missing: the candidate returned no such output")
        elif want.numel():
            got = outputs[part.output][part.mine]
            verdict = replace(against_exact(name, got, want), against=AGAINST)
            if verdict.elements and not verdict.passed and part.output in within:
                dtype = interface[part.output].dtype
                verdict = _near(verdict, got.view(dtype), want.view(dtype), within[part.output][part.base])
            yield verdict


def _near(verdict: Verdict, got: Tensor, want: Tensor, bound: Tensor) -> Verdict:
    """The verdict where two right results are compared, each within ``bound`` of the oracle and half an ULP."""
    a, b = got.to(torch.float64), want.to(torch.float64)
    near = (a - b).abs() <= 2 * bound + ulp.size(b.abs() + bound, want.dtype)
    beyond = int((~(near | (a == b) | (a.isnan() & b.isnan()))).sum())
    if beyond:
        return replace(
            verdict, reason=f"{beyond} of {verdict.elements} elements are further apart than two right results"
        )
    return Verdict(verdict.output, AGAINST, True, "", verdict.dtype, verdict.shape, verdict.elements)


# For every kernel.


def twice(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    return [Variant("twice", inputs, params)]


def graph_replay(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    return [Variant("graph replay", inputs, params, graph=True)]


def _pitched(x: Tensor, extra: int = 8) -> Tensor:
    """The same values, every dimension but the last two rows or columns longer in memory; NaN between."""
    shape = [n + (extra if axis == x.dim() - 1 else 1 if axis == x.dim() - 2 else 0) for axis, n in enumerate(x.shape)]
    inner = tuple(slice(n) for n in x.shape)
    result = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)[inner]
    return result.copy_(x)


def strides(*names: str) -> Property:
    """The tensors ``names`` with rows further apart in memory."""

    def strides(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
        pitched = {name: _pitched(inputs[name]) for name in names}
        return [Variant("strides", inputs | pitched, params, may_refuse=True)]

    return strides


def some(count: int) -> list[int]:
    """The first and the last of ``count``, if there is more than one."""
    return sorted({0, count - 1}) if count > 1 else []


def nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan) if x.dtype.is_floating_point else x


EVERY: tuple[Property, ...] = (twice, graph_replay)
