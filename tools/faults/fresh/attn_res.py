"""Faults of the attn_res models: the new prefix, what is written, the model, cluster7 and cluster7_direct."""

from tools.faults.fresh.rows import faults

# fmt: off
# Texts that several faults edit.
_SLOTS = 'chain_add(inputs["delta"][:, : prefix.shape[0]].to(torch.float32), 0)'
_P = 'return to_bf16(add_rn(prefix.to(torch.float32), d) if params["has_delta"] else d)'
_WRITE = 'blocks[:, params["write"]] = p'
_ARM = 'outputs["delta"].view(torch.int32)[:, : p.shape[0]] = SENTINEL'
_X = 'x = torch.cat([blocks[part, : params["nb"]].to(dtype), p[part, None].to(dtype)], dim=1)'
_LOGIT = 'logit = portable.total(x * w) / portable.sqrt(portable.total(x * x) / width + eps)'
_MIXTURE = "mixture = portable.total(weight[..., None] * x, dim=1)"
_RMS = "portable.sqrt(portable.total(mixture * mixture) / width + out_eps)"
_MODEL_OUT = "mixture / rms[:, None] * gamma"
_MODEL_FINAL = '        if params["final"]:\n            # From'
_RSTD = "rsqrt_approx_ftz(fma_rn(total, _fp32(1.0 / D, total.device), eps))"
_EXP = "return ex2_approx_ftz(mul_rn(x, _fp32(LOG2_E, x.device)))"
_LAST = '_threads(inputs["blocks"][part, : params["nb"]]), _threads(p[part])'
_OUT = "to_bf16(_columns(mul_rn(scaled, gamma[:, None])))"
_MIX = "chain_fma(e_blocks.t()[:, None, :, None], x.movedim(2, 0))"
_R = "fma_rn(mul_rn(a, inv)[:, None], mix, mul_rn(mul_rn(e, inv)[:, None], p))"
_R_FINAL = "r = to_bf16(r).to(torch.float32) if final else r"
_R_NORM = "return mul_rn(r, _rstd(_sum_of_products(r, r), out_eps)[:, None])"
_CROSSED = "fma_rn(mul_rn(add_rn(a, a), e), mp, mul_rn(mul_rn(e, e), ss))"
_QUAD = "fma_rn(mul_rn(a, a), mm, crossed)"
_SCALED = "fma_rn(mul_rn(a, scale)[:, None], mix, mul_rn(mul_rn(e, scale)[:, None], p))"

