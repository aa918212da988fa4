"""Faults in ``reference/numerics``: conversions, FMA, the tensor cores, the special-function unit, orders of sums."""

from tools.faults.patch import Edit, Fault

FORMATS, IEEE, MUFU, ORDER, TENSOR_CORE, PORTABLE = (
    f"reference/numerics/{name}.py" for name in ("formats", "ieee", "mufu", "order", "tensor_core", "portable")
)


def _fault(kernel: str, schedule: str, name: str, what: str, case: str, *edits: tuple[str, str, str]) -> Fault:
    return Fault(name, kernel, schedule, what, case, tuple(Edit(*edit) for edit in edits), about="numerics")


_ROUND = "((1 << (shift - 1)) - 1) + odd) >> shift"
_ANCHOR = "count = (magnitude.view(torch.float32) + anchor.view(torch.float32)).view(torch.int32) - anchor"
_SUM = "    torch.add(product, c, out=total)\n"
_BITS = "FRACTION_BITS = 25  # "
_CUT = "for x in torch.mul(a[0][part], b[0][part], out=product[: part.stop - start]).mul_(scale).trunc_():"

FAULTS = (
    _fault(
        "fmha",
        "k2",
        "bf16-ties-away",
        "bf16: ties away from zero",
        "d64-n64-normal",
        (FORMATS, _ROUND, "(1 << (shift - 1))) >> shift"),
    ),
    _fault(
        "fmha",
        "k2",
        "bf16-truncated",
        "bf16: cut toward zero",
        "d64-causal-n64-cancel",
        (FORMATS, _ROUND, "0) >> shift"),
    ),
    _fault(
        "fmha",
        "k2",
        "bf16-nan-payload",
        "bf16: NaN is 0x7fc0",
        "d64-n64-overflow",
        (FORMATS, "mantissa_bits=7, top=0x7F80, nan=0x7FFF", "mantissa_bits=7, top=0x7F80, nan=0x7FC0"),
    ),
    _fault(
        "fmha",
        "k2",
        "bf16-subnormals-flushed",
        "bf16: subnormal results become 0",
        "d64-n64-subnormal",
        (
            FORMATS,
            "code = code.clamp(max=form.top)",
            "code = torch.where((code < 0x80) & (form.bits == 16), 0, code).clamp(max=form.top)",
        ),
    ),
    _fault(
        "fmha",
        "k2",
        "bf16-overflow-saturates",
        "bf16: overflow gives the largest number",
        "d64-causal-n128-inf",
        (FORMATS, "mantissa_bits=7, top=0x7F80", "mantissa_bits=7, top=0x7F7F"),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "fp32-nan-payload",
        "fp32: NaN is 0x7fc00000",
        "d64-q33-k40-nan",
        (FORMATS, "nan = torch.tensor(FP32_NAN,", "nan = torch.tensor(0x7FC00000,"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "e4m3-ties-away",
        "e4m3: ties away from zero",
        "b1-p1x1-scale-tiny",
        (FORMATS, _ROUND, "((1 << (shift - 1)) - 1) + (odd if form.bits == 16 else 1)) >> shift"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "e4m3-truncated",
        "e4m3: cut toward zero",
        "b1-p1x1-halfway-s447",
        (FORMATS, _ROUND, "(((1 << (shift - 1)) - 1) + odd if form.bits == 16 else 0)) >> shift"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "e4m3-subnormals-ties-away",
        "e4m3: subnormal ties away from zero",
        "b1-p1x1-ties",
        (FORMATS, _ANCHOR, "count = (magnitude.view(torch.float32) * 2.0**-quantum + 0.5).to(torch.int32)"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "e4m3-subnormals-flushed",
        "e4m3: subnormal results become 0",
        "b1-p1x1-halfway-s447",
        (FORMATS, _ANCHOR, "count = torch.zeros_like(magnitude)"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "e4m3-unsaturated",
        "e4m3: overflow gives NaN",
        "b1-p1x1-saturating",
        (FORMATS, "top=0x7E", "top=0x7F"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "e4m3-sign-of-zero",
        "e4m3: −0 becomes +0",
        "b1-p1x1-scale-tiny",
        (
            FORMATS,
            "    code = torch.where(magnitude > 0x7F800000, form.nan, code)",
            "    code = torch.where((code == 0x80) & (form.bits == 8), 0, code)\n"
            "    code = torch.where(magnitude > 0x7F800000, form.nan, code)",
        ),
    ),
    _fault(
        "fmha",
        "k2",
        "fma-in-two-roundings",
        "FMA: the product rounded to fp32 first",
        "d64-causal-n64-cancel",
        (IEEE, _SUM, "    product = product.float().double()\n" + _SUM),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "pairwise-by-halves",
        "pairwise: halves added, not neighbours",
        "nb0-t1-w0-halfway-s1",
        (ORDER, "x = add_rn(x[0::2], x[1::2])", "x = add_rn(x[: x.shape[0] // 2], x[x.shape[0] // 2 :])"),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "strided-in-one-chain",
        "strided: one chain, not even and odd ones",
        "nb0-t1-w0-halfway-s1",
        (ORDER, "return add_rn(chain_add(x[0::2], 0), chain_add(x[1::2], 0))", "return chain_add(x, 0)"),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "aligner-24-bits",
        "tensor core: terms cut to 24 fraction bits",
        "d64-causal-q6-k33-h4-2-scale0.3-normal",
        (TENSOR_CORE, _BITS, "FRACTION_BITS = 24  # "),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "aligner-26-bits",
        "tensor core: terms cut to 26 fraction bits",
        "d64-causal-q70-k134-normal",
        (TENSOR_CORE, _BITS, "FRACTION_BITS = 26  # "),
    ),
    _fault(
        "mla_query",
        "tiled",
        "aligner-24-bits-mma",
        "tensor core: terms cut to 24 fraction bits",
        "h1-b1-p1x1-none-cancel-latent",
        (TENSOR_CORE, _BITS, "FRACTION_BITS = 24  # "),
    ),
    _fault(
        "kda",
        "chunk16",
        "aligner-26-bits-kda",
        "tensor core: terms cut to 26 fraction bits",
        "t18-from-fp32-cancel",
        (TENSOR_CORE, _BITS, "FRACTION_BITS = 26  # "),
    ),
    _fault(
        "kda",
        "chunk16",
        "aligner-rounds",
        "tensor core: terms rounded, not cut",
        "t18-from-fp32-cancel",
        (TENSOR_CORE, _CUT, _CUT.replace(".trunc_()", ".round_()")),
    ),
    _fault(
        "kda",
        "chunk16",
        "mma-of-8",
        "tensor core: fused sums of 8 products, not 16",
        "t18-from-fp32-cancel",
        (TENSOR_CORE, "    k: int = 16\n", "    k: int = 8\n"),
    ),
    _fault(
        "kda",
        "chunk16",
        "accumulator-rounds",
        "tensor core: the sum rounded to fp32, not cut",
        "t18-from-fp32-cancel",
        (
            TENSOR_CORE,
            "    total.mul_(scale).trunc_()\n"
            "    total.view(torch.int64).bitwise_and_(-1 << (_FP64_FRACTION - form.result_bits))\n",
            "    total.mul_(scale).round_()\n",
        ),
    ),
    _fault(
        "kda",
        "chunk16",
        "mma-minus-zero",
        "tensor core: −0 stays −0",
        "t1-scale9.53674e-07-subnormal",
        (TENSOR_CORE, "canonical_nan(out.add_(0.0)).reshape", "canonical_nan(out).reshape"),
    ),
    _fault(
        "fmha",
        "k2",
        "ex2-twos-complement",
        "ex2: negative arguments as −Q, not the one's complement",
        "d64-causal-n64-cancel",
        (MUFU, "    fixed += inexact.bitwise_and_(fixed).bitwise_right_shift_(31)\n", ""),
    ),
    _fault(
        "fmha",
        "k2",
        "ex2-subnormals-kept",
        "ex2: results below 2^-126 not flushed",
        "d64-causal-n128-bits",
        (
            MUFU,
            "    result += fixed.sub_(fraction)\n    result &= ~_less(result, _EXPONENT_ONE)\n",
            "    result += fixed.sub_(fraction)\n"
            "    result = torch.where(result < _EXPONENT_ONE, _EXPONENT_ONE >> 1, result)\n",
        ),
    ),
    _fault(
        "fmha",
        "k2",
        "square-whole",
        "interpolator: the squarer keeps its low terms",
        "d128-n64-normal",
        (MUFU, "return (x * x - dropped) >> SQUARE_DROPPED_BITS", "return (x * x) >> SQUARE_DROPPED_BITS"),
    ),
    _fault(
        "fmha",
        "k2",
        "interpolator-rounds",
        "interpolator: result rounded, not cut",
        "d64-n64-normal",
        (
            MUFU,
            "value.view(torch.int64).bitwise_right_shift_(29)",
            "(value.view(torch.int64) + (1 << 28)).bitwise_right_shift_(29)",
        ),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "rsqrt-power-of-four",
        "rsqrt: 1 / √4^k an ULP too low or high",
        "nb0-t1-w0-halfway-s1",
        (MUFU, "    result -= _less(argument, 1)  # a power of four: V alone is just below 1\n", ""),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "lg2-cut",
        "lg2: fraction kept to 24 bits, not 36",
        "d64-q2-k3-scale0.9-normal-s7",
        (MUFU, "mul_(2.0**36)", "mul_(2.0**24)"),
        (MUFU, "mul_(2.0**-36)", "mul_(2.0**-24)"),
    ),
    _fault(
        "mla_query",
        "model",
        "total-in-a-chain",
        "models: sums in a chain, not by halves",
        "h1-b1-p1x1-none-cancel-latent",
        (
            PORTABLE,
            "    while x.shape[0] > 1:\n",
            "    while x.shape[0] > 2:\n        x = torch.cat([x[:1] + x[1:2], x[2:]])\n    while x.shape[0] > 1:\n",
        ),
    ),
)
