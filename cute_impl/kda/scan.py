"""KDA forward, schedules ``chunk16_scan…``: three launches, parallel over segments of a sequence (docs/kda.md).

1. *operators*, by the roles of ``chunk16``: for every segment but a sequence's last, C, its last state from a first one
   of zeros, and M, that from the identity with v = 0. A cluster makes one of the two for a head.
2. ``Combine``: S ← S · M + C from segment to segment; S takes C's place.
3. *outputs*, by the roles of ``chunk16``: all segments, each from its S.

Segments are found on the device, so that offsets may change from replay to replay of a graph. Those of sequence n that
have operators begin at *slot* ⌊begin / L⌋ of the workspace, and all of them at *place* ⌊begin / L⌋ + n of the third
grid: neither overlaps with the next sequence's, whatever the lengths. Clusters without a segment have no chunks.

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
COMBINED_ROWS = 8  # of V, a CTA of Combine
SLABS = D // COMBINED_ROWS


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
        tokens: Int32,
        heads: Int32,
        sequences: Int32,
        offset_bytes: Int32,
        wide: Int32,
        scale: Float32,
        lower_bound: Float32,
        segment: Int32,
        slots: Int32,
        places: Int32,
        stream,
    ):
        """Launch for ``places`` · ``heads`` clusters, of operators twice as many: C first, then M.

        As ``Chunk16``. addresses: as ``NAMES``. segment: its tokens, a multiple of 16. slots: of the workspace.
        """
        numbers = (tokens, heads, sequences, offset_bytes, wide, scale, lower_bound, segment, slots, places)
        kinds = 2 if self.config.part == OPERATORS else 1
        self.kernel(addresses, pitches, *numbers).launch(
            grid=[kinds * places * heads * self.config.cluster, 1, 1],
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
        segment: Int32,
        slots: Int32,
        places: Int32,
    ):
        config = self.config
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
    """S_{j+1} = S_j · M_j + C_j: a CTA for 8 rows of V of a sequence and head, a thread for each column.

    A thread's column of M_j is in registers: as a value is used up, that of M_{j+1} is fetched in its place. S_j's rows
    are in shared memory, twice, so that one barrier a segment is enough.
    """

    @cute.jit
    def __call__(
        self,
        addresses: list,
        tokens: Int32,
        heads: Int32,
        sequences: Int32,
        offset_bytes: Int32,
        wide: Int32,
        segment: Int32,
        slots: Int32,
        stream,
    ):
        """addresses: Int64 of the first states (0: zeros), the offsets (0: none) and the workspace."""
        self.kernel(addresses, tokens, heads, offset_bytes, wide, segment, slots).launch(
            grid=[sequences * heads * SLABS, 1, 1], block=[D, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        addresses: list,
        tokens: Int32,
        heads: Int32,
        offset_bytes: Int32,
        wide: Int32,
        segment: Int32,
        slots: Int32,
    ):
        column, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        slab, head, sequence = block % SLABS, block // SLABS % heads, block // (SLABS * heads)
        initial, offsets, workspace = addresses
        rows = SmemAllocator().allocate(2 * COMBINED_ROWS * D * 4, byte_alignment=16).toint()
        begin, count = sequence_span(offsets, offset_bytes, tokens, sequence)
        steps = select_(count > 0, (count - 1) // segment, Int32(0))
        if steps > 0:
            element = slab * (COMBINED_ROWS * D) + column
            own = (Int64(sequence) * heads + head) * (D * D) + element
            first_rows(rows + column * 4, initial, own, wide)
            operator = workspace + (first_place(begin, sequence, segment, 0) * heads + head) * STATE_BYTES
            matrix = operator + Int64(slots) * heads * STATE_BYTES + Int64(column) * 4
            self.scan(rows, operator + Int64(element) * 4, matrix, Int64(heads) * STATE_BYTES, steps, column)

    @cute.jit
    def scan(self, rows: Int32, operator: Int64, matrix: Int64, pitch: Int64, steps: Int32, column: Int32):
        """``operator``, ``matrix``: of the column in the rows of C_0, in M_0; ``pitch``: to the next segment's."""
        m = cute.make_rmem_tensor(D, Float32)
        c = cute.make_rmem_tensor(COMBINED_ROWS, Float32)
        load_column(m, matrix, D)
        load_column(c, operator, COMBINED_ROWS)
        for j in cutlass.range(0, steps, 1, unroll=1):
            own, other = rows + j % 2 * (COMBINED_ROWS * D * 4), rows + (1 - j % 2) * (COMBINED_ROWS * D * 4)
            # After the last segment the last operators once more.
            step = select_(j + 1 < steps, pitch, Int64(0))
            matrix += step
            sums = [c[row] for row in range(COMBINED_ROWS)]
            load_column(c, operator + step, COMBINED_ROWS)
            cute.arch.sync_threads()
            sums = multiply(own, m, matrix, sums)
            store_column(sums, operator, other + column * 4)
            operator += step


