"""What a right kernel may do: other orders, tiles and chunks, bf16 operands where public kernels have them."""

from tools.faults.plain.rows import variants

_ROUND_P = "weighted(p.bfloat16().float(), v[:, key], keep)"
_POLYNOMIAL = (
    "x = ((s - shift[..., None]) * 1.4426950408889634).clamp(min=-127)\n        "
    "i = x.floor()\n        f = x - i\n"
    "        f = 1.0 + f * (0.695146143436431884765625 + f * (0.227564394474029541015625 "
    "+ f * 0.077119089663028717041015625))\n"
    "        p = torch.where(s == -torch.inf, 0.0, f * torch.exp2(i))"
)
_P = "p = exp(s - shift[..., None])"

_FMHA = variants(
    "fmha",
    (
        ("plain", "As it is.", "TILE = 64", "TILE = 64"),
        ("tile-16", "Tiles of 16 keys.", "TILE = 64", "TILE = 16"),
        (
            "tile-176",
            "Tiles of 176 keys, the weights of the product in bf16.",
            "TILE = 64",
            "TILE = 176",
            "weighted(p, v[:, key], keep)",
            _ROUND_P,
        ),
        ("one-tile", "All keys at once.", "TILE = 64", "TILE = 1 << 30"),
        ("descending", "Tiles in descending order.", "in range(0, n_k, TILE)", "in reversed(range(0, n_k, TILE))"),
        (
            "weights-in-bf16",
            "The weights of the product are rounded to bf16.",
            "weighted(p, v[:, key], keep)",
            _ROUND_P,
        ),
        (
            "sum-of-rounded",
            "The weights are rounded to bf16 for the sum too.",
            _P,
            "p = exp(s - shift[..., None]).bfloat16().float()",
        ),
        (
            "fp64",
            "FP64 throughout.",
            "q = q.float()",
            "q = q.double()",
            "k = k.float()",
            "k = k.double()",
            "v = v.float()",
            "v = v.double()",
            "return torch.exp(x.double()).float()",
            "return torch.exp(x)",
            "return torch.log(x.double()).float()",
            "return torch.log(x)",
        ),
        (
            "base-2",
            "Base-2 exponentials of scores that meet the scale late.",
            "* scale\n",
            "\n        c = scale * 1.4426950408889634\n",
            "alpha = exp(m - shift)",
            "alpha = torch.exp2(((m - shift) * c).double()).float()",
            _P,
            "p = torch.exp2((s * c - (shift * c)[..., None]).double()).float()",
            "m + log(total)",
            "m * scale + torch.log2(total.double()).float() * 0.6931471805599453",
        ),
        (
            "polynomial",
            "2^x by FlashAttention-4's polynomial of degree 3, weights in bf16.",
            _P,
            _POLYNOMIAL,
            "weighted(p, v[:, key], keep)",
            _ROUND_P,
        ),
        (
            "reciprocal",
            "The output is multiplied by a reciprocal.",
            "acc / torch.where(empty, 1.0, total)[..., None]",
            "acc * (1 / torch.where(empty, 1.0, total))[..., None]",
        ),
        (
            "lazy-rescale",
            "The maximum stays while a new one is less than 8 above.",
            "m_new = torch.maximum(m, s.amax(2))",
            "m_new = torch.maximum(m, s.amax(2))\n        m_new = torch.where(m_new - m < 8.0, m, m_new)",
        ),
        (
            "queries-scaled",
            "The scale meets the queries, in FP32.",
            "q = q.float()",
            "q = q.float() * scale",
            ".transpose(1, 2)) * scale",
            ".transpose(1, 2))",
        ),
        ("flush", "Subnormal weights are flushed.", _P, _P + "\n        p = torch.where(p < 2**-126, 0.0, p)"),
    ),
)

