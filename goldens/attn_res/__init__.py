"""AttnRes' room: recipes, cases, tolerances, properties, and where in a schedule an element is made."""

import torch

from goldens.attn_res.bounds import bound
from goldens.attn_res.cases import CASES, make_case
from goldens.attn_res.properties import PROPERTIES
from goldens.attn_res.recipes import RECIPES, inputs
from goldens.case import Case, Kernel, Output, Params
from reference import attn_res as reference

__all__ = ["KERNEL", "RECIPES", "bound", "inputs", "locate", "make_case"]

D = reference.D


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """The cluster (one a token), CTA rank, warp, lane and register that made an element of any output."""
    rank, column = divmod(index[-1], D // reference.CTAS)
    thread, register = divmod(column, reference.COLUMNS)
    token = index[1] if output == "delta" else index[0]
    return {"cluster": token, "rank": rank, "warp": thread // 32, "lane": thread % 32, "register": register}


def outputs(params: Params) -> dict[str, Output]:
    """Those of the interface."""
    row = Output(torch.bfloat16, ("token", "column"))
    made = {"output": row, "prefix": row, "blocks": Output(torch.bfloat16, ("token", "row", "column"))}
    made |= {f"aux{i}": row for i in range(params["aux"])}
    return made | ({"delta": Output(torch.bfloat16, ("slot", "token", "column"))} if params["slots"] else {})


KERNEL = Kernel("attn_res", reference, CASES, inputs, bound, outputs, PROPERTIES, locate)
