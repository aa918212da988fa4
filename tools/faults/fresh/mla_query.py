"""Faults of the mla_query models."""

from tools.faults.patch import Edit, Fault


def _fault(name: str, schedule: str, what: str, *edits: tuple[str, str]) -> Fault:
    file = "reference/mla_query.py"
    return Fault(name, "mla_query", schedule, what, "", tuple(Edit(file, old, new) for old, new in edits))


FAULTS = (
    # The model.
    _fault(
        "model-no-eps",
        "model",
        "the query norm forgets eps",
        ("norm(x[:, :QUERY], w_qa, eps)", "norm(x[:, :QUERY], w_qa, 0.0)"),
    ),
    _fault(
        "model-cache-eps-fixed",
        "model",
        "the insert has an eps of its own, 2^-20",
        (
            'cache_insert.model(insert_inputs(inputs), {"eps": eps}',
            'cache_insert.model(insert_inputs(inputs), {"eps": 2.0**-20}',
        ),
    ),
    _fault(
        "model-columns-from-the-right",
        "model",
        "the query latent is found from the row's end; seen only with W > 2112",
        ("norm(x[:, :QUERY], w_qa, eps)", "norm(x[:, x.shape[1] - QKV :][:, :QUERY], w_qa, eps)"),
    ),
    _fault(
        "model-rows-of-32",
        "model",
        "rows from 32 on take the normalised query of row − 32",
        ("portable.total(w_qb * normed[row])", "portable.total(w_qb * normed[row % 32])"),
    ),
    _fault(
        "model-q-not-rounded",
        "model",
        "the projected query stays in fp32",
        ("q = round_bf16(portable.total(w_qb * normed[row]))", "q = portable.total(w_qb * normed[row])"),
    ),
    _fault(
        "model-rope-not-rounded",
        "model",
        "only the part of q that is absorbed is rounded to bf16",
        ("q = round_bf16(portable.total(w_qb * normed[row]))", "q = portable.total(w_qb * normed[row])"),
        (
            "portable.total(q[:, :NOPE, None] * w_uk, dim=1)",
            "portable.total(round_bf16(q[:, :NOPE, None]) * w_uk, dim=1)",
        ),
    ),
    _fault(
        "model-latent-not-rounded",
        "model",
        "the absorbed latent stays in fp32",
        (
            "round_bf16(portable.total(q[:, :NOPE, None] * w_uk, dim=1))",
            "portable.total(q[:, :NOPE, None] * w_uk, dim=1)",
        ),
    ),
    _fault(
        "model-latent-scaled-before-rounding",
        "model",
        "the latent is rounded to bf16 after the scale, not before",
        (
            "latent = round_bf16(portable.total(q[:, :NOPE, None] * w_uk, dim=1))\n"
            "        output[row] = torch.cat([latent, q[:, NOPE:]], dim=1) * scale",
            "latent = round_bf16(portable.total(q[:, :NOPE, None] * w_uk, dim=1) * scale)\n"
            "        output[row] = torch.cat([latent, q[:, NOPE:] * scale], dim=1)",
        ),
    ),
    _fault(
        "model-last-p-lost",
        "model",
        "the absorption ends one p early",
        ("q[:, :NOPE, None] * w_uk", "q[:, : NOPE - 1, None] * w_uk[:, : NOPE - 1]"),
    ),
    _fault(
        "model-absorption-of-head-0",
        "model",
        "all heads use w_uk of head 0",
        ("q[:, :NOPE, None] * w_uk", "q[:, :NOPE, None] * w_uk[:1]"),
    ),
    _fault(
        "model-heads-interleaved",
        "model",
        "row r of w_qb is taken for head r mod heads",
        (".view(heads, HEAD)\n        latent", ".view(HEAD, heads).t()\n        latent"),
    ),
    _fault(
        "model-rope-not-scaled",
        "model",
        "q_scale_inv reaches the latent only",
        ("torch.cat([latent, q[:, NOPE:]], dim=1) * scale", "torch.cat([latent * scale, q[:, NOPE:]], dim=1)"),
    ),
    _fault(
        "model-scale-by-division",
        "model",
        "division by 1 / q_scale_inv instead of the product: an ULP apart where the reciprocal is not exact",
        ("q[:, NOPE:]], dim=1) * scale", "q[:, NOPE:]], dim=1) / (1 / scale)"),
    ),
    _fault(
        "model-nan-payload",
        "model",
        "NaN keep the payload and the sign that the machine gives them",
        ("canonical_nan(output) if dtype == torch.float32 else output", "output"),
    ),
    _fault(
        "model-q-b-chain",
        "model",
        "Q_B sums the two halves of k apart from the middle third: another order, seen where the sum cancels",
        ("portable.total(w_qb * normed[row])", "portable.total((w_qb * normed[row]).flip(1))"),
    ),
    _fault(
        "model-absorption-order",
        "model",
        "the absorption adds neighbouring p first, not halves",
        (
            "portable.total(q[:, :NOPE, None] * w_uk, dim=1)",
            "portable.total(portable.total((q[:, :NOPE, None] * w_uk).unflatten(1, (-1, 2)), dim=2), dim=1)",
        ),
    ),
    # What the schedules share: inputs of the insert, norm, output.
    _fault(
        "cache-columns-from-the-right",
        "tiled",
        "the KV latent and k_pe are found from the row's end; seen only with W > 2112",
        ('inputs["qkv"][:, QUERY:QKV]', 'inputs["qkv"][:, QUERY - QKV :]'),
    ),
    _fault(
        "cache-halves-swapped",
        "small",
        "k_pe is taken to lie before the KV latent",
        (
            'kv, k_pe = inputs["qkv"][:, QUERY:QKV].split((LATENT, ROPE), dim=1)',
            'k_pe, kv = inputs["qkv"][:, QUERY:QKV].split((ROPE, LATENT), dim=1)',
        ),
    ),
    _fault(
        "cache-scale-of-query",
        "tiled",
        "the insert converts with q_scale_inv",
        (
            '("w_kva", "cache", "slots", "k_scale_inv")}',
            '("w_kva", "cache", "slots")} | {"k_scale_inv": inputs["q_scale_inv"]}',
        ),
    ),
    _fault(
        "cache-weights-of-query",
        "small",
        "the insert normalises with the first 512 of w_qa",
        (
            '("w_kva", "cache", "slots", "k_scale_inv")}',
            '("cache", "slots", "k_scale_inv")} | {"w_kva": inputs["w_qa"][:LATENT]}',
        ),
    ),
    _fault(
        "cache-slot-32-bit",
        "small",
        "slots are read as 32-bit words: 2^32 + 3, outside every cache, is written at 3",
        (
            '("w_kva", "cache", "slots", "k_scale_inv")}',
            '("w_kva", "cache", "k_scale_inv")} | {"slots": inputs["slots"].to(torch.int32).to(torch.int64)}',
        ),
    ),
    _fault(
        "cache-slot-of-next-row",
        "tiled",
        "an even number of rows: each pair swaps its slots",
        (
            '("w_kva", "cache", "slots", "k_scale_inv")}',
            '("w_kva", "cache", "k_scale_inv")} | '
            '{"slots": inputs["slots"][torch.arange(len(kv)) ^ 1] if len(kv) % 2 == 0 else inputs["slots"]}',
        ),
    ),
    _fault(
        "cache-eps-zero",
        "small",
        "the insert forgets eps",
        ('{"eps": params["eps"]}, "insert"', '{"eps": 0.0}, "insert"'),
    ),
    _fault(
        "cache-first-32-rows",
        "tiled",
        "rows from 32 on are not inserted",
        (
            "cache_insert.exact(insert_inputs(inputs), {",
            'cache_insert.exact(insert_inputs(inputs | {n: inputs[n][:32] for n in ("qkv", "slots")}), {',
        ),
    ),
    _fault(
        "mean-by-reciprocal",
        "tiled",
        "the sum of squares is multiplied by fp32(1/1536), not divided by 1536: an ULP of a third of the means",
        ("div_rn(total, width)", "mul_rn(total, div_rn(torch.ones_like(width), width))"),
    ),
    _fault(
        "mean-fused",
        "small",
        "mean and eps in one fma with fp32(1/1536)",
        (
            "add_rn(div_rn(total, width), offset)",
            "cache_insert.fma_rn(total, div_rn(torch.ones_like(width), width), offset)",
        ),
    ),
    _fault(
        "eps-in-sum",
        "tiled",
        "eps is added to the sum of squares, before the division",
        ("add_rn(div_rn(total, width), offset)", "div_rn(add_rn(total, offset), width)"),
    ),
    _fault(
        "eps-bf16",
        "small",
        "eps goes through bf16",
        (
            "torch.tensor(value, dtype=torch.float32, device=x.device) for value in (QUERY, eps)",
            "torch.tensor(value, dtype=torch.bfloat16, device=x.device).to(torch.float32) for value in (QUERY, eps)",
        ),
    ),
    _fault(
        "mean-over-all-columns",
        "small",
        "the mean divides by 2112",
        ("for value in (QUERY, eps))", "for value in (QKV, eps))"),
    ),
    _fault(
        "rsqrt-ftz",
        "tiled",
        "rsqrt flushes a subnormal mean to zero: inf; seen with eps = 0 and values near 2^-70",
        (
            "from reference.numerics.mufu import rsqrt_approx\n",
            "from reference.numerics.mufu import rsqrt_approx_ftz as rsqrt_approx\n",
        ),
    ),
    _fault(
        "rsqrt-correctly-rounded",
        "small",
        "1 / √ in IEEE arithmetic instead of the approximation: an ULP of a fifth of the norms",
        (
            "rr = rsqrt_approx(add_rn(div_rn(total, width), offset))",
            "rr = div_rn(torch.ones_like(total), portable.sqrt(add_rn(div_rn(total, width), offset)))",
        ),
    ),
    _fault(
        "norm-weight-first",
        "tiled",
        "the weight meets rr before x: x · (rr · w)",
        ("mul_rn(mul_rn(x, rr[:, None]), w)", "mul_rn(x, mul_rn(rr[:, None], w))"),
    ),
    _fault(
        "norm-not-rounded",
        "small",
        "x̂ enters Q_B in fp32",
        ("return to_bf16(mul_rn(mul_rn(x, rr[:, None]), w))", "return mul_rn(mul_rn(x, rr[:, None]), w)"),
    ),
    _fault(
        "norm-rounded-twice",
        "tiled",
        "x · rr is rounded to bf16 before the weight, too",
        ("mul_rn(mul_rn(x, rr[:, None]), w)", "mul_rn(to_bf16(mul_rn(x, rr[:, None])).to(torch.float32), w)"),
    ),
    _fault(
        "norm-of-row-0",
        "small",
        "all rows take the norm of row 0",
        ("mul_rn(x, rr[:, None])", "mul_rn(x, rr[:1, None])"),
    ),
    _fault(
        "norm-of-first-tile",
        "tiled",
        "rows from 16 on take the norms of the first 16",
        ("mul_rn(x, rr[:, None])", "mul_rn(x, rr[torch.arange(len(rr)) % 16, None])"),
    ),
    _fault(
        "rope-of-head-0",
        "small",
        "all heads write the rope part of head 0",
        (
            "torch.cat([latent, q[..., NOPE:]], dim=-1)",
            "torch.cat([latent, q[:, :1, NOPE:].expand(-1, q.shape[1], -1)], dim=-1)",
        ),
    ),
    _fault(
        "rope-halves-swapped",
        "tiled",
        "the rope part's two halves of 32 change places",
        ("torch.cat([latent, q[..., NOPE:]], dim=-1)", "torch.cat([latent, q[..., NOPE:].roll(32, -1)], dim=-1)"),
    ),
    _fault(
        "rope-unscaled",
        "tiled",
        "the rope part is converted without q_scale_inv",
        (
            "return to_e4m3(mul_rn(values, scale))",
            "return to_e4m3(torch.cat([mul_rn(values[..., :LATENT], scale), values[..., LATENT:]], dim=-1))",
        ),
    ),
    _fault(
        "scale-by-division",
        "tiled",
        "division by 1 / q_scale_inv: an ULP, which changes a byte at a tie of e4m3",
        ("mul_rn(values, scale)", "div_rn(values, div_rn(torch.ones_like(scale), scale))"),
    ),
    _fault(
        "scale-bf16",
        "small",
        "q_scale_inv is rounded to bf16",
        ("mul_rn(values, scale)", "mul_rn(values, to_bf16(scale).to(torch.float32))"),
    ),
    _fault(
        "scale-ignored-for-one-row",
        "small",
        "B = 1 takes a path without q_scale_inv",
        ("mul_rn(values, scale)", "(mul_rn(values, scale) if len(values) > 1 else values)"),
    ),
    _fault(
        "bytes-by-way-of-bf16",
        "tiled",
        "the scaled value is rounded to bf16 before e4m3: wrong next to ties",
        ("to_e4m3(mul_rn(values, scale))", "to_e4m3(to_bf16(mul_rn(values, scale)).to(torch.float32))"),
    ),
    _fault(
        "bytes-nan-saturates",
        "tiled",
        "NaN is written as 448",
        ("to_e4m3(mul_rn(values, scale))", "to_e4m3(torch.where(values != values, 448.0, mul_rn(values, scale)))"),
    ),
    _fault(
        "bytes-overflow-is-nan",
        "small",
        "values beyond 464 become NaN instead of ±448",
        (
            "return to_e4m3(mul_rn(values, scale))",
            "values = mul_rn(values, scale)\n    return to_e4m3(torch.where(values.abs() > 464.0, torch.nan, values))",
        ),
    ),
    _fault(
        "bytes-subnormal-flushed",
        "tiled",
        "values below 2^-6 become zero",
        (
            "return to_e4m3(mul_rn(values, scale))",
            "values = mul_rn(values, scale)\n"
            "    return to_e4m3(torch.where(values.abs() < 2.0**-6, values * 0.0, values))",
        ),
    ),
    _fault(
        "bytes-negative-zero",
        "small",
        "a negative value that rounds to zero is written as +0",
        (
            "return to_e4m3(mul_rn(values, scale)).view(torch.uint8)",
            "written = to_e4m3(mul_rn(values, scale)).view(torch.uint8)\n"
            "    return torch.where(written == 0x80, 0, written)",
        ),
    ),
    _fault(
        "clamped-before-scale",
        "small",
        "the clamp to ±448 comes before the scale",
        ("mul_rn(values, scale)", "mul_rn(values.clamp(-448.0, 448.0), scale)"),
    ),
    # Schedule small.
    _fault(
        "small-columns-from-the-right",
        "small",
        "the query latent is found from the row's end; seen only with W > 2112",
        ("    x = x[:, :QUERY]\n", "    x = x[:, x.shape[1] - QKV :][:, :QUERY]\n"),
    ),
    _fault(
        "small-pitch-2112",
        "small",
        "a row pitch of 2112 is assumed: rows from the second on are shifted with W > 2112",
        ("    x = x[:, :QUERY]\n", "    x = x.contiguous().as_strided((rows, QUERY), (QKV, 1))\n"),
    ),
    _fault(
        "small-squares-strided",
        "small",
        "a thread squares every 192nd value, not 8 neighbours: another order of the sum",
        (
            "x.unflatten(1, (-1, LANES, COLUMNS)).movedim(3, 0)",
            "x.unflatten(1, (COLUMNS, -1, LANES)).movedim(1, 0)",
        ),
    ),
    _fault(
        "small-squares-butterfly-up",
        "small",
        "the butterfly of the squares starts with the neighbours",
        ("chain_fma(threads, threads), (16, 8, 4, 2, 1)", "chain_fma(threads, threads), (1, 2, 4, 8, 16)"),
    ),
    _fault(
        "small-warps-descending",
        "small",
        "the warps' sums are added from the last one down",
        ("chain_add(warps), params", "chain_add(warps.flip(-1)), params"),
    ),
    _fault(
        "small-warp-lost",
        "small",
        "the sixth warp's sum of squares is left out",
        ("chain_add(warps), params", "chain_add(warps[:, :5]), params"),
    ),
    _fault(
        "small-fifth-row",
        "small",
        "row 4, which only 5-row calls have, reads the x̂ of row 3",
        (
            "(_by_lane(t) for t in (w_qb, x_hat))",
            "(_by_lane(t) for t in (w_qb, x_hat[torch.arange(rows).clamp(max=3)]))",
        ),
    ),
    _fault(
        "small-last-row-of-a-cta",
        "small",
        "the last of each CTA's 24 rows of Q_B reads the row before",
        (
            "(_by_lane(t) for t in (w_qb, x_hat))",
            "(_by_lane(t) for t in ((lambda r: w_qb[r - (r % 24 == 23).long()])(torch.arange(len(w_qb))), x_hat))",
        ),
    ),
    _fault(
        "small-q-b-four-chains",
        "small",
        "four chains a lane instead of two",
        ("x_lanes[:, :, None], 2)", "x_lanes[:, :, None], 4)"),
    ),
    _fault(
        "small-q-b-one-chain",
        "small",
        "one chain a lane instead of two",
        ("x_lanes[:, :, None], 2)", "x_lanes[:, :, None], 1)"),
    ),
    _fault(
        "small-q-b-i-before-c",
        "small",
        "a lane runs over c inside i, so its two chains are of even and odd c",
        ("permute(1, 3, 0, 2)", "permute(3, 1, 0, 2)"),
    ),
    _fault(
        "small-q-b-contiguous-lanes",
        "small",
        "a lane owns 48 neighbouring k",
        (
            "x.unflatten(1, (-1, LANES, COLUMNS)).permute(1, 3, 0, 2).flatten(0, 1)",
            "x.unflatten(1, (LANES, -1)).permute(2, 0, 1)",
        ),
    ),
    _fault(
        "small-q-b-butterfly-up",
        "small",
        "the butterfly of Q_B starts with the neighbours",
        ("butterfly(lanes, (16, 8, 4, 2, 1))", "butterfly(lanes, (1, 2, 4, 8, 16))"),
    ),
    _fault(
        "small-q-not-rounded",
        "small",
        "q stays in fp32 for the absorption and the rope part",
        (
            "q = to_bf16(butterfly(lanes, (16, 8, 4, 2, 1))[..., 0])",
            "q = (butterfly(lanes, (16, 8, 4, 2, 1))[..., 0])",
        ),
    ),
    _fault(
        "small-cluster-of-8",
        "small",
        "6 heads run the absorption as in clusters of 8: groups of 32 p, not of 16",
        ("columns = LATENT // CLUSTER[heads]", "columns = LATENT // 8"),
    ),
    _fault(
        "small-shares-halved",
        "small",
        "twice as many groups of half as many p",
        ("share = columns // 2", "share = columns // 4"),
    ),
    _fault(
        "small-absorption-next-head",
        "small",
        "a head absorbs with the weights of the one before; seen with several heads",
        ("w_uk.unflatten(1, (-1, share))", "w_uk.roll(1, 0).unflatten(1, (-1, share))"),
    ),
    _fault(
        "small-absorption-one-chain",
        "small",
        "one chain a group instead of even and odd p",
        ("strided_fma(w_groups, q_groups, 2)", "strided_fma(w_groups, q_groups, 1)"),
    ),
    _fault(
        "small-groups-descending",
        "small",
        "the groups' sums are added from the last one down",
        (
            "chain_add(strided_fma(w_groups, q_groups, 2), dim=-2)",
            "chain_add(strided_fma(w_groups, q_groups, 2).flip(-2), dim=-2)",
        ),
    ),
    _fault(
        "small-group-lost",
        "small",
        "the last group's sum is left out",
        (
            "chain_add(strided_fma(w_groups, q_groups, 2), dim=-2)",
            "chain_add(strided_fma(w_groups, q_groups, 2)[..., :-1, :], dim=-2)",
        ),
    ),
    _fault(
        "small-latent-not-rounded",
        "small",
        "the latent goes to e4m3 in one rounding, without bf16 before",
        (
            "latent = to_bf16(chain_add(strided_fma(w_groups, q_groups, 2), dim=-2))",
            "latent = chain_add(strided_fma(w_groups, q_groups, 2), dim=-2)",
        ),
    ),
    # Schedule tiled.
    _fault(
        "tiled-squares-two-chains",
        "tiled",
        "two chains of squares a lane instead of four",
        ("strided_fma(lanes, lanes, 4)", "strided_fma(lanes, lanes, 2)"),
    ),
    _fault(
        "tiled-squares-chained",
        "tiled",
        "the four chains are added one after the other, not pairwise",
        (
            "strided_fma(lanes, lanes, 4)",
            "chain_add(torch.stack([chain_fma(lanes[way::4], lanes[way::4]) for way in range(4)]), 0)",
        ),
    ),
    _fault(
        "tiled-squares-butterfly-up",
        "tiled",
        "the butterfly of the squares starts with the neighbours",
        ("strided_fma(lanes, lanes, 4), (16, 8, 4, 2, 1)", "strided_fma(lanes, lanes, 4), (1, 2, 4, 8, 16)"),
    ),
    _fault(
        "tiled-q-b-ascending",
        "tiled",
        "an MMA of Q_B takes 16 neighbouring k",
        ("mma(x_warps, w_warps, k_order=q_b_order(x.device))", "mma(x_warps, w_warps)"),
    ),
    _fault(
        "tiled-q-b-halves-swapped",
        "tiled",
        "of each 32 k the MMA of k mod 8 ≥ 4 comes first",
        ("return k.transpose(1, 2).reshape(-1, MMA_K)", "return k.transpose(1, 2).flip(1).reshape(-1, MMA_K)"),
    ),
    _fault(
        "tiled-q-b-even-odd",
        "tiled",
        "of each 32 k the first MMA takes the even ones",
        (".view(-1, 2 * MMA_K // 8, 2, 4)", ".view(-1, MMA_K, 2, 1)"),
    ),
    _fault(
        "tiled-four-warps",
        "tiled",
        "k is split over 4 warps: chains of 24 MMAs",
        ("MMA_WARPS, MMA_K = 8, 16", "MMA_WARPS, MMA_K = 4, 16"),
    ),
    _fault(
        "tiled-one-warp",
        "tiled",
        "k is not split: one chain of 96 MMAs",
        ("MMA_WARPS, MMA_K = 8, 16", "MMA_WARPS, MMA_K = 1, 16"),
    ),
    _fault(
        "tiled-warps-interleaved",
        "tiled",
        "warp w owns every eighth k",
        (
            "(t.unflatten(1, (MMA_WARPS, -1)).transpose(0, 1) for t in (x_hat, w_qb))",
            "(t.unflatten(1, (-1, MMA_WARPS)).permute(2, 0, 1) for t in (x_hat, w_qb))",
        ),
    ),
    _fault(
        "tiled-partials-descending",
        "tiled",
        "the warps' partial sums are added from the last one down",
        ("to_bf16(chain_add(partial, 0))", "to_bf16(chain_add(partial.flip(0), 0))"),
    ),
    _fault(
        "tiled-partials-bf16",
        "tiled",
        "the warps exchange their partial sums in bf16",
        ("to_bf16(chain_add(partial, 0))", "to_bf16(chain_add(to_bf16(partial).to(torch.float32), 0))"),
    ),
    _fault(
        "tiled-q-second-tile",
        "tiled",
        "rows from 16 on absorb the q of the first 16",
        ("q[..., :NOPE].transpose(0, 1)", "q[torch.arange(rows) % 16, :, :NOPE].transpose(0, 1)"),
    ),
    _fault(
        "tiled-nan-spreads",
        "tiled",
        "a NaN or inf of one row reaches the others, as 0 · x of a tile does; finite inputs do not show it",
        (
            'total, params["eps"])\n\n    x_warps',
            'total, params["eps"])\n'
            "    x_hat = to_bf16(x_hat.to(torch.float32) + 0.0 * chain_add(x_hat.to(torch.float32), 0))\n\n    x_warps",
        ),
    ),
    _fault(
        "tiled-absorption-descending",
        "tiled",
        "the absorption takes its MMAs from the last p down",
        (
            "w_uk.transpose(1, 2))  #",
            "w_uk.transpose(1, 2), k_order=torch.arange(NOPE, device=x.device).view(-1, MMA_K).flip(0))  #",
        ),
    ),
    _fault(
        "tiled-absorption-interleaved",
        "tiled",
        "MMA s of the absorption takes p ≡ s mod 8",
        (
            "w_uk.transpose(1, 2))  #",
            "w_uk.transpose(1, 2), k_order=torch.arange(NOPE, device=x.device).view(MMA_K, -1).t())  #",
        ),
    ),
    _fault(
        "tiled-last-mma-lost",
        "tiled",
        "the absorption has 7 MMAs",
        (
            "mma(q[..., :NOPE].transpose(0, 1), w_uk.transpose(1, 2))",
            "mma(q[..., : NOPE - MMA_K].transpose(0, 1), w_uk[:, : NOPE - MMA_K].transpose(1, 2))",
        ),
    ),
    _fault(
        "tiled-latent-truncated",
        "tiled",
        "the latent is cut to bf16, not rounded",
        (
            "_to_bytes(to_bf16(latent).transpose(0, 1)",
            "_to_bytes((latent.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16).transpose(0, 1)",
        ),
    ),
)
