"""The recurrence: a warp carries one or two slabs of 16 rows of V of the state through the chunks (docs/kda.md, 9–12).

A slab stays in registers as the C fragments of 16 n-tiles [16 rows of V, 8 channels]; packed two and two they are the A
fragments of the products with K⁺ and Q⁺. Two slabs share what is read of the stage. v arrives by cp.async in the warp's
own patches, those of all chunks but one ahead; o leaves through patches of its own. A step reads its stage, then
arrives on the owner's ``empty``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cute_impl import ptx
from cute_impl.kda import layout
from cute_impl.kda.layout import CHUNK, D
from cute_impl.kda.prepare import FORM
from cute_impl.ptx import add_rn, mul_rn, sub_rn

TILES = D // 8
BLOCKS = D // 16
SLAB = 16  # rows of V
OPERATORS, OUTPUTS = "operators", "outputs"  # the parts of a scan over segments (``scan``)
ELEMS, PAIRS = 4 * TILES, 2 * TILES  # of a slab, a lane


def widened_pair(words: list) -> list:
    return [(ptx.bf16_lo(word), ptx.bf16_hi(word)) for word in words]


def pack_c(tiles: list) -> list:
    """C fragments of n-tiles as bf16 words; those of two neighbours are an A fragment."""
    return [ptx.cvt_bf16x2(c[2 * half], c[2 * half + 1]) for c in tiles for half in range(2)]


def clear(state: cute.Tensor, elems: int):
    for i in range(elems):
        state[i] = Float32(0.0)


def place(slab: int, pair: int) -> int:
    """The element of [V, K] that is first in a pair of a lane's slab, from that of its first pair."""
    tile, half = pair // 2, pair % 2
    return (slab * SLAB + half * 8) * D + tile * 8


@cute.jit
def load_state(config: cutlass.Constexpr, state: cute.Tensor, address: Int64, wide: Int32):
    """``address``: of the lane's row g and columns 2t of its warp's rows, 0 for zeros; ``wide`` 1 for fp32, 0 bf16."""
    clear(state, config.slabs * ELEMS)
    if address != 0:
        for slab in cutlass.range_constexpr(config.slabs):
            if wide != 0:
                for i in cutlass.range_constexpr(PAIRS):
                    at = slab * ELEMS + 2 * i
                    state[at], state[at + 1] = ptx.ld_v2("global", address + place(slab, i) * 4, Float32)
            else:
                for i in cutlass.range_constexpr(PAIRS):
                    at = slab * ELEMS + 2 * i
                    word = ptx.ld_b32("global", address + place(slab, i) * 2)
                    state[at], state[at + 1] = ptx.bf16_lo(word), ptx.bf16_hi(word)


def unit_rows(slabs: int, state: cute.Tensor, row: Int32, column: Int32):
    """The identity in place of what ``load_state`` reads for the lane's ``row`` and ``column``."""
    for i in range(slabs * PAIRS):
        slab, tile, half = i // PAIRS, i % PAIRS // 2, i % 2
        for c in range(2):
            one = row + (slab * SLAB + half * 8) == column + (tile * 8 + c)
            state[2 * i + c] = select_(one, Float32(1.0), Float32(0.0))


@cute.jit
def store_state(config: cutlass.Constexpr, state: cute.Tensor, address: Int64, wide: Int32):
    """The inverse of ``load_state``; nothing is stored at 0."""
    if address != 0:
        for slab in cutlass.range_constexpr(config.slabs):
            if wide != 0:
                for i in cutlass.range_constexpr(PAIRS):
                    at = slab * ELEMS + 2 * i
                    ptx.st_v2("global", address + place(slab, i) * 4, [state[at], state[at + 1]])
            else:
                for i in cutlass.range_constexpr(PAIRS):
                    at = slab * ELEMS + 2 * i
                    word = ptx.cvt_bf16x2(state[at], state[at + 1])
                    ptx.st_b32("global", address + place(slab, i) * 2, word)


