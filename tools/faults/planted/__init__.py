"""The registry: every planted fault, by the room it is in."""

from tools.faults.patch import Fault
from tools.faults.planted import attn_res, cache_insert, fmha, kda, kernels, mla_query, numerics

MODELS: tuple[Fault, ...] = tuple(
    fault for module in (fmha, attn_res, mla_query, cache_insert, kda, numerics) for fault in module.FAULTS
)
KERNELS: tuple[Fault, ...] = kernels.FAULTS
