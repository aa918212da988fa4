"""FMHA's room: recipes, cases, tolerances, properties, and where in a schedule an output element is made."""

import torch

from goldens.case import Case, Kernel, Output
from goldens.fmha.bounds import FLASH, bound
from goldens.fmha.cases import CASES, WGMMA, make_case
from goldens.fmha.properties import PROPERTIES
from goldens.fmha.recipes import RECIPES, inputs
from reference import fmha as reference

__all__ = ["KERNEL", "RECIPES", "WGMMA", "bound", "inputs", "locate", "make_case"]


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """Which tile of 64 rows, warp, lane and register of a schedule made an element of o."""
    if output != "o":
        return {}
    batch, row, column = index
    place = {"tile": row // 64, "batch": batch}
    if schedule == "k2":
        per_thread = case.dims["d"] // 4
        thread = row % 64 * 4 + column // per_thread
        return place | {"warp": thread // 32, "lane": thread % 32, "register": column % per_thread}
    if "n_q0" in case.dims:
        return {}
    # The accumulator fragment of wgmma: 16 rows a warp, two of them and two columns of every eight a lane.
    lane, register = row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return place | {"warp": row % 64 // 16, "lane": lane, "register": register}


OUTPUTS = {
    "o": Output(torch.bfloat16, ("head", "row", "channel")),
    "lse": Output(torch.float32, ("head", "row")),
}
KERNEL = Kernel("fmha", reference, CASES, inputs, bound, lambda params: OUTPUTS, PROPERTIES, locate, (FLASH,))
