"""KDA's room: recipes, cases, tolerances, properties, and where in a schedule an element is made."""

from bisect import bisect_right

import torch

from goldens.case import Case, Kernel, Output, Params
from goldens.kda.bounds import bound
from goldens.kda.cases import CASES, SCALE, make_case
from goldens.kda.properties import PROPERTIES
from goldens.kda.recipes import OFFSETS, RECIPES, inputs, split
from reference import kda as reference

__all__ = ["KERNEL", "OFFSETS", "RECIPES", "SCALE", "bound", "inputs", "locate", "make_case", "split"]

CHUNK = reference.CHUNK


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """Sequence, head, chunk, slab of 16 rows of V (a consumer warp has one or two), lane, register of an element.

    Lane and register are those of the accumulator of mma.m16n8k16, [V, tokens] for out and [V, K] for the state. All
    are the same whatever the cluster.
    """
    if output == "out":
        batch, token, head, row = index
        pattern = split(case.recipe)[1]
        starts = OFFSETS[pattern] if pattern != "-" else (0,)
        sequence = bisect_right(starts, token) - 1
        token -= starts[sequence]
        place = {"sequence": batch + sequence, "head": head, "chunk": token // CHUNK}
        column = token % CHUNK
    else:
        sequence, head, row, column = index
        place = {"sequence": sequence, "head": head}
    register = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return place | {"slab": row // 16, "lane": row % 8 * 4 + column % 8 // 2, "register": register}


def outputs(params: Params) -> dict[str, Output]:
    """Those of the interface; a sequence of an unpacked batch counts as one."""
    made = {"out": Output(torch.bfloat16, ("batch", "token", "head", "channel"))}
    state = params["final_state"]
    if state is not None:
        dtype = reference.STATE_DTYPES[state]
        made["final_state"] = Output(dtype, ("sequence", "head", "value channel", "key channel"), shared=2)
    return made


KERNEL = Kernel("kda", reference, CASES, inputs, bound, outputs, PROPERTIES, locate)
