"""Around a mailbox in tests: a kernel that publishes rows, and one that checks what came of them.

``publish`` is what an all-reduce does at its end: rows go out in 16-byte fragments, −0 replaced by +0 so that no word
is the sentinel, each CTA after a delay of its own. ``check`` ends a round on the device: it counts the words that
are not as wanted and puts tensors back. Both let their successor start at once and wait for their predecessor first.
"""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import select_
from torch import Tensor

from cute_impl import ptx, runtime
from cute_impl.attn_res.cluster7 import COLUMNS, RANKS, ROW_BYTES, SENTINEL, THREADS, D

DELAYS = 8  # different delays; a CTA takes one by its number
CHECK_CTAS = 64


def without_negative_zero(word: Int32) -> Int32:
    """A word of two bf16, −0 in either half replaced by +0."""
    word = select_((word & 0xFFFF) == 0x8000, word & -0x10000, word)
    return select_((word & -0x10000) == SENTINEL, word & 0xFFFF, word)


class Publish:
    """One CTA for 1024 columns of a row of a slot."""

    @cute.jit
    def __call__(
        self,
        source: Int64,
        mailbox: Int64,
        slot_bytes: Int64,
        tokens: Int32,
        slots: Int32,
        delay_ns: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(source, mailbox, slot_bytes, tokens, delay_ns).launch(
            grid=[RANKS * tokens, slots, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(self, source: Int64, mailbox: Int64, slot_bytes: Int64, tokens: Int32, delay_ns: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        part, slot, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        offset = Int64(part) * (THREADS * 2 * COLUMNS) + thread * (2 * COLUMNS)
        words = ptx.ld_v4("global", source + Int64(slot) * tokens * ROW_BYTES + offset)
        ptx.nanosleep((part * 5 + slot * 3) % DELAYS * delay_ns)
        ptx.st_v4("relaxed.sys.global", mailbox + slot * slot_bytes + offset, [without_negative_zero(w) for w in words])


class Check:
    """Counts words of ``got`` tensors that differ from ``want``; then copies ``back`` to it where that is not 0."""

    def __init__(self, tensors: int):
        self.tensors = tensors

    @cute.jit
    def __call__(self, got: list, want: list, back: list, fragments: list, counter: Int64, pdl: Int32, stream):
        self.kernel(got, want, back, fragments, counter).launch(
            grid=[CHECK_CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=pdl
        )

    @cute.kernel
    def kernel(self, got: list, want: list, back: list, fragments: list, counter: Int64):
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        wrong = Int32(0)
        for i in cutlass.range_constexpr(self.tensors):
            for fragment in cutlass.range(cta * THREADS + thread, fragments[i], CHECK_CTAS * THREADS):
                offset = Int64(fragment) * (2 * COLUMNS)
                have = ptx.ld_v4("global", got[i] + offset)
                wish = ptx.ld_v4("global", want[i] + offset)
                for k in cutlass.range_constexpr(4):
                    wrong += Int32(have[k] != wish[k])
                if back[i] != 0:
                    ptx.st_v4("global", got[i] + offset, list(ptx.ld_v4("global", back[i] + offset)))
        if wrong != 0:
            ptx.red_add("global", counter, wrong)


def compile_publish(options: str = ""):
    """The publisher; needs no GPU."""
    arguments = (Int64(0), Int64(0), Int64(0), Int32(1), Int32(1), Int32(0), Int32(0))
    return runtime.compile_kernel(("attn_res publish", options), Publish, *arguments, options=options)


def compile_check(tensors: int, options: str = ""):
    """The check of so many tensors; needs no GPU."""
    lists = [[kind(0)] * tensors for kind in (Int64, Int64, Int64, Int32)]
    return runtime.compile_kernel(
        ("attn_res check", tensors, options), lambda: Check(tensors), *lists, Int64(0), Int32(0), options=options
    )


def publish(rows: Tensor, mailbox: Tensor, delay_ns: int = 0, pdl: bool = False) -> None:
    """Send rows [slots, T, D] into rows 0 … T − 1 of each slot of a mailbox [slots, capacity, D], both compact."""
    slots, tokens, _ = rows.shape
    if tuple(mailbox.shape) != (slots, mailbox.shape[1], D) or mailbox.shape[1] < tokens:
        raise ValueError(f"mailbox: got shape {tuple(mailbox.shape)}, rows have {tuple(rows.shape)}")
    _require_contiguous(rows=rows, mailbox=mailbox)
    addresses = (Int64(rows.data_ptr()), Int64(mailbox.data_ptr()), Int64(mailbox.shape[1] * ROW_BYTES))
    compile_publish()(*addresses, Int32(tokens), Int32(slots), Int32(delay_ns), Int32(pdl), runtime.stream())


def check(
    got: Sequence[Tensor], want: Sequence[Tensor], back: Sequence[Tensor | None], counter: Tensor, pdl: bool = True
) -> None:
    """Add to counter (int32 [1]) the 32-bit words of got that are not those of want, then got ← back where given."""
    tensors = len(got)
    for i in range(tensors):
        _require_contiguous(got=got[i], want=want[i], back=back[i])
        if got[i].nbytes != want[i].nbytes or got[i].nbytes % 16:
            raise ValueError(f"want: got {want[i].nbytes} bytes for {got[i].nbytes}, allowed are multiples of 16")
    lists = (
        [Int64(x.data_ptr()) for x in got],
        [Int64(x.data_ptr()) for x in want],
        [Int64(0 if x is None else x.data_ptr()) for x in back],
        [Int32(x.nbytes // 16) for x in got],
    )
    compile_check(tensors)(*lists, Int64(counter.data_ptr()), Int32(pdl), runtime.stream())


def empty_mailbox(slots: int, capacity: int, device: torch.device | str) -> Tensor:
    """A mailbox [slots, capacity, D] in which nothing is published."""
    words = torch.full((slots, capacity, D // 2), SENTINEL, dtype=torch.int32, device=device)
    return words.view(torch.bfloat16)


def _require_contiguous(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")
