"""Device-side instructions with one spelling each: what is written here is what runs.

Both the DSL's compiler and ptxas contract a plain product and a later plain sum into one FMA, and
may not touch the ``.rn`` forms. Kernels therefore call these functions wherever a rounding matters.
Each function is one PTX instruction (PTX ISA, "Floating-Point Instructions"); its bits are modelled
by the function of the same name in ``reference.numerics``.
"""

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx


def _f32(instruction: str, *operands: Float32) -> Float32:
    """One instruction that takes and returns f32."""
    slots = ", ".join(f"{{$r{i}}}" for i in range(len(operands)))
    values = [Float32(x) for x in operands]
    return inline_ptx(f"{instruction} {{$w0}}, {slots};", write_only_types=[Float32], read_only_args=values)


def add_rn(a: Float32, b: Float32) -> Float32:
    """a + b, rounded once."""
    return _f32("add.rn.f32", a, b)


def sub_rn(a: Float32, b: Float32) -> Float32:
    """a − b, rounded once."""
    return _f32("sub.rn.f32", a, b)


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a · b, rounded once."""
    return _f32("mul.rn.f32", a, b)


def div_rn(a: Float32, b: Float32) -> Float32:
    """a / b, rounded once."""
    return _f32("div.rn.f32", a, b)


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """a · b + c, rounded once."""
    return _f32("fma.rn.f32", a, b, c)


def max_f32(a: Float32, b: Float32) -> Float32:
    """The larger operand; a NaN loses to a number, −0 to +0."""
    return _f32("max.f32", a, b)


def rcp_rn(a: Float32) -> Float32:
    """1 / a, rounded once."""
    return _f32("rcp.rn.f32", a)


def ex2_approx_ftz(a: Float32) -> Float32:
    """2^a by the special-function unit."""
    return _f32("ex2.approx.ftz.f32", a)


def rcp_approx_ftz(a: Float32) -> Float32:
    """1 / a by the special-function unit."""
    return _f32("rcp.approx.ftz.f32", a)


def rsqrt_approx(a: Float32) -> Float32:
    """1 / √a by the special-function unit, subnormal inputs scaled."""
    return _f32("rsqrt.approx.f32", a)


def rsqrt_approx_ftz(a: Float32) -> Float32:
    """1 / √a by the special-function unit, subnormal inputs flushed."""
    return _f32("rsqrt.approx.ftz.f32", a)


def lg2_approx_ftz(a: Float32) -> Float32:
    """log2 a by the special-function unit."""
    return _f32("lg2.approx.ftz.f32", a)


def tanh_approx(a: Float32) -> Float32:
    """tanh a by the special-function unit."""
    return _f32("tanh.approx.f32", a)


def _packed(instruction: str, lo: Float32, hi: Float32) -> Int32:
    """A conversion of two f32 to one packed word, ``lo`` in its low half."""
    return inline_ptx(instruction, write_only_types=[Int32], read_only_args=[Float32(hi), Float32(lo)])


def cvt_bf16x2(lo: Float32, hi: Float32) -> Int32:
    """Two f32 to bf16, nearest even; ``lo`` in bits 0 … 15."""
    return _packed("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", lo, hi)


def cvt_f16x2(lo: Float32, hi: Float32) -> Int32:
    """Two f32 to fp16, nearest even; ``lo`` in bits 0 … 15."""
    return _packed("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", lo, hi)


def cvt_e4m3x2(lo: Float32, hi: Float32) -> Int32:
    """Two f32 to e4m3, nearest even, saturating; ``lo`` in bits 0 … 7, ``hi`` in bits 8 … 15."""
    return _packed("{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, {$r0}, {$r1}; cvt.u32.u16 {$w0}, h; }", lo, hi)


def mma_sync(form: str, a: list[Int32], b: list[Int32], c: list) -> tuple:
    """d = a · b + c for one warp; fragments are laid out as in the PTX ISA ("Matrix Fragments").

    ``form`` is what follows ``mma.sync.aligned.``, for instance ``m16n8k16.row.col.f32.bf16.bf16.f32``;
    ``c`` holds Float32, or Int32 where the accumulator is fp16.
    """
    kind = type(c[0])
    names = [f"{{$r{i}}}" for i in range(len(a) + len(b) + len(c))]
    fragments = [
        "{" + ", ".join(group) + "}"
        for group in (
            [f"{{$w{i}}}" for i in range(len(c))],
            names[: len(a)],
            names[len(a) : len(a) + len(b)],
            names[len(a) + len(b) :],
        )
    ]
    return inline_ptx(
        f"mma.sync.aligned.{form} {', '.join(fragments)};",
        write_only_types=[kind] * len(c),
        read_only_args=[*a, *b, *c],
    )


def bf16_lo(word: Int32) -> Float32:
    """The bf16 in bits 0 … 15 of a word, widened by a shift."""
    return inline_ptx("shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[Int32(word)])


def bf16_hi(word: Int32) -> Float32:
    """The bf16 in bits 16 … 31 of a word, widened by a mask."""
    return inline_ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[Int32(word)])


def ld_v4(space: str, address, kind: type = Int32) -> tuple:
    """Four 32-bit words at a 16-byte aligned address; ``space`` follows ``ld.``, such as ``relaxed.sys.global``."""
    return inline_ptx(
        f"ld.{space}.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[kind] * 4,
        read_only_args=[address],
    )


def st_v4(space: str, address, words: list) -> None:
    """Four 32-bit words to a 16-byte aligned address; ``space`` is what follows ``st.``."""
    inline_ptx(
        f"st.{space}.v4.b32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def mapa(address: Int32, rank: Int32) -> Int32:
    """The cluster address of what lies at ``address`` in the shared memory of CTA ``rank``."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def st_async(address: Int32, value: Float32, barrier: Int32) -> None:
    """Four bytes to a cluster address; their arrival counts 4 on the mbarrier, a cluster address of the same CTA."""
    inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, Float32(value), barrier],
    )


