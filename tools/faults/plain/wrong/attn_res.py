"""Mistakes in attn_res: mailbox, new prefix, what is written, sources, scores, weights, mixture, norms, memory."""

from tools.faults.plain.rows import variants

_RUN = 'prefix, blocks, delta = inputs["prefix"], inputs["blocks"], inputs["delta"]'
_SLOT = "d = d + delta[slot, :tokens].float()"
_SLOTS = "for slot in range(slots):"
_ZEROS = "d = torch.zeros(tokens, D)"
_ROUND = "if slots > 1:\n            d = d.bfloat16().float()"
_DELTA = "d = delta.float()"
_P = 'p = to_bf16(prefix.float() + d if params["has_delta"] else d)'
_SOURCES = "sources = torch.cat([blocks[:, :nb], p[:, None]], 1).float()"
_MADE = 'made = {"output": to_bf16(mixed(sources, inputs, params)), "prefix": p}'
_ROWS = "rows = blocks.contiguous().clone()"
_IF_WRITE = 'if params["write"] >= 0:'
_WRITE = 'rows[:, params["write"]] = p'
_AUX = 'made[f"aux{i}"] = p.clone()'
_BOX = 'made["delta"] = delta.clone()'
_ARM = 'made["delta"].view(torch.int32)[:, :tokens] = SENTINEL'
_RETURN = "    return made\n"
_W = 'w = inputs["norm"].float() * inputs["query"].float()'
_SQUARE = "square = (x * x).sum(2) / D"
_RSTD = 'rstd = torch.rsqrt(square + params["eps"])'
_LOGIT = "logit = (x * w).sum(2) * rstd"
_WEIGHT = "weight = torch.softmax(logit, 1)"
_MIX = "mixture = (weight[..., None] * x).sum(1)"
_FINAL = 'if params["final"]:'
_ROUNDED = "mixture = mixture.bfloat16().float()"
_POWER = "power = (mixture * mixture).sum(1) / D"
_NORM = 'norm = torch.rsqrt(power + params["out_eps"])'
_OUT = 'return mixture * norm[:, None] * inputs["gamma"].float()'
_NAN = "y.view(torch.int16)[x.isnan()] = 0x7FFF"
_TO = "y = x.bfloat16()"

