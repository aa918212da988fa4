"""Faults in ``reference/fmha.py``: masks, the online softmax of ``k2`` and of ``wgmma128``, heads, log-sum-exp."""

from tools.faults.patch import Edit, Fault

FILE = "reference/fmha.py"


def _fault(schedule: str, name: str, what: str, case: str, *edits: tuple[str, str]) -> Fault:
    return Fault(name, "fmha", schedule, what, case, tuple(Edit(FILE, *edit) for edit in edits))


_SEES = "torch.arange(n_k, device=device) <= query + (n_k - n_q)"
_MAXIMUM = "torch.maximum(m, torch.where(s != s, -torch.inf, s).amax(-1))"
_EXP = "ex2_approx_ftz(mul_rn(x, torch.tensor(LOG2_E, dtype=torch.float32, device=x.device)))"
_SCORES = "s = mul_rn(chain_matmul(q, k[:, tile].transpose(1, 2)), scale)"
_THREADS = "chain_add(p.unflatten(-1, (16, 4)), dim=-2)"
_ROW_SUM = "butterfly(threads, (1, 2))[..., 0]"
_CARRY = "l = fma_rn(alpha, l, butterfly(threads, (1, 2))[..., 0])"
_VALUES = "acc = fma_rn(acc, alpha[..., None], chain_matmul(p, v[:, tile]))"
_INVERSE = "(l == 0) | (l != l), 1.0, rcp_approx_ftz(l))"
_STORE = "to_bf16(mul_rn(acc, inv[..., None]))"
_TILES = "for j in range(0, n, 64):"

_MODEL = (
    _fault(
        "model",
        "model-mask-top-left",
        "causal mask aligned to the top left",
        "d64-causal-q20-k9-normal",
        (_SEES, "torch.arange(n_k, device=device) <= query"),
    ),
    _fault(
        "model",
        "model-mask-off-by-one",
        "causal mask shows one key more",
        "d64-causal-q20-k9-normal",
        (_SEES, f"{_SEES} + 1"),
    ),
    _fault(
        "model",
        "model-heads-modulo",
        "query head h takes KV head h mod Hkv",
        "d64-causal-q6-k33-h4-2-scale0.3-normal",
        ("head // group", "head % k.shape[0]"),
    ),
    _fault(
        "model",
        "model-lse-base-2",
        "log-sum-exp in units of log2",
        "d64-causal-q20-k9-normal",
        ("shift + portable.log(total)", "(shift + portable.log(total)) * LOG2_E"),
    ),
    _fault(
        "model",
        "model-empty-row",
        "a row that sees no key divides 0 by 0",
        "d64-causal-q20-k9-normal",
        ("torch.where(total == 0, 1.0, total)", "total"),
    ),
)

