"""A candidate called: copies of the inputs in, plain tensors on the CPU out, and how it may refuse or fail.

This module imports nothing of the suite: it is all of ``goldens`` that a candidate's process holds.
"""

import contextlib
import itertools
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Candidate = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Mapping[str, Tensor]]
UNREAD = {True: torch.nan, False: 0x7F}  # between the rows of a copy, by whether it is of floating point
MOST_OUTPUTS = 64
MOST_BYTES = 1 << 30  # of all outputs of a call
TEXT, NAME = 500, 64  # letters that are kept of a candidate's words, of an output's name


class Unsupported(Exception):
    """Raised by a candidate that does not do a case; the words say why. Such a case is never passed."""


class CallFailed(Exception):
    """A call that gave no outputs; the words say why. ``refusal``: the candidate raised a ValueError."""

    def __init__(self, reason: str, refusal: bool = False):
        super().__init__(reason)
        self.refusal = refusal


def duplicate(x: Tensor, device: torch.device) -> Tensor:
    """A copy in memory of its own, with the same strides; what lies between its rows is NaN, or 0x7f in integers."""
    if x.is_contiguous() or 0 in x.shape:
        return x.to(device, copy=True, memory_format=torch.contiguous_format)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    fill = UNREAD[x.dtype.is_floating_point]
    return torch.full((extent,), fill, dtype=x.dtype, device=device).as_strided(x.shape, x.stride()).copy_(x)


def call(
    candidate: Candidate,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Any],
    device: torch.device,
    written: Collection[str],
) -> Tensors:
    """The candidate's outputs on the CPU, from copies of ``inputs`` on ``device``.

    written: the inputs that the interface lets it write to. CallFailed with the error's last line, with what the
    candidate returned in place of named tensors, or with another input that it changed.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            copies = {name: duplicate(x, device) for name, x in inputs.items()}
            read = {name: x for name, x in copies.items() if name not in written}
            outputs = collect(candidate(copies, dict(params)), device)
            for name, x in read.items():
                if not torch.equal(_bytes(x.cpu()), _bytes(inputs[name].cpu())):
                    raise CallFailed(f"changed its input {name}")
            return outputs
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
    items = list(itertools.islice(outputs.items(), MOST_OUTPUTS + 1))
    if len(items) > MOST_OUTPUTS:
        raise CallFailed(f"returned more than {MOST_OUTPUTS} outputs")
    size = 0
    for name, x in items:
        if not isinstance(name, str):
            raise CallFailed(f"returned the name {clean(repr(name), NAME)}, wanted a string")
        kind = _kind(x)
        if kind != "tensor":
            raise CallFailed(f"returned {kind} as {clean_name(name)}, wanted a tensor")
        size += x.numel() * x.dtype.itemsize
    if size > MOST_BYTES:
        raise CallFailed(f"returned {size:,} bytes of tensors, at most {MOST_BYTES:,} are taken")
    return {clean_name(name): _plain(x) for name, x in items}


def _kind(x: Any) -> str:
    """ "tensor" for one whose elements are there and are its own, else what it is."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    if type(x) not in (Tensor, torch.nn.Parameter):
        return f"the tensor subclass {type(x).__name__}"
    kinds = {
        "nested tensor": x.is_nested,
        f"{x.layout} tensor": x.layout != torch.strided,
        "quantised tensor": x.is_quantized,
        "meta tensor": x.device.type == "meta",
    }
    return next((f"a {kind}" for kind, found in kinds.items() if found), "tensor")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)


def words(error: BaseException) -> str:
    """An error's own words on one line without control characters, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({clean(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"raised {clean(traceback.format_exception_only(error)[-1])}{place}"


def clean(text: str, most: int = TEXT) -> str:
    """Foreign text as part of a line of ours: no control, format or line character, at most ``most`` letters."""
    line = " ".join(text[: 2 * most].split())
    cut = len(text) > 2 * most or len(line) > most
    shown = "".join(letter if letter.isprintable() else "�" for letter in line[:most])
    return shown + "…" if cut else shown


def clean_name(name: str) -> str:
    """An output's name as it may stand in a report: one word of ASCII letters, digits and ``_.:-``."""
    shown = re.sub(r"[^\w.:-]", "�", name[:NAME], flags=re.ASCII)
    return shown + "…" if len(name) > NAME else shown or "�"
