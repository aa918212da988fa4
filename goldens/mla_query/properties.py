"""What the MLA query owes bit for bit: a row, alone or among others."""

from goldens.cache_insert.properties import rows
from goldens.case import Case
from goldens.invariance import strides
from reference import mla_query as reference


def _takes(case: Case, count: int) -> bool:
    """Whether every schedule of the case takes so many rows."""
    heads = case.params["heads"]
    return count <= reference.MAX_B and not ("small" in case.schedules and reference.small_refusal(heads, count))


PROPERTIES = (rows("qkv", takes=_takes), strides("qkv"))
