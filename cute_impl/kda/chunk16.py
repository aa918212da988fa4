"""KDA forward, schedule ``chunk16``: one launch, a cluster of 1, 2, 4 or 8 CTAs for each sequence and head.

Mathematics and every rounding: docs/kda.md. In a CTA:
- *consumers*, 4 warps of 32 rows of V with one CTA, else 8 / cluster of 16, through all chunks (``step``): each reads
  the whole stage, which would keep shared memory busy all the time with 8 warps in one CTA;
- *teams* of two warps that prepare chunks (``prepare``): chunk n is prepared once in the cluster, by team
  n // cluster mod teams of CTA n mod cluster, its *owner*.

Ring of ``stages`` stages in every CTA, a multiple of the cluster, so that a stage always has one owner, and at least
cluster · teams. Chunk n lies in stage n mod stages. The owner's team writes its own CTA's stage, then copies it to the
others.
  full[s]   one arrival. In the owner: after the team's last barrier. Elsewhere: the owner's remote arrival, which makes
            the phase wait for the bytes of the copy.
  empty[s]  arrivals of all consumer warps of the cluster; used in the owner only, which waits for it before it writes:
            then every copy has been made and read.
Nobody waits in a circle: of the chunks not yet prepared the lowest waits only for the chunk that was in its stage, and
all chunks up to that one are prepared; consumers and teams take their chunks in ascending order. No waiter mistakes a
phase for the last but one: the consumers have seen them all, and a team that waits for stage use m has prepared its
chunk of cluster · teams before, after the consumers had read the chunk that was there, hence use m − 2 as well.
The cluster barrier at the start guards the set-up of the barriers; that at the end keeps a CTA alive until its last
copies have been counted and its consumers' and others' arrivals have come.

With one CTA, registers are moved from the teams to the consumers.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_impl import ptx, runtime
from cute_impl.kda import layout
from cute_impl.kda.layout import D
from cute_impl.kda.prepare import TEAM_THREADS, produce
from cute_impl.kda.step import SLAB, consume

CLUSTERS = (1, 2, 4, 8)
TOKENWISE = ("q", "k", "v", "g", "out")
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "out", "initial", "final", "offsets")
SLABS = {1: 2, 2: 1, 4: 1, 8: 1}  # of 16 rows of V, a consumer warp
TEAMS = {1: 4, 2: 4, 4: 2, 8: 1}
STAGES = dict.fromkeys(CLUSTERS, 8)
CONSUMER_REGISTERS, TEAM_REGISTERS = 248, 128
ORDERED = 96  # sequences that are put in order by length, one a thread, if there are no more


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time: CTAs of a cluster; patches of v a warp; the part of a scan, if it is one."""

    cluster: int
    values: int = 4
    part: str = ""

    def __post_init__(self) -> None:
        if self.cluster not in CLUSTERS or self.stages % self.cluster or self.cluster * self.teams > self.stages:
            raise ValueError(f"cluster: got {self.cluster}, allowed are {', '.join(map(str, CLUSTERS))}")

    @property
    def slabs(self) -> int:
        return SLABS[self.cluster]

    @property
    def consumers(self) -> int:
        """Warps of a CTA."""
        return D // (SLAB * self.slabs * self.cluster)

    @property
    def patch_bytes(self) -> int:
        """v or o of a chunk for a consumer warp."""
        return self.slabs * layout.PATCH_BYTES

    @property
    def teams(self) -> int:
        return TEAMS[self.cluster]

    @property
    def stages(self) -> int:
        return STAGES[self.cluster]

    @property
    def threads(self) -> int:
        return 32 * (self.consumers + 2 * self.teams)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the stages, the patches of v and o, the teams' scratch."""
        return (
            self.stages * layout.STAGE_BYTES,
            self.consumers * (self.values + 1) * self.patch_bytes,
            self.teams * layout.SCRATCH_BYTES,
        )

    @property
    def barriers(self) -> int:
        """full and empty of each stage, arrived of each team."""
        return 2 * self.stages + self.teams

    @property
    def smem_bytes(self) -> int:
        return sum(self.sizes) + 8 * self.barriers + 4 * (ORDERED + 1)


