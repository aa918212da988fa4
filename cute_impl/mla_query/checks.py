"""Host checks of ``mla_query`` and ``cache_insert``: a ValueError names the argument, the given and the allowed."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_impl import runtime

BYTES = (torch.uint8, torch.float8_e4m3fn)
ALIGN_BYTES = 16


class Form:
    """What a tensor must be: extents (a name is free, the same name is the same number), dtypes, alignment in bytes.

    ``rows``: its rows may lie at any multiple of 16 bytes; otherwise it is contiguous.
    """

    def __init__(
        self, shape: tuple[int | str, ...], *dtypes: torch.dtype, align: int = ALIGN_BYTES, rows: bool = False
    ):
        self.shape, self.dtypes, self.align, self.rows = shape, dtypes, align, rows


def eps_number(eps: Any) -> float:
    """eps as fp32 holds it. ValueError unless it is a number from 0 on."""
    number = runtime.fp32_number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps: got {eps!r}, allowed is a finite number from 0 on")
    return number


def check_flags(**flags: object) -> None:
    """ValueError where a flag is no bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: got {flag!r}, allowed are True and False")


def check_forms(tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> None:
    """ValueError where a tensor is not of its form, or not on the device of the first."""
    first = next(iter(forms))
    free: dict[str, tuple[int, str]] = {}
    for name, form in forms.items():
        x = tensors[name]
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, allowed is a tensor")
        wanted = "[" + ", ".join(map(str, form.shape)) + "]"
        known = {extent: free[extent][0] for extent in form.shape if isinstance(extent, str) and extent in free}
        if x.dim() != len(form.shape) or any(
            got == 0 or (isinstance(extent, int) and got != extent)
            for got, extent in zip(x.shape, form.shape, strict=True)
        ):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, allowed is {wanted}, extents from 1 on")
        for got, extent in zip(x.shape, form.shape, strict=True):
            if extent in known and got != known[extent]:
                raise ValueError(f"{name}: got {extent} = {got}, {free[extent][1]} has {known[extent]}")
            if isinstance(extent, str):
                free.setdefault(extent, (got, name))
        if x.dtype not in form.dtypes:
            raise ValueError(f"{name}: got {x.dtype}, allowed is {' or '.join(map(str, form.dtypes))}")
        if x.device != tensors[first].device:
            raise ValueError(f"{name}: is on {x.device}, {first} on {tensors[first].device}; all must be on one device")
        _check_layout(name, x, form)


def _check_layout(name: str, x: Tensor, form: Form) -> None:
    if form.rows:
        pitch = x.stride(0) * x.element_size()
        if x.stride(1) != 1 or (x.shape[0] > 1 and (pitch % form.align or x.stride(0) < x.shape[1])):
            raise ValueError(
                f"{name}: got strides {x.stride()}, allowed are 1 for the columns and, from row to row, multiples of "
                f"{form.align // x.element_size()} elements from {x.shape[1]} on"
            )
    elif not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")
    if x.data_ptr() % form.align:
        raise ValueError(f"{name}: got address {x.data_ptr():#x}, allowed are multiples of {form.align} bytes")


def check_slots(slots: Tensor, cache: Tensor) -> None:
    """The debug check: ValueError if two rows have one non-negative slot, a RuntimeWarning for slots that are skipped.

    It reads the slots back, so it waits for the GPU. −1 is the interface's way to skip a row and needs no warning.
    """
    capacity = cache.shape[0] * cache.shape[1]
    used = slots[slots >= 0].sort().values
    twice = used[1:][used[1:] == used[:-1]]
    if twice.numel():
        rows = (slots == twice[0]).nonzero().flatten().tolist()
        raise ValueError(f"slots: rows {', '.join(map(str, rows))} all have slot {int(twice[0])}, and would race")
    outside = ((slots < -1) | (slots >= capacity)).nonzero().flatten().tolist()
    if outside:
        warnings.warn(
            f"slots: rows {', '.join(map(str, outside))} are outside the cache of {capacity} rows and are skipped",
            RuntimeWarning,
            stacklevel=3,
        )
