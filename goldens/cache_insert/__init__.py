"""The cache insert's room: recipes, cases, tolerances, properties, and where an element is made."""

from goldens.cache_insert.bounds import bound
from goldens.cache_insert.cases import CASES, make_case
from goldens.cache_insert.properties import PROPERTIES
from goldens.cache_insert.recipes import EPS, RECIPES, inputs, make_inputs
from goldens.case import Case, Kernel, Output
from reference import cache_insert as reference
from reference.numerics.formats import E4M3

__all__ = ["EPS", "KERNEL", "RECIPES", "bound", "inputs", "locate", "make_case", "make_inputs"]


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """The slot, and the thread of 64 that made an element of its latent; k_pe follows as threads 64 … 71."""
    page, offset, column = index
    return {"slot": page * case.dims["page_size"] + offset, "thread": column // reference.COLUMNS}


OUTPUTS = {"cache": Output(E4M3.dtype, ("page", "offset", "column"))}
KERNEL = Kernel("cache_insert", reference, CASES, inputs, bound, lambda params: OUTPUTS, PROPERTIES, locate)