_PREFIX = (
    ("slots-descending", "cluster7", "The slots are summed in descending order.",
     _SLOTS, 'chain_add(inputs["delta"][:, : prefix.shape[0]].flip(0).to(torch.float32), 0)'),
    ("slots-by-halves", "cluster7_direct",
     "The upper half of the slots is added to the lower, and so on: a single slot's −0 stays as well.",
     _SLOTS, 'portable.total(inputs["delta"][:, : prefix.shape[0]].to(torch.float32), 0)'),
    ("slots-from-the-first", "cluster7", "The slots' sum starts from slot 0, not from 0: its −0 stays.",
     _SLOTS, 'inputs["delta"][:, : prefix.shape[0]].to(torch.float32)\n        d = sum(d[1:], d[0])'),
    ("slots-rounded-each", "cluster7", "The slots' sum is rounded to bf16 after each.",
     _SLOTS,
     'inputs["delta"][:, : prefix.shape[0]].to(torch.float32)\n'
     "        for i in range(1, len(d)):\n"
     "            d[i] = to_bf16(d[i - 1] + d[i]).to(torch.float32)\n"
     "        d = d[-1] + 0.0"),
    ("slots-not-rounded", "cluster7", "The slots' sum is not rounded before the prefix is added.",
     'if params["slots"] > 1:', "if False:"),
    ("two-slots-not-rounded", "cluster7_direct", "The slots' sum is rounded from three slots on.",
     'if params["slots"] > 1:', 'if params["slots"] > 2:'),
    ("prefix-heads-the-slots", "cluster7", "The slots are added to the prefix one by one.",
     _SLOTS,
     f'{_SLOTS}\n        if params["has_delta"]:\n'
     '            return to_bf16(sum(inputs["delta"][:, : prefix.shape[0]].to(torch.float32), prefix.float()))'),
    ("slots-four-at-most", "cluster7", "Slots from the fifth on are left out.",
     _SLOTS, 'chain_add(inputs["delta"][:4, : prefix.shape[0]].to(torch.float32), 0)'),
    ("slot-stride-of-tokens", "cluster7", "The slots' stride is T rows, not the capacity.",
     _SLOTS,
     'chain_add(inputs["delta"].flatten(0, 1)[: params["slots"] * len(prefix)]'
     '.view(params["slots"], *prefix.shape).float(), 0)'),
    ("mailbox-read-from-the-end", "cluster7_direct", "The mailbox is read T rows from its end.",
     _SLOTS, 'chain_add(inputs["delta"][:, inputs["delta"].shape[1] - prefix.shape[0] :].to(torch.float32), 0)'),
    ("delta-always-added", "cluster7", "The old prefix is added whether has_delta or not.",
     _P, "return to_bf16(add_rn(prefix.to(torch.float32), d))"),
    ("delta-bits-copied", "cluster7", "Without has_delta a plain delta is copied: NaNs keep their payload.",
     _P, 'if not params["has_delta"] and not params["slots"]:\n        return inputs["delta"].clone()\n    ' + _P),
    ("zero-delta-skipped", "cluster7", "Where delta is 0 the prefix stays: −0 with it.",
     _P, _P.replace("add_rn(prefix.to(torch.float32), d)", "torch.where(d == 0, prefix, add_rn(prefix.float(), d))")),
    ("prefix-flushed", "cluster7_direct", "The sum with the prefix flushes subnormal results.",
     _P,
     'd = add_rn(prefix.to(torch.float32), d) if params["has_delta"] else d\n'
     "    return to_bf16(torch.where(d.abs() < 2.0**-126, 0.0 * d, d))"),
    ("prefix-cut", "cluster7", "The new prefix is cut to bf16, not rounded.",
     _P,
     'd = add_rn(prefix.to(torch.float32), d) if params["has_delta"] else d\n'
     "    return to_bf16(torch.where(d == d, (d.view(torch.int32) & -0x10000).view(torch.float32), d))"),
    ("prefix-saturated", "cluster7", "The new prefix saturates at the largest bf16.",
     _P, _P.replace(' else d)', ' else d).clamp(min=-3.3895313892515355e38, max=3.3895313892515355e38)')),
    ("prefix-of-first-64-tokens", "cluster7", "The token's index into the old prefix has six bits.",
     'prefix = inputs["prefix"]\n    if',
     'prefix = inputs["prefix"][torch.arange(inputs["prefix"].shape[0]) % 64]\n    if'),
)

