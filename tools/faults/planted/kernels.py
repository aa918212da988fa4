"""Faults in ``cute_impl``: what a GPU must notice. Edits never touch addresses, so that nothing is written astray."""

from tools.faults.patch import Edit, Fault

K2, SOFTMAX = "cute_impl/fmha/k2.py", "cute_impl/fmha/softmax.py"
CLUSTER7 = "cute_impl/attn_res/cluster7.py"
SMALL, TILED, DEVICE, INSERT = (f"cute_impl/mla_query/{name}.py" for name in ("small", "tiled", "device", "insert"))
PREPARE, STEP = "cute_impl/kda/prepare.py", "cute_impl/kda/step.py"
PTX = "cute_impl/ptx.py"


def _fault(kernel: str, schedule: str, name: str, what: str, case: str, *edits: tuple[str, str, str]) -> Fault:
    return Fault(name, kernel, schedule, what, case, tuple(Edit(*edit) for edit in edits))


_ADD = "l_tile = add_rn(l_tile, p)"
_SELECT = "from cutlass.memory import SmemAllocator"
_DEN = "fma_rn(lg2_approx_ftz(total), Float32(LN_2), mul_rn(self.m[row], self.scale))"

FAULTS = (
    _fault(
        "fmha",
        "k2",
        "warp-3-drops-a-term",
        "warp 3 leaves its first column out of the row sum",
        "d64-n64-normal",
        (K2, _SELECT, f"from cutlass.cutlass_dsl import select_\n{_SELECT}"),
        (K2, _ADD, "l_tile = add_rn(l_tile, select_(thread // 32 * 16 + i == 48, Float32(0.0), p))"),
    ),
    _fault(
        "fmha",
        "k2",
        "mask-one-key-less",
        "causal mask hides the diagonal",
        "d64-causal-n64-normal",
        (K2, "i * GROUP + g > q_tile * TILE + row", "i * GROUP + g >= q_tile * TILE + row"),
    ),
    _fault(
        "fmha",
        "k2",
        "rescale-missing",
        "accumulator not rescaled",
        "d64-causal-n128-dominant",
        (K2, "rO[c] = fma_rn(rO[c], alpha, rPV[c])", "rO[c] = add_rn(rO[c], rPV[c])"),
    ),
    _fault(
        "fmha",
        "k2",
        "butterfly-2-then-1",
        "butterfly with offsets 2, 1",
        "d64-n128-halfway",
        (K2, "for offset in (1, 2):", "for offset in (2, 1):"),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "lse-base-2",
        "log-sum-exp without ln 2",
        "d64-causal-q20-k9-normal",
        (SOFTMAX, _DEN, "add_rn(lg2_approx_ftz(total), mul_rn(self.m[row], self.scale))"),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "empty-row",
        "a row that sees no key shifts by −inf",
        "d64-causal-q20-k9-normal",
        (SOFTMAX, "shift = select_(m == -Float32.inf, Float32(0.0), m)", "shift = m"),
    ),
    _fault(
        "fmha",
        "wgmma128",
        "rescale-of-the-first-row",
        "both rows of a lane rescaled by the first one's factor",
        "d128-causal-q16-k132-normal",
        (SOFTMAX, "rO[i] = mul_rn(rO[i], factors[row_of(i)])", "rO[i] = mul_rn(rO[i], factors[0])"),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "eps-outside-the-mean",
        "eps added to the sum of squares",
        "nb0-t1-w0-halfway-s1",
        (CLUSTER7, "fma_rn(total, Float32(1 / D), eps)", "mul_rn(add_rn(total, eps), Float32(1 / D))"),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "warps-in-a-chain",
        "four warps' sums as a chain",
        "nb0-t1-w0-halfway-s1",
        (CLUSTER7, "add_rn(add_rn(w0, w1), add_rn(w2, w3))", "add_rn(add_rn(add_rn(w0, w1), w2), w3)"),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "mailbox-zeroed",
        "fragments armed with +0, +0",
        "nb1-t1-slots1-w0-aux1-zeros",
        (CLUSTER7, 'ptx.st_v4("global", slot, [Int32(SENTINEL)] * 4)', 'ptx.st_v4("global", slot, [Int32(0)] * 4)'),
    ),
    _fault(
        "attn_res",
        "cluster7",
        "mixture-unrounded",
        "final mixture not rounded to bf16",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        (CLUSTER7, "r = widen(pack(r))", "r = list(r)"),
    ),
    _fault(
        "mla_query",
        "small",
        "mean-by-reciprocal",
        "sum of squares times 1 / 1536",
        "h1-b1-p1x1-halfway-s3546",
        (DEVICE, "div_rn(total, Float32(QUERY))", "mul_rn(total, Float32(1 / QUERY))"),
        (DEVICE, "import add_rn, div_rn, rsqrt_approx", "import add_rn, mul_rn, rsqrt_approx"),
    ),
    _fault(
        "mla_query",
        "small",
        "rope-unscaled",
        "rope part not scaled",
        "h1-b4-p2x3-alternate-padded",
        (SMALL, "e4m3x4([mul_rn(x, scale) for x in q])", "e4m3x4(list(q))"),
    ),
    _fault(
        "mla_query",
        "tiled",
        "k-halves-swapped",
        "of 8 consecutive k the upper 4 first",
        "h1-b2-p1x1-beyond-cancel",
        (TILED, "for half in (0, 2):", "for half in (2, 0):"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "scale-before-rounding",
        "latent not rounded to bf16 before its scale",
        "b1-p1x1-halfway-s447",
        (INSERT, "for x in widen(pack(normed))]", "for x in normed]"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "last-word-kept",
        "last word of a row not written",
        "b1-p1x1-unit",
        (INSERT, "if lane % 2 == 0:", "if lane % 2 == 0 and lane < 30:"),
    ),
    _fault(
        "kda",
        "chunk16",
        "decay-of-padded-tokens",
        "tokens beyond the end decay",
        "t1-to-bf16-normal",
        (PREPARE, 'bound = select_(i < left, gates["bound"], Float32(0.0))', 'bound = gates["bound"]'),
    ),
    _fault(
        "kda",
        "chunk16",
        "scores-strict",
        "a token's output without its own value",
        "t20-normal",
        (PREPARE, "select_(j <= g, pair[0], zero)", "select_(j < g, pair[0], zero)"),
    ),
    _fault(
        "kda",
        "chunk16",
        "solve-cut",
        "last row of the triangular solve left out",
        "t20-normal",
        (PREPARE, "for l in range(CHUNK - 1):", "for l in range(CHUNK - 2):"),
    ),
    _fault(
        "kda",
        "chunk16",
        "values-added",
        "what the state holds of v added, not subtracted",
        "t20-normal",
        (STEP, "sub_rn(v[2 * n", "add_rn(v[2 * n"),
    ),
    _fault(
        "cache_insert",
        "insert",
        "bf16-truncated",
        "bf16: cut toward zero",
        "b1-p1x1-halfway-s447",
        (PTX, "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
    ),
)
