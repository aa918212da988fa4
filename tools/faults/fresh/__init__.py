"""Faults by an author who had read the models and their specifications, and had not seen the goldens.

What share of them the goldens notice is measured. None was left out because it survived, none was written after a run.
Each changes the outputs for some legal input, which need not be the input of a golden; ``case`` is empty for all.
"""

from tools.faults.fresh import cache_insert, kda, mla_query, numerics
from tools.faults.patch import Fault

FRESH: tuple[Fault, ...] = (*cache_insert.FAULTS, *kda.FAULTS, *mla_query.FAULTS, *numerics.FAULTS)
