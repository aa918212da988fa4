"""From a candidate's outputs to verdicts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.case import Case, Kernel, Tensors
from goldens.compare import Verdict, against_exact, against_model, check_names


def select(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors under ``prefix`` of a golden, by their bare names: ``select(golden, "exact/k2/")``."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def by_format(kernel: Kernel, name: str, x: Tensor) -> Tensor:
    """Bytes as what they stand for, where the kernel declares it; anything else as it is."""
    return x.view(kernel.formats[name]) if name in kernel.formats and x.dtype == torch.uint8 else x


def judge(kernel: Kernel, case: Case, golden: Tensors, outputs: Mapping[str, Any], schedule: str) -> list[Verdict]:
    """All verdicts on one call: each output against the exact schedule and, where it is a judge, the model.

    Bits alone decide on outputs that the model does not make (copies of others), and on those for which the schedule
    has no bound on these inputs.
    outputs: what the candidate returned for clones of the golden's inputs, on any device.
    """
    exact = select(golden, f"exact/{schedule}/")
    verdicts = check_names(outputs, exact, "exact")
    inputs, model = select(golden, "in/"), select(golden, "model/")
    if case.exact_only is None:
        oracle = kernel.reference.model(inputs, case.params, torch.float64)
        own, allowed = (kernel.bound(inputs, case.params, who) for who in ("model", schedule))
    for name, want in exact.items():
        if name not in outputs:
            continue

        def locate(index: tuple[int, ...], name: str = name) -> dict[str, int]:
            return kernel.locate(case, schedule, name, index)

        got, want = outputs[name], by_format(kernel, name, want)
        if isinstance(got, Tensor):
            got = by_format(kernel, name, got.cpu())
        verdicts.append(against_exact(name, got, want, locate=locate))
        if case.exact_only is None and name in model and name in allowed:
            verdicts.append(against_model(name, got, model[name], oracle[name], allowed[name] + own[name], locate))
    return verdicts
