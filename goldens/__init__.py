"""What is demanded of a kernel: cases, their stored bits, and verdicts. Needs neither cutlass nor a GPU."""

from goldens.attn_res import KERNEL as _ATTN_RES
from goldens.cache_insert import KERNEL as _CACHE_INSERT
from goldens.case import Case, Kernel
from goldens.fmha import KERNEL as _FMHA
from goldens.kda import KERNEL as _KDA
from goldens.mla_query import KERNEL as _MLA_QUERY

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (_FMHA, _ATTN_RES, _MLA_QUERY, _CACHE_INSERT, _KDA)}


_IDS = [case.id for kernel in KERNELS.values() for case in kernel.cases]
if len(_IDS) != len(set(_IDS)):
    raise ValueError(f"cases: these ids occur twice: {sorted({i for i in _IDS if _IDS.count(i) > 1})}")


def find(case_id: str) -> Case:
    """The case of an id such as ``fmha/d64-n64-normal``; ValueError with the nearest ids if there is none."""
    import difflib

    cases = {case.id: case for kernel in KERNELS.values() for case in kernel.cases}
    if case_id not in cases:
        near = ", ".join(difflib.get_close_matches(case_id, cases, cutoff=0.4)) or "run `goldens list`"
        raise ValueError(f"case: got {case_id!r}, there is none of this id; nearest: {near}")
    return cases[case_id]
