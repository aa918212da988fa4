"""AttnRes, schedules ``cluster7`` and ``cluster7_direct``: one cluster of 7 CTAs a token, 8 columns a thread.

D = 7168 columns: CTA rank r, thread t of 128 own columns (r · 128 + t) · 8 … + 7, one 16-byte access a row. Sources
x_0 … x_{nb−1} (rows of blocks) and x_nb = p, the new prefix; w = norm · query.

Three sums over the cluster at most, each an *exchange* with an mbarrier and a buffer of its own, used once:
  pre   ss_b = Σ x_b², dw_b = Σ x_b · w of the saved rows; depends on no predecessor          (nb > 0)
  post  ss = Σ p², dw = Σ p · w, and where the norm is the quad form mp = Σ mix · p, mm = Σ mix²
  norm  Σ r² of the mixture r                                                (final, cluster7_direct)
A warp folds its n values (``fold``: n values and 32 lanes are halved together), then sends each value to all 7 CTAs
by st.async, which counts bytes on the receiver's mbarrier. ``collect`` adds what arrived: 4 warps as a tree, 4 even
ranks in half the lanes, 3 odd ones in the other half.

Who waits for whom:
- Nothing is sent before all 7 CTAs have set up their mbarriers (cluster barrier, overlapped with the loads).
- A CTA ends when its last mbarrier has counted every byte, so nobody writes to a CTA that has gone; a sender need
  not stay, st.async takes its value from a register.
- Programmatic dependent launch: the successor may start at once (``early``); or once this CTA's saved rows have
  arrived, so that its loads do not compete with them; or, with one saved row at most and a delta tensor, behind the
  wait (``in_pairs``), so that only two launches overlap. ``starts_early`` has the choice that measured faster.
  Blocks, old prefix and weights are read before the wait: only a caller who promises that they are complete at
  launch (``all_but_delta_complete``) has the kernel launched so, any other an ordinary launch, which finds nothing
  to wait for. A delta tensor is read after it. With a mailbox the wait is the last thing, so that the completion of
  this kernel implies that of all before it.
- Hence writes after reads: behind a delta tensor every write follows the wait. With a mailbox prefix, aux,
  blocks and output of a token are written as soon as that token's row has been published, when the predecessor
  may still run: it must not read them after it published the row's last fragment.
- Mailbox fragments are read by ld.relaxed.sys (publishers may be peers over NVLink) and checked word by word: a
  16-byte store may arrive in pieces. They are re-armed by plain stores; who publishes the next row into the same
  fragments must be ordered behind this kernel.

Shared memory: 112 bytes a value (7 ranks · 4 warps · fp32), 8 bytes an exchange; at most 2256.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_impl import ptx, runtime
from cute_impl.ptx import add_rn, fma_rn, mul_rn

D = 7168
RANKS, THREADS, COLUMNS = 7, 128, 8
WARPS = THREADS // 32
ROW_BYTES = 2 * D
VALUE_BYTES = RANKS * WARPS * 4  # one value in an exchange's buffer
SENTINEL = -(1 << 31)  # the word 0x80000000: a fragment that holds it is not published
MAX_BLOCKS = 8
SCHEDULES = ("cluster7", "cluster7_direct")
LOG2_E = math.log2(math.e)
TENSORS = ("delta", "prefix", "blocks", "norm", "query", "gamma", "output", "status")


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time; the fields are the interface's parameters, ``aux`` the number of copies."""

    nb: int
    slots: int = 0
    has_delta: bool = True
    write: int = -1
    final: bool = False
    aux: int = 0
    schedule: str = "cluster7"

    @property
    def name(self) -> str:
        """Such as ``cluster7-nb3-slots2-replace-write1-final-aux0``."""
        flags = "" if self.has_delta else "-replace"
        flags += f"-write{self.write}" if self.write >= 0 else ""
        flags += "-final" if self.final else ""
        return f"{self.schedule}-nb{self.nb}-slots{self.slots}{flags}-aux{self.aux}"

    @property
    def own_norm(self) -> bool:
        """Whether the mixture's norm is summed in an exchange of its own."""
        return self.nb > 0 and (self.final or self.schedule == "cluster7_direct")

    @property
    def in_pairs(self) -> bool:
        """Whether a successor that does not start early starts behind the wait."""
        return self.nb <= 1 and not self.slots

    @property
    def exchanges(self) -> tuple[int, ...]:
        """Values in each exchange, in the order of use."""
        if self.nb == 0:
            return (1,)
        return (2 * self.nb, 2, 1) if self.own_norm else (2 * self.nb, 4)