class Chunk16:
    """The kernel of one ``Config``, for any T, H, N and offsets."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        addresses: list,
        pitches: list,
        tokens: Int32,
        heads: Int32,
        sequences: Int32,
        offset_bytes: Int32,
        wide: Int32,
        scale: Float32,
        lower_bound: Float32,
        stream,
    ):
        """Launch for ``sequences`` · ``heads`` clusters: all heads of the longest sequence first, then of the next.

        addresses: Int64, as ``NAMES``, 0 where there is none. pitches: Int32, as ``TOKENWISE``: bytes from token to
        token. tokens: of a sequence, or of all if there are offsets.

        offset_bytes: 4 or 8, of an offset. wide: 1 if the states are fp32, 0 if bf16.
        """
        numbers = (tokens, heads, sequences, offset_bytes, wide, scale, lower_bound)
        self.kernel(addresses, pitches, *numbers).launch(
            grid=[sequences * heads * self.config.cluster, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[self.config.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        addresses: list,
        pitches: list,
        tokens: Int32,
        heads: Int32,
        sequences: Int32,
        offset_bytes: Int32,
        wide: Int32,
        scale: Float32,
        lower_bound: Float32,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        rank, pair = block % config.cluster, block // config.cluster
        at = dict(zip(NAMES, addresses, strict=True))
        pitch = {f"{name}_pitch": x for name, x in zip(TOKENWISE, pitches, strict=True)}
        ring = self.open_ring(thread)
        sequence = self.by_length(
            ring["lengths"], at["offsets"], offset_bytes, tokens, sequences, pair // heads, thread
        )
        work = self.find_work(at, tokens, heads, sequence, pair % heads, offset_bytes, wide) | pitch
        self.work_through(at, work, ring, {"scale": scale, "lower_bound": lower_bound}, rank, warp, lane)

    @cute.jit
    def work_through(self, at: dict, work: dict, ring: dict, numbers: dict, rank: Int32, warp: Int32, lane: Int32):
        """A sequence and head, by consumers and teams."""
        config = self.config
        if warp < config.consumers:
            if cutlass.const_expr(config.cluster == 1):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consume(config, work, ring, rank, warp, lane)
        else:
            if cutlass.const_expr(config.cluster == 1):
                cute.arch.setmaxregister_decrease(TEAM_REGISTERS)
            member = warp - config.consumers
            produce(config, at, work, ring, numbers, rank, member // 2, member % 2, lane)
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def open_ring(self, thread: Int32):
        """Addresses of the ring's parts; its barriers are set up in the whole cluster on return."""
        config = self.config
        smem = SmemAllocator()
        base = smem.allocate(sum(config.sizes), byte_alignment=1024).toint()
        barriers = smem.allocate_array(Int64, config.barriers, byte_alignment=8)
        lengths = smem.allocate(4 * (ORDERED + 1), byte_alignment=4).toint()
        if thread == 0:
            for i in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init(barriers + (config.stages + i), config.cluster * config.consumers)
            for i in cutlass.range_constexpr(config.teams):
                cute.arch.mbarrier_init(barriers + (2 * config.stages + i), TEAM_THREADS)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        full = barriers.toint()
        return {
            "stages": base,
            "patches": base + config.sizes[0],
            "scratch": base + (config.sizes[0] + config.sizes[1]),
            "full": full,
            "empty": full + 8 * config.stages,
            "arrived": full + 16 * config.stages,
            "lengths": lengths,
        }

    @cute.jit
    def by_length(
        self,
        lengths: Int32,
        offsets: Int64,
        offset_bytes: Int32,
        tokens: Int32,
        sequences: Int32,
        place: Int32,
        thread: Int32,
    ):
        """The sequence of ``place`` by falling length, then by index; ``place`` itself without offsets or with many.

        lengths: shared memory for ORDERED lengths and the answer.
        """
        sequence = place
        if offsets != 0 and sequences > 1 and sequences <= ORDERED:
            own = Int32(0)
            if thread < sequences:
                _, own = span(offsets, offset_bytes, tokens, thread)
                ptx.st_b32("shared", lengths + thread * 4, own)
            cute.arch.sync_threads()
            if thread < sequences:
                earlier = Int32(0)
                for other in cutlass.range(0, sequences, 1, unroll=4):
                    length = ptx.ld_b32("shared", lengths + other * 4)
                    # A longer one, or one as long with a lower index.
                    earlier += select_(length >= own + select_(other < thread, Int32(0), Int32(1)), Int32(1), Int32(0))
                if earlier == place:
                    ptx.st_b32("shared", lengths + 4 * ORDERED, thread)
            cute.arch.sync_threads()
            sequence = ptx.ld_b32("shared", lengths + 4 * ORDERED)
        return sequence

    @cute.jit
    def find_work(
        self, at: dict, tokens: Int32, heads: Int32, sequence: Int32, head: Int32, offset_bytes: Int32, wide: Int32
    ):
        """A sequence and head: addresses of its first token, its tokens and chunks. Bad offsets come in range."""
        start, count = Int64(sequence) * tokens, tokens
        if at["offsets"] != 0:
            start, count = span(at["offsets"], offset_bytes, tokens, sequence)
        row = start * heads + head
        state = (Int64(sequence) * heads + head) * (D * D) * select_(wide != 0, Int64(4), Int64(2))
        work = {name: at[name] + row * (2 * D) for name in TOKENWISE}
        work |= {name: select_(at[name] != 0, at[name] + state, Int64(0)) for name in ("initial", "final")}
        return work | {
            "beta": at["beta"] + row * 2,
            "beta_pitch": heads * 2,
            "tokens": count,
            "v_tokens": count,
            "chunks": (count + (layout.CHUNK - 1)) // layout.CHUNK,
            "head": head,
            "initial_wide": wide,
            "wide": wide,
        }


@cute.jit
def span(offsets: Int64, offset_bytes: Int32, tokens: Int32, sequence: Int32):
    """A sequence's first token and its tokens, in range whatever the offsets."""
    begin, end = Int64(0), Int64(0)
    if offset_bytes == 8:
        where = offsets + Int64(sequence) * 8
        begin, end = ptx.ld_b64("global", where), ptx.ld_b64("global", where + 8)
    else:
        where = offsets + Int64(sequence) * 4
        begin, end = Int64(ptx.ld_b32("global", where)), Int64(ptx.ld_b32("global", where + 4))
    begin = clamp(begin, Int64(0), Int64(tokens))
    end = clamp(end, begin, Int64(tokens))
    return begin, Int32(end - begin)


def clamp(x: Int64, low: Int64, high: Int64) -> Int64:
    x = select_(x < low, low, x)
    return select_(x > high, high, x)


def compile_variant(config: Config, options: str = ""):
    """The kernel of a configuration, for any T, H, N and offsets; needs no GPU."""
    numbers = (*(Int32(1),) * 5, Float32(0.0), Float32(0.0))
    arguments = ([Int64(0)] * len(NAMES), [Int32(1)] * len(TOKENWISE), *numbers)
    return runtime.compile_kernel(("kda", config, options), lambda: Chunk16(config), *arguments, options=options)