def fetch_values(config, work: dict, patches: Int32, chunk: Int32, lane: Int32):
    """Begin to copy a chunk's v, zeros beyond the end; one group."""
    token, half = lane // 2, lane % 2
    index, last = chunk * CHUNK + token, work["v_tokens"] - 1
    inside = index <= last
    source = ptx.mad_wide(select_(inside, index, last), work["v_pitch"], work["v"]) + half * 16
    patch = patches + chunk % config.values * config.patch_bytes + layout.patch_row(token, half)
    size = select_(inside, Int32(16), Int32(0))
    for slab in range(config.slabs):
        ptx.cp_async_16(patch + slab * layout.PATCH_BYTES, source + slab * (2 * SLAB), size)
    cute.arch.cp_async_commit_group()


def products(a: list, b: list, sums: list) -> list:
    """For each slab: the sums [V, …] of two n-tiles plus its fragment of a times b, one instruction each."""
    return [
        [list(ptx.mma_sync(FORM, words, b[2 * n : 2 * n + 2], old[n])) for n in range(2)]
        for words, old in zip(a, sums, strict=True)
    ]


def zeros(slabs: int) -> list:
    return [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(slabs)]


def step(slabs: int, state: cute.Tensor, stage: Int32, patch: Int32, lane: Int32) -> list:
    """One chunk: the new state in place; returns o as C fragments of two n-tiles, packed, for each slab."""
    s = [[[state[m * ELEMS + 4 * tile + c] for c in range(4)] for tile in range(TILES)] for m in range(slabs)]
    by_token = stage + layout.rows_by_8(lane)

    def multiply(operand: int, words: list, block: int, sums: list) -> list:
        return products(words, list(ptx.ldmatrix_x4(layout.block_of(by_token + operand, block))), sums)

    def state_words(block: int) -> list:
        return [pack_c(tiles[2 * block : 2 * block + 2]) for tiles in s]

    lower, upper, o = (zeros(slabs) for _ in range(3))
    first, second = [], []  # halves of S_b by block
    for block in range(BLOCKS // 2):
        first.append(state_words(block))
        second.append(state_words(block + 4))
        lower = multiply(layout.K_PLUS, first[block], block, lower)
        upper = multiply(layout.K_PLUS, second[block], block + 4, upper)
        if slabs > 1:  # no registers to keep the first half
            o = multiply(layout.Q_PLUS, first[block], block, o)
    if slabs == 1:
        for block in range(BLOCKS // 2):
            o = multiply(layout.Q_PLUS, first[block], block, o)

    t_words = list(ptx.ld_v4("shared", stage + layout.T_AT + lane * 16))
    b = ptx.ld_v4("shared", stage + layout.B_AT + lane % 4 * 16, Float32)
    r_words = []
    for m in range(slabs):
        v = widened_pair(list(ptx.ldmatrix_x4_trans(patch + m * layout.PATCH_BYTES + layout.patch_rows_by_8(lane))))
        w = [[add_rn(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(lower[m], upper[m], strict=True)]
        r = [[mul_rn(b[2 * n + c % 2], sub_rn(v[2 * n + c // 2][c % 2], w[n][c])) for c in range(4)] for n in range(2)]
        r_words.append(pack_c(r))
    u = products(r_words, t_words, zeros(slabs))
    for block in range(BLOCKS // 2):
        o = multiply(layout.Q_PLUS, second[block], block + 4, o)
    u_words = [pack_c(tiles) for tiles in u]

    by_channel = stage + layout.rows_by_16(lane)
    for block in range(BLOCKS):
        decays = ptx.ld_v4("shared", stage + layout.DECAY_AT + layout.decay_of_block(lane, block), Float32)
        new = [
            [[mul_rn(tiles[2 * block + n][c], decays[2 * n + c % 2]) for c in range(4)] for n in range(2)]
            for tiles in s
        ]
        for at in (layout.K_LOW, layout.K_HIGH):
            new = products(u_words, list(ptx.ldmatrix_x4_trans(layout.block_of(by_channel + at, block))), new)
        for m in range(slabs):
            for i in range(8):
                state[m * ELEMS + 8 * block + i] = new[m][i // 4][i % 4]
    p_words = list(ptx.ld_v4("shared", stage + layout.P_AT + lane * 16))
    return [pack_c(tiles) for tiles in products(u_words, p_words, o)]


@cute.jit
def release(config: cutlass.Constexpr, empty: Int32, chunk: Int32, lane: Int32):
    """The warp has read the stage: to the CTA that will fill it again."""
    cute.arch.sync_warp()
    if lane == 0:
        if cutlass.const_expr(config.cluster > 1):
            ptx.mbarrier_arrive_cluster(ptx.mapa(empty, chunk % config.cluster))
        else:
            ptx.mbarrier_arrive(empty)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    work: dict,
    ring: dict,
    rank: Int32,
    warp: Int32,
    lane: Int32,
):
    """All chunks for the rows of V of a warp."""
    row = rank * (D // config.cluster) + warp * (config.slabs * SLAB)
    work = dict(work)
    for name in ("v", "out"):
        work[name] = work[name] + row * 2
    patches = ring["patches"] + warp * ((config.values + 1) * config.patch_bytes)
    out_patch = patches + config.values * config.patch_bytes
    state = cute.make_rmem_tensor(config.slabs * ELEMS, Float32)
    element = Int64((row + lane // 4) * D + lane % 4 * 2)
    wide = work["initial_wide"]
    bytes_ = element * select_(wide != 0, Int64(4), Int64(2))
    if cutlass.const_expr(config.part == OUTPUTS):
        cute.arch.griddepcontrol_wait()
    load_state(config, state, select_(work["initial"] != 0, work["initial"] + bytes_, Int64(0)), wide)
    if cutlass.const_expr(config.part == OPERATORS):
        if work["transfer"] != 0:
            unit_rows(config.slabs, state, row + lane // 4, lane % 4 * 2)
    if work["chunks"] > 0:
        for i in cutlass.range_constexpr(config.values - 1):
            fetch_values(config, work, patches, Int32(i), lane)
    token, half = lane // 2, lane % 2
    for chunk in cutlass.range(0, work["chunks"], 1, unroll=1):
        slot = chunk % config.stages
        stage = ring["stages"] + slot * layout.STAGE_BYTES
        cute.arch.cp_async_wait_group(config.values - 2)
        cute.arch.sync_warp()
        fetch_values(config, work, patches, chunk + (config.values - 1), lane)
        ptx.mbarrier_wait(ring["full"] + slot * 8, chunk // config.stages % 2)
        patch = patches + chunk % config.values * config.patch_bytes
        o_words = step(config.slabs, state, stage, patch, lane)
        release(config, ring["empty"] + slot * 8, chunk, lane)
        if cutlass.const_expr(config.part != OPERATORS):
            for slab in cutlass.range_constexpr(config.slabs):
                row_at = out_patch + slab * layout.PATCH_BYTES + layout.patch_rows_by_8(lane)
                ptx.stmatrix_x4_trans(row_at, o_words[slab])
            cute.arch.sync_warp()
            index = chunk * CHUNK + token
            target = ptx.mad_wide(index, work["out_pitch"], work["out"]) + half * 16
            for slab in cutlass.range_constexpr(config.slabs):
                words = ptx.ld_v4("shared", out_patch + slab * layout.PATCH_BYTES + layout.patch_row(token, half))
                if index < work["tokens"]:
                    ptx.st_v4("global", target + slab * (2 * SLAB), list(words))
    wide = work["wide"]
    bytes_ = element * select_(wide != 0, Int64(4), Int64(2))
    store_state(config, state, select_(work["final"] != 0, work["final"] + bytes_, Int64(0)), wide)