_ATTN_RES = variants(
    "attn_res",
    (
        ("plain", "As it is.", "D = 7168", "D = 7168"),
        (
            "normed-first",
            "Sources are normalised in FP32 before the score.",
            "(x * w).sum(2) * rstd",
            "(x * rstd[..., None] * w).sum(2)",
        ),
        (
            "weights-one-by-one",
            "norm and query meet the normalised source one after another.",
            "(x * w).sum(2) * rstd",
            '(x * rstd[..., None] * inputs["norm"].float() * inputs["query"].float()).sum(2)',
        ),
        (
            "fp64",
            "FP64 sums.",
            "w = inputs",
            "x = x.double()\n    w = inputs",
            '["query"].float()',
            '["query"].double()',
            "mixture.bfloat16().float()",
            "mixture.float().bfloat16().double()",
            'return mixture * norm[:, None] * inputs["gamma"].float()',
            'return (mixture * norm[:, None] * inputs["gamma"]).float()',
        ),
        (
            "columns-in-reverse",
            "The sums run from the last column.",
            "(x * w).sum(2)",
            "(x * w).flip(2).sum(2)",
            "(x * x).sum(2)",
            "(x * x).flip(2).sum(2)",
        ),
        (
            "shares-of-1024",
            "Seven shares of 1024 columns.",
            "(x * w).sum(2)",
            "(x * w).view(*x.shape[:2], 7, 1024).sum(3).sum(2)",
            "(x * x).sum(2)",
            "(x * x).view(*x.shape[:2], 7, 1024).sum(3).sum(2)",
        ),
        (
            "base-2",
            "The softmax by base-2 exponentials and a reciprocal.",
            "weight = torch.softmax(logit, 1)",
            "logit = logit * 1.4426950408889634\n"
            "    weight = torch.exp2((logit - logit.amax(1, keepdim=True)).double()).float()\n"
            "    weight = weight * (1 / weight.sum(1, keepdim=True))",
        ),
        (
            "unnormalised-first",
            "The mixture is divided at its end.",
            "weight = torch.softmax(logit, 1)",
            "weight = torch.exp(logit - logit.amax(1, keepdim=True))",
            "(weight[..., None] * x).sum(1)",
            "(weight[..., None] * x).sum(1) / weight.sum(1, keepdim=True)",
        ),
        (
            "division",
            "Divisions by roots.",
            'torch.rsqrt(square + params["eps"])',
            '1 / (square + params["eps"]).sqrt()',
            'torch.rsqrt(power + params["out_eps"])',
            '1 / (power + params["out_eps"]).sqrt()',
        ),
        (
            "source-by-source",
            "The mixture source by source, the prefix first.",
            "mixture = (weight[..., None] * x).sum(1)",
            "mixture = torch.zeros_like(x[:, 0])\n    for i in reversed(range(x.shape[1])):\n     "
            "   mixture = mixture + weight[:, i, None] * x[:, i]",
        ),
        (
            "gamma-first",
            "Gamma meets the norm's factor first.",
            'mixture * norm[:, None] * inputs["gamma"].float()',
            'mixture * (norm[:, None] * inputs["gamma"].float())',
        ),
        (
            "power-from-products",
            "Unless final the norm comes from the sources' FP32 products, as production kernels have it.",
            "power = (mixture * mixture).sum(1) / D",
            'power = (mixture * mixture).sum(1) / D\n    if not params["final"]:\n'
            "        power = ((x[:, None] * x[:, :, None]).sum(3) * weight[:, "
            "None] * weight[..., None]).sum((1, 2)) / D",
        ),
    ),
)

_NORMED = 'x * torch.rsqrt(power + eps) * inputs["w_qa"].float()'
_KV_NORMED = 'kv * torch.rsqrt(mean + eps) * inputs["w_kva"].float()'

_APART = "w = w.float()\n    return torch.stack([w @ row for row in x.float()])"
_ABSORBED = 'return torch.stack([torch.einsum("hp,hpl->hl", row, w) for row in q.float()])'

