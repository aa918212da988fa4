"""MLA query, schedule ``tiled``: clusters of 8 CTAs, tensor cores, K of Q_B split over the cluster.

The schedule splits K = 1536 over 8 "warps" of 192 columns. Here they are the CTAs of a cluster: CTA rank r owns columns
192 r … of all 192 rows of Q_B, so that a CTA reads 1/8 of x̂, not all of it. A cluster serves a head and a group of at
most 16 T requests (T tiles); few heads take several groups, so that more SMs are at work. What comes of rows beyond B
is not written. One more cluster inserts the cache rows, a warp each. 256 threads; g = lane / 4, j = lane mod 4 as in
the PTX ISA's fragments.

  stage      a warp's 24 rows · 192 columns of Q_B in 72 registers as the MMA takes them; [128, 64] of W_UK by cp.async
  wait       for the predecessor; everything before it depends on weights alone. Then the successor may start
  norm       row b by CTA b mod 8, warp b / 8: Σx² of all 1536 columns; its rr goes to all CTAs by st.async (exchange 1)
  x̂          192 threads normalise the CTA's 192 columns of all rows, in place in sX
  Q_B        per tile of requests and 8 rows of Q_B (m16n8) 12 MMAs from 0; a lane's 16 bytes are 8 consecutive k, of
             which one MMA takes the first 4 and the next the others; the 24 rows of warp w go to CTA w by st.async
                                                                                                            (exchange 2)
  sum        CTA r adds the 8 partial sums of its 24 rows in order of k, rounds to bf16: two m16n8 tiles of C make an
             A fragment of m16k16, so "nope" q goes to all CTAs as fragments by a bulk copy each (exchange 3), "rope" q
             is written
  absorb     warp w: latent columns 64 r + 8 w …, 8 MMAs from 0; bytes meet in shared memory, 16 a thread out

Who waits for whom: nothing is sent before all CTAs of the cluster have set up their mbarriers. A CTA ends after all of
its cluster have everything that was sent to them (cluster barrier), since a bulk copy reads the sender's shared memory.
Buffers that others write to are used once; sOut shares its memory with sPart, after a barrier behind the last read.
Outputs and cache are written after the wait for the predecessor. With ``dcp`` see ``dcp.py``.

Exchange 3 is a bulk copy because st.async sends about a lane a cycle on an H200, however few its bytes.

Shared memory, bytes: sUk 128 · 144 (padded: 8 rows of a matrix on different banks), sX 16 T · 448 (padded), sPart
12,288 T, sQ 4096 T, sRr 64 T, three mbarriers: 18,456 + 23,616 T. Two CTAs fit on an SM: one at work, and one of the
next launch that has its weights. Were a launch to let the next one in before its own wait, three would overlap, and two
CTAs of one launch share an SM and its path to the cluster: that is much slower.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_impl import ptx, runtime
from cute_impl.attn_res.cluster7 import pack, widen
from cute_impl.mla_query import dcp, device
from cute_impl.mla_query.device import HEAD, LATENT, NAMES, NOPE, QUERY, ROW_BYTES, THREADS, WARPS
from cute_impl.mla_query.insert import WIDTH
from cute_impl.ptx import add_rn, fma_rn, mul_rn

CTAS = 8
TILE = 16  # requests
K = QUERY // CTAS  # columns of a CTA
BLOCKS = K // 32  # 32 k: two MMAs
ROWS = HEAD // WARPS  # rows of Q_B of a warp, and of a CTA after exchange 2
N_TILES = ROWS // 8
COLUMNS = LATENT // CTAS
UK_PITCH, X_PITCH = 2 * COLUMNS + 16, 2 * K + 64
OWNERS = 2 * K // 16 * WARPS  # threads that normalise: 24 pieces of 16 bytes a row, 8 rows at once
FRAGMENT = 512  # bytes of a warp's tile, 4 words a lane
ABREAST = 2  # rows that a thread normalises at once
SMS = 132  # of an H200
FORM = "m16n8k16.row.col.f32.bf16.bf16.f32"


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time: tiles of 16 requests in a group, ranks that share a context (0: no mailbox)."""

    tiles: int
    dcp: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of sUk, sX, sPart, sQ, sRr."""
        return (
            NOPE * UK_PITCH,
            self.tiles * TILE * X_PITCH,
            self.tiles * CTAS * N_TILES * FRAGMENT,
            self.tiles * NOPE // 16 * FRAGMENT,
            self.tiles * TILE * 4,
        )

    @property
    def smem_bytes(self) -> int:
        return sum(self.sizes) + 24


class Tiled:
    """The kernel of one ``Config``, for any number of heads, groups, and requests up to 16 a tile."""

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
        groups: Int32,
        rows: Int32,
        eps: Float32,
        pdl: Int32,
        stream,
    ):
        """addresses: Int64, as ``NAMES``. mailbox: see ``dcp``. pitch: bytes from row to row. capacity: cache rows."""
        self.kernel(addresses, mailbox, pitch, capacity, heads, groups, rows, eps).launch(
            grid=[(heads * groups + 1) * CTAS, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=1 if self.config.dcp else 2,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        addresses: list,
        mailbox: list,
        pitch: Int64,
        capacity: Int64,
        heads: Int32,
        groups: Int32,
        rows: Int32,
        eps: Float32,
    ):
        config = self.config
        block, _, _ = cute.arch.block_idx()
        unit, rank = block // CTAS, block % CTAS
        at = dict(zip(NAMES, addresses, strict=True))
        smem = SmemAllocator()
        base = smem.allocate(config.smem_bytes - 24, byte_alignment=128).toint()
        sBarriers = smem.allocate_array(Int64, 3, byte_alignment=8)
        row = cute.arch.thread_idx()[0] // 32 * CTAS + rank
        if unit == heads * groups:
            device.insert_rows(at, pitch, capacity, row, rows, eps)
        else:
            # From here on a request is counted within its group.
            group = unit // heads
            first = group * (config.tiles * TILE)
            at["qkv"] = at["qkv"] + pitch * first
            at["output"] = at["output"] + Int64(first) * (heads * WIDTH)
            place = dcp.Place(group, groups, first, rows)
            own_rows = device.clamp(rows - first, 0, config.tiles * TILE)
            self.query(at, mailbox, pitch, unit % heads, heads, rank, own_rows, place, eps, base, sBarriers)

    @cute.jit
    def query(
        self,
        at: dict,
        mailbox: list,
        pitch: Int64,
        head: Int32,
        heads: Int32,
        rank: Int32,
        rows: Int32,
        place: cutlass.Constexpr,
        eps: Float32,
        base: Int32,
        sBarriers: cute.Pointer,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        sUk, sX, sPart, sQ, sRr = [base + sum(config.sizes[:i]) for i in range(5)]
        barriers = [sBarriers + i for i in range(3)]
        self.open_exchanges(thread, rank, rows, barriers)
        q_b = self.stage(at, head, rank, sUk)
        piece = thread % (OWNERS // WARPS)  # of the CTA's columns, the same in all rows
        w_words = ptx.ld_v4("global", at["w_qa"] + (rank * K * 2 + piece * 16))

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        x = at["qkv"]
        own = warp * CTAS + rank
        # A row beyond the last: the last is read once more, and nothing comes of it.
        x_row = x + pitch * select_(own < rows, own, rows - 1)
        x_words = [ptx.ld_v4("global", x_row + c * 512 + lane * 16) for c in range(QUERY // 256)]
        scale = ptx.ld_b32("global", at["q_scale_inv"], Float32)
        shared_round: Any = None
        if cutlass.const_expr(config.dcp > 0):
            shared_round = dcp.Round(mailbox, head, heads, rank, CTAS, rows, place)
            shared_round.rearm()
        self.stage_x(x + (rank * K * 2 + piece * 16), pitch, rows, sX)
        rr = self.row_scale(x_words, eps)
        cute.arch.cluster_wait()
        if own < rows and lane < CTAS:
            ptx.st_async(ptx.mapa(sRr + own * 4, lane), rr, ptx.mapa(barriers[0].toint(), lane))
        ptx.mbarrier_spin(barriers[0].toint(), 0)
        self.normalise(w_words, rows, sX, sRr)

        self.multiply(q_b, rank, sX, sPart, barriers[1])
        ptx.mbarrier_spin(barriers[1].toint(), 0)
        out = at["output"] + Int64(head * WIDTH)
        self.add_parts(out, heads * WIDTH, rank, rows, scale, sPart, sQ, barriers[2], shared_round)
        self.absorb(out, heads * WIDTH, rank, rows, scale, sUk, sQ, sPart, barriers[2], shared_round)
        if cutlass.const_expr(config.dcp > 0):
            shared_round.finish()
        cute.arch.cluster_wait()

    def own_q_bytes(self, rank: Int32) -> Int32:
        """Bytes of sQ that CTA ``rank`` makes: what of its 24 rows of Q_B is "nope"."""
        eights = device.clamp(NOPE // 8 - rank * N_TILES, 0, N_TILES)
        return eights * (self.config.tiles * FRAGMENT // 2)

    @cute.jit
    def open_exchanges(self, thread: Int32, rank: Int32, rows: Int32, barriers: list):
        """Armed mbarriers of the three exchanges; arrives at, and leaves open, the first cluster barrier."""
        if thread == 0:
            for i in cutlass.range_constexpr(3):
                cute.arch.mbarrier_init(barriers[i], 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barriers[0], 4 * rows)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers[1], self.config.sizes[2])
            cute.arch.mbarrier_arrive_and_expect_tx(barriers[2], self.config.sizes[3] - self.own_q_bytes(rank))
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def stage(self, at: dict, head: Int32, rank: Int32, sUk: Int32):
        """Begin to copy W_UK; returns the warp's part of Q_B [N_TILES][BLOCKS], 4 words of 8 consecutive k a lane."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        row = head * HEAD + warp * ROWS + lane // 4
        q_b = at["w_qb"] + Int64(row) * ROW_BYTES + (rank * K * 2 + lane % 4 * 16)
        words = [
            [ptx.ld_v4("global", q_b + n * (8 * ROW_BYTES) + block * 64) for block in range(BLOCKS)]
            for n in range(N_TILES)
        ]
        pieces = cutlass.const_expr(COLUMNS // 8)
        w_uk = at["w_uk"] + (Int64(head * NOPE * LATENT) + rank * COLUMNS) * 2
        for i in cutlass.range_constexpr(0, NOPE * pieces, THREADS):
            p, piece = (i + thread) // pieces, (i + thread) % pieces
            ptx.cp_async_16(sUk + p * UK_PITCH + piece * 16, w_uk + p * (LATENT * 2) + piece * 16)
        cute.arch.cp_async_commit_group()
        return words

    @cute.jit
    def stage_x(self, x: Int64, pitch: Int64, rows: Int32, sX: Int32):
        """Begin to copy this thread's piece of every eighth row as it is; zeros beyond the last row."""
        thread, _, _ = cute.arch.thread_idx()
        piece, first = thread % (OWNERS // WARPS), thread // (OWNERS // WARPS)
        if thread < OWNERS:
            for row in cutlass.range(first, self.config.tiles * TILE, WARPS, unroll=1):
                inside = row < rows
                source = x + pitch * select_(inside, row, Int32(0))
                ptx.cp_async_16(sX + row * X_PITCH + piece * 16, source, select_(inside, Int32(16), Int32(0)))
        cute.arch.cp_async_commit_group()

    def row_scale(self, x_words: list, eps: Float32) -> Float32:
        """rr of a row, from the warp that holds its 1536 columns."""
        ways = [Float32(0.0)] * 4
        for words in x_words:
            for i, value in enumerate(widen(words)):
                ways[i % 4] = fma_rn(value, value, ways[i % 4])
        total = add_rn(add_rn(ways[0], ways[1]), add_rn(ways[2], ways[3]))
        for offset in (16, 8, 4, 2, 1):
            total = add_rn(total, cute.arch.shuffle_sync_bfly(total, offset))
        return device.rstd(total, eps)

    @cute.jit
    def normalise(self, w_words: tuple, rows: Int32, sX: Int32, sRr: Int32):
        """x̂ in place of x; each thread the pieces that it copied itself. All of it, and W_UK, is there on return."""
        thread, _, _ = cute.arch.thread_idx()
        piece, first = thread % (OWNERS // WARPS), thread // (OWNERS // WARPS)
        cute.arch.cp_async_wait_group(0)
        w = widen(w_words)
        if thread < OWNERS:
            # A loop, not straight code: each instruction would be fetched for one use.
            for start in cutlass.range(first, rows, ABREAST * WARPS, unroll=1):
                # Of these the last may be beyond ``rows``: nothing comes of it.
                own = [start + i * WARPS for i in range(ABREAST)]
                scales = [ptx.ld_b32("shared", sRr + row * 4, Float32) for row in own]
                where = [sX + row * X_PITCH + piece * 16 for row in own]
                for address, rr, words in zip(where, scales, [ptx.ld_v4("shared", a) for a in where], strict=True):
                    normal = [mul_rn(mul_rn(v, rr), g) for v, g in zip(widen(words), w, strict=True)]
                    ptx.st_v4("shared", address, pack(normal))
        cute.arch.sync_threads()

    @cute.jit
    def multiply(self, q_b: list, rank: Int32, sX: Int32, sPart: Int32, barrier: cute.Pointer):
        """This CTA's columns of x̂ times the warp's 24 rows of Q_B, to CTA ``warp``."""
        tiles = self.config.tiles
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        size = cutlass.const_expr(N_TILES * FRAGMENT)  # of a tile's sums
        target = ptx.mapa(sPart + rank * (tiles * size) + lane * 16, warp)
        counter = ptx.mapa(barrier.toint(), warp)
        for tile in cutlass.range(tiles, unroll=1):
            x = sX + (tile * TILE + lane // 4) * X_PITCH + lane % 4 * 16
            sums = [[Float32(0.0)] * 4 for _ in range(N_TILES)]
            for block in cutlass.range_constexpr(BLOCKS):
                upper = ptx.ld_v4("shared", x + block * 64)
                lower = ptx.ld_v4("shared", x + 8 * X_PITCH + block * 64)
                for half in (0, 2):
                    a = [upper[half], lower[half], upper[half + 1], lower[half + 1]]
                    for n in cutlass.range_constexpr(N_TILES):
                        b = q_b[n][block]
                        sums[n] = list(ptx.mma_sync(FORM, a, [b[half], b[half + 1]], sums[n]))
            for n in cutlass.range_constexpr(N_TILES):
                ptx.st_async_v4(target + tile * size + n * FRAGMENT, sums[n], counter)

    @cute.jit
    def add_parts(
        self,
        out: Int64,
        request_bytes: Int32,
        rank: Int32,
        rows: Int32,
        scale: Float32,
        sPart: Int32,
        sQ: Int32,
        barrier: cute.Pointer,
        shared_round: cutlass.Constexpr,
    ):
        """q of this CTA's 24 rows of Q_B and all requests; a warp takes an m16n8 tile at a time."""
        tiles = cutlass.const_expr(self.config.tiles)
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        for unit in cutlass.range(warp, N_TILES * tiles, WARPS, unroll=1):
            n, tile = unit % N_TILES, unit // N_TILES
            parts = [
                ptx.ld_v4("shared", sPart + (k * N_TILES * tiles + unit) * FRAGMENT + lane * 16, Float32)
                for k in range(CTAS)
            ]
            q = pack([device.chain([Float32(0.0), *part]) for part in zip(*parts, strict=True)])
            eight = rank * N_TILES + n  # which 8 of the head's 192 rows
            if eight < NOPE // 8:
                ptx.st_v2("shared", sQ + (eight * tiles + tile) * (FRAGMENT // 2) + lane * 8, q)
            else:
                row, word = self.to_words([mul_rn(x, scale) for x in widen(q)], lane)
                row += tile * TILE
                if row < rows:
                    offset = LATENT - NOPE + eight * 8 + lane % 4 // 2 * 4
                    device.put(out, request_bytes, row, offset, [word], shared_round)
        ptx.fence_proxy_async_shared()
        cute.arch.sync_threads()  # all of sPart has been read, all of the own q written
        if thread < CTAS and thread != rank and rank * N_TILES < NOPE // 8:
            own = sQ + rank * (N_TILES * tiles * FRAGMENT // 2)
            counter = ptx.mapa(barrier.toint(), thread)
            ptx.bulk_copy_to_cluster(ptx.mapa(own, thread), own, self.own_q_bytes(rank), counter)

    @cute.jit
    def absorb(
        self,
        out: Int64,
        request_bytes: Int32,
        rank: Int32,
        rows: Int32,
        scale: Float32,
        sUk: Int32,
        sQ: Int32,
        sOut: Int32,
        barrier: cute.Pointer,
        shared_round: cutlass.Constexpr,
    ):
        """This CTA's 64 latent columns of all requests."""
        tiles = self.config.tiles
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        uk = sUk + lane * UK_PITCH + warp * 16
        b = [word for p in range(0, NOPE, 32) for word in ptx.ldmatrix_x4_trans(uk + p * UK_PITCH)]
        ptx.mbarrier_spin(barrier.toint(), 0)
        cute.arch.cluster_arrive_relaxed()
        sums = [[Float32(0.0)] * 4 for _ in range(tiles)]  # all tiles at once: each chain waits for its last MMA
        for s in cutlass.range_constexpr(NOPE // 16):
            for tile in cutlass.range_constexpr(tiles):
                q = sQ + (2 * s * tiles + tile) * (FRAGMENT // 2) + lane * 8
                a = [*ptx.ld_v2("shared", q), *ptx.ld_v2("shared", q + tiles * (FRAGMENT // 2))]
                sums[tile] = list(ptx.mma_sync(FORM, a, b[2 * s : 2 * s + 2], sums[tile]))
        for tile in cutlass.range_constexpr(tiles):
            row, word = self.to_words([mul_rn(x, scale) for x in widen(pack(sums[tile]))], lane)
            ptx.st_b32("shared", sOut + (tile * TILE + row) * COLUMNS + warp * 8 + lane % 4 // 2 * 4, word)
        cute.arch.sync_threads()
        row, piece = thread // 4, thread % 4
        if row < rows and row < tiles * TILE:
            words = ptx.ld_v4("shared", sOut + row * COLUMNS + piece * 16)
            device.put(out, request_bytes, row, rank * COLUMNS + piece * 16, list(words), shared_round)

    def to_words(self, values: list, lane: Int32) -> tuple:
        """A C fragment as e4m3: the row, 0 … 15, and the word of four columns that this lane has.

        Neighbours share four columns of rows g and g + 8: the even lane takes row g, the odd one row g + 8.
        """
        upper, lower = ptx.cvt_e4m3x2(*values[:2]), ptx.cvt_e4m3x2(*values[2:])
        even = lane % 2 == 0
        other = Int32(cute.arch.shuffle_sync_bfly(select_(even, lower, upper), 1))
        word = select_(even, upper | (other << 16), other | (lower << 16))
        return lane // 4 + select_(even, Int32(0), Int32(8)), word


def groups_for(heads: int, rows: int) -> tuple[int, int]:
    """Groups of requests and tiles a group for B = ``rows``: as many groups as keep 8 CTAs a cluster on 132 SMs."""
    tiles = -(-rows // TILE)
    groups = min(tiles, max(1, (SMS // CTAS - 1) // heads))
    tiles = -(-tiles // groups)
    return -(-rows // (tiles * TILE)), tiles


def compile_variant(config: Config, options: str = ""):
    """The kernel of a configuration, for any heads, B, pitch and cache; needs no GPU."""
    numbers = (Int64(0), Int64(0), Int32(1), Int32(1), Int32(1), Float32(0.0), Int32(0))
    arguments = ([Int64(0)] * len(NAMES), dcp.stand_in(config.dcp), *numbers)
    return runtime.compile_kernel(
        ("mla_query tiled", config, options), lambda: Tiled(config), *arguments, options=options
    )
