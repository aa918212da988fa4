"""Decode context parallelism: every rank's query bytes in every rank's mailbox, by peer stores and polling.

A mailbox is bytes [2, capacity, ranks · heads, 576]: round n uses half n mod 2, in which rank s owns head block s. Its
words start as, and are put back to, 0xffffffff, which no four e4m3 bytes of ours make (a NaN is 0x7f). ``state`` beside
it, int32 [4] on the device: the round, the CTAs that have finished it, and the rows of the round before; so a graph
may be replayed any number of times. All ranks run the same number of rounds, round n with the same B everywhere.

A round of one rank, each CTA of the kernel for itself:
  1. re-arm   after the wait for the predecessor: its share of the other half, which round n − 1 left full
  2. publish  fence, then its words to all mailboxes, relaxed at system scope, its own included
  3. gather   its share of its own mailbox's half of this round: read each word until it is not the sentinel
  4. close    the last CTA resets the count and advances the round
A share is 576 / C bytes of the CTA's head in every rank's block. What follows in the stream finds the half full.

Why nothing is lost. A peer stores into half n mod 2 of mine again in round n + 2, hence after its round n + 1, which
ended only when it had read all my words of round n + 1; I re-armed that half in round n + 1 before I published any of
them (step 1, a fence, step 2), after all my readers of round n, which lie before round n + 1 in my stream. So its
store comes behind my sentinel, and its round n + 1 stores go to the other half.

Words are compared as integers and one by one, since wider stores may arrive in pieces. ``polls`` bounds the reads of a
word, 0 for no bound; if it is reached, status (int32 [4]) is set to 1 and the round ends as if the word had come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import select_
from torch import Tensor

from cute_impl import ptx, runtime
from cute_impl.mla_query.device import THREADS
from cute_impl.mla_query.insert import WIDTH

SENTINEL = -1
WORDS = WIDTH // 4  # of a head
FIELDS = ("state", "status", "rank", "polls", "half_bytes")  # before the mailboxes, in the kernels' list ``mailbox``
NONE = 1  # length of that list without decode context parallelism


def fields(mailbox: list) -> tuple[dict, list]:
    """The named numbers and the addresses of the ranks' mailboxes."""
    return dict(zip(FIELDS, mailbox[: len(FIELDS)], strict=True)), mailbox[len(FIELDS) :]


@dataclass(frozen=True)
class Place:
    """Where a group's requests stand: group ``group`` of ``groups``, from request ``first`` on, of ``rows`` in all."""

    group: Int32
    groups: Int32
    first: Int32
    rows: Int32


