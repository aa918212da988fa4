"""Rows of V beyond a packed sequence's end.

TMA fills with zeros what lies beyond a tensor; beyond a sequence lies its neighbour, whose NaN times a weight of 0
would be NaN. So the warpgroups write zeros over those rows, each all of them: they write the same, and need not wait
for each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from cute_impl.fmha.problem import WARPGROUP

VALUES = 8  # bf16 of 16 bytes


@cute.jit
def clear_values(sV: cute.Tensor, used: Int32, index: Int32):
    """Zero rows ``used`` … of a tile (keys, d), by the threads of warpgroup ``index``; the product sees them."""
    keys, d = cutlass.const_expr(cute.size(sV, mode=[0])), cutlass.const_expr(cute.size(sV, mode=[1]))
    if used < keys:
        zeros = cute.make_rmem_tensor(VALUES, BFloat16)
        zeros.fill(0.0)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        pieces = cutlass.const_expr(d // VALUES)
        for i in cutlass.range(used * pieces + thread, keys * pieces, WARPGROUP, unroll=1):
            cute.autovec_copy(zeros, cute.local_tile(sV, (1, VALUES), (i // pieces, i % pieces)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=index + 1, number_of_threads=WARPGROUP)