_EXACT = (
    ("write-row-0-ignored", "cluster7", "write = 0 counts as none.",
     'if params["write"] >= 0:', 'if params["write"] > 0:'),
    ("write-behind-sources", "cluster7", "The new prefix is written behind the sources, whatever write says.",
     _WRITE, 'blocks[:, min(params["nb"], blocks.shape[1] - 1)] = p'),
    ("write-old-prefix", "cluster7", "The row that write names takes the old prefix.",
     _WRITE, 'blocks[:, params["write"]] = inputs["prefix"]'),
    ("write-first-token-only", "cluster7_direct", "Only the first token's row is written.",
     _WRITE, 'blocks[:1, params["write"]] = p[:1]'),
    ("write-at-transposed-stride", "cluster7",
     "Later tokens' rows are written at a token stride of nb rows: right where R = nb.",
     _WRITE,
     'flat = blocks.flatten(0, 1)\n'
     '        flat[params["write"] + params["nb"] * torch.arange(blocks.shape[0])] = p\n'
     "        blocks = flat.view(blocks.shape)"),
    ("write-before-read", "cluster7", "The row is written before it is read as a source.",
     "SCHEDULES[schedule](inputs, params, p)", 'SCHEDULES[schedule]({**inputs, "blocks": blocks}, params, p)'),
    ("blocks-nan-canonical", "cluster7", "Rows that nobody writes pass through fp32: their NaNs change payload.",
     'blocks = inputs["blocks"].clone(memory_format=torch.contiguous_format)',
     'blocks = to_bf16(inputs["blocks"].to(torch.float32).contiguous())'),
    ("prefix-kept-without-delta", "cluster7", "Without has_delta the prefix is not written.",
     '"prefix": p, "blocks"', '"prefix": p if params["has_delta"] else inputs["prefix"].clone(), "blocks"'),
    ("aux-later-old-prefix", "cluster7", "The second copy and later ones are of the old prefix.",
     '{f"aux{i}": p.clone() for', '{f"aux{i}": (inputs["prefix"] if i else p).clone() for'),
    ("arm-first-slot", "cluster7", "Only the first slot is armed again.",
     _ARM, 'outputs["delta"].view(torch.int32)[:1, : p.shape[0]] = SENTINEL'),
    ("arm-one-row-more", "cluster7", "One row behind the tokens is armed as well.",
     _ARM, 'outputs["delta"].view(torch.int32)[:, : p.shape[0] + 1] = SENTINEL'),
    ("arm-first-words", "cluster7", "One word of each 16 bytes is armed again.",
     _ARM, 'outputs["delta"].view(torch.int32)[:, : p.shape[0], ::4] = SENTINEL'),
    ("arm-last-token-left", "cluster7_direct", "The last token's rows are not armed again.",
     _ARM, 'outputs["delta"].view(torch.int32)[:, : max(0, p.shape[0] - 1)] = SENTINEL'),
    ("arm-pair-swapped", "cluster7", "The sentinel is (−0, +0).",
     _ARM, _ARM.replace("SENTINEL", "0x8000")),
)

_MODEL = (
    ("model-epsilons-swapped", "model", "eps and out_eps are exchanged.",
     '(*epsilons(params), D))', '(*epsilons(params)[::-1], D))'),
    ("model-mean-of-d-minus-one", "model", "The mean divides by D − 1.",
     '(*epsilons(params), D))', '(*epsilons(params), D - 1))'),
    ("model-prefix-first", "model", "The prefix is the first source, not the last: the same sums in another order.",
     _X, 'x = torch.cat([p[part, None].to(dtype), blocks[part, : params["nb"]].to(dtype)], dim=1)'),
    ("model-one-source-more", "model", "One row more than nb is a source, if there is one.",
     _X, _X.replace('params["nb"]', 'params["nb"] + 1')),
    ("model-epsilon-beside-root", "model", "eps is added to the root, not below it.",
     _LOGIT, "logit = portable.total(x * w) / (portable.sqrt(portable.total(x * x) / width) + eps)"),
    ("model-epsilon-in-sum", "model", "eps is added to the sum, not to the mean.",
     _LOGIT, "logit = portable.total(x * w) / portable.sqrt((portable.total(x * x) + eps) / width)"),
    ("model-normalised-first", "model", "A source is normalised before it meets the query.",
     _LOGIT, "logit = portable.total(x / portable.sqrt(portable.total(x * x) / width + eps)[..., None] * w)"),
    ("model-shift-of-first", "model", "The first source's logit is subtracted instead of the largest.",
     "logit.amax(1, keepdim=True)", "logit[:, :1]"),
    ("model-weights-ascending", "model", "The weights are summed in ascending order.",
     "weight = e / portable.total(e)[:, None]", "weight = e / sum(e.unbind(1))[:, None]"),
    ("model-divided-at-last", "model", "The mixture is divided by the sum of the weights, not the weights.",
     "weight = e / portable.total(e)[:, None]\n        " + _MIXTURE,
     "weight = e\n        mixture = portable.total(weight[..., None] * x, dim=1) / portable.total(e)[:, None]"),
    ("model-mixture-ascending", "model", "The mixture is summed in ascending order.",
     _MIXTURE, "mixture = sum((weight[..., None] * x).unbind(1))"),
    ("model-always-final", "model", "The mixture is rounded whether final or not.",
     _MODEL_FINAL, _MODEL_FINAL.replace('params["final"]', "True")),
    ("model-final-from-two", "model", "With a single block the final mixture is not rounded.",
     _MODEL_FINAL, _MODEL_FINAL.replace('params["final"]', 'params["final"] and params["nb"] > 1')),
    ("model-gamma-plus-one", "model", "gamma counts from 1.",
     _MODEL_OUT, "mixture / rms[:, None] * (1.0 + gamma)"),
    ("model-gamma-first", "model", "gamma multiplies the mixture before the norm divides it.",
     _MODEL_OUT, "mixture * gamma / rms[:, None]"),
    ("model-nan-as-it-comes", "model", "NaNs keep the payload and sign that the arithmetic gave them.",
     "canonical_nan(output) if dtype == torch.float32 else output", "output"),
)