def nanosleep(duration_ns: Int32) -> None:
    """Suspend the thread for about as long, at most twice."""
    inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(duration_ns)])


def red_add(space: str, address, value: Int32) -> None:
    """Add to a word in memory, atomically on this GPU."""
    inline_ptx(f"red.relaxed.gpu.{space}.add.u32 [{{$r0}}], {{$r1}};", read_only_args=[address, Int32(value)])


def mbarrier_spin(barrier: Int32, parity: int) -> None:
    """Wait for a phase of an mbarrier in this CTA's shared memory by asking again and again, without a pause."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], "
        f"{parity}; @!done bra again; }}",
        read_only_args=[barrier],
    )


def ld_v2(space: str, address, kind: type = Int32) -> tuple:
    """Two 32-bit words at an 8-byte aligned address; ``space`` follows ``ld.``."""
    return inline_ptx(
        f"ld.{space}.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}];", write_only_types=[kind] * 2, read_only_args=[address]
    )


def ld_b32(space: str, address, kind: type = Int32):
    """A 32-bit word; ``space`` follows ``ld.``."""
    return inline_ptx(f"ld.{space}.b32 {{$w0}}, [{{$r0}}];", write_only_types=[kind], read_only_args=[address])


def ld_b64(space: str, address) -> Int64:
    """A 64-bit word; ``space`` follows ``ld.``."""
    return inline_ptx(f"ld.{space}.b64 {{$w0}}, [{{$r0}}];", write_only_types=[Int64], read_only_args=[address])


def ld_bf16(space: str, address) -> Float32:
    """One bf16, widened by placing it above 16 zero bits; ``space`` follows ``ld.``."""
    return inline_ptx(
        f"{{ .reg .b16 h, z; ld.{space}.b16 h, [{{$r0}}]; mov.b16 z, 0; mov.b32 {{$w0}}, {{z, h}}; }}",
        write_only_types=[Float32],
        read_only_args=[address],
    )


def st_v2(space: str, address, words: list) -> None:
    """Two 32-bit words to an 8-byte aligned address; ``space`` follows ``st.``."""
    inline_ptx(f"st.{space}.v2.b32 [{{$r0}}], {{{{$r1}}, {{$r2}}}};", read_only_args=[address, *words])


def st_b32(space: str, address, word) -> None:
    """A 32-bit word, Int32 or Float32; ``space`` follows ``st.``."""
    inline_ptx(f"st.{space}.b32 [{{$r0}}], {{$r1}};", read_only_args=[address, word])


def cp_async_16(shared: Int32, address: Int64, size: Int32 | int = 16) -> None:
    """16 bytes from global to shared memory in this thread's current group: ``size`` of them read, the rest zeros."""
    inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared, address, Int32(size)])


