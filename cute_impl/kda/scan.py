"""KDA forward, schedules ``chunk16_scan…``: three launches, parallel over segments of a sequence (docs/kda.md).

1. *operators*, by the roles of ``chunk16``: for every segment but a sequence's last, C, its last state from a first one
   of zeros, and M, that from the identity with v = 0. A cluster makes one of the two for a head.
2. ``Combine``: S ← S · M + C from segment to segment; S takes C's place.
3. *outputs*, by the roles of ``chunk16``: all segments, each from its S.

Segments are found on the device, so that offsets may change from replay to replay of a graph. Those of sequence n that
have operators begin at *slot* ⌊begin / L⌋ of the workspace, and all of them at *place* ⌊begin / L⌋ + n of the third
grid: neither overlaps with the next sequence's, whatever the lengths. Clusters without a segment have no chunks.

Programmatic dependent launch between them: before their wait the second and the third read what this call does not
write, inputs, offsets and first states; they write to memory after it, and every CTA waits, so that the third ends
after all of the first two. The first waits for all of the call before. The caller's first states are not where the
third writes the last ones.

Workspace: C [slots, H, V, K] fp32, then M alike.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from cute_impl import ptx, runtime
from cute_impl.kda import chunk16, layout
from cute_impl.kda.chunk16 import TOKENWISE, Chunk16, Config, span
from cute_impl.kda.layout import D
from cute_impl.kda.step import OPERATORS, OUTPUTS
from cute_impl.ptx import fma_rn

NAMES = (*chunk16.NAMES, "workspace")
PARTS = (OPERATORS, OUTPUTS)
STATE_BYTES = 4 * D * D

# Combine: rows of V of a CTA, in groups of a thread's; elements of a thread; k of M in a piece, and in registers.
COMBINED_ROWS, GROUP_ROWS, PIECES, BLOCK = 16, 8, 4, 4
SLABS, GROUPS = D // COMBINED_ROWS, COMBINED_ROWS // GROUP_ROWS
COMBINE_THREADS = D // 2 * GROUPS
OWNED = 2 * GROUP_ROWS
FETCHED = (2 + GROUP_ROWS) * BLOCK
PIECE_ROWS, PIECE_BYTES = D // PIECES, STATE_BYTES // PIECES
GROUP_BYTES = GROUP_ROWS * 4 * D + 64
SLAB_BYTES = GROUPS * GROUP_BYTES
COMBINE_BYTES = 2 * STATE_BYTES + 2 * SLAB_BYTES + 2 * PIECES * 8  # of shared memory


def slots(tokens: int, segment: int) -> int:
    """How many segments of so many tokens in all can have a successor in their sequence, at most."""
    return max(tokens - 1, 0) // segment


def places(tokens: int, sequences: int, segment: int) -> int:
    """How many segments there can be, with one for each empty sequence."""
    return slots(tokens, segment) + 1 if sequences == 1 else tokens // segment + sequences


def grids(tokens: int, sequences: int, segment: int) -> tuple[int, int]:
    """Runs through a segment in the first and in the third launch, a head."""
    return 2 * slots(tokens, segment), places(tokens, sequences, segment)


def workspace_bytes(tokens: int, heads: int, segment: int) -> int:
    """Of C and M."""
    return 2 * slots(tokens, segment) * heads * STATE_BYTES


def first_place(begin, sequence, segment, apart: int):
    """Where a sequence's segments begin: among the slots (``apart`` 0) or the places (1)."""
    return begin // segment + apart * sequence


@cute.jit
def sequence_span(offsets: Int64, offset_bytes: Int32, tokens: Int32, sequence: Int32):
    """A sequence's first token and its tokens; ``tokens`` of one sequence without offsets, else of all."""
    begin, count = Int64(sequence) * tokens, tokens
    if offsets != 0:
        begin, count = span(offsets, offset_bytes, tokens, sequence)
    return begin, count


@cute.jit
def sequence_of(
    offsets: Int64,
    offset_bytes: Int32,
    tokens: Int32,
    sequences: Int32,
    segment: Int32,
    place: Int32,
    apart: cutlass.Constexpr,
):
    """The last sequence whose ``first_place`` is ``place`` or before."""
    low, high = Int32(0), sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin, _ = sequence_span(offsets, offset_bytes, tokens, middle)
        here = Int32(first_place(begin, middle, segment, apart)) <= place
        low, high = select_(here, middle, low), select_(here, high, middle - 1)
    return low