_SUMS = (
    ("threads-columns-apart", "cluster7", "A thread's eight columns lie 896 apart.",
     "unflatten(-1, (THREADS, COLUMNS)).movedim(-1, 0).contiguous()",
     "unflatten(-1, (COLUMNS, THREADS)).movedim(-2, 0).contiguous()",
     "return x.movedim(0, -1).flatten(-2)", "return x.movedim(0, -2).flatten(-2)"),
    ("threads-of-four-columns", "cluster7", "256 threads of four columns a CTA.",
     "CTAS, WARPS, LANES, COLUMNS = 7, 4, 32, 8", "CTAS, WARPS, LANES, COLUMNS = 7, 8, 32, 4"),
    ("butterfly-ascending", "cluster7", "The butterfly's offsets ascend.",
     "(16, 8, 4, 2, 1))[..., 0]", "(1, 2, 4, 8, 16))[..., 0]"),
    ("butterfly-without-one", "cluster7_direct", "The butterfly's last stage is missing.",
     "(16, 8, 4, 2, 1))[..., 0]", "(16, 8, 4, 2))[..., 0]"),
    ("warps-in-a-chain", "cluster7", "The warps are summed in a chain.",
     "strided(pairwise(warps))", "strided(chain_add(warps))"),
    ("ctas-in-a-chain", "cluster7", "The CTAs are summed in one chain.",
     "strided(pairwise(warps))", "chain_add(pairwise(warps))"),
    ("ctas-by-halves", "cluster7", "The CTAs' chains are those of 0 … 3 and 4 … 6.",
     "strided(pairwise(warps))", "add_rn(*(chain_add(x) for x in pairwise(warps).split((4, 3), -1)))"),
    ("exchange-of-token-before", "cluster7", "From the second token on CTA 3's part is still the token's before.",
     "return strided(pairwise(warps))",
     "x = pairwise(warps)\n"
     "    return strided(torch.cat([x[..., :3], torch.cat([x[:1], x[:-1]])[..., 3:4], x[..., 4:]], -1))"),
    ("dot-descending", "cluster7", "A thread's chain runs over descending columns.",
     "return _exchange(chain_fma(a, b))", "return _exchange(chain_fma(a.flip(0), b.flip(0)))"),
    ("dot-two-chains", "cluster7_direct", "A thread's even and odd columns are summed apart.",
     "return _exchange(chain_fma(a, b))",
     "return _exchange(add_rn(chain_fma(a[0::2], b[0::2]), chain_fma(a[1::2], b[1::2])))"),
    ("dot-unfused", "cluster7",
     "Products are rounded before they are added: sources' are exact, those of the mixture are not.",
     "return _exchange(chain_fma(a, b))", "return _exchange(chain_add(mul_rn(a, b), 0))"),
    ("rstd-unfused", "cluster7", "The mean is rounded before eps is added.",
     _RSTD, "rsqrt_approx_ftz(add_rn(mul_rn(total, _fp32(1.0 / D, total.device)), eps))"),
    ("rstd-divided", "cluster7", "The sum is divided by D, not multiplied by fp32(1/D).",
     _RSTD, "rsqrt_approx_ftz(add_rn(total / _fp32(D, total.device), eps))"),
    ("rstd-epsilon-in-sum", "cluster7_direct", "The epsilon is added to the sum, not to the mean.",
     _RSTD, "rsqrt_approx_ftz(mul_rn(add_rn(total, eps), _fp32(1.0 / D, total.device)))"),
    ("rstd-without-epsilon", "cluster7_direct", "The epsilons are left out.",
     _RSTD, "rsqrt_approx_ftz(mul_rn(total, _fp32(1.0 / D, total.device)))"),
    ("rstd-accurate", "cluster7", "A correctly rounded reciprocal root instead of the approximation.",
     _RSTD, f"(1 / torch.sqrt({_RSTD[len('rsqrt_approx_ftz(') : -1]}.double())).float()"),
    ("exp-accurate", "cluster7", "A correctly rounded exponential instead of the approximation.",
     _EXP, "return portable.exp(x)"),
    ("exp-subnormal", "cluster7", "ex2 without ftz: a subnormal weight, seen if the heavy sources are 0.",
     _EXP,
     "y = mul_rn(x, _fp32(LOG2_E, x.device))\n"
     "    return torch.where(y < -126, ex2_approx_ftz(y + 24) * 2.0**-24, ex2_approx_ftz(y))"),
)

