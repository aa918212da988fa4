"""The recurrence: a warp carries 16 rows of V of the state through the chunks (docs/kda.md, 9–12).

The state stays in registers as the C fragments of 16 n-tiles [16 rows of V, 8 channels]; packed two and two they are
the A fragments of the products with K⁺ and Q⁺. v arrives by cp.async in the warp's own patches, all but one of them
ahead; o leaves through a patch of its own. A step reads its stage, then arrives on the owner's ``empty``.
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
ROWS = 16  # of V, a warp


def widened_pair(words: list) -> list:
    return [(ptx.bf16_lo(word), ptx.bf16_hi(word)) for word in words]


def pack_c(tiles: list) -> list:
    """C fragments of n-tiles as bf16 words; those of two neighbours are an A fragment."""
    return [ptx.cvt_bf16x2(c[2 * half], c[2 * half + 1]) for c in tiles for half in range(2)]


def clear(state: cute.Tensor):
    for i in range(4 * TILES):
        state[i] = Float32(0.0)


@cute.jit
def load_state(state: cute.Tensor, address: Int64, wide: Int32):
    """``address``: of the lane's row g and columns 2t of its warp's rows, 0 for zeros; ``wide`` 1 for fp32, 0 bf16."""
    clear(state)
    if address != 0:
        if wide != 0:
            for i in cutlass.range_constexpr(2 * TILES):
                row, tile = i % 2 * 8, i // 2
                pair = ptx.ld_v2("global", address + (row * D + tile * 8) * 4, Float32)
                state[2 * i], state[2 * i + 1] = pair
        else:
            for i in cutlass.range_constexpr(2 * TILES):
                row, tile = i % 2 * 8, i // 2
                word = ptx.ld_b32("global", address + (row * D + tile * 8) * 2)
                state[2 * i], state[2 * i + 1] = ptx.bf16_lo(word), ptx.bf16_hi(word)


@cute.jit
def store_state(state: cute.Tensor, address: Int64, wide: Int32):
    """The inverse of ``load_state``; nothing is stored at 0."""
    if address != 0:
        if wide != 0:
            for i in cutlass.range_constexpr(2 * TILES):
                row, tile = i % 2 * 8, i // 2
                ptx.st_v2("global", address + (row * D + tile * 8) * 4, [state[2 * i], state[2 * i + 1]])
        else:
            for i in cutlass.range_constexpr(2 * TILES):
                row, tile = i % 2 * 8, i // 2
                word = ptx.cvt_bf16x2(state[2 * i], state[2 * i + 1])
                ptx.st_b32("global", address + (row * D + tile * 8) * 2, word)


def fetch_values(config, work: dict, patches: Int32, chunk: Int32, lane: Int32):
    """Begin to copy a chunk's v, zeros beyond the end; one group."""
    token, half = lane // 2, lane % 2
    index, last = chunk * CHUNK + token, work["tokens"] - 1
    inside = index <= last
    source = ptx.mad_wide(select_(inside, index, last), work["v_pitch"], work["v"]) + half * 16
    patch = patches + chunk % config.values * layout.PATCH_BYTES
    ptx.cp_async_16(patch + layout.patch_row(token, half), source, select_(inside, Int32(16), Int32(0)))
    cute.arch.cp_async_commit_group()


def multiply(operand: Int32, state_words: list, blocks: range, sums: list) -> list:
    """sums [V, token] of two n-tiles plus S_b times the operand's blocks, ascending."""
    for block in blocks:
        b = list(ptx.ldmatrix_x4(layout.block_of(operand, block)))
        a = state_words[4 * block : 4 * block + 4]
        sums = [list(ptx.mma_sync(FORM, a, b[2 * n : 2 * n + 2], sums[n])) for n in range(2)]
    return sums


def zeros() -> list:
    return [[Float32(0.0)] * 4 for _ in range(2)]


def step(state: cute.Tensor, stage: Int32, patch: Int32, lane: Int32) -> list:
    """One chunk: the new state in place; returns o as C fragments of two n-tiles, packed."""
    s = [[state[4 * tile + c] for c in range(4)] for tile in range(TILES)]
    state_words = pack_c(s)
    by_token = stage + layout.rows_by_8(lane)
    lower, upper = zeros(), zeros()
    for block in range(BLOCKS // 2):
        lower = multiply(by_token + layout.K_PLUS, state_words, range(block, block + 1), lower)
        upper = multiply(by_token + layout.K_PLUS, state_words, range(block + 4, block + 5), upper)
    o = multiply(by_token + layout.Q_PLUS, state_words, range(4), zeros())

    v = widened_pair(list(ptx.ldmatrix_x4_trans(patch + layout.patch_rows_by_8(lane))))
    t_words = list(ptx.ld_v4("shared", stage + layout.T_AT + lane * 16))
    w = [[add_rn(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(lower, upper, strict=True)]
    r = [[sub_rn(v[2 * n + c // 2][c % 2], w[n][c]) for c in range(4)] for n in range(2)]
    r_words = pack_c(r)
    u = [list(ptx.mma_sync(FORM, r_words, t_words[2 * n : 2 * n + 2], zeros()[0])) for n in range(2)]
    o = multiply(by_token + layout.Q_PLUS, state_words, range(4, 8), o)
    u_words = pack_c(u)

    by_channel = stage + layout.rows_by_16(lane)
    for block in range(BLOCKS):
        decays = ptx.ld_v4("shared", stage + layout.DECAY_AT + layout.decay_of_block(lane, block), Float32)
        parts = [
            list(ptx.ldmatrix_x4_trans(layout.block_of(by_channel + at, block))) for at in (layout.K_LOW, layout.K_HIGH)
        ]
        for n in range(2):
            tile = 2 * block + n
            new = [mul_rn(s[tile][c], decays[2 * n + c % 2]) for c in range(4)]
            for b in parts:
                new = list(ptx.mma_sync(FORM, u_words, b[2 * n : 2 * n + 2], new))
            for c in range(4):
                state[4 * tile + c] = new[c]
    p_words = list(ptx.ld_v4("shared", stage + layout.P_AT + lane * 16))
    return pack_c([list(ptx.mma_sync(FORM, u_words, p_words[2 * n : 2 * n + 2], o[n])) for n in range(2)])


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
    row = rank * (D // config.cluster) + warp * ROWS
    work = dict(work)
    for name in ("v", "out"):
        work[name] = work[name] + row * 2
    patches = ring["patches"] + warp * ((config.values + 1) * layout.PATCH_BYTES)
    out_patch = patches + config.values * layout.PATCH_BYTES
    state = cute.make_rmem_tensor(4 * TILES, Float32)
    element = Int64((row + lane // 4) * D + lane % 4 * 2)
    wide = work["wide"]
    bytes_ = element * select_(wide != 0, Int64(4), Int64(2))
    load_state(state, select_(work["initial"] != 0, work["initial"] + bytes_, Int64(0)), wide)
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
        patch = patches + chunk % config.values * layout.PATCH_BYTES
        o_words = step(state, stage, patch, lane)
        release(config, ring["empty"] + slot * 8, chunk, lane)
        ptx.stmatrix_x4_trans(out_patch + layout.patch_rows_by_8(lane), o_words)
        cute.arch.sync_warp()
        words = ptx.ld_v4("shared", out_patch + layout.patch_row(token, half))
        index = chunk * CHUNK + token
        if index < work["tokens"]:
            ptx.st_v4("global", ptx.mad_wide(index, work["out_pitch"], work["out"]) + half * 16, list(words))
    store_state(state, select_(work["final"] != 0, work["final"] + bytes_, Int64(0)), wide)
