"""Faults of the cache_insert models."""

from tools.faults.patch import Edit, Fault


def _fault(name: str, schedule: str, what: str, *edits: tuple[str, str]) -> Fault:
    file = "reference/cache_insert.py"
    return Fault(name, "cache_insert", schedule, what, "", tuple(Edit(file, old, new) for old, new in edits))


FAULTS = (
    # Where rows go; the model and the schedule share it.
    _fault(
        "slot-0-skipped",
        "insert",
        "slot 0 counts as no slot",
        ("(slots >= 0) & (slots < flat", "(slots > 0) & (slots < flat"),
    ),
    _fault(
        "last-slot-skipped",
        "insert",
        "the cache's last row counts as outside",
        ("(slots < flat.shape[0])", "(slots < flat.shape[0] - 1)"),
    ),
    _fault(
        "last-page-skipped",
        "model",
        "the last page counts as outside",
        ("(slots < flat.shape[0])", "(slots < flat.shape[0] - cache.shape[1])"),
    ),
    _fault(
        "minus-one-wraps",
        "insert",
        "slot −1 is the cache's last row",
        (
            "inside = ((slots >= 0) &",
            "slots = torch.where(slots == -1, flat.shape[0] - 1, slots)\n    inside = ((slots >= 0) &",
        ),
    ),
    _fault(
        "outside-clamped",
        "insert",
        "slots behind the cache write its last row",
        (
            "inside = ((slots >= 0) &",
            "slots = slots.clamp(max=flat.shape[0] - 1)\n    inside = ((slots >= 0) &",
        ),
    ),
    _fault(
        "outside-modulo",
        "model",
        "slots behind the cache start over at its beginning",
        (
            "inside = ((slots >= 0) &",
            "slots = torch.where(slots >= 0, slots % flat.shape[0], slots)\n    inside = ((slots >= 0) &",
        ),
    ),
    _fault(
        "slot-32-bit",
        "insert",
        "slots are read as 32-bit words: 2^32 + 3 is written at 3",
        ("inside = ((slots >= 0) &", "slots = slots.to(torch.int32).to(torch.int64)\n    inside = ((slots >= 0) &"),
    ),
    _fault(
        "page-of-64-rows",
        "insert",
        "pages of 64 rows are assumed: wrong where the cache has smaller ones",
        (
            "flat.index_copy_(0, slots.index_select(0, inside),",
            "flat.index_copy_(0, (lambda s: (s // 64 * cache.shape[1] + s % 64).clamp(max=len(flat) - 1))"
            "(slots.index_select(0, inside)),",
        ),
    ),
    _fault(
        "offset-before-page",
        "insert",
        "a slot is offset · pages + page",
        (
            "flat.index_copy_(0, slots.index_select(0, inside),",
            "flat.index_copy_(0, (lambda s: s % cache.shape[0] * cache.shape[1] + s // cache.shape[0])"
            "(slots.index_select(0, inside)),",
        ),
    ),
    _fault(
        "rows-close-up",
        "insert",
        "a skipped row does not count: those after it write the row before theirs",
        ("rows.index_select(0, inside)", "rows[: len(inside)]"),
    ),
    _fault(
        "skipped-row-ends",
        "insert",
        "a skipped row ends the loop over rows",
        (
            "inside = ((slots >= 0) & (slots < flat.shape[0])).nonzero().squeeze(1)",
            "inside = ((slots >= 0) & (slots < flat.shape[0])).long().cumprod(0).nonzero().squeeze(1)",
        ),
    ),
    _fault(
        "first-32-rows",
        "insert",
        "rows from 32 on are not written",
        (
            "inside = ((slots >= 0) & (slots < flat.shape[0])).nonzero().squeeze(1)",
            "inside = ((slots >= 0) & (slots < flat.shape[0])).nonzero().squeeze(1)\n    inside = inside[inside < 32]",
        ),
    ),
    _fault(
        "next-row-touched",
        "insert",
        "a store of 16 bytes too many clears the beginning of the next row of the cache",
        (
            "inside = ((slots >= 0) & (slots < flat.shape[0])).nonzero().squeeze(1)",
            "inside = ((slots >= 0) & (slots < flat.shape[0])).nonzero().squeeze(1)\n"
            "    flat[(slots.index_select(0, inside) + 1).clamp(max=len(flat) - 1), :16] = 0",
        ),
    ),
    # The model.
    _fault(
        "model-eps-outside-root",
        "model",
        "eps is added to the root",
        (
            "square = mean + torch.tensor(eps, dtype=x.dtype, device=x.device)\n"
            "    return round_bf16(x / portable.sqrt(square)[:, None] * w)",
            "return round_bf16(x / (portable.sqrt(mean) + torch.tensor(eps, dtype=x.dtype))[:, None] * w)",
        ),
    ),
    _fault(
        "model-mean-over-576",
        "model",
        "the mean divides by the whole row's width",
        ("torch.tensor(x.shape[1], dtype=x.dtype", "torch.tensor(WIDTH, dtype=x.dtype"),
    ),
    _fault(
        "model-not-rounded",
        "model",
        "the normed latent stays in fp32",
        ("return round_bf16(x / portable.sqrt(square)[:, None] * w)", "return x / portable.sqrt(square)[:, None] * w"),
    ),
    _fault(
        "model-rounded-before-weight",
        "model",
        "the rounding to bf16 comes before the weight",
        ("round_bf16(x / portable.sqrt(square)[:, None] * w)", "round_bf16(x / portable.sqrt(square)[:, None]) * w"),
    ),
    _fault(
        "model-reciprocal-root",
        "model",
        "x · (1 / √) instead of x / √; seen next to the ties of bf16",
        ("x / portable.sqrt(square)[:, None] * w", "x * (1 / portable.sqrt(square))[:, None] * w"),
    ),
    _fault(
        "model-rope-not-scaled",
        "model",
        "k_pe is not multiplied by k_scale_inv",
        (
            "torch.cat([norm(kv, w_kva, eps), k_pe], dim=1) * scale",
            "torch.cat([norm(kv, w_kva, eps) * scale, k_pe], dim=1)",
        ),
    ),
    _fault(
        "model-truncated",
        "model",
        "bf16 by cutting, not by rounding",
        (
            "return to_bf16(x.to(torch.float32)).to(x.dtype)",
            "return (x.to(torch.float32).view(torch.int32) & -65536).view(torch.float32).to(x.dtype)",
        ),
    ),
    _fault(
        "model-negative-zero-of-old-rows",
        "model",
        "a −0 that was in the cache becomes +0",
        ('inputs["cache"].view(E4M3.dtype).to(dtype)', 'inputs["cache"].view(E4M3.dtype).to(dtype) + 0.0'),
    ),
    _fault(
        "model-nan-payload",
        "model",
        "NaN keep the payload and the sign that the machine gives them",
        ("canonical_nan(cache) if dtype == torch.float32 else cache", "cache"),
    ),
    # Schedule insert.
    _fault(
        "squares-strided",
        "insert",
        "a thread squares every 64th value, not 8 neighbours: another order of the sum",
        ("kv.unflatten(1, (2, LANES, COLUMNS)).movedim(3, 0)", "kv.unflatten(1, (COLUMNS, 2, LANES)).movedim(1, 0)"),
    ),
    _fault(
        "squares-descending",
        "insert",
        "a thread's chain runs from its last value down",
        ("chain_fma(threads, threads)", "chain_fma(threads.flip(0), threads.flip(0))"),
    ),
    _fault(
        "squares-butterfly-up",
        "insert",
        "the butterfly starts with the neighbours",
        ("(16, 8, 4, 2, 1)", "(1, 2, 4, 8, 16)"),
    ),
    _fault(
        "butterfly-of-16-lanes",
        "insert",
        "the butterfly lacks its first step, so a half-warp's sum is missing",
        ("(16, 8, 4, 2, 1)", "(8, 4, 2, 1)"),
    ),
    _fault(
        "warp-0-twice",
        "insert",
        "warp 1's sum is not read, warp 0's counts twice",
        ("add_rn(warps[:, 0], warps[:, 1])", "add_rn(warps[:, 0], warps[:, 0])"),
    ),
    _fault(
        "mean-over-576",
        "insert",
        "the mean divides by the whole row's width",
        ("for x in (1.0 / LATENT, eps))", "for x in (1.0 / WIDTH, eps))"),
    ),
    _fault(
        "eps-in-sum",
        "insert",
        "eps is added to the sum, before the division",
        (
            "fma_rn(add_rn(warps[:, 0], warps[:, 1]), share, offset)",
            "mul_rn(add_rn(add_rn(warps[:, 0], warps[:, 1]), offset), share)",
        ),
    ),
    _fault(
        "eps-bf16",
        "insert",
        "eps goes through bf16",
        (
            "(torch.tensor(x, dtype=torch.float32, device=kv.device) for",
            "(torch.tensor(x, dtype=torch.bfloat16, device=kv.device).to(torch.float32) for",
        ),
    ),
    _fault(
        "rsqrt-not-ftz",
        "insert",
        "rsqrt keeps subnormal means, where the kernel's gives inf; seen with eps = 0 and values near 2^-66",
        (
            "from reference.numerics.mufu import rsqrt_approx_ftz\n",
            "from reference.numerics.mufu import rsqrt_approx as rsqrt_approx_ftz\n",
        ),
    ),
    _fault(
        "rsqrt-correctly-rounded",
        "insert",
        "1 / √ in IEEE arithmetic instead of the approximation: an ULP of a fifth of the norms",
        (
            "rr = rsqrt_approx_ftz(fma_rn(add_rn(warps[:, 0], warps[:, 1]), share, offset))",
            "rr = 1 / portable.sqrt(fma_rn(add_rn(warps[:, 0], warps[:, 1]), share, offset))",
        ),
    ),
    _fault(
        "weight-first",
        "insert",
        "the weight meets rr before x: x · (rr · w)",
        ("mul_rn(mul_rn(kv, rr[:, None]), w_kva)", "mul_rn(kv, mul_rn(rr[:, None], w_kva))"),
    ),
    _fault(
        "not-rounded",
        "insert",
        "the latent goes to e4m3 in one rounding, without bf16 before",
        (
            "latent = to_bf16(mul_rn(mul_rn(kv, rr[:, None]), w_kva)).to(torch.float32)",
            "latent = mul_rn(mul_rn(kv, rr[:, None]), w_kva)",
        ),
    ),
    _fault(
        "rounded-twice",
        "insert",
        "x · rr is rounded to bf16 before the weight, too",
        ("mul_rn(mul_rn(kv, rr[:, None]), w_kva)", "mul_rn(to_bf16(mul_rn(kv, rr[:, None])).to(torch.float32), w_kva)"),
    ),
    _fault(
        "norm-of-even-row",
        "insert",
        "a CTA of two rows uses its first row's norm for both",
        ("mul_rn(kv, rr[:, None])", "mul_rn(kv, rr[torch.arange(len(rr)) & -2, None])"),
    ),
    _fault(
        "weights-of-warp-0",
        "insert",
        "warp 1 reads the weights of warp 0",
        ("rr[:, None]), w_kva))", "rr[:, None]), w_kva[: LATENT // 2].repeat(2)))"),
    ),
    _fault(
        "rope-pitch-64",
        "insert",
        "k_pe is read with a row pitch of 64: wrong from the second row on where it is a view",
        (
            "    threads = kv.unflatten",
            '    k_pe = inputs["k_pe"].as_strided(k_pe.shape, (ROPE, 1)).to(torch.float32)\n    threads = kv.unflatten',
        ),
    ),
    _fault(
        "latent-pitch-of-rope",
        "insert",
        "the latent is read with a row pitch of 512 in calls of more than 8 rows; wrong where it is a view",
        (
            "    threads = kv.unflatten",
            '    kv = inputs["kv"].as_strided(kv.shape, (LATENT, 1)).to(torch.float32) if len(kv) > 8 else kv\n'
            "    threads = kv.unflatten",
        ),
    ),
    _fault(
        "scale-by-division",
        "insert",
        "division by 1 / k_scale_inv: an ULP, which changes a byte at a tie of e4m3",
        (
            'mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"])',
            'torch.cat([latent, k_pe], dim=1) / (1 / inputs["k_scale_inv"])',
        ),
    ),
    _fault(
        "scale-ignored-for-rope",
        "insert",
        "k_pe is converted without k_scale_inv",
        (
            'mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"])',
            'torch.cat([mul_rn(latent, inputs["k_scale_inv"]), k_pe], dim=1)',
        ),
    ),
    _fault(
        "bytes-by-way-of-bf16",
        "insert",
        "the scaled value is rounded to bf16 before e4m3: wrong next to ties",
        (
            'to_e4m3(mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"]))',
            'to_e4m3(to_bf16(mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"])).to(torch.float32))',
        ),
    ),
    _fault(
        "infinity-is-nan",
        "insert",
        "an infinite value is written as NaN, not as ±448",
        (
            'mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"])',
            "(lambda x: torch.where(x.isinf(), torch.nan, x))(mul_rn(torch.cat([latent, k_pe], dim=1), "
            'inputs["k_scale_inv"]))',
        ),
    ),
    _fault(
        "old-nan-rewritten",
        "insert",
        "the cache is copied by value: a byte 0xff of another row becomes 0x7f",
        (
            'write(inputs["cache"].view(torch.uint8), inputs["slots"], rows)',
            'write(to_e4m3(inputs["cache"].view(E4M3.dtype).float()).view(torch.uint8), inputs["slots"], rows)',
        ),
    ),
)
