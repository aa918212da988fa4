"""One instruction a kernel: what ``reference.numerics`` is measured from and proven against.

``PROBES`` names each element-wise instruction; ``run(name, a, b, c)`` applies it to tensors of
fp32 on the GPU and returns fp32, or the packed word of a conversion as int32.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from cute_impl import ptx, runtime

THREADS = 256


class Probe(NamedTuple):
    """An instruction on 1 to 3 fp32 operands; ``out`` is the type of its result."""

    arity: int
    device: Callable
    out: type = Float32


PROBES = {
    "add": Probe(2, ptx.add_rn),
    "sub": Probe(2, ptx.sub_rn),
    "mul": Probe(2, ptx.mul_rn),
    "div": Probe(2, ptx.div_rn),
    "fma": Probe(3, ptx.fma_rn),
    "max": Probe(2, ptx.max_f32),
    "rcp_rn": Probe(1, ptx.rcp_rn),
    "ex2": Probe(1, ptx.ex2_approx_ftz),
    "rcp": Probe(1, ptx.rcp_approx_ftz),
    "rsqrt": Probe(1, ptx.rsqrt_approx),
    "rsqrt_ftz": Probe(1, ptx.rsqrt_approx_ftz),
    "lg2": Probe(1, ptx.lg2_approx_ftz),
    "tanh": Probe(1, ptx.tanh_approx),
    "bf16": Probe(1, lambda a: ptx.cvt_bf16x2(a, Float32(0.0)), Int32),
    "fp16": Probe(1, lambda a: ptx.cvt_f16x2(a, Float32(0.0)), Int32),
    "e4m3": Probe(1, lambda a: ptx.cvt_e4m3x2(a, Float32(0.0)), Int32),
}


class Elementwise:
    """out[i] = instruction(a[i], b[i], c[i]); one thread an element."""

    def __init__(self, probe: Probe):
        self.probe = probe

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mOut: cute.Tensor, stream):
        blocks = cute.ceil_div(mA.shape[0], THREADS)
        self.kernel(mA, mB, mC, mOut).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mOut: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < mA.shape[0]:
            operands = (mA[i], mB[i], mC[i])[: self.probe.arity]
            mOut[i] = self.probe.device(*operands)


def compile_probe(name: str):
    """Compile the kernel of one instruction for sm_90a; needs no GPU."""
    n = cute.sym_int()
    words = [runtime.fake(Float32, (n,)) for _ in range(3)]
    return runtime.compile_kernel(
        ("probe", name), lambda: Elementwise(PROBES[name]), *words, runtime.fake(PROBES[name].out, (n,))
    )


def run(name: str, *operands: torch.Tensor) -> torch.Tensor:
    """Apply one instruction to fp32 tensors [n] on the GPU; returns fp32 [n], or int32 [n] for conversions."""
    probe = PROBES[name]
    if len(operands) != probe.arity:
        raise ValueError(f"{name} takes {probe.arity} operands, got {len(operands)}")
    a, b, c = (*operands, *[operands[0]] * (3 - probe.arity))
    out = torch.empty_like(a, dtype=torch.float32 if probe.out is Float32 else torch.int32)
    compile_probe(name)(*[runtime.view(x, {0: 1}) for x in (a, b, c, out)], runtime.stream())
    return out


class MmaForm(NamedTuple):
    """A tensor-core instruction: its PTX form, depth, bytes an operand element takes, accumulator type."""

    ptx: str
    k: int
    operand_bytes: int
    accumulator: type


MMA_FORMS = {
    "bf16": MmaForm("m16n8k16.row.col.f32.bf16.bf16.f32", 16, 2, Float32),
    "fp16": MmaForm("m16n8k16.row.col.f32.f16.f16.f32", 16, 2, Float32),
    "fp16_acc16": MmaForm("m16n8k16.row.col.f16.f16.f16.f16", 16, 2, Int32),
    "e4m3": MmaForm("m16n8k32.row.col.f32.e4m3.e4m3.f32", 32, 1, Float32),
}


class Mma:
    """d = a · b + c, one instruction for each tile of 16 rows of a and 8 columns of b; one warp a tile.

    mA int32 [tiles, 16, W], mB int32 [tiles, 8, W], the K of a row packed in W words; mC and mD fp32
    [tiles, 16, 8], or int32 [tiles, 16, 4] where the accumulator is fp16.
    """

    WARPS = 4

    def __init__(self, form: MmaForm):
        self.form = form

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor, stream):
        blocks = cute.ceil_div(mA.shape[0], self.WARPS)
        self.kernel(mA, mB, mC, mD).launch(grid=[blocks, 1, 1], block=[32 * self.WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile = block * self.WARPS + thread // 32
        row, quad = thread % 32 // 4, thread % 4
        if tile < mA.shape[0]:
            a = [mA[tile, row + 8 * (i % 2), quad + 4 * (i // 2)] for i in range(4)]
            b = [mB[tile, row, quad + 4 * i] for i in range(2)]
            if cutlass.const_expr(self.form.accumulator is Float32):
                where = [(tile, row + 8 * (i // 2), 2 * quad + i % 2) for i in range(4)]
            else:
                where = [(tile, row + 8 * i, quad) for i in range(2)]
            d = ptx.mma_sync(self.form.ptx, a, b, [mC[w] for w in where])
            for i in cutlass.range_constexpr(len(where)):
                mD[where[i]] = d[i]


def compile_mma(name: str, options: str = ""):
    """Compile the kernel of one ``mma.sync`` form for sm_90a; needs no GPU. ``options`` go to ``cute.compile``."""
    form = MMA_FORMS[name]
    n = cute.sym_int()
    words = form.k * form.operand_bytes // 4
    c = runtime.fake(form.accumulator, (n, 16, 8 if form.accumulator is Float32 else 4))
    return runtime.compile_kernel(
        ("mma", name, options),
        lambda: Mma(form),
        runtime.fake(Int32, (n, 16, words)),
        runtime.fake(Int32, (n, 8, words)),
        c,
        c,
        options=options,
    )


def run_mma(name: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """One ``mma.sync`` a tile: a [n, 16, K], b [n, 8, K] (K contiguous) of the form's operand type, c [n, 16, 8]."""
    d = torch.empty_like(c)
    words = [x.contiguous().view(torch.int32) for x in (a, b)]
    results = [x if x.dtype == torch.float32 else x.view(torch.int32) for x in (c, d)]
    compile_mma(name)(*[runtime.view(x, {0: 1}) for x in (*words, *results)], runtime.stream())
    return d