def multiply(rows: Int32, m: cute.Tensor, following: Int64, sums: list) -> list:
    """sums plus S's rows times the column of M, ascending; the column at ``following`` takes its place."""
    for k in range(0, D, 4):
        for row in range(COMBINED_ROWS):
            s = ptx.ld_v4("shared", rows + (row * D + k) * 4, Float32)
            for i in range(4):
                sums[row] = fma_rn(s[i], m[k + i], sums[row])
        for i in range(4):
            m[k + i] = ptx.ld_b32("global", following + (k + i) * (4 * D), Float32)
    return sums


def store_column(values: list, memory: Int64, shared: Int32):
    for row, value in enumerate(values):
        ptx.st_b32("global", memory + row * (4 * D), value)
        ptx.st_b32("shared", shared + row * (4 * D), value)


def load_column(x: cute.Tensor, address: Int64, rows: int):
    for row in range(rows):
        x[row] = ptx.ld_b32("global", address + row * (4 * D), Float32)


@cute.jit
def first_rows(target: Int32, initial: Int64, element: Int64, wide: Int32):
    """Copy a column's 8 rows of the first state, from ``element`` on, to shared memory as fp32; zeros without one."""
    for row in cutlass.range_constexpr(COMBINED_ROWS):
        value = Float32(0.0)
        if initial != 0:
            if wide != 0:
                value = ptx.ld_b32("global", initial + (element + row * D) * 4, Float32)
            else:
                value = ptx.ld_bf16("global", initial + (element + row * D) * 2)
        ptx.st_b32("shared", target + row * (4 * D), value)


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
    """All three kernels; of the first two none where no sequence can have two segments.

    addresses, pitches, numbers: as ``Chunk16``. workspace: its address. clusters: of operators and of outputs.
    """
    tokens, _, sequences, offset_bytes, _ = numbers
    total = tokens if offset_bytes else tokens * sequences
    initial, offsets = (addresses[chunk16.NAMES.index(name)] for name in ("initial", "offsets"))
    own = [*addresses, Int64(workspace)]
    carried = slots(total, segment)
    scalars = (*map(Int32, numbers), Float32(scale), Float32(lower_bound), Int32(segment), Int32(carried))

    def part(name: str, places: int, cluster: int) -> None:
        compile_segments(Config(cluster, part=name))(own, pitches, *scalars, Int32(places), stream)

    if carried:
        part(OPERATORS, carried, clusters[0])
        own_numbers = map(Int32, (*numbers, segment, carried))
        compile_combine()([initial, offsets, own[-1]], *own_numbers, stream)
    part(OUTPUTS, places(total, sequences, segment), clusters[1])


def compile_segments(config: Config, options: str = ""):
    """A part of a scan, for any T, H, N, offsets and segments; needs no GPU."""
    numbers = (*(Int32(1),) * 5, Float32(0.0), Float32(0.0), *(Int32(1),) * 3)
    arguments = ([Int64(0)] * len(NAMES), [Int32(1)] * len(TOKENWISE), *numbers)
    return runtime.compile_kernel(("kda", config, options), lambda: Segments(config), *arguments, options=options)


def compile_combine(options: str = ""):
    """The kernel between the parts; needs no GPU."""
    arguments = ([Int64(0)] * 3, *(Int32(1),) * 7)
    return runtime.compile_kernel(("kda", "combine", options), Combine, *arguments, options=options)
