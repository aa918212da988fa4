"""Faults written by an author who had not seen the goldens: the share of them that the goldens notice is a measurement.

None was dropped because it survived. Each is a real one: for some legal input the outputs differ.
"""

from tools.faults.fresh import attn_res, fmha
from tools.faults.patch import Fault

FRESH: tuple[Fault, ...] = (*attn_res.FAULTS, *fmha.FAULTS)
