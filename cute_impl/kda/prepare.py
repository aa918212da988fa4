"""What does not depend on the state: a team of two warps turns a chunk's q, k, g, beta into a stage (docs/kda.md, 1–8).

Thread u of a team's 64 owns channels 2u, 2u + 1, a 32-bit word a token and tensor. q, k and g of the team's next chunk
are copied to its scratch by cp.async, 16 bytes a thread and step, as soon as those of the last have been read; mbarrier
``arrived`` counts the threads whose copies are there. Four barriers of the team a chunk:
  sums      both warps' sums of squares are written
  operands  K⁺, Q⁺, K⁻'s parts are written; then warp 0 makes κ = K⁺ K⁻ᵀ, warp 1 π = Q⁺ K⁻ᵀ
  scores    both have read K⁻; then Kᵉ takes its place, warp 0 solves for T, warp 1 masks P
  stage     all is written; then warp 1 tells the consumers, and copies the stage to the other CTAs of the cluster
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cute_impl import ptx
from cute_impl.attn_res.cluster7 import fold
from cute_impl.kda import layout
from cute_impl.kda.layout import CHUNK, D
from cute_impl.ptx import add_rn, ex2_approx_ftz, fma_rn, mul_rn, rcp_approx_ftz, sub_rn

FORM = "m16n8k16.row.col.f32.bf16.bf16.f32"
TEAM_THREADS = 64
LOG2_E = math.log2(math.e)
EPS = 1e-6


def gate_numbers(a_log: Float32, lower_bound: Float32):
    """a and the bound of a head in log2 units."""
    a = mul_rn(ex2_approx_ftz(mul_rn(a_log, Float32(LOG2_E))), Float32(-LOG2_E))
    return a, mul_rn(lower_bound, Float32(LOG2_E))


def sigmoid(logit: Float32) -> Float32:
    return rcp_approx_ftz(add_rn(Float32(1.0), ex2_approx_ftz(mul_rn(logit, Float32(-LOG2_E)))))


def gate(g: Float32, bias: Float32, a: Float32, bound: Float32) -> Float32:
    """γ of a channel."""
    return mul_rn(bound, rcp_approx_ftz(add_rn(Float32(1.0), ex2_approx_ftz(mul_rn(a, add_rn(g, bias))))))


def clamp_token(token: Int32, work: dict) -> Int32:
    last = work["tokens"] - 1
    return select_(token < last, token, last)


def fetch(work: dict, logit: cute.Tensor, raw: Int32, arrived: Int32, chunk: Int32, u: Int32):
    """Begin to copy a chunk's q, k, g; the logit of token u mod 16. Beyond the end: the last token.

    16 threads take a row of 256 bytes, the team 4 rows at once.
    """
    row, piece = u // 16, u % 16 * 16
    for first in range(0, CHUNK, 4):
        token = clamp_token(chunk * CHUNK + first + row, work)
        for tensor, name in enumerate(layout.RAW):
            source = ptx.mad_wide(token, work[f"{name}_pitch"], work[name]) + piece
            target = raw + (tensor * CHUNK + first + row) * layout.ROW_BYTES + piece
            ptx.cp_async_16(target, source)
    ptx.cp_async_arrive(arrived)
    token = clamp_token(chunk * CHUNK + u % CHUNK, work)
    logit[0] = ptx.ld_bf16("global", ptx.mad_wide(token, work["beta_pitch"], work["beta"]))


def raw_words(raw: Int32, name: str, u: Int32) -> list:
    """A tensor's word of thread u in each token."""
    at = raw + layout.RAW.index(name) * layout.OPERAND_BYTES + u * 4
    return [ptx.ld_b32("shared", at + i * layout.ROW_BYTES) for i in range(CHUNK)]


def sum_of_squares(words: list, lane: Int32) -> Float32:
    """Of 16 tokens over the warp's channels; lanes 2i, 2i + 1 return that of token i."""
    pairs = [(ptx.bf16_lo(word), ptx.bf16_hi(word)) for word in words]
    return fold([fma_rn(x1, x1, mul_rn(x0, x0)) for x0, x1 in pairs], lane)


