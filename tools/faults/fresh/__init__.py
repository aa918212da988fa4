"""Faults written by authors who had not seen the goldens: the share of them that the goldens notice is a measurement.

None was dropped because it survived. Each is a real one: for some legal input the outputs differ.
"""

from tools.faults.fresh import attn_res, cache_insert, fmha, kda, mla_query, numerics
from tools.faults.patch import Fault

FRESH: tuple[Fault, ...] = tuple(
    fault for module in (fmha, attn_res, mla_query, cache_insert, kda, numerics) for fault in module.FAULTS
)
