"""From a candidate to verdicts: the call, what it may return, and what is demanded of it."""

import contextlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.case import Case, Kernel, Tensors
from goldens.compare import Verdict, against_exact, against_model, check_form, check_names

Candidate = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Mapping[str, Tensor]]
UNREAD = {True: torch.nan, False: 0x7F}  # between the rows of a copy, by whether it is of floating point


class Unsupported(Exception):
    """Raised by a candidate that does not do a case; the words say why. Such a case is never passed."""


class CallFailed(Exception):
    """A call that gave no outputs; the words say why. ``refusal``: the candidate raised a ValueError."""

    def __init__(self, reason: str, refusal: bool = False):
        super().__init__(reason)
        self.refusal = refusal


def select(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors under ``prefix`` of a golden, by their bare names: ``select(golden, "exact/k2/")``."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def by_format(kernel: Kernel, name: str, x: Tensor) -> Tensor:
    """Bytes as what they stand for, where the kernel declares it; anything else as it is."""
    return x.view(kernel.formats[name]) if name in kernel.formats and x.dtype == torch.uint8 else x


def duplicate(x: Tensor, device: torch.device) -> Tensor:
    """A copy in memory of its own, with the same strides; what lies between its rows is NaN, or 0x7f in integers."""
    if x.is_contiguous() or 0 in x.shape:
        return x.to(device, copy=True, memory_format=torch.contiguous_format)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    fill = UNREAD[x.dtype.is_floating_point]
    return torch.full((extent,), fill, dtype=x.dtype, device=device).as_strided(x.shape, x.stride()).copy_(x)


def call(
    candidate: Candidate, inputs: Mapping[str, Tensor], params: Mapping[str, Any], device: torch.device
) -> Tensors:
    """The candidate's outputs on the CPU, from copies of ``inputs`` on ``device``.

    CallFailed with the error's last line, or with what the candidate returned in place of named tensors.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            outputs = candidate({name: duplicate(x, device) for name, x in inputs.items()}, dict(params))
            return collect(outputs, device)
    except (Unsupported, CallFailed):
        raise
    except Exception as error:
        raise CallFailed(words(error), isinstance(error, ValueError)) from None


def collect(outputs: Any, device: torch.device) -> Tensors:
    """What a candidate returned, on the CPU, once the device has finished. CallFailed unless it is named tensors."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not isinstance(outputs, Mapping):
        raise CallFailed(f"returned {type(outputs).__name__}, wanted a dictionary of named tensors")
    for name, x in outputs.items():
        if not isinstance(name, str):
            raise CallFailed(f"returned the name {name!r}, wanted a string")
        if not isinstance(x, Tensor):
            raise CallFailed(f"returned {type(x).__name__} as {name}, wanted a tensor")
    return {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in outputs.items()}


def words(error: BaseException) -> str:
    """An error's own words on one line without control characters, and where it was raised."""
    last = " ".join(traceback.format_exception_only(error)[-1].split())
    last = "".join(letter if letter.isprintable() else "�" for letter in last)
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised {last}" + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def failed(reason: str, against: str, what: str = "call") -> list[Verdict]:
    """The verdict where nothing could be compared: the call gave no outputs, or the golden cannot be read."""
    return [Verdict(what, against, False, reason)]


def required(case: Case, golden: Tensors, schedule: str | None) -> Tensors:
    """The outputs that a candidate must return: the exact ones of its schedule, of any if it claims none."""
    claimed = schedule or next(iter(case.schedules), None)
    return select(golden, f"exact/{claimed}/") if claimed else select(golden, "model/")


def judge(
    kernel: Kernel,
    case: Case,
    golden: Tensors,
    outputs: Mapping[str, Any],
    schedule: str | None,
    only: tuple[str, ...] | None = None,
) -> list[Verdict]:
    """All verdicts on one call: each output against the exact schedule and, where it is a judge, the model.

    Bits alone decide on outputs that the model does not make (copies of others), and on those for which the schedule
    has no bound on these inputs. A candidate that claims no ``schedule`` (None) is held to the model's outputs by the
    widest bound of the kernel's schedules, and to the bits of what the model does not make; it may return what the
    model makes and the schedules do not.
    outputs: what the candidate returned for clones of the golden's inputs, on any device. only: the outputs that it
    says it returns; others are not wanted.
    """
    wanted, model = required(case, golden, schedule), select(golden, "model/")
    may = wanted | (model if schedule is None else {})
    if only is not None:
        if not set(only) & set(may):
            said, there = ", ".join(only), ", ".join(may)
            return failed(f"it says that it returns {said}, the golden has {there}", "exact", "outputs")
        wanted, may = ({name: x for name, x in names.items() if name in only} for names in (wanted, may))
    verdicts = [v for v in check_names(outputs, wanted, "exact") if v.output not in may or v.output not in outputs]
    inputs = select(golden, "in/")
    by_model = case.exact_only is None
    if by_model:
        oracle = kernel.reference.model(inputs, case.params, torch.float64)
        own, allowed = kernel.bound(inputs, case.params, "model"), bound(kernel, case, inputs, schedule)
    for name in (n for n in may if n in outputs):

        def locate(index: tuple[int, ...], name: str = name) -> dict[str, int]:
            return kernel.locate(case, schedule, name, index) if schedule else {}

        got = outputs[name]
        if isinstance(got, Tensor):
            got = by_format(kernel, name, got.cpu())
        if schedule is not None or (name in wanted and name not in model):
            exact = by_format(kernel, name, wanted[name])
            verdicts.append(against_exact(name, got, exact, locate=locate))
        elif name in wanted and case.schedules:
            form = by_format(kernel, name, wanted[name])
            refused = check_form(name, "model", got, form, form.dtype)
            if refused:
                verdicts.append(refused)
                continue
        if by_model and name in model and name in allowed:
            verdicts.append(against_model(name, got, model[name], oracle[name], allowed[name] + own[name], locate))
    return verdicts


def bound(kernel: Kernel, case: Case, inputs: Tensors, schedule: str | None) -> Tensors:
    """The schedule's bound, or elementwise the widest of all that the kernel's schedules and the model have."""
    if schedule is not None:
        return kernel.bound(inputs, case.params, schedule)
    widest: Tensors = {}
    for who in ("model", *kernel.reference.SCHEDULES):
        for name, x in kernel.bound(inputs, case.params, who).items():
            widest[name] = torch.maximum(widest[name], x) if name in widest else x
    return widest
