"""Tiles in shared memory, products by ``wgmma``, and a lane's place in the accumulator.

Q, K and V lie in shared memory as TMA writes them with the 128-byte swizzle: columns in groups of 64, rows of 128
bytes. Q · Kᵀ takes both operands from there; P · V takes P from registers and V transposed ("MN-major") from its tile.

The accumulator of m64nN, a lane's N / 2 registers (PTX ISA, "Register Fragments for wgmma"): register i holds row
16 warp + lane / 4 + 8 (i / 2 mod 2) and column 8 (i / 4) + 2 (lane mod 4) + i mod 2. Two registers that a lane holds
next to each other are also neighbours in the fragment of operand A, so P needs no exchange between threads.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import get_smem_layout_atom, make_trivial_tiled_mma

from cute_impl.fmha.problem import WARPGROUP, WARPGROUP_ROWS, Config, Fixed, Operands


def tile_layout(rows: int, d: int, stages: int | None = None) -> cute.ComposedLayout:
    """(rows, d) or (rows, d, stages) in shared memory, swizzled."""
    atom = warpgroup.make_smem_layout_atom(get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, d), BFloat16)
    return cute.tile_to_shape(
        atom, (rows, d) if stages is None else (rows, d, stages), order=(0, 1, 2)[: 2 + bool(stages)]
    )


def copies(operands: Operands) -> list[cpasync.TmaInfo]:
    """How TMA takes tiles of q, k and v."""
    config = operands.config
    rows = {"q": config.rows, "k": config.keys, "v": config.keys}
    return [
        cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), operands.tensor(name), tile_layout(n, config.d), (n, config.d)
        )
        for name, n in rows.items()
    ]


def tiles_of(atom: cute.CopyAtom, mX: cute.Tensor, sX: cute.Tensor, rows: int, start: Int32, head: Int32, batch: Int32):
    """(shared, global) tiles of one head as TMA takes them, from row ``start`` on; sX (rows, d), or also stages."""
    own = cute.domain_offset((start, 0), mX[None, None, head, batch])
    gX = cute.local_tile(own, (rows, cute.size(mX, mode=[1])), (None, 0))
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))


class Products(Fixed):
    """S = Q · Kᵀ and O += P · V of one warpgroup's 64 rows; its registers S, P and O.

    sQ (rows, d, stages), sK and sV (keys, d, stages).
    """

    def __init__(self, config: Config, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, index: Int32):
        kinds = (config.warpgroups, 1, 1)
        self.qk = make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, kinds, (64, config.keys)
        )
        self.pv = make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            kinds,
            (64, config.d),
            warpgroup.OperandSource.RMEM,
        )
        qk, pv = (mma.get_slice(index * WARPGROUP) for mma in (self.qk, self.pv))
        sVt = cute.composition(sV, cute.make_ordered_layout((config.d, config.keys, sV.shape[2]), order=(1, 0, 2)))
        self.tQ, self.tK = qk.make_fragment_A(qk.partition_A(sQ)), qk.make_fragment_B(qk.partition_B(sK))
        self.tV = pv.make_fragment_B(pv.partition_B(sVt))
        rows = config.warpgroups * WARPGROUP_ROWS
        self.acc_s = cute.make_rmem_tensor(qk.partition_shape_C((rows, config.keys)), Float32)
        self.acc_o = cute.make_rmem_tensor(pv.partition_shape_C((rows, config.d)), Float32)
        self.tP = pv.make_fragment_A(pv.partition_shape_A((rows, config.keys)))
        self.rS, self.rO = (self._flat(x) for x in (self.acc_s, self.acc_o))
        self.rP = self._flat(cute.recast_tensor(self.tP, Int32))

    def _flat(self, x: cute.Tensor) -> cute.Tensor:
        """Registers in order."""
        return cute.make_tensor(x.iterator, cute.make_layout(cute.size(x)))

    def scores(self, stage: Int32, q_stage: Int32 | int = 0):
        """Begin S = Q · Kᵀ."""
        q, k = self.tQ[None, None, None, q_stage], self.tK[None, None, None, stage]
        multiply(self.qk, self.acc_s, q, k, zero=True)

    def add_values(self, stage: Int32):
        """Begin O += P · V."""
        multiply(self.pv, self.acc_o, self.tP, self.tV[None, None, None, stage], zero=False)


def multiply(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: bool):
    """Begin a chain of products over ascending k into ``acc``, or from zero, as one group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def rows_of(index: Int32) -> list[Int32]:
    """The two rows of a CTA's tile that this lane of warpgroup ``index`` holds."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first = index * WARPGROUP_ROWS + thread // 32 * 16 + thread % 32 // 4
    return [first, first + 8]


def row_of(i: int) -> int:
    """Which of the lane's two rows register i belongs to."""
    return i // 2 % 2


def column_of(i: int) -> int:
    """The column of register i, less 2 (lane mod 4)."""
    return i // 4 * 8 + i % 2
