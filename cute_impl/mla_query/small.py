"""MLA query, schedule ``small``: one cluster of C CTAs a head, scalar FP32, weights in shared memory before the wait.

CTA rank r of a head's cluster owns R = 192 / C rows of Q_B (r · R …) and L = 512 / C latent columns (r · L …). One more
cluster inserts the rows into the cache, a warp each. 256 threads. For each of the B ≤ 5 requests, unrolled:

  stage      R rows of Q_B by cp.async (or one bulk copy), [128, L] of W_UK by cp.async; w_qa in registers
             each warp's rows of Q_B go on to registers, so that reading shared memory is not on the path behind
  wait       for the predecessor; everything before it depends on weights alone. Then the successor may start
  norm       every CTA for itself: thread t < 192 owns 8 columns; sums meet in shared memory; x̂ to sX, bf16
  project    a warp takes whole rows: R / 8 of them, or for R = 12 rows w and, w < 4, w + 8; all requests at once
  exchange   "nope" q to all C CTAs by st.async, as fp32 holding bf16, "rope" q to the own sQ
  absorb     thread (group of p, column): two FMA chains; groups meet in shared memory; 4 columns a thread out
Bits do not depend on which warp takes which rows.

Who waits for whom: nothing is sent before all CTAs of the cluster have set up their mbarriers (cluster barrier, begun
before the staging). A CTA ends after its mbarrier has counted every byte sent to it, so none writes to one that has
gone. Outputs and cache are written after the wait for the predecessor. With ``dcp`` see ``dcp.py``.

Shared memory, bytes: sQb R · 3072, sUk 256 · L, and for each request sX 3072, sQ 768, sP 1024, sSum 32; two mbarriers.
C = 8: 90,112 + 4,896 B + 16; C = 16: 45,056 + 4,896 B + 16. Two CTAs fit an SM: one at work, and one of the next launch
that has its weights. Were a launch to let the next one in before its own wait, three would share the SMs: slower.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_impl import ptx, runtime
from cute_impl.attn_res.cluster7 import dot8, fold, lanes_a_value, pack, widen
from cute_impl.mla_query import dcp, device
from cute_impl.mla_query.device import HEAD, LATENT, NAMES, NOPE, QUERY, ROW_BYTES, THREADS, WARPS
from cute_impl.mla_query.insert import WIDTH, e4m3x4
from cute_impl.ptx import add_rn, fma_rn, mul_rn

CHUNKS = QUERY // 256  # of 32 lanes · 8 columns
OWNERS = QUERY // 8  # threads that own columns in the norm


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time: CTAs a head, B, how Q_B is staged, ranks that share a context (0: no mailbox)."""

    cluster: int
    rows: int
    q_b_cp_async: bool = True
    dcp: int = 0

    @property
    def q_b_rows(self) -> int:
        return HEAD // self.cluster

    @property
    def columns(self) -> int:
        return LATENT // self.cluster

    @property
    def groups(self) -> int:
        """Groups of threads that share the p of a column."""
        return THREADS // self.columns

    @property
    def smem_bytes(self) -> int:
        weights = self.q_b_rows * ROW_BYTES + NOPE * self.columns * 2
        return weights + self.rows * (ROW_BYTES + HEAD * 4 + THREADS * 4 + WARPS * 4) + 16


