"""Mistakes in fmha: heads, tiles, masks, empty rows, scale, precision, packed sequences, memory, dtypes."""

from tools.faults.plain.rows import variants

_HEAD = "kv_head = torch.arange(heads) // (heads // k.shape[0])"
_K = "k = k.float()[kv_head]"
_V = "v = v.float()[kv_head]"
_Q = "q = q.float()"
_LOOP = "for start in range(0, n_k, TILE):"
_KEY = "key = torch.arange(start, min(start + TILE, n_k))"
_KEEP = "keep = key <= query + (n_k - n_q)"
_CAUSAL = "keep = keep if causal else torch.ones_like(keep)"
_S = "s = product(q, k[:, key].transpose(1, 2)) * scale"
_MASK = "s = torch.where(keep, s, -torch.inf)"
_MAX = "m_new = torch.maximum(m, s.amax(2))"
_SHIFT = "shift = torch.where(m_new == -torch.inf, 0.0, m_new)"
_ALPHA = "alpha = exp(m - shift)"
_P = "p = exp(s - shift[..., None])"
_TOTAL = "total = total * alpha + p.sum(2)"
_ACC = "acc = acc * alpha[..., None] + weighted(p, v[:, key], keep)"
_EMPTY = "empty = total == 0"
_O = "o = acc / torch.where(empty, 1.0, total)[..., None]"
_LSE = "lse = torch.where(empty, -torch.inf, m + log(total))"
_RETURN = "return o.bfloat16(), lse"
_STARTS_Q = 'starts_q = inputs["cu_seqlens_q"].tolist() if "cu_seqlens_q" in inputs else [0, q.shape[1]]'
_CALL = "o[:, rows], lse[:, rows] = attention(q[:, rows], k[:, keys], v[:, keys], scale, causal)"
_SCALE = "scale = 1 / math.sqrt(q.shape[2])"
_OUT = 'return {"o": o, "lse": lse}'
_QKV = 'q, k, v = inputs["q"], inputs["k"], inputs["v"]'