class Segments(Chunk16):
    """Part ``OPERATORS`` or ``OUTPUTS`` of a scan, for any T, H, N, offsets and length of segments."""

    @cute.jit
    def __call__(
        self,
        addresses: list,
        pitches: list,
        numbers: list,
        scale: Float32,
        lower_bound: Float32,
        places: Int32,
        pdl: Int32,
        stream,
    ):
        """Launch for ``places`` · heads clusters, of operators twice as many: C first, then M.

        As ``Chunk16``. addresses: as ``NAMES``. numbers: as ``launch`` makes them. pdl: 1 for programmatic dependent
        launch.
        """
        kinds = 2 if self.config.part == OPERATORS else 1
        self.kernel(addresses, pitches, numbers, scale, lower_bound, places).launch(
            grid=[kinds * places * numbers[1] * self.config.cluster, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[self.config.cluster, 1, 1],
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self, addresses: list, pitches: list, numbers: list, scale: Float32, lower_bound: Float32, places: Int32
    ):
        config = self.config
        tokens, heads, sequences, offset_bytes, wide, segment, slots = numbers
        if cutlass.const_expr(config.part == OPERATORS):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        rank, pair = block % config.cluster, block // config.cluster
        at = dict(zip(NAMES, addresses, strict=True))
        ring = self.open_ring(thread)
        transfer, place, head = pair // (places * heads), pair // heads % places, pair % heads
        apart = 0 if config.part == OPERATORS else 1
        sequence = sequence_of(at["offsets"], offset_bytes, tokens, sequences, segment, place, apart)
        begin, count = sequence_span(at["offsets"], offset_bytes, tokens, sequence)
        index = place - Int32(first_place(begin, sequence, segment, apart))
        last = select_(count > 0, (count - 1) // segment, Int32(0))
        work = {"head": head, "wide": wide, "beta_pitch": heads * 2}
        work |= {f"{name}_pitch": x for name, x in zip(TOKENWISE, pitches, strict=True)}
        if cutlass.const_expr(config.part == OPERATORS):
            used = (index >= 0) & (index < last)
            state = at["workspace"] + ((Int64(transfer) * slots + place) * heads + head) * STATE_BYTES
            work |= {
                "transfer": transfer,
                "initial": Int64(0),
                "initial_wide": Int32(1),
                "final": select_(used, state, Int64(0)),
                "wide": Int32(1),
                "v_pitch": select_(transfer != 0, Int32(0), work["v_pitch"]),
            }
        else:
            used = (index >= 0) & (index <= last)
            own = (Int64(sequence) * heads + head) * (D * D) * select_(wide != 0, Int64(4), Int64(2))
            first, final = (select_(at[name] != 0, at[name] + own, Int64(0)) for name in ("initial", "final"))
            before = first_place(begin, sequence, segment, 0) + (index - 1)
            carried = at["workspace"] + (before * heads + head) * STATE_BYTES
            work |= {
                "initial": select_(used, select_(index == 0, first, carried), Int64(0)),
                "initial_wide": select_(index == 0, wide, Int32(1)),
                "final": select_(used & (index == last), final, Int64(0)),
            }
        work |= self.segment_of(at, begin, count, used, index, heads, head, segment)
        if cutlass.const_expr(config.part == OPERATORS):
            work["v_tokens"] = select_(transfer != 0, Int32(0), work["tokens"])
        self.work_through(at, work, ring, {"scale": scale, "lower_bound": lower_bound}, rank, warp, lane)

    @cute.jit
    def segment_of(
        self,
        at: dict,
        begin: Int64,
        count: Int32,
        used: cutlass.Boolean,
        index: Int32,
        heads: Int32,
        head: Int32,
        segment: Int32,
    ):
        """Addresses of a segment's first token, its tokens and chunks: none if it is not used."""
        index = select_(used, index, Int32(0))
        left = count - index * segment
        tokens = select_(used, select_(left < segment, left, segment), Int32(0))
        row = (begin + Int64(index) * segment) * heads + head
        work = {name: at[name] + row * (2 * D) for name in TOKENWISE}
        return work | {
            "beta": at["beta"] + row * 2,
            "tokens": tokens,
            "v_tokens": tokens,
            "chunks": (tokens + (layout.CHUNK - 1)) // layout.CHUNK,
        }


class Combine:
    """S_{j+1} = S_j · M_j + C_j: a CTA for 16 rows of V of a sequence and head, a thread for 8 rows of two columns.

    M_{j+1} comes to shared memory by bulk copies while M_j is used: two buffers, each in ``PIECES`` with an mbarrier
    that counts a piece's bytes. S_j's rows are there twice as well, so that one barrier a segment is enough: behind it
    S_j is written, and what M_{j+1} and S_{j+1} take the place of has been read. A thread fetches four k ahead.

    Lanes 2i, 2i + 1 have the same columns, of the upper and the lower 8 rows, which lie 64 bytes further on: a warp
    reads 128 bytes of M at once, and S at two addresses of different banks.
    """

    @cute.jit
    def __call__(self, addresses: list, numbers: list, stream):
        """addresses: Int64 of the first states (0: zeros), the offsets (0: none) and the workspace. numbers: as
        ``launch`` makes them."""
        self.kernel(addresses, numbers).launch(
            grid=[numbers[2] * numbers[1] * SLABS, 1, 1],
            block=[COMBINE_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, addresses: list, numbers: list):
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        initial, offsets, workspace = addresses
        tokens, heads, _, offset_bytes, wide, segment, slots = numbers
        slab, head, sequence = block % SLABS, block // SLABS % heads, block // (SLABS * heads)
        smem = SmemAllocator()
        base = smem.allocate(2 * STATE_BYTES + 2 * SLAB_BYTES, byte_alignment=128).toint()
        full = smem.allocate_array(Int64, 2 * PIECES, byte_alignment=8)
        if thread == 0:
            for i in cutlass.range_constexpr(2 * PIECES):
                cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
        begin, count = sequence_span(offsets, offset_bytes, tokens, sequence)
        steps = select_(count > 0, (count - 1) // segment, Int32(0))
        group, column = thread % GROUPS, thread // GROUPS * 2
        element = (slab * COMBINED_ROWS + group * GROUP_ROWS) * D + column
        if steps > 0:
            own = (Int64(sequence) * heads + head) * (D * D) + element
            first_rows(base + (2 * STATE_BYTES + group * GROUP_BYTES) + column * 4, initial, own, wide)
        cute.arch.griddepcontrol_wait()
        if steps > 0:
            operator = workspace + (first_place(begin, sequence, segment, 0) * heads + head) * STATE_BYTES
            matrix = operator + Int64(slots) * heads * STATE_BYTES
            pitch = Int64(heads) * STATE_BYTES
            self.scan(base, full, operator + Int64(element) * 4, matrix, pitch, steps, thread, group, column)

    @cute.jit
    def scan(
        self,
        base: Int32,
        full: cute.Pointer,
        operator: Int64,
        matrix: Int64,
        pitch: Int64,
        steps: Int32,
        thread: Int32,
        group: Int32,
        column: Int32,
    ):
        """``operator``: of the thread's first element in C_0; ``matrix``: of M_0; ``pitch``: to the next segment's."""
        c, sums, ahead = (cute.make_rmem_tensor(count, Float32) for count in (OWNED, OWNED, FETCHED))
        if thread == 0:
            # M was written by ordinary stores, copies are of the asynchronous proxy.
            ptx.fence_proxy_async_global()
            copy_matrix(base, matrix, full)
        load_pairs(c, operator)
        for j in cutlass.range(0, steps, 1, unroll=1):
            buffer = j % 2
            for i in cutlass.range_constexpr(OWNED):
                sums[i] = c[i]
            # After the last segment the last C once more.
            step = select_(j + 1 < steps, pitch, Int64(0))
            load_pairs(c, operator + step)
            cute.arch.sync_threads()
            matrix += pitch
            if thread == 0 and j + 1 < steps:
                copy_matrix(base + (1 - buffer) * STATE_BYTES, matrix, full + (1 - buffer) * PIECES)
            rows = base + 2 * STATE_BYTES + group * GROUP_BYTES
            here = full.toint() + buffer * (8 * PIECES)
            matrix_here, parity = base + buffer * STATE_BYTES + column * 4, j // 2 % 2
            ptx.mbarrier_wait(here, parity)
            fetch(ahead, rows + buffer * SLAB_BYTES, matrix_here)
            for piece in cutlass.range(0, PIECES, 1, unroll=1):
                multiply_piece(sums, ahead, rows + buffer * SLAB_BYTES, matrix_here, here, parity, piece)
            store_pairs(sums, operator, rows + (1 - buffer) * SLAB_BYTES + column * 4)
            operator += step


def copy_matrix(target: Int32, source: Int64, full: cute.Pointer):
    """Begin to copy an M; each piece counts on its barrier."""
    for piece in range(PIECES):
        cute.arch.mbarrier_arrive_and_expect_tx(full + piece, PIECE_BYTES)
        ptx.bulk_copy(target + piece * PIECE_BYTES, source + piece * PIECE_BYTES, PIECE_BYTES, (full + piece).toint())


def multiply_piece(
    sums: cute.Tensor, ahead: cute.Tensor, rows: Int32, matrix: Int32, full: Int32, parity: Int32, piece: Int32
):
    """Add the products of a piece, whose first k are ``ahead``; then those of the following piece are."""
    here_rows, here = rows + piece * (4 * PIECE_ROWS), matrix + piece * PIECE_BYTES
    following = (piece + 1) % PIECES
    for k in range(BLOCK, PIECE_ROWS + BLOCK, BLOCK):
        now = [ahead[i] for i in range(FETCHED)]
        if k < PIECE_ROWS:
            fetch(ahead, here_rows + k * 4, here + k * (4 * D))
        else:
            ptx.mbarrier_wait(full + following * 8, parity)
            fetch(ahead, rows + following * (4 * PIECE_ROWS), matrix + following * PIECE_BYTES)
        accumulate(sums, now)


def fetch(ahead: cute.Tensor, rows: Int32, matrix: Int32):
    """Two columns of ``BLOCK`` rows of M, then as many columns of the thread's rows of S."""
    for k in range(BLOCK):
        ahead[2 * k], ahead[2 * k + 1] = ptx.ld_v2("shared", matrix + k * (4 * D), Float32)
    for row in range(GROUP_ROWS):
        values = ptx.ld_v4("shared", rows + row * (4 * D), Float32)
        for k in range(BLOCK):
            ahead[2 * BLOCK + row * BLOCK + k] = values[k]


def accumulate(sums: cute.Tensor, fetched: list):
    """One k after the other."""
    for k in range(BLOCK):
        for i in range(OWNED):
            sums[i] = fma_rn(fetched[2 * BLOCK + i // 2 * BLOCK + k], fetched[2 * k + i % 2], sums[i])


def load_pairs(x: cute.Tensor, address: Int64):
    for row in range(GROUP_ROWS):
        x[2 * row], x[2 * row + 1] = ptx.ld_v2("global", address + row * (4 * D), Float32)


def store_pairs(x: cute.Tensor, memory: Int64, shared: Int32):
    for row in range(GROUP_ROWS):
        pair = [x[2 * row], x[2 * row + 1]]
        ptx.st_v2("global", memory + row * (4 * D), pair)
        ptx.st_v2("shared", shared + row * (4 * D), pair)


@cute.jit
def first_rows(target: Int32, initial: Int64, element: Int64, wide: Int32):
    """Copy a thread's pairs of the first state, from ``element`` on, to shared memory as fp32; zeros without one."""
    x = cute.make_rmem_tensor(OWNED, Float32)
    for i in cutlass.range_constexpr(OWNED):
        x[i] = Float32(0.0)
    if initial != 0:
        if wide != 0:
            load_pairs(x, initial + element * 4)
        else:
            for row in cutlass.range_constexpr(GROUP_ROWS):
                word = ptx.ld_b32("global", initial + (element + row * D) * 2)
                x[2 * row], x[2 * row + 1] = ptx.bf16_lo(word), ptx.bf16_hi(word)
    for row in cutlass.range_constexpr(GROUP_ROWS):
        ptx.st_v2("shared", target + row * (4 * D), [x[2 * row], x[2 * row + 1]])


def launch(
    addresses: list,
    pitches: list,
    numbers: tuple[int, ...],
    scale: float,
    lower_bound: float,
    segment: int,
    workspace: int,
    clusters: list[int],
    stream,
) -> None:
    """All three kernels; the third alone, and without PDL, where no sequence can have two segments.

    addresses, pitches, numbers: as ``Chunk16``; the kernels take numbers with the tokens of a segment, a multiple of
    16, and the slots of the workspace. workspace: its address. clusters: of operators and of outputs.
    """
    tokens, _, sequences, offset_bytes, _ = numbers
    total = tokens if offset_bytes else tokens * sequences
    initial, offsets = (addresses[chunk16.NAMES.index(name)] for name in ("initial", "offsets"))
    own = [*addresses, Int64(workspace)]
    carried = slots(total, segment)
    counts = [*map(Int32, (*numbers, segment, carried))]

    def part(name: str, places: int, cluster: int, pdl: bool) -> None:
        scalars = (Float32(scale), Float32(lower_bound), Int32(places), Int32(pdl))
        compile_segments(Config(cluster, part=name))(own, pitches, counts, *scalars, stream)

    if carried:
        part(OPERATORS, carried, clusters[0], False)
        compile_combine()([initial, offsets, own[-1]], counts, stream)
    part(OUTPUTS, places(total, sequences, segment), clusters[1], carried > 0)


def compile_segments(config: Config, options: str = ""):
    """A part of a scan, for any T, H, N, offsets and segments; needs no GPU."""
    numbers = ([Int32(1)] * 7, Float32(0.0), Float32(0.0), Int32(1), Int32(0))
    arguments = ([Int64(0)] * len(NAMES), [Int32(1)] * len(TOKENWISE), *numbers)
    return runtime.compile_kernel(("kda", config, options), lambda: Segments(config), *arguments, options=options)


def compile_combine(options: str = ""):
    """The kernel between the parts; needs no GPU."""
    arguments = ([Int64(0)] * 3, [Int32(1)] * 7)
    return runtime.compile_kernel(("kda", "combine", options), Combine, *arguments, options=options)