class Small:
    """The kernel of one ``Config``, for any number of heads."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        addresses: list,
        mailbox: list,
        pitch: Int64,
        capacity: Int64,
        heads: Int32,
        eps: Float32,
        pdl: Int32,
        stream,
    ):
        """addresses: Int64, as ``NAMES``. mailbox: see ``dcp``. pitch: bytes from row to row. capacity: cache rows."""
        config = self.config
        self.kernel(addresses, mailbox, pitch, capacity, heads, eps).launch(
            grid=[(heads + 1) * config.cluster, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[config.cluster, 1, 1],
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=1 if self.config.dcp else 2,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, addresses: list, mailbox: list, pitch: Int64, capacity: Int64, heads: Int32, eps: Float32):
        config = self.config
        block, _, _ = cute.arch.block_idx()
        head, rank = block // config.cluster, block % config.cluster
        at = dict(zip(NAMES, addresses, strict=True))
        smem = SmemAllocator()
        base = smem.allocate(config.smem_bytes - 16, byte_alignment=128).toint()
        sBarriers = smem.allocate_array(Int64, 2, byte_alignment=8)
        if head == heads:
            warp = cute.arch.thread_idx()[0] // 32
            device.insert_rows(at, pitch, capacity, warp * config.cluster + rank, Int32(config.rows), eps)
        else:
            self.query(at, mailbox, pitch, head, heads, rank, eps, base, sBarriers)

    @cute.jit
    def query(
        self,
        at: dict,
        mailbox: list,
        pitch: Int64,
        head: Int32,
        heads: Int32,
        rank: Int32,
        eps: Float32,
        base: Int32,
        sBarriers: cute.Pointer,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = thread // 32
        rows, q_b_rows = config.rows, config.q_b_rows
        sizes = (q_b_rows * ROW_BYTES, NOPE * config.columns * 2, rows * ROW_BYTES, rows * HEAD * 4, rows * THREADS * 4)
        sQb, sUk, sX, sQ, sP, sSum = [base + sum(sizes[:i]) for i in range(len(sizes) + 1)]
        staged, exchange = sBarriers, sBarriers + 1
        # Of this CTA's rows of Q_B, the last ``rope_rows`` are "rope".
        rope_rows = device.clamp((rank + 1) * q_b_rows - NOPE, 0, q_b_rows)

        if thread == 0:
            cute.arch.mbarrier_init(staged, 1)
            cute.arch.mbarrier_init(exchange, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(exchange, 4 * rows * (NOPE + rope_rows))
        cute.arch.cluster_arrive_relaxed()
        self.stage(at, head, rank, sQb, sUk, staged)
        owner = select_(thread < OWNERS, thread, thread - 64)  # warps 6 and 7 compute along and write nothing
        w_words = ptx.ld_v4("global", at["w_qa"] + owner * 16)
        own = [warp * (q_b_rows // WARPS) + i for i in range(q_b_rows // WARPS)]
        if cutlass.const_expr(q_b_rows % WARPS != 0):
            own = [warp, select_(warp < q_b_rows - WARPS, warp + WARPS, warp)]
        q_b = self.load_rows(own, sQb, staged)

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        x_words = [ptx.ld_v4("global", at["qkv"] + pitch * b + owner * 16) for b in range(rows)]
        scale = ptx.ld_b32("global", at["q_scale_inv"], Float32)
        shared_round: Any = None
        if cutlass.const_expr(config.dcp > 0):
            shared_round = dcp.Round(mailbox, head, heads, rank, config.cluster, Int32(rows))
            shared_round.rearm()
        self.normalise(x_words, w_words, eps, sX, sSum)
        cute.arch.cluster_wait()
        if cutlass.const_expr(q_b_rows % WARPS == 0):  # noqa: SIM114
            self.project(own, q_b, rank, sX, sQ, exchange)
        elif warp < q_b_rows - WARPS:
            self.project(own, q_b, rank, sX, sQ, exchange)
        else:
            self.project(own[:1], q_b[:1], rank, sX, sQ, exchange)
        self.absorb(sUk, sQ, sP, exchange)
        out = at["output"] + Int64(head * WIDTH)
        self.write(out, heads * WIDTH, rank, rope_rows, scale, sQ, sP, shared_round)
        if cutlass.const_expr(config.dcp > 0):
            shared_round.finish()

    @cute.jit
    def stage(self, at: dict, head: Int32, rank: Int32, sQb: Int32, sUk: Int32, staged: cute.Pointer):
        """Begin the copies of this CTA's weights."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        size = config.q_b_rows * ROW_BYTES
        q_b = at["w_qb"] + Int64(head * config.cluster + rank) * size
        if cutlass.const_expr(config.q_b_cp_async):
            for i in cutlass.range_constexpr(0, size, THREADS * 16):
                ptx.cp_async_16(sQb + i + thread * 16, q_b + i + thread * 16)
        else:
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(staged, size)
                ptx.bulk_copy(sQb, q_b, size, staged.toint())
        cute.arch.cp_async_commit_group()
        pieces = config.columns // 8  # 16 bytes each, of a row of sUk
        w_uk = at["w_uk"] + (Int64(head * NOPE * LATENT) + rank * config.columns) * 2
        for i in cutlass.range_constexpr(0, NOPE * pieces, THREADS):
            p, piece = (i + thread) // pieces, (i + thread) % pieces
            ptx.cp_async_16(sUk + (i + thread) * 16, w_uk + p * (LATENT * 2) + piece * 16)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_rows(self, own: list, sQb: Int32, staged: cute.Pointer):
        """This warp's rows of Q_B, in registers as they are: reading shared memory is done before the wait."""
        if cutlass.const_expr(self.config.q_b_cp_async):
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()
        else:
            cute.arch.sync_threads()  # the mbarrier is set up by another thread
            ptx.mbarrier_spin(staged.toint(), 0)
        at = sQb + cute.arch.lane_idx() * 16
        return [[ptx.ld_v4("shared", at + row * ROW_BYTES + c * 512) for c in range(CHUNKS)] for row in own]

    @cute.jit
    def normalise(self, x_words: list, w_words: tuple, eps: Float32, sX: Int32, sSum: Int32):
        """x̂ of all requests to sX; then W_UK is in shared memory as well."""
        config = self.config
        rows = config.rows
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        sums = fold([dot8(x, x) for x in map(widen, x_words)], lane)
        b = lane // lanes_a_value(rows)
        if lane % lanes_a_value(rows) == 0 and b < rows and warp < OWNERS // 32:
            ptx.st_b32("shared", sSum + b * (WARPS * 4) + warp * 4, sums)
        cute.arch.sync_threads()
        w = widen(w_words)
        for b in cutlass.range_constexpr(rows):
            warps = [
                *ptx.ld_v4("shared", sSum + b * (WARPS * 4), Float32),
                *ptx.ld_v2("shared", sSum + b * (WARPS * 4) + 16, Float32),
            ]
            rr = device.rstd(device.chain(warps), eps)
            x_hat = [mul_rn(mul_rn(x, rr), g) for x, g in zip(widen(x_words[b]), w, strict=True)]
            if warp < OWNERS // 32:
                ptx.st_v4("shared", sX + b * ROW_BYTES + thread * 16, pack(x_hat))
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def project(self, own: list, q_b: list, rank: Int32, sX: Int32, sQ: Int32, exchange: cute.Pointer):
        """This warp's rows ``own``, whose words are q_b, times all x̂, rounded to bf16, to the CTAs that need them."""
        config = self.config
        lane = cute.arch.lane_idx()
        sums = [[Float32(0.0), Float32(0.0)] for _ in range(len(own) * config.rows)]  # even and odd columns
        for c in cutlass.range_constexpr(CHUNKS):
            w = [widen(words[c]) for words in q_b]
            for b in cutlass.range_constexpr(config.rows):
                x = widen(ptx.ld_v4("shared", sX + b * ROW_BYTES + c * 512 + lane * 16))
                for r in cutlass.range_constexpr(len(own)):
                    pair = sums[r * config.rows + b]
                    for i in cutlass.range_constexpr(8):
                        pair[i % 2] = fma_rn(w[r][i], x[i], pair[i % 2])
        n = cutlass.const_expr(len(sums))
        q = ptx.bf16_lo(ptx.cvt_bf16x2(fold([add_rn(even, odd) for even, odd in sums], lane), Float32(0.0)))

        group = cutlass.const_expr(lanes_a_value(n))
        v, first = lane // group, lane % group
        row = own[0]
        for r in cutlass.range_constexpr(1, len(own)):
            row = select_(v // config.rows == r, own[r], row)
        p = rank * config.q_b_rows + row
        where = sQ + (v % config.rows) * (HEAD * 4) + p * 4
        for target in cutlass.range_constexpr(0, config.cluster, group):
            receiver = first + target
            if v < n and receiver < config.cluster and (p < NOPE or receiver == rank):
                ptx.st_async(ptx.mapa(where, receiver), q, ptx.mapa(exchange.toint(), receiver))

    @cute.jit
    def absorb(self, sUk: Int32, sQ: Int32, sP: Int32, exchange: cute.Pointer):
        """Each group's part of every latent column to sP [requests, groups, L]."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        share = cutlass.const_expr(NOPE // config.groups)
        group, column = thread // config.columns, thread % config.columns
        at = sUk + (group * share * config.columns + column) * 2
        w = [ptx.ld_bf16("shared", at + i * config.columns * 2) for i in range(share)]
        ptx.mbarrier_spin(exchange.toint(), 0)
        for b in cutlass.range_constexpr(config.rows):
            even, odd = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(0, share, 4):
                q = ptx.ld_v4("shared", sQ + b * (HEAD * 4) + (group * share + i) * 4, Float32)
                even, odd = fma_rn(w[i], q[0], even), fma_rn(w[i + 1], q[1], odd)
                even, odd = fma_rn(w[i + 2], q[2], even), fma_rn(w[i + 3], q[3], odd)
            ptx.st_b32("shared", sP + b * (THREADS * 4) + thread * 4, add_rn(even, odd))
        cute.arch.sync_threads()

    @cute.jit
    def write(
        self,
        out: Int64,
        request_bytes: Int32,
        rank: Int32,
        rope_rows: Int32,
        scale: Float32,
        sQ: Int32,
        sP: Int32,
        shared_round: cutlass.Constexpr,
    ):
        """Four bytes a thread: the latent by the first threads, "rope" by the upper half."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        words = cutlass.const_expr(config.columns // 4)
        b, word = thread // words, thread % words
        if b < config.rows:
            parts = sP + b * (THREADS * 4) + word * 16
            groups = [ptx.ld_v4("shared", parts + g * config.columns * 4, Float32) for g in range(config.groups)]
            latent = [device.chain([Float32(0.0), *column]) for column in zip(*groups, strict=True)]
            scaled = [mul_rn(x, scale) for x in widen(pack(latent))]
            device.put(out, request_bytes, b, rank * config.columns + word * 4, [e4m3x4(scaled)], shared_round)
        b, word = (thread - THREADS // 2) // 8, thread % 8
        if thread >= THREADS // 2 and b < config.rows and word * 4 < rope_rows:
            p = (rank + 1) * config.q_b_rows - rope_rows + word * 4
            q = ptx.ld_v4("shared", sQ + b * (HEAD * 4) + p * 4, Float32)
            byte4 = e4m3x4([mul_rn(x, scale) for x in q])
            device.put(out, request_bytes, b, LATENT + p - NOPE, [byte4], shared_round)


def compile_variant(config: Config, options: str = ""):
    """The kernel of a configuration, for any heads, pitch and cache; needs no GPU."""
    arguments = (
        [Int64(0)] * len(NAMES),
        dcp.stand_in(config.dcp),
        Int64(0),
        Int64(0),
        Int32(1),
        Float32(0.0),
        Int32(0),
    )
    return runtime.compile_kernel(
        ("mla_query small", config, options), lambda: Small(config), *arguments, options=options
    )
