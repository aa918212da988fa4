"""Faults of the arithmetic that the models share; each names a kernel and a schedule that can show it."""

from tools.faults.patch import Edit, Fault


def _fault(name: str, kernel: str, schedule: str, what: str, *edits: tuple[str, str]) -> Fault:
    """The name's first word is the file."""
    file = f"reference/numerics/{name.split('-')[0]}.py"
    return Fault(name, kernel, schedule, what, "", tuple(Edit(file, old, new) for old, new in edits), about="numerics")


FAULTS = (
    _fault(
        "formats-ties-away",
        "cache_insert",
        "insert",
        "ties are rounded away from zero",
        ("((1 << (shift - 1)) - 1) + odd)", "(1 << (shift - 1)))"),
    ),
    _fault(
        "formats-ties-toward-zero",
        "kda",
        "chunk16",
        "ties are rounded toward zero",
        ("((1 << (shift - 1)) - 1) + odd)", "((1 << (shift - 1)) - 1))"),
    ),
    _fault(
        "formats-e4m3-overflow-nan",
        "cache_insert",
        "insert",
        "e4m3 overflows to NaN, not to 448",
        ("mantissa_bits=3, top=0x7E", "mantissa_bits=3, top=0x7F"),
    ),
    _fault(
        "formats-e4m3-top-240",
        "mla_query",
        "tiled",
        "e4m3 saturates at 240, as the format with infinities does",
        ("mantissa_bits=3, top=0x7E", "mantissa_bits=3, top=0x77"),
    ),
    _fault(
        "formats-nan-sign",
        "cache_insert",
        "insert",
        "a conversion keeps the sign of NaN",
        (
            "code = torch.where(magnitude > 0x7F800000, form.nan, code)",
            "code = torch.where(magnitude > 0x7F800000, form.nan | code & (1 << (form.bits - 1)), code)",
        ),
    ),
    _fault(
        "formats-infinity-nan",
        "mla_query",
        "small",
        "a conversion turns inf into NaN",
        ("torch.where(magnitude > 0x7F800000, form.nan", "torch.where(magnitude >= 0x7F800000, form.nan"),
    ),
    _fault(
        "formats-e4m3-first-subnormal-binade",
        "cache_insert",
        "insert",
        "values from 2^-7 to 2^-6 are taken for normal ones",
        ("magnitude < ((128 - form.bias) << 23)", "magnitude < ((127 - form.bias) << 23)"),
    ),
    _fault(
        "formats-e4m3-flush",
        "mla_query",
        "small",
        "subnormal results become zero",
        (
            "torch.where(magnitude < ((128 - form.bias) << 23), count, code)",
            "torch.where(magnitude < ((128 - form.bias) << 23), 0, code)",
        ),
    ),
    _fault(
        "formats-negative-zero",
        "cache_insert",
        "insert",
        "−0 is written as +0",
        ("| ((bits >> 31) & (1 << (form.bits - 1)))", "| ((bits >> 31) & (1 << (form.bits - 1)) & -(code > 0).int())"),
    ),
    _fault(
        "formats-bf16-nan",
        "kda",
        "chunk16",
        "NaN in bf16 is 0x7fc0",
        ("mantissa_bits=7, top=0x7F80, nan=0x7FFF", "mantissa_bits=7, top=0x7F80, nan=0x7FC0"),
    ),
    _fault(
        "formats-bf16-saturates",
        "attn_res",
        "cluster7",
        "bf16 saturates at its largest number",
        ("mantissa_bits=7, top=0x7F80", "mantissa_bits=7, top=0x7F7F"),
    ),
    _fault(
        "formats-canonical-nan",
        "kda",
        "model",
        "the stored NaN of fp32 is 0x7fc00000",
        ("nan = torch.tensor(FP32_NAN, dtype", "nan = torch.tensor(0x7FC00000, dtype"),
    ),
    _fault(
        "ieee-fma-rounds-twice",
        "kda",
        "chunk16_scan64",
        "fma is the fp64 sum rounded to fp32: wrong where it falls on the midpoint of two fp32 and is inexact, about "
        "one FMA in 2^30",
        ("if bool(scratch.min() == _MIDPOINT):", "if False:"),
    ),
    _fault(
        "ieee-fma-splits",
        "attn_res",
        "cluster7",
        "fma rounds the product to fp32 first",
        ("torch.mul(a64, b64, out=a64)", "torch.mul(a64, b64, out=a64).copy_(a64.to(torch.float32))"),
    ),
    _fault(
        "ieee-fma-flushes",
        "kda",
        "chunk16_scan64",
        "fma flushes subnormal sums; seen with states below 2^-126",
        (
            "        out_part.copy_(total)\n",
            "        out_part.copy_(torch.where(total.abs() < _SMALLEST_NORMAL, 0.0, total))\n",
        ),
    ),
    _fault(
        "ieee-fma-blocks",
        "kda",
        "chunk16_scan512",
        "an fma of more than a block of 2^16 values starts over with the first c",
        ("c64.copy_(c_part)", "c64.copy_(parts[2][0][: c_part.numel()])"),
    ),
    _fault(
        "mufu-ex2-two-complement",
        "kda",
        "chunk16",
        "a negative argument is negated, not complemented",
        ("    fixed += inexact.bitwise_and_(fixed).bitwise_right_shift_(31)\n", ""),
    ),
    _fault(
        "mufu-ex2-no-flush",
        "fmha",
        "wgmma128",
        "ex2 stops at 2^-126 instead of flushing what is below; seen where a value of v is huge",
        ("clamp(-127.0, 128.0)", "clamp(-126.0, 128.0)"),
    ),
    _fault(
        "mufu-rounds",
        "kda",
        "chunk16",
        "the interpolator rounds to nearest, it does not cut",
        (
            "value.view(torch.int64).bitwise_right_shift_(29)",
            "value.view(torch.int64).add_(1 << 28).bitwise_right_shift_(29)",
        ),
    ),
    _fault(
        "mufu-full-square",
        "kda",
        "chunk16",
        "the squarer keeps its low columns",
        ("(x * x - dropped) >> SQUARE_DROPPED_BITS", "(x * x) >> SQUARE_DROPPED_BITS"),
    ),
    _fault(
        "mufu-rcp-offset",
        "kda",
        "chunk16",
        "rcp takes its offset in units of 2^-17, not of 2^-16",
        ("(mantissa & 0xFFFF) << 1)", "mantissa & 0xFFFF)"),
    ),
    _fault(
        "mufu-rcp-no-flush",
        "kda",
        "chunk16",
        "rcp has no flush: 1 / 2^127 and above come out negative; seen at gates whose exponent lies between 127 and "
        "128",
        (
            "    result += _ONE - (magnitude - mantissa)\n    result &= ~_less(result, _EXPONENT_ONE)\n",
            "    result += _ONE - (magnitude - mantissa)\n",
        ),
    ),
    _fault(
        "mufu-rsqrt-power-of-four",
        "cache_insert",
        "insert",
        "rsqrt of 4^k is an ULP low; seen where the mean is a power of four and a product is a tie of bf16",
        ("    result -= _less(argument, 1)  # a power of four: V alone is just below 1\n", ""),
    ),
    _fault(
        "mufu-rsqrt-subnormal-scale",
        "mla_query",
        "tiled",
        "rsqrt of a subnormal number is half as large; seen with eps = 0 and values near 2^-70",
        ("(subnormal & (12 << 23))", "(subnormal & (11 << 23))"),
    ),
    _fault(
        "mufu-rsqrt-parity",
        "mla_query",
        "small",
        "the exponent's lowest bit is not in rsqrt's argument: wrong by √2 for half of the exponents",
        ("(magnitude & 0xFFFFFF) ^ _EXPONENT_ONE", "(magnitude & _MANTISSA) | _EXPONENT_ONE"),
    ),
    _fault(
        "mufu-lg2-negative",
        "fmha",
        "wgmma128",
        "a negative logarithm is cut toward zero, not floored; seen where the weights' sum is just below 1, with one "
        "key",
        ("fixed = torch.floor(value)", "fixed = torch.trunc(value)"),
    ),
    _fault(
        "mufu-lg2-of-one", "fmha", "wgmma128", "log2 1 is the interpolator's value, not 0", ("    result &= ~one\n", "")
    ),
    _fault(
        "order-chain-descending",
        "mla_query",
        "small",
        "a chain of additions starts with the last value",
        ("for part in x.unbind(dim):", "for part in reversed(x.unbind(dim)):"),
    ),
    _fault(
        "order-chain-from-first",
        "attn_res",
        "cluster7",
        "a chain of additions starts from its first value, not from 0: −0 stays; seen in a mailbox of one slot whose "
        "value is −0, with a prefix of −0",
        (
            "total = torch.zeros_like(x.select(dim, 0))\n    for part in x.unbind(dim):",
            "total, *rest = x.unbind(dim)\n    for part in rest:",
        ),
    ),
    _fault(
        "order-fma-chain-split",
        "attn_res",
        "cluster7",
        "a chain of FMAs multiplies and adds apart",
        ("total = fma_rn(x, y, total)", "total = add_rn(x * y, total)"),
    ),
    _fault(
        "order-butterfly-backward",
        "attn_res",
        "cluster7_direct",
        "the butterfly takes its offsets from the last one",
        ("for offset in offsets:", "for offset in reversed(offsets):"),
    ),
    _fault(
        "order-pairwise-halves",
        "mla_query",
        "tiled",
        "the upper half is added to the lower, where neighbours should meet",
        ("add_rn(x[0::2], x[1::2])\n    return x[0]", "add_rn(x[: len(x) // 2], x[len(x) // 2 :])\n    return x[0]"),
    ),
    _fault(
        "order-strided-chain",
        "attn_res",
        "cluster7",
        "the CTAs' sums are added in one chain, not even and odd",
        ("add_rn(chain_add(x[0::2], 0), chain_add(x[1::2], 0))", "chain_add(x, 0)"),
    ),
    _fault(
        "order-strided-blocks",
        "mla_query",
        "small",
        "a chain of FMAs takes neighbouring positions, not every second",
        ("chain_fma(a[way::ways], b[way::ways]) for", "chain_fma(a.chunk(ways)[way], b.chunk(ways)[way]) for"),
    ),
    _fault(
        "order-matmul-descending",
        "fmha",
        "k2",
        "a product of matrices runs from the last k down",
        ("zip(columns, rows, strict=True)", "zip(columns.flip(0), rows.flip(0), strict=True)"),
    ),
    _fault(
        "order-matmul-split",
        "fmha",
        "k2",
        "a product of matrices rounds its products to fp32",
        ("torch.mul(column, row, out=product)", "torch.mul(column, row, out=product).copy_(product.to(torch.float32))"),
    ),
    _fault(
        "portable-total-odd",
        "mla_query",
        "model",
        "the odd middle of a sum is lost",
        ("torch.cat([sums, x[2 * half :]]) if x.shape[0] % 2 else sums", "sums"),
    ),
    _fault(
        "portable-total-neighbours",
        "kda",
        "model",
        "a sum adds neighbours, not halves",
        ("x[:half] + x[half : 2 * half]", "x[0 : 2 * half : 2] + x[1 : 2 * half : 2]"),
    ),
    _fault(
        "portable-matmul-descending",
        "fmha",
        "model",
        "a product of matrices runs from the last k down",
        ("for k in range(a.shape[1]):", "for k in reversed(range(a.shape[1])):"),
    ),
    _fault(
        "portable-matmul-keeps-all",
        "fmha",
        "model",
        "masked products are added as weight 0: 0 · NaN is NaN; seen where a masked value is NaN or inf",
        ("product if kept is None else torch.where(kept[k, :, None], product, 0.0)", "product"),
    ),
    _fault(
        "portable-exp-degree-7",
        "kda",
        "model",
        "the exponential's polynomial ends at degree 7",
        ("for n in range(14)]", "for n in range(8)]"),
    ),
    _fault(
        "portable-exp-ln2",
        "kda",
        "model",
        "the exponential reduces by the high part of ln 2 alone",
        ("r = (clipped - k * _LN2_HIGH) - k * _LN2_LOW", "r = clipped - k * _LN2_HIGH"),
    ),
    _fault(
        "portable-exp-clipped",
        "fmha",
        "model",
        "e^x stays at e^-87 below; seen where a value of v is huge",
        ("torch.where(wide < -746.0, -746.0,", "torch.where(wide < -87.0, -87.0,"),
    ),
    _fault(
        "portable-log-degree-5",
        "fmha",
        "model",
        "the logarithm's series ends at the fifth power",
        ("2.0 / 23.0)\n    for power in range(21, 0, -2):", "2.0 / 5.0)\n    for power in range(3, 0, -2):"),
    ),
    _fault("tensor_core-24-bits", "fmha", "wgmma128", "24 fraction bits", ("FRACTION_BITS = 25", "FRACTION_BITS = 24")),
    _fault("tensor_core-26-bits", "kda", "chunk16", "26 fraction bits", ("FRACTION_BITS = 25", "FRACTION_BITS = 26")),
    _fault(
        "tensor_core-result-rounds",
        "mla_query",
        "tiled",
        "the sum is rounded to nearest, not cut",
        ("total.view(torch.int64).bitwise_and_(-1", "total.view(torch.int64).add_(1 << 28).bitwise_and_(-1"),
    ),
    _fault(
        "tensor_core-accumulator-floor",
        "kda",
        "chunk16",
        "the accumulator is cut downward, not toward zero",
        ("total.copy_(c).mul_(scale).trunc_()", "total.copy_(c).mul_(scale).floor_()"),
    ),
    _fault(
        "tensor_core-products-floor",
        "fmha",
        "wgmma176",
        "products are cut downward, not toward zero",
        ("mul_(scale).trunc_():", "mul_(scale).floor_():"),
    ),
    _fault(
        "tensor_core-products-normalised",
        "mla_query",
        "tiled",
        "a product of 2 and more is normalised before the largest exponent is found",
        (
            "            torch.maximum(largest, x, out=largest)\n    #",
            "            torch.maximum(largest, x, out=largest)\n    for x in a[0] * b[0]:\n"
            "        exponents = torch.where(x == 0, -1024, torch.frexp(x).exponent - 1).to(torch.int16)\n"
            "        torch.maximum(largest, exponents, out=largest)\n    #",
        ),
    ),
    _fault(
        "tensor_core-accumulator-exponent",
        "kda",
        "chunk16",
        "the accumulator's exponent is one too small where it decides the alignment",
        (
            "largest.copy_(_exponents(c, form.lowest_c, form.zero_c))",
            "largest.copy_(_exponents(c, form.lowest_c, form.zero_c)).sub_(1)",
        ),
    ),
    _fault(
        "tensor_core-zeros-align",
        "fmha",
        "wgmma128",
        "a zero product takes part in the largest exponent; seen where a masked key's v is huge and the others tiny",
        ("zero_products_align: bool = False", "zero_products_align: bool = True"),
    ),
    _fault(
        "tensor_core-zero-accumulator",
        "mla_query",
        "tiled",
        "a zero accumulator has exponent −126; seen at products below 2^-126",
        ("zero_c: int = -133", "zero_c: int = -126"),
    ),
    _fault(
        "tensor_core-negative-zero",
        "kda",
        "chunk16",
        "a negative sum that is cut to zero is −0; seen in a state of −0 whose update is below 2^-149",
        ("canonical_nan(out.add_(0.0))", "canonical_nan(out)"),
    ),
    _fault("tensor_core-k8", "fmha", "wgmma128", "one fused sum takes 8 k", ("    k: int = 16\n", "    k: int = 8\n")),
    _fault(
        "tensor_core-subnormals-flushed",
        "mla_query",
        "tiled",
        "subnormal operands count as zero",
        (
            "    return by_k.to(torch.float64), _exponents",
            "    by_k = torch.where(by_k.abs() < 2.0**lowest, 0.0, by_k)\n"
            "    return by_k.to(torch.float64), _exponents",
        ),
    ),
)
