"""One warpgroup product a tile: what ``reference.numerics.tensor_core`` is proven against for ``wgmma``.

d = a · bᵀ + c for tiles of 64 rows and 8 columns, by a chain of ``wgmma.mma_async`` m64n8 over K in
ascending order (one instruction where K is its depth). The accumulator starts from c, scale-d is 1.
``run_wgmma(name, a, b, c)`` applies it on the GPU; names are those of ``tensor_core.FORMS``.

Shared memory holds the 32 bytes of K that one instruction takes, without swizzle (PTX ISA,
"Shared Memory Matrix Layout"): core matrices of 8 rows · 16 bytes, each contiguous, the two along K
128 bytes apart (leading offset), groups of 8 rows 256 bytes apart (stride offset).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx

from cute_impl import runtime

ROWS, COLUMNS = 64, 8
THREADS = 128
STEP_WORDS = 8  # 32 bytes of K an instruction
CORE_WORDS = 32  # a core matrix: 8 rows · 16 bytes
LEADING_BYTES, STRIDE_BYTES = 128, 256
# Matrix descriptor: bits 4 … 17 of the address in bits 0 … 13, leading offset / 16 from bit 16, stride offset / 16
# from bit 32, no swizzle (0) in bits 62, 63.
ADDRESS_MASK = 0x3FFF
DESCRIPTOR = (LEADING_BYTES >> 4) << 16 | (STRIDE_BYTES >> 4) << 32


class WgmmaForm(NamedTuple):
    """An instruction: what follows ``wgmma.mma_async.sync.aligned.``, its immediates, depth, operand type."""

    ptx: str
    immediates: str
    k: int
    operand: torch.dtype


# Immediates: scale-a 1, scale-b 1, and for 16-bit operands trans-a 0, trans-b 0 (both K-major).
WGMMA_FORMS = {
    "wgmma_bf16": WgmmaForm("m64n8k16.f32.bf16.bf16", "1, 1, 0, 0", 16, torch.bfloat16),
    "wgmma_fp16": WgmmaForm("m64n8k16.f32.f16.f16", "1, 1, 0, 0", 16, torch.float16),
    "wgmma_e4m3": WgmmaForm("m64n8k32.f32.e4m3.e4m3", "1, 1", 32, torch.float8_e4m3fn),
}


def wgmma(form: WgmmaForm, a: Int64, b: Int64, c: list[Float32]) -> tuple:
    """d = a · b + c for one warpgroup, complete on return; a and b are matrix descriptors.

    The accumulator lives in registers of the block's own, so that no input shares one with an output.
    """
    names = ", ".join(f"acc{i}" for i in range(4))
    load = " ".join(f"mov.f32 acc{i}, {{$r{i}}};" for i in range(4))
    store = " ".join(f"mov.f32 {{$w{i}}}, acc{i};" for i in range(4))
    return inline_ptx(
        "{ .reg .pred one; .reg .f32 acc<4>; setp.eq.b32 one, 0, 0; "
        f"{load} wgmma.fence.sync.aligned; "
        f"wgmma.mma_async.sync.aligned.{form.ptx} {{{names}}}, {{$r4}}, {{$r5}}, one, {form.immediates}; "
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; "
        f"{store} }}",
        write_only_types=[Float32] * 4,
        read_only_args=[*c, a, b],
    )


class Wgmma:
    """One CTA of one warpgroup a tile.

    mA int32 [tiles, 64, W], mB int32 [tiles, 8, W], the K of a row packed in W words, a multiple of 8;
    mC and mD fp32 [tiles, 64, 8]. Shared memory: 2048 bytes of A, 256 of B.
    """

    def __init__(self, form: WgmmaForm):
        self.form = form

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor, stream):
        self.kernel(mA, mB, mC, mD).launch(grid=[mA.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        sA = self._words(ROWS * STEP_WORDS)
        sB = self._words(COLUMNS * STEP_WORDS)
        a, b = [DESCRIPTOR | Int64(s.iterator.toint() >> 4 & ADDRESS_MASK) for s in (sA, sB)]
        # Accumulator fragment: four registers a thread (PTX ISA, "Register Fragments for wgmma").
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        acc = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(4):
            acc[i] = mC[tile, row + 8 * (i // 2), column + i % 2]
        for step in cutlass.range(mA.shape[2] // STEP_WORDS, unroll=1):
            self._stage(mA, sA, tile, step, thread)
            if thread < 2 * COLUMNS:
                self._stage(mB, sB, tile, step, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            d = wgmma(self.form, a, b, [acc[i] for i in range(4)])
            for i in cutlass.range_constexpr(4):
                acc[i] = d[i]
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(4):
            mD[tile, row + 8 * (i // 2), column + i % 2] = acc[i]

    def _words(self, count: int) -> cute.Tensor:
        """Shared memory for ``count`` words."""
        return cute.make_tensor(cute.arch.alloc_smem(Int32, count, alignment=128), cute.make_layout(count))

    @cute.jit
    def _stage(self, mX: cute.Tensor, sX: cute.Tensor, tile: Int32, step: Int32, thread: Int32):
        """Copy 16 bytes a thread into the core matrices: two threads a row."""
        row, half = thread // 2, thread % 2
        core = (row // 8 * 2 + half) * CORE_WORDS + row % 8 * 4
        for i in cutlass.range_constexpr(4):
            sX[core + i] = mX[tile, row, step * STEP_WORDS + half * 4 + i]


def compile_wgmma(name: str, options: str = ""):
    """Compile the kernel of one form for sm_90a; needs no GPU. ``options`` go to ``cute.compile``."""
    tiles, steps = cute.sym_int(), cute.sym_int(divisibility=STEP_WORDS)
    c = runtime.fake(Float32, (tiles, ROWS, COLUMNS))
    return runtime.compile_kernel(
        ("wgmma", name, options),
        lambda: Wgmma(WGMMA_FORMS[name]),
        runtime.fake(Int32, (tiles, ROWS, steps)),
        runtime.fake(Int32, (tiles, COLUMNS, steps)),
        c,
        c,
        options=options,
    )


def run_wgmma(name: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """A chain of ``wgmma`` a tile: a [n, 64, K], b [n, 8, K] of the form's operand type, c [n, 64, 8] fp32 -> d as c.

    K is a multiple of the instruction's depth. ValueError for an unknown name, a wrong shape or dtype.
    """
    if name not in WGMMA_FORMS:
        raise ValueError(f"name: got {name!r}, need one of {', '.join(WGMMA_FORMS)}")
    form = WGMMA_FORMS[name]
    tiles, depth = a.shape[0], a.shape[-1]
    if depth % form.k or depth == 0:
        raise ValueError(f"a: got K = {depth}, need a multiple of {form.k}")
    wanted = {"a": (tiles, ROWS, depth), "b": (tiles, COLUMNS, depth), "c": (tiles, ROWS, COLUMNS)}
    for (label, shape), x in zip(wanted.items(), (a, b, c), strict=True):
        dtype = torch.float32 if label == "c" else form.operand
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ValueError(f"{label}: got {x.dtype} {tuple(x.shape)}, need {dtype} {shape}")
    c = c.contiguous()
    d = torch.empty_like(c)
    words = [x.contiguous().view(torch.int32) for x in (a, b)]
    views = [runtime.view(x, {0: 1, 2: STEP_WORDS}) for x in words] + [runtime.view(x, {0: 1}) for x in (c, d)]
    compile_wgmma(name)(*views, runtime.stream())
    return d