_MLA_QUERY = variants(
    "mla_query",
    (
        ("plain", "As it is.", "from torch import Tensor", "from torch import Tensor"),
        (
            "k-in-reverse",
            "The projection from the last k.",
            _APART,
            "w = w.flip(1).float()\n    return torch.stack([w @ row for row in x.flip(1).float()])",
        ),
        (
            "eight-parts",
            "The projection in eight parts, one after another.",
            _APART,
            "w = w.float()\n    return torch.stack([sum(b @ a for a, b in "
            "zip(row.split(192), w.split(192, 1))) for row in x.float()])",
        ),
        (
            "steps-of-16",
            "The projection in steps of 16.",
            _APART,
            "w = w.float()\n    return torch.stack([(w * row).view(-1, 96, "
            "16).sum(2).cumsum(1)[:, -1] for row in x.float()])",
        ),
        (
            "fp64",
            "FP64 sums.",
            _APART,
            "w = w.double()\n    return torch.stack([w @ row for row in x.double()]).float()",
            _ABSORBED,
            'return torch.stack([torch.einsum("hp,hpl->hl", row, w.double()) for row in q.double()]).float()',
        ),
        (
            "weight-first",
            "The norms' weight meets the factor first.",
            _NORMED,
            'x * (torch.rsqrt(power + eps) * inputs["w_qa"].float())',
            _KV_NORMED,
            'kv * (torch.rsqrt(mean + eps) * inputs["w_kva"].float())',
        ),
        (
            "weight-on-x",
            "The norms' weight meets the row first.",
            _NORMED,
            'x * inputs["w_qa"].float() * torch.rsqrt(power + eps)',
        ),
        (
            "division",
            "Divisions by roots.",
            _NORMED,
            'x / (power + eps).sqrt() * inputs["w_qa"].float()',
            _KV_NORMED,
            'kv / (mean + eps).sqrt() * inputs["w_kva"].float()',
        ),
        (
            "shares",
            "The squares in six and two shares.",
            "(x * x).sum(1, keepdim=True)",
            "(x * x).view(-1, 6, 256).sum(2).sum(1, keepdim=True)",
            "(kv * kv).sum(1, keepdim=True)",
            "(kv * kv).view(-1, 2, 256).sum(2).sum(1, keepdim=True)",
        ),
        ("reciprocal", "The means by reciprocals.", "/ 1536", "* (1 / 1536)", "/ 512", "* (1 / 512)"),
        (
            "absorption-in-halves",
            "The absorption in two halves.",
            'latent = absorbed(nope, inputs["w_uk"])',
            'latent = absorbed(nope[..., :64], inputs["w_uk"][:, :64]) + '
            'absorbed(nope[..., 64:], inputs["w_uk"][:, 64:])',
        ),
        (
            "absorption-by-p",
            "The absorption p by p.",
            _ABSORBED,
            "return torch.stack([(row[..., None] * w).cumsum(1)[:, -1] for row in q.float()])",
        ),
    ),
)

_CACHE_NORMED = "kv * rstd * w"
_CODE = "code = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)"

_CACHE_INSERT = variants(
    "cache_insert",
    (
        ("plain", "As it is.", "from torch import Tensor", "from torch import Tensor"),
        ("weight-first", "The weight meets the factor first.", _CACHE_NORMED, "kv * (rstd * w)"),
        ("weight-on-x", "The weight meets the row first.", _CACHE_NORMED, "kv * w * rstd"),
        ("division", "Division by the root.", _CACHE_NORMED, 'kv / (mean + params["eps"]).sqrt() * w'),
        (
            "fp64",
            "FP64 until the rounding.",
            "kv * kv",
            "kv.double() ** 2",
            _CACHE_NORMED + ")",
            "kv * rstd * w).float()",
        ),
        (
            "shares",
            "The squares in sixteen shares.",
            "(kv * kv).sum(1, keepdim=True)",
            "(kv * kv).view(-1, 16, 32).sum(1).sum(1, keepdim=True)",
        ),
        (
            "reverse",
            "The squares from the last.",
            "(kv * kv).sum(1, keepdim=True)",
            "(kv * kv).flip(1).cumsum(1)[:, -1:]",
        ),
        ("reciprocal", "The mean by a reciprocal.", "/ 512", "* (1 / 512)"),
        (
            "by-quantum",
            "The conversion by the quantum of each value.",
            _CODE,
            "y = x.clamp(-448, 448).nan_to_num(0.0)\n    quantum = torch.exp2(torch.frexp(y)[1].cl"
            "amp(min=-5) - 4.0)\n"
            "    code = ((y / quantum).round() * quantum).copysign(y).clamp(-448, "
            "448).to(torch.float8_e4m3fn).view(torch.uint8)",
        ),
        (
            "rows-in-reverse",
            "Rows are written from the last.",
            "flat[slots[inside]] = codes[inside]",
            "flat[slots[inside].flip(0)] = codes[inside].flip(0)",
        ),
    ),
)

