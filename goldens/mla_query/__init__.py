"""The MLA query's room: recipes, cases, tolerances, properties, and where in a schedule an element is made."""

from goldens import cache_insert as insert
from goldens.case import Case, Kernel, Output
from goldens.mla_query.bounds import agreement, bound
from goldens.mla_query.cases import CASES, make_case
from goldens.mla_query.properties import PROPERTIES
from goldens.mla_query.recipes import RECIPES, inputs
from reference import mla_query as reference
from reference.numerics.formats import E4M3

__all__ = ["KERNEL", "RECIPES", "agreement", "bound", "inputs", "locate", "make_case"]

LATENT, NOPE, HEAD = reference.LATENT, reference.NOPE, reference.HEAD


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """Row and head of an element of output, in ``small`` also the CTA of the cluster; an element of the cache as in the
    insert's own room."""
    if output == "cache":
        return insert.locate(case, "insert", output, index)
    row, head, column = index
    place = {"row": row, "head": head}
    if schedule == "small":
        ctas = reference.CLUSTER[case.params["heads"]]
        rope = column - LATENT
        place["rank"] = column // (LATENT // ctas) if rope < 0 else (NOPE + rope) // (HEAD // ctas)
    return place


OUTPUTS = {"output": Output(E4M3.dtype, ("row", "head", "column")), **insert.OUTPUTS}
KERNEL = Kernel("mla_query", reference, CASES, inputs, bound, lambda params: OUTPUTS, PROPERTIES, locate)