def exp(x: Float32) -> Float32:
    return ptx.ex2_approx_ftz(mul_rn(x, Float32(LOG2_E)))


def rstd(total: Float32, eps: Float32) -> Float32:
    return ptx.rsqrt_approx_ftz(fma_rn(total, Float32(1 / D), eps))


def dot8(a: list, b: list) -> Float32:
    """A chain of FMAs from 0 over the thread's columns."""
    total = Float32(0.0)
    for x, y in zip(a, b, strict=True):
        total = fma_rn(x, y, total)
    return total


def widen(words: Sequence) -> list:
    """8 fp32 from 4 words of two bf16."""
    return [half(word) for word in words for half in (ptx.bf16_lo, ptx.bf16_hi)]


def pack(values: list) -> list:
    """8 fp32 rounded to bf16, as 4 words."""
    return [ptx.cvt_bf16x2(lo, hi) for lo, hi in zip(values[::2], values[1::2], strict=True)]


def lanes_a_value(n: int) -> int:
    """Lanes that hold the same value after ``fold`` of n values."""
    return 32 >> max(0, (n - 1).bit_length())


def fold(values: list, lane: Int32) -> Float32:
    """The warp's sums of n ≤ 32 values; lane l returns that of value l // lanes_a_value(n), 0 beyond n.

    For each value this is the butterfly with offsets 16, 8, 4, 2, 1: while there are several values, lanes that meet
    split them, so that each addition is made once.
    """
    values = values + [Float32(0.0)] * (32 // lanes_a_value(len(values)) - len(values))
    for offset in (16, 8, 4, 2, 1):
        half = len(values) // 2
        if half:
            upper = (lane & offset) != 0
            split = list(zip(values[:half], values[half:], strict=True))
            kept = [select_(upper, hi, lo) for lo, hi in split]
            sent = [select_(upper, lo, hi) for lo, hi in split]
        else:
            kept = sent = values
        values = [add_rn(k, cute.arch.shuffle_sync_bfly(s, offset)) for k, s in zip(kept, sent, strict=True)]
    return values[0]


class Cluster7:
    """The kernel of one ``Config``; ``names`` orders the addresses and strides it takes."""

    def __init__(self, config: Config):
        self.config = config
        self.names = (*TENSORS, *(f"aux{i}" for i in range(config.aux)))

    @cute.jit
    def __call__(
        self,
        addresses: list,
        strides: list,
        tokens: Int32,
        eps: Float32,
        out_eps: Float32,
        polls: Int32,
        early: Int32,
        pdl: Int32,
        stream,
    ):
        """Launch for ``tokens`` tokens.

        addresses: Int64, as ``names``; status may be 0. strides: bytes from token to token, as ``names``, then the
        bytes between rows of blocks and between slots of the mailbox. polls bounds the reads of a mailbox
        fragment, 0 for no bound; early and pdl are 0 or 1.
        """
        self.kernel(addresses, strides, eps, out_eps, polls, early).launch(
            grid=[RANKS * tokens, 1, 1], block=[THREADS, 1, 1], cluster=[RANKS, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(self, addresses: list, strides: list, eps: Float32, out_eps: Float32, polls: Int32, early: Int32):
        config = self.config
        if early != 0:
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        token, lane, warp = Int64(block // RANKS), thread % 32, thread // 32
        buffers, barriers = self.open_exchanges(thread)

        offset = Int64((rank * THREADS + thread) * (2 * COLUMNS))
        token_strides, (block_stride, slot_stride) = strides[: len(self.names)], strides[len(self.names) :]
        at = {n: a + token * s + offset for n, a, s in zip(self.names, addresses, token_strides, strict=True)}
        rows = [at["blocks"] + block_stride * b for b in range(config.nb)]
        slots = [at["delta"] + slot_stride * s for s in range(config.slots)]

        x_words = [ptx.ld_v4("global", row) for row in rows]
        names = ("gamma", "norm", "query") if config.nb else ("gamma",)
        gamma_words, *weight_words = [ptx.ld_v4("global", at[n]) for n in names]
        if cutlass.const_expr(config.has_delta):
            old_words = ptx.ld_v4("global", at["prefix"])
        slot_words = [word for slot in slots for word in ptx.ld_v4("relaxed.sys.global", slot)]

        w = [mul_rn(a, b) for a, b in zip(*map(widen, weight_words), strict=True)]
        pre = self.fold_blocks(x_words, w, lane)
        if cutlass.const_expr(not config.in_pairs):
            if early == 0:
                cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_wait()
        m, sum_e, mix = Float32(0.0), Float32(0.0), []
        if cutlass.const_expr(config.nb > 0):
            self.send(pre, 2 * config.nb, buffers[0], barriers[0], lane, warp, rank)
            ptx.mbarrier_spin(barriers[0].toint(), 0)
            m, e_blocks = self.weigh_blocks(buffers[0], lane, eps)
            for e in e_blocks:
                sum_e = add_rn(sum_e, e)
            mix = [Float32(0.0)] * COLUMNS
            for e, words in zip(e_blocks, x_words, strict=True):
                # Widened once more: 4 registers a row between the two uses, not 8.
                mix = [fma_rn(e, value, total) for value, total in zip(widen(words), mix, strict=True)]

        if cutlass.const_expr(config.slots > 0):
            d = self.receive(slots, slot_words, polls, addresses[TENSORS.index("status")])
        else:
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(config.in_pairs):
                if early == 0:
                    cute.arch.griddepcontrol_launch_dependents()
            d = widen(ptx.ld_v4("global", at["delta"]))
        if cutlass.const_expr(config.has_delta):
            d = [add_rn(old, new) for old, new in zip(widen(old_words), d, strict=True)]
        p_words = pack(d)
        p = widen(p_words)

        post = [dot8(p, p)]
        if cutlass.const_expr(config.nb > 0):
            post.append(dot8(p, w))
            if cutlass.const_expr(not config.own_norm):
                post += [dot8(mix, p), dot8(mix, mix)]
        stage = len(config.exchanges) - (2 if config.own_norm else 1)
        self.send(fold(post, lane), len(post), buffers[stage], barriers[stage], lane, warp, rank)
        self.store_prefix(at, block_stride, slots, p_words)
        gamma = widen(gamma_words)
        ptx.mbarrier_spin(barriers[stage].toint(), 0)
        total = self.collect(buffers[stage], lane % len(post), lane)
        sums = [cute.arch.shuffle_sync(total, i) for i in range(len(post))] if len(post) > 1 else [total]

        if cutlass.const_expr(config.nb == 0):
            scale = rstd(sums[0], out_eps)
            out = [mul_rn(mul_rn(value, scale), g) for value, g in zip(p, gamma, strict=True)]
        else:
            logit = mul_rn(sums[1], rstd(sums[0], eps))
            top = ptx.max_f32(m, logit)
            a, e = exp(ptx.sub_rn(m, top)), exp(ptx.sub_rn(logit, top))
            den = fma_rn(a, sum_e, e)
            if cutlass.const_expr(config.own_norm):
                inv = ptx.rcp_rn(den)
            else:
                inv = self.quad_scale(a, e, sums, den, out_eps)
            a, e = mul_rn(a, inv), mul_rn(e, inv)
            r = [fma_rn(a, y, mul_rn(e, value)) for y, value in zip(mix, p, strict=True)]
            if cutlass.const_expr(config.own_norm):
                if cutlass.const_expr(config.final):
                    r = widen(pack(r))
                self.send(fold([dot8(r, r)], lane), 1, buffers[2], barriers[2], lane, warp, rank)
                ptx.mbarrier_spin(barriers[2].toint(), 0)
                scale = rstd(self.collect(buffers[2], Int32(0), lane), out_eps)
                r = [mul_rn(value, scale) for value in r]
            out = [mul_rn(value, g) for value, g in zip(r, gamma, strict=True)]
        ptx.st_v4("global", at["output"], pack(out))
        if cutlass.const_expr(config.slots > 0):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def open_exchanges(self, thread: Int32):
        """Buffers and armed mbarriers of all exchanges; arrives at, and leaves open, the first cluster barrier."""
        counts = self.config.exchanges
        smem = SmemAllocator()
        data = smem.allocate(VALUE_BYTES * sum(counts), byte_alignment=16).toint()
        sBarriers = smem.allocate_array(Int64, len(counts), byte_alignment=8)
        barriers = [sBarriers + i for i in range(len(counts))]
        if thread == 0:
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers[i], 1)
            cute.arch.mbarrier_init_fence()
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_arrive_and_expect_tx(barriers[i], VALUE_BYTES * counts[i])
        cute.arch.cluster_arrive_relaxed()
        return [data + VALUE_BYTES * sum(counts[:i]) for i in range(len(counts))], barriers

    def fold_blocks(self, x_words: list, w: list, lane: Int32):
        """This warp's ss_0, dw_0, ss_1, dw_1, …"""
        values = [dot8(x, y) for x in map(widen, x_words) for y in (x, w)]
        return fold(values, lane) if values else Float32(0.0)

    @cute.jit
    def send(
        self,
        value: Float32,
        n: cutlass.Constexpr,
        buffer: Int32,
        barrier: cute.Pointer,
        lane: Int32,
        warp: Int32,
        rank: Int32,
    ):
        """What ``fold`` of n values returned, to all CTAs of the cluster, this one included."""
        group = cutlass.const_expr(lanes_a_value(n))
        v, first = lane // group, lane % group
        where = buffer + (v * RANKS + rank) * (WARPS * 4) + warp * 4
        for target in cutlass.range_constexpr(0, RANKS, group):
            if first + target < RANKS and v < n:
                receiver = first + target
                ptx.st_async(ptx.mapa(where, receiver), value, ptx.mapa(barrier.toint(), receiver))

    def collect(self, buffer: Int32, v: Int32, lane: Int32) -> Float32:
        """The cluster's sum of value v: lanes 0 … 15 add the even ranks, lanes 16 … 31 the odd ones, then they meet."""
        odd = lane // 16
        chain = Float32(0.0)
        for rank in (0, 2, 4, 6):
            # There is no rank 7: the odd lanes read rank 5 again and leave it.
            source = rank + odd if rank < 6 else rank - odd
            w0, w1, w2, w3 = ptx.ld_v4("shared", buffer + (v * RANKS + source) * (WARPS * 4), Float32)
            longer = add_rn(chain, add_rn(add_rn(w0, w1), add_rn(w2, w3)))
            chain = longer if rank < 6 else select_(odd == 0, longer, chain)
        return add_rn(chain, cute.arch.shuffle_sync_bfly(chain, 16))

    def weigh_blocks(self, buffer: Int32, lane: Int32, eps: Float32):
        """m and e_0 … e_{nb−1}; lanes 2b and 2b + 1 compute logit b, over and over; beyond nb they repeat the last."""
        nb = self.config.nb
        b = lane // 2 % (1 << (nb - 1).bit_length())
        b = select_(b < nb, b, Int32(nb - 1))
        own = self.collect(buffer, 2 * b + lane % 2, lane)
        other = cute.arch.shuffle_sync_bfly(own, 1)
        even = lane % 2 == 0
        ss, dw = select_(even, own, other), select_(even, other, own)
        logit = mul_rn(dw, rstd(ss, eps))
        m = logit
        for offset in (2, 4, 8):
            if 2 * nb > offset:
                m = ptx.max_f32(m, cute.arch.shuffle_sync_bfly(m, offset))
        e = exp(ptx.sub_rn(logit, m))
        return m, [cute.arch.shuffle_sync(e, 2 * b) for b in range(nb)]

    @cute.jit
    def receive(self, slots: list, first: list, polls: Int32, status: Int64):
        """The slots' sum, 8 fp32, once every fragment is published, or read ``polls`` times: then status is set to 1.

        ``first`` holds the words of the first read, which may have come too early.
        """
        n = cutlass.const_expr(len(slots))
        words = cute.make_rmem_tensor(4 * n, Int32)
        for i in cutlass.range_constexpr(4 * n):
            words[i] = first[i]
        missing = self.missing(words, 0, n)
        reads = Int32(1)
        while missing and reads != polls:
            for s in cutlass.range_constexpr(n):
                if self.missing(words, s, s + 1):
                    again = ptx.ld_v4("relaxed.sys.global", slots[s])
                    for i in cutlass.range_constexpr(4):
                        words[4 * s + i] = again[i]
            missing = self.missing(words, 0, n)
            reads += 1
        if missing and status != 0:
            ptx.st_v4("global", status, [Int32(1)] * 4)
        cute.arch.sync_warp()
        d = [Float32(0.0)] * COLUMNS
        for s in cutlass.range_constexpr(n):
            arrived = widen([words[4 * s + i] for i in range(4)])
            d = [add_rn(total, value) for total, value in zip(d, arrived, strict=True)]
        return widen(pack(d)) if n > 1 else d

    def missing(self, words: cute.Tensor, start: int, stop: int):
        """Whether a word of fragments start … stop − 1 is the sentinel; an integer comparison."""
        found = words[4 * start] == SENTINEL
        for i in range(4 * start + 1, 4 * stop):
            found = found | (words[i] == SENTINEL)
        return found

    def store_prefix(self, at: dict, block_stride: Int64, slots: list, p_words: list):
        """The new prefix to all its places; the fragments that were read are armed again."""
        config = self.config
        for name in ("prefix", *(f"aux{i}" for i in range(config.aux))):
            ptx.st_v4("global", at[name], p_words)
        if config.write >= 0:
            ptx.st_v4("global", at["blocks"] + block_stride * config.write, p_words)
        for slot in slots:
            ptx.st_v4("global", slot, [Int32(SENTINEL)] * 4)

    def quad_scale(self, a: Float32, e: Float32, sums: list, den: Float32, out_eps: Float32) -> Float32:
        """1 / rms of the mixture times 1 / den, from the sums of its two parts and their product."""
        ss, _, mp, mm = sums
        tail = fma_rn(mul_rn(mul_rn(Float32(2.0), a), e), mp, mul_rn(mul_rn(e, e), ss))
        quad = fma_rn(mul_rn(a, a), mm, tail)
        return rstd(quad, mul_rn(mul_rn(out_eps, den), den))


def starts_early(tokens: int, nb: int) -> bool:
    """Whether the successor should start at once: with few CTAs latency decides, with many nb's traffic does."""
    return tokens <= 4 or (tokens > 32 and nb > 1)


def compile_variant(config: Config, options: str = ""):
    """The kernel of a configuration, for any T and strides; needs no GPU."""
    kernel = Cluster7(config)
    n = len(kernel.names)
    numbers = (Int32(1), Float32(0.0), Float32(0.0), Int32(0), Int32(1), Int32(1))
    arguments = ([Int64(0)] * n, [Int64(0)] * (n + 2), *numbers)
    return runtime.compile_kernel(("attn_res", config, options), lambda: kernel, *arguments, options=options)