_K2 = (
    _fault(
        "k2", "mask-one-key-more", "causal mask shows one key more", "d64-causal-n64-cancel", (_SEES, f"{_SEES} + 1")
    ),
    _fault(
        "k2", "mask-one-key-less", "causal mask hides the diagonal", "d64-causal-n64-cancel", (_SEES, f"{_SEES} - 1")
    ),
    _fault(
        "k2",
        "mask-missing",
        "causal mask left out",
        "d64-causal-n64-cancel",
        ('keep = visible(n, n, params.get("causal", False), q.device)', "keep = visible(n, n, False, q.device)"),
    ),
    _fault(
        "k2",
        "scale-before-the-sum",
        "q scaled, then multiplied by k",
        "d64-n64-overflow",
        (_SCORES, "s = chain_matmul(mul_rn(q, scale), k[:, tile].transpose(1, 2))"),
    ),
    _fault(
        "k2",
        "scale-missing",
        "scores not scaled",
        "d64-causal-n64-cancel",
        (_SCORES, "s = chain_matmul(q, k[:, tile].transpose(1, 2))"),
    ),
    _fault(
        "k2",
        "scores-descending",
        "chain of a score over descending k",
        "d64-causal-n64-cancel",
        (_SCORES, "s = mul_rn(chain_matmul(q.flip(2), k[:, tile].flip(2).transpose(1, 2)), scale)"),
    ),
    _fault(
        "k2",
        "scores-in-bf16",
        "scores rounded to bf16",
        "d64-causal-n64-cancel",
        (_SCORES, "s = to_bf16(mul_rn(chain_matmul(q, k[:, tile].transpose(1, 2)), scale)).float()"),
    ),
    _fault(
        "k2",
        "stale-maximum",
        "maximum of the first tile for all",
        "d64-causal-n128-bits",
        (_MAXIMUM, f"torch.where(m == -torch.inf, {_MAXIMUM}, m)"),
    ),
    _fault(
        "k2", "maximum-of-the-tile", "maximum of the tile alone", "d64-causal-n128-bits", (_MAXIMUM, _MAXIMUM[17:-1])
    ),
    _fault(
        "k2",
        "rescale-missing",
        "accumulator not rescaled to the new maximum",
        "d64-causal-n128-bits",
        (_VALUES, "acc = acc + chain_matmul(p, v[:, tile])"),
    ),
    _fault(
        "k2",
        "carry-missing",
        "row sum not rescaled to the new maximum",
        "d64-causal-n128-bits",
        (_CARRY, f"l = l + {_ROW_SUM}"),
    ),
    _fault(
        "k2",
        "sum-before-rescale",
        "the tile's sum added before the row sum is rescaled",
        "d64-causal-n64-cancel",
        (_CARRY, f"l = mul_rn(alpha, l + {_ROW_SUM})"),
    ),
    _fault(
        "k2",
        "rescale-in-two-roundings",
        "accumulator's FMA as product and sum",
        "d64-n128-halfway",
        (_VALUES, "acc = mul_rn(acc, alpha[..., None]) + chain_matmul(p, v[:, tile])"),
    ),
    _fault(
        "k2",
        "carry-in-two-roundings",
        "row sum's FMA as product and sum",
        "d64-n128-halfway",
        (_CARRY, f"l = mul_rn(alpha, l) + {_ROW_SUM}"),
    ),
    _fault(
        "k2",
        "sum-in-one-chain",
        "row sum as one chain of 64, not four and a butterfly",
        "d64-n64-normal",
        (_ROW_SUM, "chain_add(p)"),
    ),
    _fault(
        "k2",
        "sum-of-lanes-in-a-chain",
        "the four lanes' sums as a chain, not a butterfly",
        "d64-n128-halfway",
        (_ROW_SUM, "chain_add(threads)"),
    ),
    _fault(
        "k2",
        "butterfly-2-then-1",
        "butterfly with offsets 2, 1",
        "d64-n128-halfway",
        ("butterfly(threads, (1, 2))", "butterfly(threads, (2, 1))"),
    ),
    _fault(
        "k2",
        "sum-in-blocks-of-16",
        "a lane owns 16 neighbours, not every fourth column",
        "d64-n128-halfway",
        (_THREADS, "chain_add(p.unflatten(-1, (4, 16)), dim=-1)"),
    ),
    _fault(
        "k2",
        "sum-descending",
        "a lane adds its columns in descending order",
        "d64-n128-halfway",
        (_THREADS, "chain_add(p.flip(-1).unflatten(-1, (16, 4)), dim=-2)"),
    ),
    _fault(
        "k2",
        "exp-argument-unrounded",
        "product with log2 e not rounded to fp32",
        "d64-causal-n64-cancel",
        (_EXP, "ex2_approx_ftz((x.double() * LOG2_E).float())"),
    ),
    _fault(
        "k2",
        "exp-to-nearest",
        "exponential correctly rounded",
        "d64-causal-n64-cancel",
        (_EXP, "x.double().exp().float()"),
    ),
    _fault("k2", "exp-base-2", "log2 e left out", "d64-causal-n64-cancel", (_EXP, "ex2_approx_ftz(x)")),
    _fault(
        "k2",
        "weights-in-bf16",
        "weights rounded to bf16",
        "d64-causal-n64-cancel",
        (_VALUES, _VALUES.replace("(p, v", "(to_bf16(p).float(), v")),
    ),
    _fault(
        "k2",
        "values-descending",
        "chain of p · v over descending keys",
        "d64-causal-n64-cancel",
        (_VALUES, _VALUES.replace("(p, v[:, tile]", "(p.flip(2), v[:, tile].flip(1)")),
    ),
    _fault(
        "k2",
        "values-in-fp64",
        "p · v summed in fp64 and rounded once",
        "d64-causal-n64-cancel",
        (_VALUES, _VALUES.replace("chain_matmul(p, v[:, tile])", "(p.double() @ v[:, tile].double()).float()")),
    ),
    _fault(
        "k2",
        "value-tiles-swapped",
        "tiles of v in reverse order",
        "d64-causal-n128-bits",
        (_VALUES, _VALUES.replace("v[:, tile]", "v[:, n - 64 - j : n - j]")),
    ),
    _fault(
        "k2",
        "reciprocal-to-nearest",
        "reciprocal correctly rounded",
        "d64-n64-normal",
        (_INVERSE, "(l == 0) | (l != l), 1.0, 1.0 / l)"),
    ),
    _fault(
        "k2",
        "division",
        "division in place of reciprocal and product",
        "d64-n64-normal",
        (_INVERSE, "(l == 0) | (l != l), 1.0, l)"),
        (_STORE, "to_bf16(acc / inv[..., None])"),
    ),
    _fault(
        "k2",
        "output-by-fp16",
        "output rounded to fp16, then to bf16",
        "d64-causal-n64-cancel",
        (_STORE, "to_bf16(mul_rn(acc, inv[..., None]).to(torch.float16).float())"),
    ),
    _fault(
        "k2",
        "nan-of-the-library",
        "output's NaN as torch converts it",
        "d64-n64-overflow",
        (_STORE, "mul_rn(acc, inv[..., None]).to(torch.bfloat16)"),
    ),
    _fault(
        "k2",
        "tiles-descending",
        "key tiles in descending order",
        "d64-causal-n128-bits",
        (_TILES, "for j in reversed(range(0, n, 64)):"),
    ),
    _fault(
        "k2",
        "first-tile-skipped",
        "first key tile skipped",
        "d64-causal-n128-bits",
        (_TILES, "for j in range(64 % n, n, 64):"),
    ),
    _fault(
        "k2",
        "last-tile-skipped",
        "last key tile skipped",
        "d64-causal-n128-bits",
        (_TILES, "for j in range(0, n - 64 or 64, 64):"),
    ),
)

