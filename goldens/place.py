"""Where the elements at some positions of a tensor lie, in words: "all 8 failures in token 6, channels 40 to 47"."""

import itertools
import math

import torch
from torch import Tensor

LISTED = 4  # indices of a dimension that are named one by one


def place(shape: torch.Size, where: Tensor, axes: tuple[str, ...] = ()) -> str:
    """Words on the failures at flat positions ``where`` (int64, distinct); empty of fewer than two.

    axes: what the dimensions are called, in the singular; "dimension 0", … if there are none. Of each dimension that
    the failures do not spread over, the one index, few, the range or the step in which all lie.
    """
    count = where.numel()
    if count < 2:
        return ""
    if count == shape.numel():
        return f"all {count:,} elements fail"
    named, named_elements = [], 1
    for axis, index in enumerate(torch.unravel_index(where, shape)):
        found = (torch.bincount(index, minlength=shape[axis]) > 0).nonzero().squeeze(1).tolist()
        if len(found) == shape[axis]:
            named_elements *= len(found)
            continue
        words, indices = _axis(axes[axis] if axes else f"dimension {axis}:", found)
        named.append(words)
        named_elements *= indices
    if not named:
        return ""
    return f"all {count:,} failures in {', '.join(named)}" + (
        ", every element there" if count == named_elements else ""
    )


def _axis(name: str, found: list[int]) -> tuple[str, int]:
    """Words on indices (ascending) of one dimension, and how many indices the words name."""
    first, last, count = found[0], found[-1], len(found)
    if count == 1:
        return f"{name} {first}", 1
    names = name if name.endswith(":") else name + ("es" if name.endswith(("ch", "s", "x")) else "s")
    if count <= LISTED and last - first >= count:
        return f"{names} {', '.join(map(str, found[:-1]))} and {last}", count
    step = math.gcd(*(b - a for a, b in itertools.pairwise(found)))
    words = f"{names} {first} to {last}" + (f" in steps of {step}" if step > 1 else "")
    return words, (last - first) // step + 1