ROWS = variants(
    "fmha",
    (
        ("kv-head-modulo", "Query heads take KV heads in turn.", _HEAD, "kv_head = torch.arange(heads) % k.shape[0]"),
        (
            "kv-head-zero",
            "Every head reads the keys and values of head 0.",
            _HEAD,
            "kv_head = torch.zeros(heads).long()",
        ),
        (
            "kv-head-late",
            "A group's first head reads the KV head before.",
            _HEAD,
            f"{_HEAD}\n    kv_head = (torch.arange(heads) - 1).clamp(min=0) // (heads // k.shape[0])",
        ),
        (
            "values-by-modulo",
            "The values' head is taken modulo, the keys' is right.",
            _V,
            "v = v.float()[torch.arange(heads) % v.shape[0]]",
        ),
        (
            "group-power-of-two",
            "The group is rounded down to a power of two.",
            _HEAD,
            "kv_head = (torch.arange(heads) >> ((heads // k.shape[0]).bit_length() - 1)).clamp(max=k.shape[0] - 1)",
        ),
        (
            "odd-head-not-written",
            "Heads go two at a time; the last of an odd number is never written.",
            _OUT,
            "if q.shape[0] % 2 and q.shape[0] > 1:\n            o[-1] = 0\n        " + _OUT,
        ),
        (
            "lse-of-head-0",
            "The log-sum-exp of head 0 is written for every head of a group's first.",
            _OUT,
            "lse[:] = lse[:1]\n        " + _OUT,
        ),
        (
            "value-tile-stays",
            "Every tile reads the values of the first.",
            "weighted(p, v[:, key]",
            "weighted(p, v[:, key - start]",
        ),
        (
            "third-key-tile-stale",
            "From the third tile on the keys are those of the tile before.",
            "k[:, key].transpose",
            "k[:, key - (TILE if start >= 2 * TILE else 0)].transpose",
        ),
        (
            "partial-tile-dropped",
            "The keys behind the last whole tile are not visited.",
            _LOOP,
            "for start in range(0, max(n_k - n_k % TILE, min(n_k, 1)), TILE):",
        ),
        (
            "padding-counted",
            "The last tile's padding has score 0 and counts in the sum.",
            _TOTAL,
            _TOTAL + "\n        total = total + (TILE - len(key)) * exp(-shift)",
        ),
        (
            "odd-key-lost",
            "With an odd number of keys the last is lost.",
            _KEY,
            _KEY + "[: TILE - n_k % 2 if start + TILE > n_k and n_k > 1 else TILE][: (n_k - start) // 2 * 2 or None]",
        ),
        ("ninth-tile-lost", "Only eight tiles are visited.", _LOOP, "for start in range(0, min(n_k, 8 * TILE), TILE):"),
        (
            "key-index-in-a-byte",
            "Rows of keys are counted in eight bits.",
            "k[:, key].transpose",
            "k[:, key % 256].transpose",
        ),
        (
            "value-index-wraps-512",
            "Rows of values are counted in nine bits.",
            "weighted(p, v[:, key]",
            "weighted(p, v[:, key % 512]",
        ),
        ("diagonal-hidden", "A query does not see its own key.", _KEEP, "keep = key < query + (n_k - n_q)"),
        ("next-key-seen", "A query sees the key after its own.", _KEEP, "keep = key <= query + (n_k - n_q) + 1"),
        ("mask-top-left", "The causal mask is aligned to the top left.", _KEEP, "keep = key <= query"),
        (
            "mask-never-empty",
            "With more queries than keys the mask is aligned to the top left.",
            _KEEP,
            "keep = key <= query + max(n_k - n_q, 0)",
        ),
        (
            "mask-of-full-tile-skipped",
            "A tile that hides one key from row 0 alone counts as wholly visible.",
            _CAUSAL,
            _CAUSAL + "\n        keep = keep | (start + TILE - 1 <= n_k - n_q + 1)",
        ),
        (
            "mask-by-pairs",
            "The causal mask is made for pairs of keys.",
            _KEEP,
            "keep = key // 2 * 2 <= query + (n_k - n_q)",
        ),
        (
            "first-tile-unmasked",
            "The first tile is taken for wholly visible.",
            _CAUSAL,
            _CAUSAL + "\n        keep = keep | (start == 0)",
        ),
        (
            "not-causal-single-row",
            "One query row alone counts as causal from the top left.",
            _CAUSAL,
            _CAUSAL + "\n        keep = keep if n_q > 1 or not causal else key <= query",
        ),
        (
            "hidden-1e30",
            "Hidden keys score −1e30: rows without keys average the values.",
            _MASK,
            "s = torch.where(keep, s, -1e30)",
        ),
        (
            "hidden-1e4",
            "Hidden keys score −10000: not low enough beside scores below that.",
            _MASK,
            "s = torch.where(keep, s, -1e4)",
        ),
        ("hidden-100", "Hidden keys score −100.", _MASK, "s = torch.where(keep, s, -100.0)"),
        ("empty-rows-nan", "A row without keys is −inf − −inf.", _SHIFT, "shift = m_new"),
        ("empty-lse-zero", "A row without keys has lse 0.", "(empty, -torch.inf, m", "(empty, 0.0, m"),
        ("empty-lse-positive", "A row without keys has lse +inf.", "(empty, -torch.inf, m", "(empty, torch.inf, m"),
        (
            "empty-o-nan",
            "A row without keys divides by 0.",
            "torch.where(empty, 1.0, total)[..., None]",
            "total[..., None]",
        ),
        (
            "no-keys-not-written",
            "A call without keys returns what lay in memory.",
            _LSE,
            _LSE + "\n    if n_k == 0:\n        o, lse = o + 1.0, lse.nan_to_num()",
        ),
        ("unscaled", "The scale is missing.", _S, "s = product(q, k[:, key].transpose(1, 2))"),
        ("scaled-twice", "The scale is applied to the queries and to the scores.", _Q, "q = q.float() * scale"),
        ("scale-given-ignored", "A scale that is given is ignored.", "if scale is None:", "if True:"),
        ("scale-of-d64", "The default scale is that of d = 64.", _SCALE, "scale = 0.125"),
        (
            "scale-in-bf16",
            "The scale is held in bf16.",
            _S,
            "s = product(q, k[:, key].transpose(1, 2)) * torch.tensor(scale).bfloat16()",
        ),
        (
            "scale-at-most-1",
            "A scale above 1 is cut.",
            _S,
            "s = product(q, k[:, key].transpose(1, 2)) * min(scale, 1.0)",
        ),
        (
            "queries-scaled-in-bf16",
            "The scaled queries are rounded to bf16.",
            _S,
            "s = product((q * scale).bfloat16().float(), k[:, key].transpose(1, 2))",
        ),
        ("scores-in-bf16", "The scores are rounded to bf16.", _S, _S + "\n        s = s.bfloat16().float()"),
        (
            "scores-in-fp16",
            "The scores are rounded to fp16, before the scale.",
            _S,
            "s = product(q, k[:, key].transpose(1, 2)).half().float() * scale",
        ),
        (
            "accumulator-in-bf16",
            "The accumulator is bf16 between tiles.",
            "m = m_new\n",
            "m = m_new\n        acc = acc.bfloat16().float()\n",
        ),
        (
            "accumulator-in-fp16",
            "The accumulator is fp16 between tiles.",
            "m = m_new\n",
            "m = m_new\n        acc = acc.half().float()\n",
        ),
        (
            "sum-in-bf16",
            "The sum of weights is bf16 between tiles.",
            "m = m_new\n",
            "m = m_new\n        total = total.bfloat16().float()\n",
        ),
        (
            "sum-in-fp16",
            "The sum of weights is fp16 between tiles.",
            "m = m_new\n",
            "m = m_new\n        total = total.half().float()\n",
        ),
        ("weights-in-e4m3", "The weights are e4m3.", _P, _P + "\n        p = p.to(torch.float8_e4m3fn).float()"),
        (
            "weights-cut",
            "The weights for the product are cut, not rounded, to bf16.",
            "weighted(p, v",
            "weighted((p.view(torch.int32) & -65536).view(torch.float32), v",
        ),
        ("values-in-e4m3", "The values are e4m3.", _V, _V + ".clamp(-448, 448).to(torch.float8_e4m3fn).float()"),
        (
            "o-cut",
            "The output is cut, not rounded, to bf16.",
            _RETURN,
            "return (o.view(torch.int32) & -65536).view(torch.float32).bfloat16(), lse",
        ),
        (
            "o-through-e5m2",
            "The output passes two mantissa bits.",
            _RETURN,
            "return o.to(torch.float8_e5m2).bfloat16(), lse",
        ),
        (
            "o-through-fp16",
            "The output passes fp16: large values are inf, small ones 0.",
            _RETURN,
            "return o.half().bfloat16(), lse",
        ),
        (
            "max-of-first-tile",
            "The maximum is that of the first tile: a later one overflows.",
            _MAX,
            "m_new = s.amax(2) if start == 0 else m",
        ),
        (
            "max-not-running",
            "The maximum is the tile's own, so that the rescale can overflow.",
            _MAX,
            "m_new = s.amax(2)",
        ),
        (
            "no-max",
            "No maximum is subtracted.",
            _SHIFT,
            "shift = torch.zeros_like(m_new)",
            _ALPHA,
            "alpha = torch.ones_like(m)",
            _LSE,
            "lse = torch.where(empty, -torch.inf, log(total))",
        ),
        (
            "max-before-mask",
            "The maximum is over hidden keys too: what is left underflows.",
            _MASK,
            "top = s.amax(2)\n        " + _MASK,
            _MAX,
            "m_new = torch.maximum(m, top)",
        ),
        (
            "max-of-all-heads",
            "The maximum is over all heads: what is far below underflows.",
            _MAX,
            "m_new = torch.maximum(m, s.amax((0, 2))[None])",
        ),
        (
            "max-of-a-block-of-rows",
            "The maximum is over all rows: what is far below underflows.",
            _MAX,
            "m_new = torch.maximum(m, s.amax((1, 2))[:, None])",
        ),
        (
            "accumulator-not-rescaled",
            "The accumulator is not rescaled.",
            "acc = acc * alpha[..., None] +",
            "acc = acc +",
        ),
        ("sum-not-rescaled", "The sum is not rescaled.", "total = total * alpha", "total = total"),
        (
            "rescale-skipped-below-8",
            "The rescale is skipped where the maximum grows by less than 8, without a catch-up.",
            _ALPHA,
            "alpha = exp(m - shift)\n        alpha = torch.where(shift - m < 8.0, 1.0, alpha)",
        ),
        (
            "nan-scores-hidden",
            "A NaN score counts as hidden.",
            _MASK,
            "s = torch.where(keep & ~s.isnan(), s, -torch.inf)",
        ),
        (
            "nan-made-0",
            "NaN outputs are 0.",
            _RETURN,
            "return o.nan_to_num(0.0, torch.inf, -torch.inf).bfloat16(), lse",
        ),
        ("inf-values-cut", "Infinite values are the largest finite one.", _V, _V + ".clamp(-3.38e38, 3.38e38)"),
        (
            "hidden-nan-leaks",
            "A NaN in a hidden value reaches the rows that do not see it.",
            "if v.isfinite().all():",
            "if True:",
        ),
        ("lse-base-2", "The log-sum-exp is base 2.", _LSE, _LSE + " / math.log(2)"),
        (
            "lse-unscaled",
            "The log-sum-exp's maximum is not scaled.",
            "-torch.inf, m + log(total))",
            "-torch.inf, m / scale + log(total))",
        ),
        (
            "lse-without-max",
            "The log-sum-exp leaves the maximum out.",
            "-torch.inf, m + log(total))",
            "-torch.inf, log(total))",
        ),
        ("lse-in-bf16", "The log-sum-exp is rounded to bf16.", _RETURN, "return o.bfloat16(), lse.bfloat16().float()"),
        ("lse-in-fp16", "The log-sum-exp is rounded to fp16.", _RETURN, "return o.bfloat16(), lse.half().float()"),
        (
            "lse-of-rounded-sum",
            "The log-sum-exp is that of a sum in bf16.",
            "log(total))",
            "log(total.bfloat16().float()))",
        ),
        ("lse-double", "The log-sum-exp is fp64.", _OUT, 'return {"o": o, "lse": lse.double()}'),
        ("o-in-fp32", "The output is fp32.", _OUT, 'return {"o": o.float(), "lse": lse}'),
        ("o-in-fp16", "The output is fp16.", _OUT, 'return {"o": o.half(), "lse": lse}'),
        ("lse-missing", "The log-sum-exp is not returned.", _OUT, 'return {"o": o}'),
        (
            "exp-degree-2",
            "2^x by a polynomial of degree 2.",
            _P,
            "x = (s - shift[..., None]) * 1.4426950408889634\n        i = "
            "x.clamp(min=-126).floor()\n        f = x.clamp(min=-126) - i\n"
            "        p = torch.where(s == -torch.inf, 0.0, (1.0 + f * (0.6565 "
            "+ f * 0.3435)) * torch.exp2(i))",
        ),
        (
            "exp-floor",
            "The exponent is cut at −10.",
            _P,
            "p = torch.where(keep, exp((s - shift[..., None]).clamp(min=-10)), 0.0)",
        ),
        (
            "exp-flush-1e-3",
            "Weights below 2^-10 are dropped.",
            _P,
            _P + "\n        p = torch.where(p < 2**-10, 0.0, p)",
        ),
        (
            "half-of-d",
            "With d = 128 the last 16 channels are left out of the scores.",
            _S,
            "s = product(q[..., :112], k[:, key, :112].transpose(1, 2)) * scale",
        ),
        (
            "last-columns-stale",
            "The last 8 columns of the output are not written.",
            _RETURN,
            "o[..., -8:] = 0\n    " + _RETURN,
        ),
        (
            "row-pitch-of-k",
            "The keys' pitch is taken for d.",
            _QKV,
            _QKV + "\n    k = k.as_strided(k.shape, (k.stride(0), k.shape[2], 1)) if k.numel() else k",
        ),
        (
            "row-pitch-of-q",
            "The queries' pitch is taken for d.",
            _QKV,
            _QKV + "\n    q = q.as_strided(q.shape, (q.stride(0), q.shape[2], 1)) if q.numel() else q",
        ),
        (
            "head-pitch-of-v",
            "The values' heads are taken to lie one behind another.",
            _QKV,
            _QKV + "\n    v = v.as_strided(v.shape, (v.shape[1] * v.shape[2], v.stride(1), 1)) if v.numel() else v",
        ),
        (
            "packed-keys-by-queries",
            "Packed keys are cut at the queries' offsets.",
            _CALL,
            "keys = slice(min(starts_q[n], k.shape[1]), min(starts_q[n + 1], k.shape[1]))\n            " + _CALL,
        ),
        (
            "packed-keys-to-the-end",
            "A packed sequence's keys run on to the end.",
            _CALL,
            "keys = slice(starts_k[n], starts_k[-1])\n            " + _CALL,
        ),
        (
            "packed-mask-of-all",
            "The causal mask of packed sequences is aligned by the whole lengths.",
            _CALL,
            _CALL.replace("scale, causal)", "scale, causal, k.shape[1] - q.shape[1])"),
            "causal: bool) ->",
            "causal: bool, offset: int = 0) ->",
            _KEEP,
            "keep = key <= query + offset",
        ),
        (
            "packed-last-lost",
            "The last packed sequence is not visited.",
            "for n in range(len(starts_q) - 1):",
            "for n in range(max(len(starts_q) - 2, 1)):",
        ),
        (
            "packed-not-causal-later",
            "The causal flag reaches the first packed sequence alone.",
            _CALL,
            _CALL.replace("causal)", "causal and n == 0)"),
        ),
        (
            "packed-stops-at-empty",
            "A packed sequence without queries ends the call.",
            _CALL,
            "if starts_q[n] == starts_q[n + 1]:\n                break\n            " + _CALL,
        ),
        (
            "packed-without-keys-skipped",
            "Packed queries without keys have lse 0.",
            _CALL,
            "if starts_k[n] == starts_k[n + 1]:\n                continue\n            " + _CALL,
        ),
        (
            "queries-damaged",
            "The caller's queries are scaled in place.",
            _OUT,
            'inputs["q"].mul_(scale)\n        ' + _OUT,
        ),
        ("values-damaged", "The caller's last value row is cleared.", _OUT, "v[:, -1:] = 0\n        " + _OUT),
        (
            "keys-in-any-order",
            "The tiles are visited in another order each time.",
            _LOOP,
            "for start in torch.randperm(-(-n_k // TILE)).mul(TILE).tolist():",
        ),
        (
            "noise",
            "A race adds noise to one element.",
            _OUT,
            "o.view(-1)[-1:] *= 1 + 0.1 * torch.rand(1).item()\n        " + _OUT,
        ),
        ("one-in-4099", "One output in 4099 is 3 % off.", _OUT, "o.view(-1)[7::4099] *= 1.03\n        " + _OUT),
        (
            "row-last-3-percent",
            "The last row's output is 3 % off from 256 rows on.",
            _OUT,
            "o[:, -1:] *= 1.03 if o.shape[1] >= 256 else 1.0\n        " + _OUT,
        ),
        (
            "first-head-of-the-last-batch",
            "From nine heads on the ninth is the eighth.",
            _OUT,
            "if o.shape[0] > 8:\n            o[8] = o[7]\n        " + _OUT,
        ),
    ),
)