def bulk_copy(shared: Int32, address: Int64, size: int, barrier: Int32) -> None:
    """A multiple of 16 bytes from global memory to this CTA's shared memory; they count on its mbarrier."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, address, Int32(size), barrier],
    )


def ldmatrix_x4_trans(address: Int32) -> tuple:
    """Four 8 × 8 matrices of 16 bits, transposed; lane l gives the address of row l mod 8 of matrix l // 8."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def atom_add(address, value: Int32) -> Int32:
    """Add to a word in global memory, ordered before and after at GPU scope; returns the word before."""
    return inline_ptx(
        "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, Int32(value)],
    )


def atom_add_relaxed(address, value: Int32) -> Int32:
    """Add to a word in global memory, atomically on this GPU and without order; returns the word before."""
    return inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, Int32(value)],
    )


def ldmatrix_x4(address: Int32) -> tuple:
    """Four 8 × 8 matrices of 16 bits as they lie; lane l gives the address of row l mod 8 of matrix l // 8."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def stmatrix_x4_trans(address: Int32, words: list) -> None:
    """Four 8 × 8 matrices of 16 bits, transposed; the inverse of ``ldmatrix_x4_trans``."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def st_b16(space: str, address, word: Int32) -> None:
    """The low 16 bits of a word; ``space`` follows ``st.``."""
    inline_ptx(
        f"{{ .reg .b16 h; cvt.u16.u32 h, {{$r1}}; st.{space}.b16 [{{$r0}}], h; }}", read_only_args=[address, word]
    )


def mad_wide(a: Int32, b: Int32, c: Int64) -> Int64:
    """a · b + c, the factors unsigned 32 bits, the product in full."""
    return inline_ptx(
        "mad.wide.u32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int64], read_only_args=[Int32(a), b, c]
    )


def mbarrier_wait(barrier: Int32, parity: Int32) -> None:
    """Wait for the phase of this parity of an mbarrier in this CTA."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@!done bra again; }",
        read_only_args=[barrier, parity],
    )


def mbarrier_arrive(barrier: Int32) -> None:
    """Arrive once on an mbarrier of this CTA."""
    inline_ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier])


def mbarrier_arrive_if(barrier: Int32, condition) -> None:
    """Arrive once on an mbarrier of this CTA where the condition holds, without a branch."""
    inline_ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier], predicate=condition)


def mbarrier_arrive_cluster(barrier: Int32) -> None:
    """Arrive once on the mbarrier at a cluster address; ordered behind this thread's own accesses in its CTA alone.

    A release at cluster scope waits for all memory of the GPU, some 500 cycles on an H200.
    """
    inline_ptx("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", read_only_args=[barrier])


def mbarrier_arrive_expect_tx_cluster(barrier: Int32, size: int) -> None:
    """Arrive once on the mbarrier at a cluster address and let its phase wait for ``size`` bytes."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, Int32(size)],
    )


def bulk_copy_to_cluster(target: Int32, source: Int32, size: int, barrier: Int32) -> None:
    """A multiple of 16 bytes from this CTA's shared memory to a cluster address; they count on the mbarrier there."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
    )


def fence_proxy_async_shared() -> None:
    """This thread's accesses to shared memory come before what the asynchronous proxy does there afterwards."""
    inline_ptx("fence.proxy.async.shared::cta;")


def fence_proxy_async_global() -> None:
    """What this thread sees of global memory comes before what the asynchronous proxy does there afterwards."""
    inline_ptx("fence.proxy.async.global;")


def cp_async_arrive(barrier: Int32) -> None:
    """Arrive once on an mbarrier of this CTA as soon as all of this thread's copies by cp.async so far are there."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


def st_async_v4(address: Int32, words: list, barrier: Int32) -> None:
    """Four words to a 16-byte aligned cluster address; their bytes count on the mbarrier as in ``st_async``."""
    inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *words, barrier],
    )