class Round:
    """A CTA's part of a round: ``rows`` requests of head ``head``, share ``part`` of ``parts``. Device code; made after
    the wait. place: None if these are all requests.
    """

    def __init__(
        self, mailbox: list, head: Int32, heads: Int32, part: Int32, parts: int, rows: Int32, place: Place | None = None
    ):
        self.place = Place(Int32(0), Int32(1), Int32(0), rows) if place is None else place
        self.numbers, self.peers = fields(mailbox)
        self.ranks, self.parts = len(self.peers), parts
        self.head, self.heads, self.part, self.rows = head, heads, part, rows
        number, _, self.rows_before, _ = ptx.ld_v4("global", self.numbers["state"])
        self.number = number
        self.row_bytes = heads * (self.ranks * WIDTH)
        self.half = Int64(number & 1) * self.numbers["half_bytes"]
        self.other_half = Int64((number & 1) ^ 1) * self.numbers["half_bytes"]
        self.own = self.select_own()

    def select_own(self) -> Int64:
        """The address of this rank's mailbox."""
        own = self.peers[0]
        for rank in range(1, self.ranks):
            own = select_(self.numbers["rank"] == rank, self.peers[rank], own)
        return Int64(own)

    def of_share(self, i: Int32) -> Int64:
        """The offset of word i of a CTA's share, within a half; rows before ranks before words."""
        words = cutlass.const_expr(WORDS // self.parts)
        word, block = i % words, i // words
        row, source = block // self.ranks, block % self.ranks
        offset = ((source * self.heads + self.head) * WORDS + self.part * words + word) * 4
        return Int64(row) * self.row_bytes + offset

    @cute.jit
    def rearm(self):
        """Step 1; a barrier of the CTA must lie between it and ``publish``."""
        thread, _, _ = cute.arch.thread_idx()
        words = self.rows_before * (self.ranks * (WORDS // self.parts))
        base = self.own + self.other_half
        group, groups = self.place.group, self.place.groups
        for i in cutlass.range(thread + group * THREADS, words, groups * THREADS, unroll=1):
            ptx.st_b32("relaxed.sys.global", base + self.of_share(i), Int32(SENTINEL))

    def publish(self, row: Int32, offset: Int32, words: list):
        """Step 2: 1 or 4 words of this head, at byte ``offset`` of its 576 in row ``row``."""
        cute.arch.fence_acq_rel_sys()
        block = Int32(self.numbers["rank"]) * self.heads + self.head
        where = self.half + Int64(self.place.first + row) * self.row_bytes + block * WIDTH + offset
        for peer in self.peers:
            if len(words) == 4:
                ptx.st_v4("relaxed.sys.global", peer + where, words)
            else:
                ptx.st_b32("relaxed.sys.global", peer + where, words[0])

    @cute.jit
    def finish(self):
        """Steps 3 and 4."""
        thread, _, _ = cute.arch.thread_idx()
        words = self.rows * (self.ranks * (WORDS // self.parts))
        base = self.own + self.half + Int64(self.place.first) * self.row_bytes
        polls, status = Int32(self.numbers["polls"]), self.numbers["status"]
        for i in cutlass.range(thread, words, THREADS, unroll=1):
            where = base + self.of_share(i)
            word, reads = Int32(ptx.ld_b32("relaxed.sys.global", where)), Int32(1)
            while word == SENTINEL and reads != polls:
                word = Int32(ptx.ld_b32("relaxed.sys.global", where))
                reads += 1
            if word == SENTINEL and status != 0:
                ptx.st_v4("global", status, [Int32(1)] * 4)
        cute.arch.fence_acq_rel_sys()
        cute.arch.sync_threads()
        if thread == 0:
            state = self.numbers["state"]
            if ptx.atom_add(state + 4, 1) == self.heads * self.parts * self.place.groups - 1:
                ptx.st_v4("global", state, [self.number + 1, Int32(0), self.place.rows, Int32(0)])


class Mailbox:
    """One rank's end: the ranks' mailboxes as this process sees them, and the state of its own.

    buffers: a uint8 tensor [2, capacity, ranks · heads, 576] a rank, in order of rank, each on the GPU that calls or
    mapped there from a peer; its own from ``empty``, full of 0xff. polls and status: see ``dcp``.
    Buffers of torch's symmetric memory own nothing: the caller keeps its tensor and its handle for as long.
    ValueError names what does not fit.
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int, polls: int = 0):
        if not 1 <= len(buffers) <= 8:
            raise ValueError(f"buffers: got {len(buffers)} ranks, allowed are 1 … 8")
        if not 0 <= rank < len(buffers):
            raise ValueError(f"rank: got {rank}, allowed are 0 … {len(buffers) - 1}")
        if not isinstance(polls, int) or not 0 <= polls < 1 << 31:
            raise ValueError(f"polls: got {polls!r}, allowed are 0 (no bound) … 2^31 − 1")
        for i, x in enumerate(buffers):
            if (
                x.dtype != torch.uint8
                or x.dim() != 4
                or x.shape[0] != 2
                or x.shape[3] != WIDTH
                or not x.is_contiguous()
            ):
                raise ValueError(
                    f"buffers[{i}]: got {x.dtype} {tuple(x.shape)}, allowed is contiguous torch.uint8 [2, capacity, "
                    f"ranks · heads, {WIDTH}]"
                )
            if x.shape != buffers[0].shape:
                raise ValueError(f"buffers[{i}]: got shape {tuple(x.shape)}, buffers[0] has {tuple(buffers[0].shape)}")
            if x.data_ptr() % 16:
                raise ValueError(f"buffers[{i}]: got address {x.data_ptr():#x}, allowed are multiples of 16 bytes")
        if buffers[0].shape[2] % len(buffers):
            raise ValueError(
                f"buffers: got {buffers[0].shape[2]} heads in all, allowed are multiples of {len(buffers)}"
            )
        self.buffers, self.rank, self.polls = list(buffers), rank, polls
        self.state = torch.zeros(4, dtype=torch.int32, device=buffers[rank].device)
        self.status = torch.zeros(4, dtype=torch.int32, device=buffers[rank].device)

    @staticmethod
    def empty(ranks: int, heads: int, capacity: int, device: torch.device | str) -> Tensor:
        """A mailbox in which nothing is published."""
        return torch.full((2, capacity, ranks * heads, WIDTH), 0xFF, dtype=torch.uint8, device=device)

    @property
    def heads(self) -> int:
        """Of a rank."""
        return self.buffers[0].shape[2] // len(self.buffers)

    @property
    def capacity(self) -> int:
        return self.buffers[0].shape[1]

    def gathered(self, rows: int) -> Tensor:
        """The bytes [rows, ranks · heads, 576] of the last round; reads the state back, so it waits for the GPU."""
        last = (int(self.state[0]) - 1) % 2
        return self.buffers[self.rank][last, :rows]

    def check(self) -> None:
        """TimeoutError if a word was not published within ``polls`` reads, in any round so far."""
        if int(self.status[0]):
            raise TimeoutError(f"mailbox: a word was not published within {self.polls} reads")


def to_list(buffers: Sequence[Tensor], state: Tensor, status: Tensor, rank: int, polls: int) -> list:
    """What the kernels take as ``mailbox``."""
    half_bytes = buffers[0].nbytes // 2
    numbers = (state.data_ptr(), status.data_ptr(), rank, polls, half_bytes)
    return [Int64(x) for x in (*numbers, *(x.data_ptr() for x in buffers))]


def stand_in(ranks: int) -> list:
    """The same to compile against; 0 ranks: without decode context parallelism."""
    return [Int64(0)] * (len(FIELDS) + ranks if ranks else NONE)


class PublishOthers:
    """For tests on one GPU: the other ranks' bytes into this round's half of one mailbox. One CTA a row."""

    @cute.jit
    def __call__(
        self,
        source: Int64,
        mailbox: Int64,
        state: Int64,
        half_bytes: Int64,
        rows: Int32,
        row_words: Int32,
        first: Int32,
        last: Int32,
        delay_ns: Int32,
        pdl: Int32,
        stream,
    ):
        """Words first … last − 1 of each row belong to the rank itself and are left alone."""
        self.kernel(source, mailbox, state, half_bytes, row_words, first, last, delay_ns).launch(
            grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(
        self,
        source: Int64,
        mailbox: Int64,
        state: Int64,
        half_bytes: Int64,
        row_words: Int32,
        first: Int32,
        last: Int32,
        delay_ns: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        number = ptx.ld_b32("global", state)
        half = mailbox + Int64(number & 1) * half_bytes
        ptx.nanosleep((row * 5 + number * 3) % 8 * delay_ns)
        for i in cutlass.range(thread, row_words, THREADS, unroll=1):
            if i < first or i >= last:
                offset = (Int64(row) * row_words + i) * 4
                ptx.st_b32("relaxed.sys.global", half + offset, ptx.ld_b32("global", source + offset))


def compile_publish_others(options: str = ""):
    """The test kernel; needs no GPU."""
    arguments = ([Int64(0)] * 4, [Int32(1)] * 6)
    return runtime.compile_kernel(
        ("mla_query publish", options), PublishOthers, *arguments[0], *arguments[1], options=options
    )


def publish_others(rows: Tensor, mailbox: Mailbox, delay_ns: int = 0, pdl: bool = False) -> None:
    """Other ranks' blocks of rows [B, ranks · heads, 576] uint8 into the rank's own mailbox, this round's half."""
    own = mailbox.buffers[mailbox.rank]
    if rows.dtype != torch.uint8 or rows.shape[1:] != own.shape[2:] or rows.shape[0] > mailbox.capacity:
        raise ValueError(f"rows: got {rows.dtype} {tuple(rows.shape)}, the mailbox is {tuple(own.shape)}")
    if not rows.is_contiguous():
        raise ValueError(f"rows: got strides {rows.stride()} for shape {tuple(rows.shape)}, allowed is contiguous")
    block = mailbox.heads * WORDS
    addresses = [Int64(x) for x in (rows.data_ptr(), own.data_ptr(), mailbox.state.data_ptr(), own.nbytes // 2)]
    numbers = (rows.shape[0], rows.shape[1] * WORDS, mailbox.rank * block, (mailbox.rank + 1) * block, delay_ns, pdl)
    with torch.cuda.device(own.device):
        compile_publish_others()(*addresses, *map(Int32, numbers), runtime.stream())