_MMA = 'tensor_core.mma(to_bf16(p), values, mul_rn(o[:, rows], alpha), form="wgmma_bf16")'
_FIRST_ROWS = "[row - row % 16 // 8 * 8 for row in range(alpha.shape[1])]"
_ARGUMENT = "fma_rn(s, c, -mul_rn(shift, c)[..., None])"
_LSE = "fma_rn(lg2_approx_ftz(total), ln_2, mul_rn(m, scale))"

_WGMMA = (
    _fault(
        "wgmma128",
        "wgmma-weights-unrounded",
        "P not rounded to bf16: the product in fp32",
        "d64-causal-q20-k9-normal",
        (_MMA, "mul_rn(o[:, rows], alpha) + chain_matmul(p, v[:, keys].float())"),
    ),
    _fault(
        "wgmma128",
        "wgmma-weights-truncated",
        "P cut to bf16",
        "d64-causal-q20-k9-normal",
        (_MMA, _MMA.replace("to_bf16(p)", "(p.view(torch.int32) & -65536).view(torch.float32)")),
    ),
    _fault(
        "wgmma128",
        "wgmma-mask-top-left",
        "causal mask aligned to the top left",
        "d64-causal-q20-k9-normal",
        ("torch.arange(n_q, device=device) + (n_k - n_q) if causal", "torch.arange(n_q, device=device) if causal"),
    ),
    _fault(
        "wgmma128",
        "wgmma-tail-unmasked",
        "one padding key counts",
        "d64-q3-k129-negative",
        ("torch.full((n_q,), n_k - 1, device=device)", "torch.full((n_q,), n_k, device=device)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-ascending",
        "key tiles in ascending order",
        "d64-q3-k129-negative",
        ("reversed(range(0, n_k, bc))", "range(0, n_k, bc)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-last-tile-skipped",
        "keys from the second tile on skipped",
        "d64-q3-k129-negative",
        ("if rows.start >= n_q:", "if rows.start >= n_q or start > 0:"),
    ),
    _fault(
        "wgmma128",
        "wgmma-rescale-missing",
        "accumulator not rescaled",
        "d64-q3-k129-negative",
        (_MMA, _MMA.replace("mul_rn(o[:, rows], alpha)", "o[:, rows]")),
    ),
    _fault(
        "wgmma128",
        "wgmma-rescale-of-the-first-row",
        "rows r and r + 8 of 16, which a lane holds, rescaled by the first one's factor",
        "d128-causal-q16-k132-normal",
        (_MMA, _MMA.replace("alpha)", f"alpha[:, {_FIRST_ROWS}])")),
    ),
    _fault(
        "wgmma128",
        "wgmma-argument-in-two-roundings",
        "scores shifted, then multiplied by c",
        "d64-causal-q20-k9-normal",
        (_ARGUMENT, "mul_rn(sub_rn(s, shift[..., None]), c)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-scale-rounded-twice",
        "c as the product of the scale and fp32(log2 e)",
        "d64-q2-k3-scale0.9-normal-s7",
        ("(number, number * LOG2_E, LN_2)", "(number, float(torch.tensor(number) * torch.tensor(LOG2_E)), LN_2)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-lane-columns",
        "a lane's sum takes a quarter of neighbours",
        "d64-causal-q6-k33-h4-2-scale0.3-normal",
        ("p.unflatten(-1, (bc // 8, 4, 2)).transpose(-3, -2).flatten(-2)", "p.unflatten(-1, (4, bc // 4))"),
    ),
    _fault(
        "wgmma128",
        "wgmma-butterfly-2-then-1",
        "butterfly of the lanes' sums with offsets 2, 1",
        "d64-causal-q6-k33-h4-2-scale0.3-normal",
        ("total = butterfly(l, (1, 2))", "total = butterfly(l, (2, 1))"),
    ),
    _fault(
        "wgmma128",
        "wgmma-heads-modulo",
        "query head h takes KV head h mod Hkv",
        "d64-causal-q6-k33-h4-2-scale0.3-normal",
        ("x.repeat_interleave(heads // x.shape[0], 0)", "x.repeat(heads // x.shape[0], 1, 1)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-lse-base-2",
        "log-sum-exp without ln 2",
        "d64-causal-q20-k9-normal",
        (_LSE, "lg2_approx_ftz(total) + mul_rn(m, scale)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-lse-in-two-roundings",
        "log-sum-exp as product and sum",
        "d64-causal-q20-k9-normal",
        (_LSE, "mul_rn(lg2_approx_ftz(total), ln_2) + mul_rn(m, scale)"),
    ),
    _fault(
        "wgmma128",
        "wgmma-empty-row",
        "a row that sees no key shifts by −inf",
        "d64-causal-q20-k9-normal",
        ("shift = torch.where(m_new == -torch.inf, 0.0, m_new)", "shift = m_new"),
    ),
)

FAULTS = (*_MODEL, *_K2, *_WGMMA)