def write_roots(
    q: list, k: list, left: Int32, scale: Float32, scratch: Int32, warp: Int32, lane: Int32, barrier: Int32
):
    """(r_q, r_k) of each token, 0 from token ``left`` on, for the warp to read; returns where."""
    odd = lane % 2 != 0
    part = select_(odd, sum_of_squares(k, lane), sum_of_squares(q, lane))
    sums = scratch + layout.SUMS_AT + lane * 4
    ptx.st_b32("shared", sums + warp * 128, part)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=TEAM_THREADS)
    lower, upper = ptx.ld_b32("shared", sums, Float32), ptx.ld_b32("shared", sums + 128, Float32)
    root = ptx.rsqrt_approx_ftz(add_rn(add_rn(lower, upper), Float32(EPS)))
    roots = scratch + layout.ROOTS_AT + warp * 128
    root = select_(odd, root, mul_rn(root, scale))
    ptx.st_b32("shared", roots + lane * 4, select_(lane // 2 < left, root, Float32(0.0)))
    cute.arch.sync_warp()
    return roots


def operands(q: list, k: list, g: list, roots: Int32, left: Int32, gates: dict, stage: Int32, u: Int32):
    """Write K⁺, Q⁺ and K⁻'s parts; returns k⁻ in fp32 and the decay of the chunk, two channels each, and the rows'
    addresses.

    Tokens from ``left`` on hold the words of the last one. Their roots are 0, and 0 instead of the bound makes γ = 0:
    where the product is NaN instead, the last token has made the sum NaN already.
    """
    rows = [layout.word_of_channels(u, token) - token * layout.ROW_BYTES + stage for token in range(8)]
    total: list = []
    k_minus: list = []
    up: list = []
    pairs: list = []
    for i in range(CHUNK):
        up = []
        bound = select_(i < left, gates["bound"], Float32(0.0))
        if i % 2 == 0:
            pairs = list(ptx.ld_v4("shared", roots + i * 8, Float32))
        r_q, r_k = pairs[i % 2 * 2 : i % 2 * 2 + 2]
        halves = [(ptx.bf16_lo, gates["bias"][0]), (ptx.bf16_hi, gates["bias"][1])]
        q_plus, k_plus, minus = [], [], []
        for c, (half, bias) in enumerate(halves):
            gamma = gate(half(g[i]), bias, gates["a"], bound)
            if i == 0:
                total.append(gamma)
            else:
                total[c] = add_rn(total[c], gamma)
            e_plus, e_minus = ex2_approx_ftz(total[c]), ex2_approx_ftz(-total[c])
            k_hat = mul_rn(half(k[i]), r_k)
            q_plus.append(mul_rn(mul_rn(half(q[i]), r_q), e_plus))
            k_plus.append(mul_rn(k_hat, e_plus))
            minus.append(mul_rn(k_hat, e_minus))
            up.append(e_plus)
        where = rows[i % 8] + i * layout.ROW_BYTES
        for offset, pair in ((layout.K_PLUS, k_plus), (layout.Q_PLUS, q_plus)):
            ptx.st_b32("shared", where + offset, ptx.cvt_bf16x2(*pair))
        write_two_parts(minus, where + layout.K_MINUS_HIGH, where + layout.K_MINUS_LOW)
        k_minus.append(minus)
    return k_minus, up, rows


def write_two_parts(pair: list, high_at: Int32, low_at: Int32):
    """bf16 of a pair, and bf16 of what is left."""
    high = ptx.cvt_bf16x2(*pair)
    rest = [sub_rn(x, half(high)) for x, half in zip(pair, (ptx.bf16_lo, ptx.bf16_hi), strict=True)]
    ptx.st_b32("shared", high_at, high)
    ptx.st_b32("shared", low_at, ptx.cvt_bf16x2(*rest))


def end_operand(k_minus: list, decay: list, rows: list, stage: Int32, u: Int32):
    """Write Kᵉ in two parts, and the decay."""
    for i in range(CHUNK):
        pair = [mul_rn(k, d) for k, d in zip(k_minus[i], decay, strict=True)]
        where = rows[i % 8] + i * layout.ROW_BYTES
        write_two_parts(pair, where + layout.K_HIGH, where + layout.K_LOW)
    ptx.st_v2("shared", stage + layout.DECAY_AT + layout.decay_pair(u), decay)


def scores(stage: Int32, offset: Int32, lane: Int32) -> list:
    """The operand at ``offset`` times K⁻ᵀ: C fragments [i, j] of j = 0 … 7 and 8 … 15."""
    a_row = stage + offset + layout.rows_by_16(lane)
    b_row = stage + layout.rows_by_8(lane)
    sums = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
    for block in range(D // 16):
        a = list(ptx.ldmatrix_x4(layout.block_of(a_row, block)))
        for at in (layout.K_MINUS_LOW, layout.K_MINUS_HIGH):
            b = list(ptx.ldmatrix_x4(layout.block_of(b_row + at, block)))
            sums = [list(ptx.mma_sync(FORM, a, b[2 * n : 2 * n + 2], sums[n])) for n in range(2)]
    return sums


def solve(kappa: list, b: Float32, stage: Int32, scratch: Int32, lane: Int32):
    """T = (I + L)⁻¹ by substitution, and b; lane j and lane j + 16 have column j, b is that of token lane mod 16."""
    g, t = lane // 4, lane % 4
    minus_b = [-cute.arch.shuffle_sync(b, g), -cute.arch.shuffle_sync(b, g + 8)]
    # −L transposed: row j, column i. Of rows i = g nothing at j ≥ 8 is below the diagonal.
    column = scratch + layout.L_AT + t * (2 * layout.L_PITCH) + g * 4
    for n, half in ((0, 0), (0, 1), (1, 1)):
        for c in range(2):
            value = mul_rn(minus_b[half], kappa[n][2 * half + c])
            ptx.st_b32("shared", column + (8 * n + c) * layout.L_PITCH + half * 32, value)
    cute.arch.sync_warp()
    own = lane % CHUNK
    ptx.st_b32("shared", stage + layout.B_AT + layout.b_element(own), b)
    values = [select_(own == i, Float32(1.0), Float32(0.0)) for i in range(CHUNK)]
    for l in range(CHUNK - 1):
        first = (l + 1) // 4 * 4
        row = scratch + layout.L_AT + l * layout.L_PITCH
        minus_l = [x for i in range(first, CHUNK, 4) for x in ptx.ld_v4("shared", row + i * 4, Float32)]
        for i in range(l + 1, CHUNK):
            values[i] = fma_rn(minus_l[i - first], values[l], values[i])
    # Lanes 0 … 15 write i = 0 … 7, lanes 16 … 31 the others.
    upper = lane // CHUNK
    column = stage + layout.T_AT + layout.t_element(0, own) + upper * 8
    for i in range(0, 8, 2):
        pair = [select_(upper != 0, values[i + c + 8], values[i + c]) for c in range(2)]
        word = ptx.cvt_bf16x2(*pair)
        for c, half in enumerate((word, word >> 16)):
            ptx.st_b16("shared", column + layout.t_element(i + c, 0), half)


def mask(pi: list, stage: Int32, lane: Int32):
    """P: π on and below the diagonal."""
    g, j = lane // 4, lane % 4 * 2
    low, high = pi
    zero = Float32(0.0)

    def lower(pair: list) -> Int32:
        return ptx.cvt_bf16x2(select_(j <= g, pair[0], zero), select_(j + 1 <= g, pair[1], zero))

    words = [lower(low[:2]), Int32(0), ptx.cvt_bf16x2(*low[2:]), lower(high[2:])]
    ptx.st_v4("shared", stage + layout.P_AT + lane * 16, words)


@cute.jit
def publish(config: cutlass.Constexpr, stage: Int32, full: Int32, rank: Int32, warp: Int32, lane: Int32):
    """After the team's last barrier: the stage of this CTA and its copies are full."""
    if warp == 1 and lane < config.cluster:
        if lane == rank:
            ptx.mbarrier_arrive(full)
        else:
            remote = ptx.mapa(full, lane)
            ptx.mbarrier_arrive_expect_tx_cluster(remote, layout.STAGE_BYTES)
            ptx.bulk_copy_to_cluster(ptx.mapa(stage, lane), stage, layout.STAGE_BYTES, remote)


@cute.jit
def produce(
    config: cutlass.Constexpr,
    at: dict,
    work: dict,
    ring: dict,
    numbers: dict,
    rank: Int32,
    team: Int32,
    warp: Int32,
    lane: Int32,
):
    """A team's chunks rank + cluster · team, then every cluster · teams-th."""
    u = warp * 32 + lane
    barrier = team + 1
    scratch = ring["scratch"] + team * layout.SCRATCH_BYTES
    arrived = ring["arrived"] + team * 8
    a_log = ptx.ld_b32("global", at["A_log"] + Int64(work["head"]) * 4, Float32)
    a, bound = gate_numbers(a_log, numbers["lower_bound"])
    bias = ptx.ld_v2("global", at["dt_bias"] + Int64(work["head"]) * (4 * D) + u * 8, Float32)
    gates = {"a": a, "bound": bound, "bias": bias}
    logit = cute.make_rmem_tensor(1, Float32)
    first = rank + team * config.cluster
    step = config.cluster * config.teams
    if first < work["chunks"]:
        fetch(work, logit, scratch, arrived, first, u)
    for chunk in cutlass.range(first, work["chunks"], step, unroll=1):
        slot = chunk % config.stages
        stage = ring["stages"] + slot * layout.STAGE_BYTES
        left = work["tokens"] - chunk * CHUNK
        b = select_(lane % CHUNK < left, sigmoid(logit[0]), Float32(0.0))
        ptx.mbarrier_wait(arrived, chunk // step % 2)
        q, k = raw_words(scratch, "q", u), raw_words(scratch, "k", u)
        roots = write_roots(q, k, left, numbers["scale"], scratch, warp, lane, barrier)
        # The phase before the first is complete from the start.
        ptx.mbarrier_wait(ring["empty"] + slot * 8, chunk // config.stages % 2 ^ 1)
        k_minus, decay, rows = operands(q, k, raw_words(scratch, "g", u), roots, left, gates, stage, u)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=TEAM_THREADS)
        if chunk + step < work["chunks"]:
            fetch(work, logit, scratch, arrived, chunk + step, u)
        sums = scores(stage, warp * layout.OPERAND_BYTES, lane)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=TEAM_THREADS)
        end_operand(k_minus, decay, rows, stage, u)
        if warp == 0:
            solve(sums, b, stage, scratch, lane)
        else:
            mask(sums, stage, lane)
        if cutlass.const_expr(config.cluster > 1):
            ptx.fence_proxy_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=TEAM_THREADS)
        publish(config, stage, ring["full"] + slot * 8, rank, warp, lane)
