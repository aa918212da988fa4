"""Mistakes in mla_query: norm, projection, absorption, rope, conversion, rows and heads, the insert."""

from tools.faults.plain.rows import variants

_X = 'x = inputs["qkv"][:, :1536].float()'
_POWER = "power = (x * x).sum(1, keepdim=True) / 1536"
_NORMED = 'normed = (x * torch.rsqrt(power + eps) * inputs["w_qa"].float()).bfloat16()'
_Q = 'q = rows_apart(normed, inputs["w_qb"]).bfloat16()'
_VIEW = "q = q.view(-1, heads, 192)"
_SPLIT = "nope, rope = q[..., :128], q[..., 128:]"
_LATENT = 'latent = absorbed(nope, inputs["w_uk"])'
_ROUND = "latent = latent.bfloat16()"
_VALUES = "values = torch.cat([latent, rope], 2).float()"
_OUT = 'return to_e4m3(values * inputs["q_scale_inv"])'
_APART = "w = w.float()\n    return torch.stack([w @ row for row in x.float()])"
_CALL = 'return {"output": query(inputs, params), "cache": insert(inputs, params["eps"])}'
_KV = 'kv, k_pe = inputs["qkv"][:, 1536:2048].float(), inputs["qkv"][:, 2048:2112].float()'
_MEAN = "mean = (kv * kv).sum(1, keepdim=True) / 512"
_KVN = 'kv_normed = (kv * torch.rsqrt(mean + eps) * inputs["w_kva"].float()).bfloat16()'
_CODES = 'codes = to_e4m3(torch.cat([kv_normed.float(), k_pe], 1) * inputs["k_scale_inv"])'
_CACHE = 'cache = inputs["cache"].view(torch.uint8).clone()'
_INSIDE = "inside = (slots >= 0) & (slots < len(flat))"
_WRITE = "flat[slots[inside]] = codes[inside]"
_CODE = "code = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)"
_NAN = "return torch.where(x.isnan(), 0x7F, code)"