_CHUNK = ("CHUNK = 0", "CHUNK = 16")
_OPERANDS = (
    "k_up, q_up, k_down = kc * up, qc * up, kc * down",
    "k_up, q_up, k_down = (kc * up).bfloat16().float(), (qc * up).bfloat16().float(), kc * down",
    "k_up @ s.transpose(1, 2)",
    "k_up @ s.bfloat16().float().transpose(1, 2)",
    "inter = q_up @ s.transpose(1, 2)",
    "u = u.bfloat16().float()\n        inter = q_up @ s.bfloat16().float().transpose(1, 2)",
    "intra = scores @ u",
    "intra = scores.bfloat16().float() @ u",
    "k_end = k_down * last[:, None]",
    "k_end = (k_down * last[:, None]).bfloat16().float()",
)

_KDA = variants(
    "kda",
    (
        ("plain", "As it is.", "CHUNK = 0", "CHUNK = 0"),
        ("chunk-16", "Chunks of 16 tokens, FP32.", *_CHUNK),
        ("chunk-8", "Chunks of 8 tokens, FP32.", "CHUNK = 0", "CHUNK = 8"),
        ("chunk-5", "Chunks of 5 tokens, FP32.", "CHUNK = 0", "CHUNK = 5"),
        (
            "chunk-16-operands-in-bf16",
            "Chunks of 16, operands of tensor-core products in bf16, as public kernels have.",
            *_CHUNK,
            *_OPERANDS,
        ),
        (
            "chunk-16-state-operand-in-bf16",
            "Chunks of 16, the state alone in bf16 as an operand.",
            *_CHUNK,
            *_OPERANDS[2:4],
            "inter = q_up @ s.transpose(1, 2)",
            "inter = q_up @ s.bfloat16().float().transpose(1, 2)",
        ),
        (
            "fp64",
            "FP64 recurrence.",
            '.float() for name in ("q"',
            '.double() for name in ("q"',
            '["initial_state"].float()',
            '["initial_state"].double()',
            "torch.zeros(sequences, heads, 128, 128)",
            "torch.zeros(sequences, heads, 128, 128, dtype=torch.float64)",
            '"out": out.bfloat16()',
            '"out": out.float().bfloat16()',
            "states.to(STATES",
            "states.float().to(STATES",
        ),
        (
            "base-2",
            "Base-2 exponentials.",
            "decay = exp(gate)",
            "decay = torch.exp2((gate * 1.4426950408889634).double()).float()",
        ),
        (
            "sigmoid-by-hand",
            "1 / (1 + e^−x).",
            'sigmoid(rate * (g + inputs["dt_bias"]))',
            '(1 / (1 + exp(-rate * (g + inputs["dt_bias"]))))',
        ),
        (
            "scale-on-q",
            "The scale meets the query.",
            "(s @ q[t][..., None])[..., 0] * scale",
            "(s @ (q[t] * scale)[..., None])[..., 0]",
        ),
        (
            "division",
            "Divisions by roots.",
            "q * torch.rsqrt((q * q).sum(2, keepdim=True) + 1e-6)",
            "q / ((q * q).sum(2, keepdim=True) + 1e-6).sqrt()",
            "k * torch.rsqrt((k * k).sum(2, keepdim=True) + 1e-6)",
            "k / ((k * k).sum(2, keepdim=True) + 1e-6).sqrt()",
        ),
        (
            "flush",
            "Subnormal decays and updates are flushed.",
            "decay = exp(gate)",
            "decay = exp(gate)\n    k = torch.where(k.abs() < 2**-126, 0.0, k)",
        ),
    ),
)

LEGAL = (*_FMHA, *_ATTN_RES, *_MLA_QUERY, *_CACHE_INSERT, *_KDA)
