"""A predecessor at its worst: it lets its successor start at once and writes long after.

``write_late(target, source)`` copies on the device what the next launch is to read. A kernel that is launched early and
reads before it waits for its predecessor gets what was there before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from cute_impl import ptx, runtime

THREADS, WORD_BYTES = 256, 4
DELAY_NS = 2_000_000  # by then the host has launched the successor, and that has read what it reads early


class WriteLate:
    """One CTA, so that the successor finds room on all other SMs."""

    @cute.jit
    def __call__(self, target: Int64, source: Int64, words: Int32, delay_ns: Int64, stream):
        self.kernel(target, source, words, delay_ns).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, target: Int64, source: Int64, words: Int32, delay_ns: Int64):
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        begin = cute.arch.globaltimer()
        while cute.arch.globaltimer() - begin < delay_ns:
            ptx.nanosleep(1000)
        for i in cutlass.range(thread, words, THREADS, unroll=1):
            offset = Int64(i) * WORD_BYTES
            ptx.st_b32("global", target + offset, ptx.ld_b32("global", source + offset))


def compile_write_late(options: str = ""):
    """The kernel, for any size and delay; needs no GPU."""
    return runtime.compile_kernel(
        ("write late", options), WriteLate, Int64(0), Int64(0), Int32(1), Int64(0), options=options
    )


def write_late(target: Tensor, source: Tensor, delay_ns: int = DELAY_NS) -> None:
    """target ← source, ``delay_ns`` after the next launch on the stream may start; both compact, of whole words."""
    for name, x in (("target", target), ("source", source)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, allowed is contiguous")
    if target.nbytes != source.nbytes or target.nbytes % WORD_BYTES:
        raise ValueError(
            f"target: got {target.nbytes} bytes for {source.nbytes}, allowed are as many, a multiple of {WORD_BYTES}"
        )
    addresses = (Int64(target.data_ptr()), Int64(source.data_ptr()))
    compile_write_late()(*addresses, Int32(target.nbytes // WORD_BYTES), Int64(delay_ns), runtime.stream())