_CLUSTER = (
    ("weight-in-bf16", "cluster7", "The product of norm and query is rounded to bf16.",
     'w = mul_rn(_threads(inputs["norm"]), _threads(inputs["query"]))',
     'w = to_bf16(mul_rn(_threads(inputs["norm"]), _threads(inputs["query"]))).float()'),
    ("gamma-of-four-ctas", "cluster7_direct", "CTAs from the fifth on read the gamma of the first.",
     'gamma = _threads(inputs["gamma"])', 'gamma = _threads(inputs["gamma"])[:, torch.arange(THREADS) % 512]'),
    ("one-epsilon", "cluster7", "Both norms take eps.",
     'for x in epsilons(params))\n    output', 'for x in epsilons(params)[:1] * 2)\n    output'),
    ("tokens-from-64-stale", "cluster7", "Tokens from 64 on read the blocks of the first 64.",
     _LAST, '_threads(inputs["blocks"][: p[part].shape[0], : params["nb"]]), _threads(p[part])'),
    ("prefix-unrounded-inside", "cluster7",
     "With a plain delta the last source is the sum before its rounding to bf16.",
     _LAST,
     '_threads(inputs["blocks"][part, : params["nb"]]), _threads(p[part])\n'
     '        if params["has_delta"] and not params["slots"]:\n'
     '            last = _threads(inputs["prefix"][part].float() + inputs["delta"][part].float())'),
    ("old-prefix-inside", "cluster7", "The last source is the old prefix.",
     _LAST, '_threads(inputs["blocks"][part, : params["nb"]]), _threads(inputs["prefix"][part])'),
    ("alone-with-eps", "cluster7", "Without blocks the output norm takes eps.",
     "_rstd(_sum_of_products(last, last), out_eps)[:, None])", "_rstd(_sum_of_products(last, last), eps)[:, None])"),
    ("alone-divided", "cluster7_direct", "Without blocks the prefix is divided by the root.",
     "mul_rn(last, _rstd(_sum_of_products(last, last), out_eps)[:, None])",
     "last / portable.sqrt(fma_rn(_sum_of_products(last, last), _fp32(1.0 / D, p.device), out_eps))[:, None]"),
    ("bf16-before-gamma", "cluster7", "The normalised row is rounded to bf16 before gamma.",
     _OUT, "to_bf16(_columns(mul_rn(to_bf16(scaled).float(), gamma[:, None])))"),
    ("output-ties-away", "cluster7", "The output's ties round away from zero.",
     _OUT,
     "to_bf16(_columns(mul_rn(scaled, gamma[:, None])))\n"
     "        r = _columns(mul_rn(scaled, gamma[:, None])).contiguous()\n"
     "        up = ((r.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)\n"
     "        output[part] = to_bf16(torch.where(r.isfinite(), up, r))"),
    ("output-flushed", "cluster7_direct", "Subnormal outputs become 0.",
     _OUT, "to_bf16(_columns(torch.where((y := mul_rn(scaled, gamma[:, None])).abs() < 2.0**-126, 0.0, y)))"),
    ("output-positive-zero", "cluster7", "A negative zero of the output becomes +0.",
     _OUT, "to_bf16(_columns(mul_rn(scaled, gamma[:, None]) + 0.0))"),
)