ROWS = variants(
    "attn_res",
    (
        ("slot-last-lost", "The last slot is left out.", _SLOTS, "for slot in range(max(slots - 1, 1)):"),
        ("slots-four", "Slots from the fifth on are left out.", _SLOTS, "for slot in range(min(slots, 4)):"),
        (
            "slots-descending",
            "The slots are summed in descending order.",
            _SLOTS,
            "for slot in reversed(range(slots)):",
        ),
        (
            "slots-in-bf16",
            "The slots' sum is bf16 after each.",
            _SLOT,
            "d = (d + delta[slot, :tokens].float()).bfloat16().float()",
        ),
        (
            "slots-in-fp64",
            "The slots are summed in fp64.",
            _ZEROS,
            "d = torch.zeros(tokens, D, dtype=torch.float64)",
            "d.bfloat16().float()\n    else",
            "d.float().bfloat16().float()\n    else",
        ),
        ("slots-not-rounded", "The slots' sum meets the prefix unrounded.", _ROUND, "if False:\n            pass"),
        (
            "slots-cut",
            "The slots' sum is cut to bf16.",
            "d = d.bfloat16().float()\n    else",
            "d = (d.view(torch.int32) & -65536).view(torch.float32)\n    else",
        ),
        (
            "slots-from-the-first",
            "The sum starts from slot 0, not from 0: its −0 stays.",
            _SLOT,
            "d = d + delta[slot, :tokens].float() if slot else delta[slot, :tokens].float()",
        ),
        (
            "slot-pitch-of-tokens",
            "The slots' pitch is T rows, not the capacity.",
            _SLOT,
            "d = d + delta.view(-1, D)[slot * tokens : (slot + 1) * tokens].float()",
        ),
        (
            "mailbox-from-its-end",
            "The mailbox is read from its last row backwards.",
            _SLOT,
            "d = d + delta[slot, delta.shape[1] - tokens :].float()",
        ),
        ("mailbox-token-0", "Every token takes the mailbox rows of token 0.", _SLOT, "d = d + delta[slot, :1].float()"),
        (
            "mailbox-word-of-zero-skipped",
            "A fragment of eight with a +0 pair is taken for unpublished.",
            _SLOT,
            "x = delta[slot, :tokens].contiguous()\n"
            "            gone = (x.view(torch.int32).view(tokens, -1, 4) "
            "== 0).any(2).repeat_interleave(8, 1)\n"
            "            d = d + torch.where(gone, 0.0, x.float())",
        ),
        (
            "arm-all-rows",
            "The sentinel is written beyond the last token.",
            _ARM,
            'made["delta"].view(torch.int32)[:] = SENTINEL',
        ),
        ("arm-first-slot", "Only slot 0 is re-armed.", _ARM, 'made["delta"].view(torch.int32)[:1, :tokens] = SENTINEL'),
        (
            "arm-fragment-end",
            "Only the first word of a fragment is re-armed.",
            _ARM,
            'made["delta"].view(torch.int32)[:, :tokens, ::4] = SENTINEL',
        ),
        (
            "arm-last-fragment-lost",
            "The last fragment of a row is not re-armed.",
            _ARM,
            'made["delta"].view(torch.int32)[:, :tokens, :-4] = SENTINEL',
        ),
        (
            "arm-swapped",
            "The sentinel's halves are swapped: (−0, +0).",
            _ARM,
            'made["delta"].view(torch.int32)[:, :tokens] = 0x8000',
        ),
        ("arm-ones", "The sentinel is 0xffffffff.", _ARM, 'made["delta"].view(torch.int32)[:, :tokens] = -1'),
        (
            "arm-last-token-lost",
            "The last token's rows are not re-armed from three tokens on.",
            _ARM,
            'made["delta"].view(torch.int32)[:, : tokens - (tokens > 2)] = SENTINEL',
        ),
        ("arm-missing", "The mailbox is not re-armed.", _ARM, "pass"),
        (
            "prefix-always-added",
            "The old prefix is added whether has_delta or not.",
            _P,
            "p = to_bf16(prefix.float() + d)",
        ),
        (
            "prefix-cut",
            "The new prefix is cut to bf16.",
            _P,
            _P + "\n    p = ((prefix.float() + d).view(torch.int32) >> 16).to(torch.int16).view(torch.b"
            'float16) if params["has_delta"] else p',
        ),
        (
            "prefix-in-fp16",
            "The new prefix passes fp16.",
            _P,
            _P.replace("else d)", "else d)\n    p = to_bf16(p.half().float())"),
        ),
        (
            "prefix-saturates",
            "An overflow of the new prefix is the largest finite number.",
            _P,
            _P + "\n    p = to_bf16(p.float().clamp(-3.38e38, 3.38e38))",
        ),
        (
            "prefix-of-token-0",
            "Every token has token 0's old prefix.",
            _P,
            _P.replace("prefix.float()", "prefix[:1].float()"),
        ),
        (
            "prefix-late-token",
            "From the 65th token on the old prefix is that of 64 before.",
            _P,
            "old = prefix.clone()\n    old[64:] = prefix[: max(tokens - 64, 0)]\n    "
            + _P.replace("prefix.float()", "old.float()"),
        ),
        ("prefix-minus-zero", "A −0 of the new prefix is +0.", _P, _P + "\n    p = p + 0.0"),
        (
            "prefix-subnormal",
            "Subnormal sums are flushed.",
            _P,
            _P + "\n    p = torch.where(p.abs() < 2**-126, 0.0, p)",
        ),
        (
            "prefix-copied-nan",
            "Without an old prefix delta's bits are copied: a NaN's payload stays.",
            _P,
            _P + '\n    if not params["has_delta"] and not slots:\n        p = delta.clone()',
        ),
        ("prefix-nan-7fc0", "A NaN is 0x7fc0.", _NAN, "y.view(torch.int16)[x.isnan()] = 0x7FC0"),
        (
            "prefix-not-returned-new",
            "The prefix is left as it was.",
            _MADE,
            _MADE.replace('"prefix": p', '"prefix": prefix.clone()'),
        ),
        (
            "prefix-of-sources-old",
            "The last source is the old prefix.",
            _SOURCES,
            _SOURCES.replace("p[:, None]", "prefix[:, None]"),
        ),
        (
            "source-unrounded-prefix",
            "The last source is the sum before its rounding.",
            _SOURCES,
            'new = prefix.float() + d if params["has_delta"] else d\n    '
            "sources = torch.cat([blocks[:, :nb].float(), new[:, None]], "
            "1)",
        ),
        (
            "written-before-read",
            "The written row is read after it was written.",
            _SOURCES,
            'if 0 <= params["write"] < nb:\n        blocks = blocks.clone()\n        '
            'blocks[:, params["write"]] = p\n    ' + _SOURCES,
        ),
        (
            "last-block-lost",
            "The last block is no source.",
            _SOURCES,
            _SOURCES.replace(":nb]", ": max(nb - 1, min(nb, 1))]"),
        ),
        (
            "eighth-block-is-seventh",
            "Of eight blocks the last is the one before.",
            _SOURCES,
            _SOURCES + "\n    if nb == 8:\n        sources[:, 7] = sources[:, 6]",
        ),
        (
            "all-rows-are-sources",
            "Rows behind nb are sources too.",
            _SOURCES,
            _SOURCES.replace("[:, :nb]", "[:, : nb and blocks.shape[1]]"),
        ),
        (
            "blocks-of-token-0",
            "Every token mixes token 0's blocks.",
            _SOURCES,
            _SOURCES + "\n    sources[:, :nb] = sources[:1, :nb].clone()",
        ),
        (
            "block-pitch",
            "Blocks are taken to lie one behind another.",
            _RUN,
            _RUN + "\n    n = blocks.shape[1] * D\n    blocks = blocks.as_strided(blocks.shape, "
            "(n, D, 1)) if blocks.numel() else blocks",
        ),
        (
            "block-row-pitch",
            "A token's rows are taken to lie one behind another.",
            _RUN,
            _RUN + "\n    blocks = blocks.as_strided(blocks.shape, (blocks.stride(0), "
            "D, 1)) if blocks.numel() else blocks",
        ),
        (
            "write-next-row",
            "The row after the one asked for is written.",
            _WRITE,
            'rows[:, min(params["write"] + 1, rows.shape[1] - 1)] = p',
        ),
        ("write-row-0-never", "Row 0 is never written.", _IF_WRITE, 'if params["write"] > 0:'),
        ("write-minus-1", "−1 writes the last row.", _IF_WRITE, "if rows.shape[1]:"),
        (
            "write-nan-bits",
            "Untouched rows pass a conversion: a NaN's payload is lost.",
            _ROWS,
            "rows = to_bf16(blocks.float())",
        ),
        ("write-zero-sign", "Untouched rows lose the sign of zero.", _ROWS, "rows = blocks.contiguous() + 0.0"),
        (
            "write-last-token-lost",
            "The last token's row is not written from two tokens on.",
            _WRITE,
            'rows[: tokens - (tokens > 1), params["write"]] = p[: tokens - (tokens > 1)]',
        ),
        (
            "write-tail-lost",
            "The last eight columns of the row are not written.",
            _WRITE,
            'rows[:, params["write"], :-8] = p[:, :-8]',
        ),
        (
            "aux-second-stale",
            "Copies from the second on are zero.",
            _AUX,
            'made[f"aux{i}"] = p.clone() if i == 0 else torch.zeros_like(p)',
        ),
        ("aux-old-prefix", "Copies are of the old prefix.", _AUX, 'made[f"aux{i}"] = prefix.clone()'),
        ("aux-of-delta", "Copies are of delta, rounded.", _AUX, 'made[f"aux{i}"] = to_bf16(d)'),
        (
            "aux-one-less",
            "One copy less is returned.",
            'for i in range(params["aux"]):',
            'for i in range(params["aux"] - 1):',
        ),
        ("w-without-norm", "The score leaves the source norm's weight out.", _W, 'w = inputs["query"].float()'),
        ("w-in-bf16", "norm · query is rounded to bf16.", _W, 'w = (inputs["norm"] * inputs["query"]).float()'),
        ("w-in-fp16", "norm · query is rounded to fp16.", _W, _W + "\n    w = w.half().float()"),
        (
            "sources-in-e4m3",
            "Sources of the score are e4m3.",
            _LOGIT,
            "logit = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() * w).sum(2) * rstd",
        ),
        (
            "normed-source-in-bf16",
            "The normalised sources are rounded to bf16 before the score.",
            _LOGIT,
            "logit = ((x * rstd[..., None]).bfloat16().float() * w).sum(2)",
        ),
        ("score-in-bf16", "The scores are rounded to bf16.", _LOGIT, _LOGIT + "\n    logit = logit.bfloat16().float()"),
        ("score-in-fp16", "The scores are rounded to fp16.", _LOGIT, _LOGIT + "\n    logit = logit.half().float()"),
        (
            "score-sum-in-bf16",
            "Each CTA's share of the score is bf16.",
            _LOGIT,
            "logit = (x * w).view(*x.shape[:2], 7, 1024).sum(3).bfloat16().float().sum(2) * rstd",
        ),
        ("score-scaled", "The scores are scaled by 1/√D.", _LOGIT, "logit = (x * w).sum(2) * rstd * D**-0.5"),
        (
            "score-last-cta-lost",
            "The score leaves the last 1024 columns out.",
            _LOGIT,
            "logit = (x[..., :-1024] * w[:-1024]).sum(2) * rstd",
        ),
        (
            "score-last-8-lost",
            "The score leaves the last 8 columns out.",
            _LOGIT,
            "logit = (x[..., :-8] * w[:-8]).sum(2) * rstd",
        ),
        ("eps-missing", "The source norm has no eps.", _RSTD, "rstd = torch.rsqrt(square)"),
        (
            "eps-outside",
            "The source norm's eps is outside the root.",
            _RSTD,
            'rstd = 1 / (square.sqrt() + params["eps"])',
        ),
        ("eps-twice", "The source norm's eps is added twice.", _RSTD, 'rstd = torch.rsqrt(square + 2 * params["eps"])'),
        (
            "eps-of-output",
            "The source norm takes the output norm's eps.",
            _RSTD,
            'rstd = torch.rsqrt(square + params["out_eps"])',
        ),
        (
            "eps-of-sum",
            "The source norm's eps is added to the sum.",
            _RSTD,
            'rstd = torch.rsqrt(((x * x).sum(2) + params["eps"]) / D)',
        ),
        ("source-layer-norm", "The source norm subtracts the mean.", _SQUARE, "square = x.var(2, correction=0)"),
        ("source-square-8192", "The source norm divides by 8192.", _SQUARE, "square = (x * x).sum(2) / 8192"),
        (
            "source-square-in-bf16",
            "The sum of squares is bf16.",
            _SQUARE,
            _SQUARE + "\n    square = square.bfloat16().float()",
        ),
        (
            "rstd-of-prefix-for-all",
            "Every source takes the prefix's norm.",
            _RSTD,
            _RSTD + "\n    rstd = rstd[:, -1:].expand_as(rstd)",
        ),
        (
            "softmax-without-max",
            "The softmax subtracts no maximum.",
            _WEIGHT,
            "weight = torch.exp(logit)\n    weight = weight / weight.sum(1, keepdim=True)",
        ),
        (
            "softmax-max-of-blocks",
            "The maximum is that of the blocks alone.",
            _WEIGHT,
            "top = logit[:, :-1].amax(1, keepdim=True) if logit.shape[1] "
            "> 1 else logit\n    weight = torch.exp(logit - top)\n    weight "
            "= weight / weight.sum(1, keepdim=True)",
        ),
        (
            "softmax-max-of-all-tokens",
            "The maximum is over all tokens.",
            _WEIGHT,
            "weight = torch.exp(logit - (logit.max() if logit.numel() else "
            "0))\n    weight = weight / weight.sum(1, keepdim=True)",
        ),
        ("softmax-base-2", "The softmax is base 2.", _WEIGHT, "weight = torch.softmax(logit * 0.6931472, 1)"),
        (
            "softmax-unnormalised",
            "The weights are not divided by their sum: out_eps weighs less.",
            _WEIGHT,
            "weight = torch.exp(logit - logit.amax(1, keepdim=True))",
        ),
        (
            "weights-in-bf16",
            "The weights are rounded to bf16.",
            _WEIGHT,
            _WEIGHT + "\n    weight = weight.bfloat16().float()",
        ),
        (
            "weights-in-fp16",
            "The weights are rounded to fp16.",
            _WEIGHT,
            _WEIGHT + "\n    weight = weight.half().float()",
        ),
        (
            "weights-cut-at-exp-8",
            "Weights below 2^-12 are dropped.",
            _WEIGHT,
            _WEIGHT + "\n    weight = torch.where(weight < 2**-12, 0.0, weight)",
        ),
        ("mixture-always-rounded", "The mixture is rounded to bf16 though not final.", _FINAL, "if True:"),
        ("mixture-never-rounded", "The mixture is not rounded though final.", _FINAL, "if False:"),
        (
            "mixture-cut",
            "The final mixture is cut to bf16.",
            _ROUNDED,
            "mixture = (mixture.view(torch.int32) & -65536).view(torch.float32)",
        ),
        (
            "mixture-in-bf16-steps",
            "The mixture is summed in bf16.",
            _MIX,
            "mixture = torch.zeros_like(x[:, 0])\n    for i in range(x.shape[1]):\n        "
            "mixture = (mixture + weight[:, i, None] * x[:, i]).bfloat16().float()",
        ),
        ("mixture-in-fp16", "The mixture passes fp16.", _MIX, _MIX + "\n    mixture = mixture.half().float()"),
        (
            "mixture-of-normed",
            "The mixture is of normalised sources.",
            _MIX,
            "mixture = ((weight * rstd)[..., None] * x).sum(1)",
        ),
        (
            "power-before-rounding",
            "The output norm is that of the mixture before its rounding.",
            _MIX,
            _MIX + "\n    early = (mixture * mixture).sum(1) / D",
            _NORM,
            _NORM.replace("power", "early"),
        ),
        (
            "power-quadratic",
            "The output norm comes from sums in bf16 of the sources' products.",
            _POWER,
            "gram = (x @ x.transpose(1, 2)).bfloat16().float()\n    power "
            "= torch.einsum('ta,tab,tb->t', weight, gram, weight) / D",
        ),
        ("out-eps-missing", "The output norm has no eps.", _NORM, "norm = torch.rsqrt(power)"),
        (
            "out-eps-of-source",
            "The output norm takes the source norm's eps.",
            _NORM,
            'norm = torch.rsqrt(power + params["eps"])',
        ),
        (
            "out-eps-outside",
            "The output norm's eps is outside the root.",
            _NORM,
            'norm = 1 / (power.sqrt() + params["out_eps"])',
        ),
        (
            "out-eps-twice",
            "The output norm's eps is added twice.",
            _NORM,
            'norm = torch.rsqrt(power + 2 * params["out_eps"])',
        ),
        (
            "out-layer-norm",
            "The output norm subtracts the mean.",
            _POWER,
            "mixture = mixture - mixture.mean(1, keepdim=True)\n    " + _POWER,
        ),
        (
            "out-power-1024",
            "The output norm sees one CTA's columns.",
            _POWER,
            "power = (mixture[:, :1024] ** 2).sum(1) / 1024",
        ),
        (
            "out-norm-in-bf16",
            "The output norm's factor is bf16.",
            _NORM,
            _NORM + "\n    norm = norm.bfloat16().float()",
        ),
        (
            "out-normed-in-bf16",
            "The normalised mixture is rounded before gamma.",
            _OUT,
            'return (mixture * norm[:, None]).bfloat16().float() * inputs["gamma"].float()',
        ),
        (
            "gamma-plus-1",
            "Gamma is taken for an offset from 1.",
            _OUT,
            _OUT.replace('["gamma"].float()', '["gamma"].float().add(1.0)'),
        ),
        ("gamma-missing", "Gamma is left out.", _OUT, "return mixture * norm[:, None]"),
        ("gamma-is-norm", "The output takes the source norm's weight.", _OUT, _OUT.replace("gamma", "norm")),
        (
            "out-last-token-first",
            "From 33 tokens on the 33rd is the first.",
            _OUT,
            "out = " + _OUT[7:] + "\n    if len(out) > 32:\n        out[32] = out[0]\n    return out",
        ),
        (
            "out-fp32",
            "The output is fp32.",
            _MADE,
            _MADE.replace("to_bf16(mixed(sources, inputs, params))", "mixed(sources, inputs, params)"),
        ),
        (
            "out-cut",
            "The output is cut to bf16.",
            _OUT,
            "out = " + _OUT[7:] + "\n    return (out.view(torch.int32) & -65536).view(torch.float32)",
        ),
        ("out-nan-0", "NaN outputs are 0.", _OUT, "return (" + _OUT[7:] + ").nan_to_num(0.0, torch.inf, -torch.inf)"),
        ("nan-of-neighbour", "A NaN token reaches all.", _OUT, _OUT + " + 0.0 * x.sum()"),
        (
            "nan-of-unread-row",
            "A NaN in a row that is no source reaches the token.",
            _SOURCES,
            _SOURCES + "\n    sources[:, -1] += 0.0 * blocks.float().sum(1)",
        ),
        (
            "nan-of-unread-prefix",
            "Without has_delta the old prefix is multiplied by 0.",
            _P,
            _P.replace("else d)", "else d + 0.0 * prefix.float())"),
        ),
        (
            "noise",
            "A race adds noise to one column.",
            _OUT,
            "out = " + _OUT[7:] + "\n    out[:, -1] *= 1 + 0.1 * torch.rand(1).item()\n    return out",
        ),
        (
            "one-in-5003",
            "One output in 5003 is 2 % off.",
            _OUT,
            "out = " + _OUT[7:] + "\n    out.view(-1)[9::5003] *= 1.02\n    return out",
        ),
        (
            "gamma-damaged",
            "The caller's gamma is halved in place.",
            _RETURN,
            '    inputs["gamma"].mul_(0.5)\n' + _RETURN,
        ),
        (
            "source-order-by-slot",
            "With three sources or more the last two swap their weights.",
            _WEIGHT,
            _WEIGHT + "\n    if weight.shape[1] > 2:\n        weight[:, -2:] = weight[:, -2:].flip(1)",
        ),
    ),
)