ROWS = variants(
    "mla_query",
    (
        ("norm-of-request-0", "Every request takes request 0's norm.", _NORMED, _NORMED.replace("power", "power[:1]")),
        ("eps-missing", "The query's norm has no eps.", _NORMED, _NORMED.replace("power + eps", "power")),
        (
            "eps-outside",
            "The query norm's eps is outside the root.",
            _NORMED,
            _NORMED.replace("torch.rsqrt(power + eps)", "(1 / (power.sqrt() + eps))"),
        ),
        (
            "eps-twice",
            "The query norm's eps is added twice.",
            _NORMED,
            _NORMED.replace("power + eps", "power + 2 * eps"),
        ),
        ("eps-1e-6", "The query norm's eps is always 1e-6.", _NORMED, _NORMED.replace("power + eps", "power + 1e-6")),
        (
            "eps-of-sum",
            "The eps is added to the sum.",
            _POWER,
            "power = (x * x).sum(1, keepdim=True) / 1536 + eps / 1536 - eps",
        ),
        ("mean-of-2048", "The mean is over 2048.", _POWER, "power = (x * x).sum(1, keepdim=True) / 2048"),
        (
            "mean-of-qkv",
            "The mean takes all of qkv.",
            _POWER,
            'power = (inputs["qkv"][:, :2112].float() ** 2).sum(1, keepdim=True) / 2112',
        ),
        (
            "mean-last-warp-lost",
            "The last warp's squares are lost.",
            _POWER,
            "power = (x[:, :1280] ** 2).sum(1, keepdim=True) / 1536",
        ),
        (
            "mean-last-8-lost",
            "The last thread's squares are lost.",
            _POWER,
            "power = (x[:, :-8] ** 2).sum(1, keepdim=True) / 1536",
        ),
        ("layer-norm", "The mean is subtracted.", _POWER, "x = x - x.mean(1, keepdim=True)\n    " + _POWER),
        ("squares-in-bf16", "The mean of squares is bf16.", _POWER, _POWER + "\n    power = power.bfloat16().float()"),
        (
            "squares-in-fp16",
            "The sum of squares is fp16.",
            _POWER,
            "power = (x * x).sum(1, keepdim=True).half().float() / 1536",
        ),
        (
            "normed-cut",
            "The normalised row is cut to bf16.",
            _NORMED,
            'normed = ((x * torch.rsqrt(power + eps) * inputs["w_qa"].float()).view(torch.int32) '
            "& -65536).view(torch.float32)",
        ),
        ("normed-not-rounded", "The normalised row is not rounded.", _NORMED, _NORMED.replace(".bfloat16()", "")),
        (
            "normed-rounded-twice",
            "The normalised row is rounded before its weight too.",
            _NORMED,
            'normed = ((x * torch.rsqrt(power + eps)).bfloat16().float() * inputs["w_qa"].float()).bfloat16()',
        ),
        ("normed-in-fp16", "The normalised row is fp16.", _NORMED, _NORMED.replace(".bfloat16()", ".half()")),
        (
            "normed-in-e4m3",
            "The normalised row is e4m3.",
            _NORMED,
            _NORMED + "\n    normed = normed.float().clamp(-448, 448).to(torch.float8_e4m3fn)",
        ),
        (
            "rstd-in-bf16",
            "The norm's factor is bf16.",
            _NORMED,
            _NORMED.replace("torch.rsqrt(power + eps)", "torch.rsqrt(power + eps).bfloat16().float()"),
        ),
        ("w-qa-missing", "The norm's weight is left out.", _NORMED, _NORMED.replace(' * inputs["w_qa"].float()', "")),
        (
            "w-qa-plus-1",
            "The norm's weight is an offset from 1.",
            _NORMED,
            _NORMED.replace('inputs["w_qa"].float()', '(1 + inputs["w_qa"].float())'),
        ),
        (
            "projection-of-head-0",
            "Every head takes W_QB of head 0.",
            _VIEW,
            _VIEW + "\n    q = q[:, :1].expand(-1, heads, -1)",
        ),
        (
            "projection-head-pitch-128",
            "A head's rows of W_QB are taken to be 128 apart.",
            _VIEW,
            "q = q.unfold(1, 192, 128)[:, :heads] if heads > 1 else q[:, None]",
        ),
        (
            "projection-last-head-stale",
            "The last head from six on is the one before.",
            _VIEW,
            _VIEW + "\n    q = torch.cat([q[:, :-1], q[:, -2:-1]], 1) if heads > 1 else q",
        ),
        (
            "projection-in-bf16-parts",
            "Eight warps' partial sums are bf16.",
            _APART,
            "return sum(torch.stack([b.float() @ row for row in a.float()]).bfloat16().float() "
            "for a, b in zip(x.split(192, 1), w.split(192, 1)))",
        ),
        (
            "projection-in-fp16-parts",
            "Eight warps' partial sums are fp16.",
            _APART,
            "return sum(torch.stack([b.float() @ row for row in a.float()]).half().float() "
            "for a, b in zip(x.split(192, 1), w.split(192, 1)))",
        ),
        (
            "projection-bf16-accumulator",
            "The projection's accumulator is bf16 every 16 k.",
            _APART,
            "total = 0.0\n    for a, b in zip(x.split(16, 1), w.split(16, "
            "1)):\n        total = (total + torch.stack([b.float() @ row "
            "for row in a.float()])).bfloat16().float()\n    return total",
        ),
        (
            "projection-last-16-lost",
            "The last 16 of the projection's k are lost.",
            _APART,
            "return torch.stack([w[:, :-16].float() @ row for row in x[:, :-16].float()])",
        ),
        (
            "projection-last-8-lost",
            "The last 8 of the projection's k are lost.",
            _APART,
            "return torch.stack([w[:, :-8].float() @ row for row in x[:, :-8].float()])",
        ),
        (
            "projection-weights-e4m3",
            "W_QB is e4m3.",
            _APART,
            "w = w.float().to(torch.float8_e4m3fn).float()\n    return torch.stack([w @ row for row in x.float()])",
        ),
        ("q-not-rounded", "q is not rounded before the absorption.", _Q, 'q = rows_apart(normed, inputs["w_qb"])'),
        (
            "q-cut",
            "q is cut to bf16.",
            _Q,
            'q = (rows_apart(normed, inputs["w_qb"]).view(torch.int32) & -65536).view(torch.float32)',
        ),
        ("q-in-fp16", "q is fp16.", _Q, 'q = rows_apart(normed, inputs["w_qb"]).half()'),
        (
            "q-in-e4m3",
            "q is e4m3 before the absorption.",
            _LATENT,
            "nope = nope.float().clamp(-448, 448).to(torch.float8_e4m3fn)\n    " + _LATENT,
        ),
        ("rope-first", "The rope rows come before the nope rows.", _SPLIT, "rope, nope = q[..., :64], q[..., 64:]"),
        (
            "rope-of-head-0",
            "Every head takes head 0's rope.",
            _SPLIT,
            _SPLIT + "\n    rope = rope[:, :1].expand(-1, heads, -1)",
        ),
        (
            "rope-of-k-pe",
            "The rope is that of the key.",
            _SPLIT,
            _SPLIT + '\n    rope = inputs["qkv"][:, None, 2048:2112].expand(-1, heads, -1)',
        ),
        ("rope-halves-swapped", "The rope's halves are swapped.", _SPLIT, _SPLIT + "\n    rope = rope.roll(32, 2)"),
        (
            "rope-unscaled",
            "The rope is not scaled.",
            _OUT,
            'values[..., :512] *= inputs["q_scale_inv"]\n    return to_e4m3(values)',
        ),
        (
            "rope-unrounded",
            "The rope is not rounded to bf16 before e4m3.",
            _Q,
            'exact = rows_apart(normed, inputs["w_qb"])\n    q = exact.bfloat16()',
            _VALUES,
            "values = torch.cat([latent.float(), exact.view(-1, heads, 192)[..., 128:]], 2)",
        ),
        (
            "absorption-of-head-0",
            "Every head takes W_UK of head 0.",
            _LATENT,
            _LATENT.replace('inputs["w_uk"]', 'inputs["w_uk"][:1].expand(heads, -1, -1)'),
        ),
        (
            "absorption-transposed",
            "W_UK is read [512, 128].",
            _LATENT,
            _LATENT.replace('inputs["w_uk"]', 'inputs["w_uk"].view(heads, 512, 128).transpose(1, 2)'),
        ),
        (
            "absorption-half",
            "The last 64 of the absorption's p are lost.",
            _LATENT,
            'latent = absorbed(nope[..., :64], inputs["w_uk"][:, :64])',
        ),
        (
            "absorption-last-p-lost",
            "The last p is lost.",
            _LATENT,
            'latent = absorbed(nope[..., :127], inputs["w_uk"][:, :127])',
        ),
        (
            "absorption-bf16-parts",
            "The absorption's groups are summed in bf16.",
            _LATENT,
            "latent = 0.0\n    for i in range(0, 128, 16):\n        part "
            '= absorbed(nope[..., i : i + 16], inputs["w_uk"][:, i : i + '
            "16])\n"
            "        latent = (latent + part).bfloat16().float()",
        ),
        ("latent-not-rounded", "The latent is not rounded to bf16 before e4m3.", _ROUND, "pass"),
        (
            "latent-cut",
            "The latent is cut to bf16.",
            _ROUND,
            "latent = (latent.view(torch.int32) & -65536).view(torch.float32)",
        ),
        ("latent-in-fp16", "The latent is fp16: inf from 65520 on.", _ROUND, "latent = latent.half()"),
        (
            "latent-last-tile-stale",
            "The last 64 latent columns are those of the request before.",
            _ROUND,
            "latent = latent.bfloat16()\n    latent[1:, :, -64:] = latent[:-1, :, -64:].clone()",
        ),
        ("scale-divides", "The inverse scale divides.", _OUT, _OUT.replace("values *", "values /")),
        ("scale-of-k", "The query takes the key's scale.", _OUT, _OUT.replace("q_scale_inv", "k_scale_inv")),
        (
            "scale-in-bf16",
            "The query's scale is bf16.",
            _OUT,
            _OUT.replace('["q_scale_inv"]', '["q_scale_inv"].bfloat16().float()'),
        ),
        (
            "scale-before-rounding",
            "The scale comes before the latent's rounding.",
            _ROUND,
            'latent = (latent * inputs["q_scale_inv"]).bfloat16() / inputs["q_scale_inv"]',
        ),
        (
            "scaled-in-bf16",
            "The scaled query is rounded to bf16 before e4m3.",
            _OUT,
            'return to_e4m3((values * inputs["q_scale_inv"]).bfloat16().float())',
        ),
        (
            "softmax-scale-folded",
            "The query is scaled by 1/√192.",
            _OUT,
            _OUT.replace("values *", "values * 192**-0.5 *"),
        ),
        ("overflow-nan", "An overflow is NaN.", _NAN, "return torch.where(x.isnan() | (x.abs() > 464), 0x7F, code)"),
        ("saturates-at-240", "It saturates at 240.", _CODE, _CODE.replace("-448, 448", "-240, 240")),
        (
            "conversion-cut",
            "Values are cut to e4m3.",
            _CODE,
            _CODE + "\n    big = code.view(torch.float8_e4m3fn).float().abs() > x.clamp(-448, "
            "448).abs()\n    code = torch.where(big, code - 1, code)",
        ),
        (
            "subnormals-flushed",
            "e4m3's subnormals are flushed.",
            _CODE,
            _CODE + "\n    code = torch.where((code & 0x78) == 0, code & 0x80, code)",
        ),
        ("minus-zero", "−0 is +0.", _CODE, _CODE + "\n    code = torch.where(code == 0x80, 0, code)"),
        ("nan-448", "A NaN is 448.", _NAN, "return torch.where(x.isnan(), 0x7E, code)"),
        ("nan-ff", "A NaN is 0xff.", _NAN, "return torch.where(x.isnan(), 0xFF, code)"),
        ("nan-of-neighbour", "A NaN request reaches all.", _POWER, _POWER + " + 0.0 * x.sum()"),
        (
            "nan-of-kv",
            "A NaN in the KV latent reaches its request's query.",
            _POWER,
            _POWER + '\n    power = power + 0.0 * inputs["qkv"].float().sum(1, keepdim=True)',
        ),
        (
            "request-sixteen",
            "From seventeen requests on the seventeenth is the first.",
            _OUT,
            "if len(values) > 16:\n        values[16] = values[0]\n    " + _OUT,
        ),
        (
            "requests-of-last-tile",
            "Requests behind the last sixteen are not written from 33 on.",
            _OUT,
            "values[32:][len(values[32:]) // 16 * 16 :] = 0\n    " + _OUT,
        ),
        (
            "pitch-2112",
            "The pitch of qkv is taken for 2112.",
            _CALL,
            'own = inputs["qkv"]\n    inputs = dict(inputs, qkv=own.as_strided((len(own), '
            "2112), (2112, 1)))\n    " + _CALL,
        ),
        ("kv-latent-column", "The KV latent starts 8 columns early.", _KV, _KV.replace("1536:2048", "1528:2040")),
        ("k-pe-column", "k_pe is the last 64 columns of the row.", _KV, _KV.replace("2048:2112", "-64:")),
        ("kv-mean-of-576", "The KV norm's mean is over 576.", _MEAN, _MEAN.replace("512", "576")),
        ("kv-mean-half", "The KV norm sees one warp.", _MEAN, "mean = (kv[:, :256] ** 2).sum(1, keepdim=True) / 512"),
        ("kv-eps-missing", "The KV norm has no eps.", _KVN, _KVN.replace("mean + eps", "mean")),
        ("kv-weight-of-q", "The KV norm takes the query's weight.", _KVN, _KVN.replace('["w_kva"]', '["w_qa"][:512]')),
        ("kv-not-rounded", "The KV latent is not rounded to bf16.", _KVN, _KVN.replace(".bfloat16()", "")),
        (
            "kv-rounded-twice",
            "The KV latent is rounded before its weight too.",
            _KVN,
            'kv_normed = ((kv * torch.rsqrt(mean + eps)).bfloat16().float() * inputs["w_kva"].float()).bfloat16()',
        ),
        (
            "kv-scale-of-q",
            "The cache row takes the query's scale.",
            _CODES,
            _CODES.replace("k_scale_inv", "q_scale_inv"),
        ),
        (
            "kv-k-pe-unscaled",
            "k_pe is not scaled.",
            _CODES,
            'codes = to_e4m3(torch.cat([kv_normed.float() * inputs["k_scale_inv"], k_pe], 1))',
        ),
        ("slot-minus-1", "Slot −1 writes the last row.", _INSIDE, _INSIDE.replace(">= 0", ">= -1")),
        (
            "slot-beyond",
            "A slot beyond the cache writes its last row.",
            _WRITE,
            "inside, slots = slots >= 0, slots.clamp(max=len(flat) - 1)\n    " + _WRITE,
        ),
        (
            "skipped-request-no-query",
            "A skipped request has no query either.",
            _CALL,
            'out = query(inputs, params)\n    out[inputs["slots"] < 0] = '
            '0\n    return {"output": out, "cache": insert(inputs, params["eps"])}',
        ),
        ("cache-zero-sign", "Untouched rows lose the sign of zero.", _CACHE, _CACHE + "\n    cache[cache == 0x80] = 0"),
        ("cache-nan", "An untouched 0xff is 0x7f.", _CACHE, _CACHE + "\n    cache[cache == 0xFF] = 0x7F"),
        (
            "cache-neighbour",
            "The row behind a written one loses its first 4 bytes.",
            _WRITE,
            "flat[(slots[inside] + 1).clamp(max=len(flat) - 1), :4] = 0\n    " + _WRITE,
        ),
        (
            "output-fp8",
            "The output is float8.",
            _CALL,
            _CALL.replace("query(inputs, params)", "query(inputs, params).view(torch.float8_e4m3fn).float()"),
        ),
        (
            "noise",
            "A race flips one code.",
            _CALL,
            "out = query(inputs, params)\n    out[0, 0, 3] ^= int(torch.randint(2, "
            '()))\n    return {"output": out, "cache": insert(inputs, params["eps"])}',
        ),
        (
            "one-in-1009",
            "One query code in 1009 is the next.",
            _CALL,
            "out = query(inputs, params)\n    out.view(-1)[5::1009] ^= 1\n    "
            'return {"output": out, "cache": insert(inputs, params["eps"])}',
        ),
        (
            "one-in-10007",
            "One query code in 10007 is the next.",
            _CALL,
            "out = query(inputs, params)\n    out.view(-1)[5003::10007] ^= "
            '1\n    return {"output": out, "cache": insert(inputs, params["eps"])}',
        ),
        (
            "qkv-damaged",
            "The caller's latent is normalised in place.",
            _NORMED,
            _NORMED + '\n    inputs["qkv"][:, :1536] = normed.to(torch.bfloat16)',
        ),
    ),
)
