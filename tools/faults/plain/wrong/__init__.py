"""Single mistakes, a module a kernel. None was dropped because it survived."""

from tools.faults.patch import Fault
from tools.faults.plain.wrong import attn_res, cache_insert, fmha, kda, mla_query

WRONG: tuple[Fault, ...] = (*fmha.ROWS, *attn_res.ROWS, *mla_query.ROWS, *cache_insert.ROWS, *kda.ROWS)
