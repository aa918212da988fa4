"""From a candidate's outputs to verdicts: what is demanded of them. The call itself is ``goldens.call``."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from goldens.call import Candidate, Unsupported
from goldens.case import Case, Kernel, Tensors
from goldens.compare import Verdict, against_exact, against_model, check_form, check_names

__all__ = ["Candidate", "Judge", "Unsupported", "by_format", "decided", "failed", "judge", "select"]


def select(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors under ``prefix`` of a golden, by their bare names: ``select(golden, "exact/k2/")``."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def by_format(kernel: Kernel, case: Case, name: str, x: Tensor) -> Tensor:
    """Bytes as what they stand for, where the interface's output has another type; anything else as it is."""
    output = kernel.outputs(case.params).get(name)
    return x.view(output.dtype) if output is not None and x.dtype == torch.uint8 else x


def failed(reason: str, against: str, what: str = "call") -> list[Verdict]:
    """The verdict where nothing could be compared: the call gave no outputs, or the golden cannot be read."""
    return [Verdict(what, against, False, reason)]


def decided(verdicts: Iterable[Verdict]) -> bool:
    """Whether these verdicts say anything: one fails, or compared an element, or found none to compare."""
    return any(not v.passed or v.judged or not v.elements for v in verdicts)


class Judge:
    """What one case's golden demands; what this takes to compute is computed once, whatever is judged."""

    def __init__(self, kernel: Kernel, case: Case, golden: Tensors):
        self.kernel, self.case = kernel, case
        self.inputs, self.model = select(golden, "in/"), select(golden, "model/")
        self._golden = golden
        self._bounds: dict[str, Tensors] = {}

    @cached_property
    def oracle(self) -> Tensors:
        """The model in fp64."""
        return self.kernel.reference.model(self.inputs, self.case.params, torch.float64)

    def bound(self, schedule: str | None) -> Tensors:
        """What a candidate and the model may be apart: the schedule's bound and the model's.

        None: elementwise the widest of all that is legal, the kernel's schedules and the model among it; infinite where
        any is.
        """
        if schedule is not None:
            own = self._bound("model")
            return {name: x + own[name] for name, x in self._bound(schedule).items()}
        widest: Tensors = {}
        for who in ("model", *self.kernel.reference.SCHEDULES, *self.kernel.legal):
            for name, x in self.bound(who).items():
                known = widest.get(name, x)
                infinite = (known == torch.inf) | (x == torch.inf)
                widest[name] = torch.where(infinite, torch.inf, torch.maximum(known, x))
        return widest

    def _bound(self, who: str) -> Tensors:
        if who not in self._bounds:
            self._bounds[who] = self.kernel.bound(self.inputs, self.case.params, who)
        return self._bounds[who]

    def exact(self, schedule: str | None) -> Tensors:
        """The exact outputs of a schedule, or of the case's first one; none if it has none."""
        claimed = schedule or next(iter(self.case.schedules), None)
        return select(self._golden, f"exact/{claimed}/") if claimed else {}

    def __call__(
        self, outputs: Mapping[str, Any], schedule: str | None, only: tuple[str, ...] | None = None
    ) -> list[Verdict]:
        """All verdicts on one call: each output against the exact schedule and, where it is a judge, the model.

        Every output has the interface's dtype, whoever judges. Bits alone decide on outputs that the model does not
        make (copies of others) and on elements without a bound on these inputs; elements whose bound is 0 are copies
        too, held to their bits. A candidate that claims no ``schedule`` (None) is held to the model's outputs by the
        widest bound of the kernel's schedules, and to the bits of what is a copy; it may return what the model makes
        and the schedules do not.
        outputs: what the candidate returned for clones of the golden's inputs, on any device. only: the outputs that
        it says it returns; others are not wanted.
        """
        exact = self.exact(schedule)
        wanted = exact or self.model
        may = wanted | (self.model if schedule is None else {})
        if only is not None:
            if not set(only) & set(may):
                said, there = ", ".join(only), ", ".join(may)
                return failed(f"it says that it returns {said}, the golden has {there}", "exact", "outputs")
            wanted, may = ({name: x for name, x in names.items() if name in only} for names in (wanted, may))
        verdicts = [v for v in check_names(outputs, wanted, "exact") if v.output not in may or v.output not in outputs]
        for name in may:
            if name in outputs:
                verdicts += self._of_output(name, outputs[name], schedule, exact.get(name))
        return verdicts

    def _of_output(self, name: str, got: Any, schedule: str | None, exact: Tensor | None) -> Iterator[Verdict]:
        """The verdicts on an output that the golden has."""
        kernel, case = self.kernel, self.case
        interface = kernel.outputs(case.params)[name]
        by_bits = exact is not None and (schedule is not None or name not in self.model)

        def locate(index: tuple[int, ...]) -> dict[str, int]:
            return kernel.locate(case, schedule, name, index) if schedule else {}

        if isinstance(got, Tensor):
            got = by_format(kernel, case, name, got.cpu())
        if exact is not None:
            exact = by_format(kernel, case, name, exact)
        like = exact if exact is not None else self.model[name]
        refused = check_form(name, "exact" if by_bits else "model", got, like, interface.dtype)
        if refused:
            yield refused
            return
        if exact is not None and by_bits:
            yield against_exact(name, got, exact, locate=locate, axes=interface.axes)
        if case.exact_only is None and name in self.model:
            bound = self.bound(schedule).get(name)
            if bound is not None:
                model, oracle = self.model[name], self.oracle[name]
                yield against_model(name, got, model, oracle, bound, locate, exact, interface.axes, interface.shared)


def judge(
    kernel: Kernel,
    case: Case,
    golden: Tensors,
    outputs: Mapping[str, Any],
    schedule: str | None,
    only: tuple[str, ...] | None = None,
) -> list[Verdict]:
    """``Judge`` of a golden on one call."""
    return Judge(kernel, case, golden)(outputs, schedule, only)