_MIXING = (
    ("blocks-with-out-eps", "cluster7", "The blocks' norms take out_eps.",
     "_rstd(_sum_of_products(x, x), eps))  # [t, nb]", "_rstd(_sum_of_products(x, x), out_eps))  # [t, nb]"),
    ("eighth-block-stale", "cluster7", "The eighth block's sum of squares is still the seventh's.",
     "_rstd(_sum_of_products(x, x), eps))  # [t, nb]",
     "_rstd(_sum_of_products(x, x)[:, [min(b, 6) for b in range(x.shape[2])]], eps))  # [t, nb]"),
    ("maximum-from-zero", "cluster7", "The blocks' maximum starts at 0.",
     "m = logits[:, 0]\n", "m = logits[:, 0].clamp(min=0.0)\n"),
    ("maximum-without-last", "cluster7_direct", "The last block has no part in the maximum.",
     "for b in range(1, logits.shape[1]):", "for b in range(1, logits.shape[1] - 1):"),
    ("weights-descending", "cluster7", "The blocks' weights are summed in descending order.",
     "total = chain_add(e_blocks)", "total = chain_add(e_blocks.flip(-1))"),
    ("weights-in-bf16", "cluster7_direct", "The blocks are mixed by weights in bf16.",
     _MIX, "chain_fma(to_bf16(e_blocks).float().t()[:, None, :, None], x.movedim(2, 0))"),
    ("mix-descending", "cluster7", "The blocks are mixed in descending order.",
     _MIX, "chain_fma(e_blocks.t().flip(0)[:, None, :, None], x.movedim(2, 0).flip(0))"),
    ("mix-unfused", "cluster7", "Weight times block is rounded before it is added.",
     _MIX, "chain_add(mul_rn(e_blocks.t()[:, None, :, None], x.movedim(2, 0)), 0)"),
    ("mix-kept-in-bf16", "cluster7_direct", "The blocks' mixture waits for the prefix in bf16.",
     _MIX, f"to_bf16({_MIX}).float()"),
    ("mix-ring-of-four", "cluster7", "From the fifth on a block's columns are those of four before.",
     _MIX, "chain_fma(e_blocks.t()[:, None, :, None], x.movedim(2, 0)[torch.arange(x.shape[2]) % 4])"),
    ("mix-weights-of-first-token", "cluster7_direct", "All tokens mix their blocks by the first one's weights.",
     _MIX, "chain_fma(e_blocks[:1].expand(len(m), -1).t()[:, None, :, None], x.movedim(2, 0))"),
    ("prefix-with-out-eps", "cluster7_direct", "The prefix's norm as a source takes out_eps.",
     "_rstd(ss, eps))", "_rstd(ss, out_eps))"),
    ("top-of-blocks", "cluster7", "The prefix has no part in the maximum.",
     "top = max_f32(m, logit)", "top = m"),
    ("top-of-prefix", "cluster7_direct", "The prefix's logit is taken for the maximum.",
     "top = max_f32(m, logit)", "top = logit"),
    ("den-unfused", "cluster7", "The denominator's product is rounded before the sum.",
     "den = fma_rn(a, total, e)", "den = add_rn(mul_rn(a, total), e)"),
    ("direct-by-quad", "cluster7_direct", "The direct schedule finds the norm from the four sums as well.",
     "if final or direct:", "if final:"),
    ("quad-never", "cluster7", "The norm is summed from the mixture in every schedule.",
     "if final or direct:", "if True:"),
    ("inverse-approximate", "cluster7", "The denominator's reciprocal is the special-function unit's: final.",
     "from reference.numerics.mufu import ex2_approx_ftz, rsqrt_approx_ftz",
     "from reference.numerics.mufu import ex2_approx_ftz, rcp_approx_ftz, rsqrt_approx_ftz",
     "inv = rcp_rn(den)", "inv = rcp_approx_ftz(den)"),
    ("quotients-of-den", "cluster7_direct", "The weights are divided by the denominator.",
     _R, "fma_rn((a / den)[:, None], mix, mul_rn((e / den)[:, None], p))"),
    ("prefix-fused-last", "cluster7_direct", "The prefix's product is fused and the blocks' is rounded.",
     _R, "fma_rn(mul_rn(e, inv)[:, None], p, mul_rn(mul_rn(a, inv)[:, None], mix))"),
    ("mixture-divided-at-last", "cluster7", "The final mixture is multiplied by the reciprocal as a whole.",
     _R, "mul_rn(fma_rn(a[:, None], mix, mul_rn(e[:, None], p)), inv[:, None])"),
    ("final-not-rounded", "cluster7", "The final mixture is not rounded.",
     _R_FINAL, "r = r"),
    ("direct-rounded", "cluster7_direct", "The direct schedule rounds its mixture whether final or not.",
     _R_FINAL, "r = to_bf16(r).to(torch.float32)"),
    ("final-norm-before-rounding", "cluster7", "The norm is that of the mixture before its final rounding.",
     _R_FINAL, f"ss = _sum_of_products(r, r)\n        {_R_FINAL}",
     "_rstd(_sum_of_products(r, r), out_eps)", "_rstd(ss, out_eps)"),
    ("direct-norm-in-double", "cluster7_direct", "The mixture's squares are summed in fp64.",
     _R_NORM, "return mul_rn(r, _rstd((r.double() ** 2).sum((0, -1)).float(), out_eps)[:, None])"),
    ("cross-term-once", "cluster7", "The cross term of the square counts once.",
     "mul_rn(add_rn(a, a), e)", "mul_rn(a, e)"),
    ("quad-from-squares", "cluster7", "The square sums its terms in another order: the cross term last.",
     f"crossed = {_CROSSED}", "crossed = fma_rn(mul_rn(a, a), mm, mul_rn(mul_rn(e, e), ss))",
     _QUAD, "fma_rn(mul_rn(add_rn(a, a), e), mp, crossed)"),
    ("quad-products-regrouped", "cluster7", "e · (e · ss) instead of (e · e) · ss.",
     "mul_rn(mul_rn(e, e), ss)", "mul_rn(e, mul_rn(e, ss))"),
    ("quad-not-negative", "cluster7", "A negative square counts as 0: sources that oppose each other.",
     f"quad = {_QUAD}", f"quad = {_QUAD}.clamp(min=0.0)"),
    ("out-eps-without-den", "cluster7", "out_eps is not multiplied by the square of the denominator.",
     "mul_rn(mul_rn(out_eps, den), den)", "out_eps"),
    ("out-eps-den-squared", "cluster7", "out_eps · (den · den).",
     "mul_rn(mul_rn(out_eps, den), den)", "mul_rn(out_eps, mul_rn(den, den))"),
    ("scaled-at-last", "cluster7", "The sum of both products is scaled, not the weights.",
     _SCALED, "mul_rn(fma_rn(a[:, None], mix, mul_rn(e[:, None], p)), scale[:, None])"),
    ("scaled-prefix-fused", "cluster7", "The prefix's product is fused and the blocks' is rounded.",
     _SCALED, "fma_rn(mul_rn(e, scale)[:, None], p, mul_rn(mul_rn(a, scale)[:, None], mix))"),
)

# fmt: on
FAULTS = faults("attn_res", (*_PREFIX, *_EXACT, *_MODEL, *_SUMS, *_CLUSTER, *_MIXING))
