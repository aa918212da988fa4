"""Mistakes in cache_insert: slots, rows, memory, norm, conversion, untouched rows."""

from tools.faults.plain.rows import variants

_KV = 'kv, k_pe, w = inputs["kv"].float(), inputs["k_pe"].float(), inputs["w_kva"].float()'
_CACHE = 'cache = inputs["cache"].view(torch.uint8).clone()'
_SLOTS = 'slots = inputs["slots"]'
_MEAN = "mean = (kv * kv).sum(1, keepdim=True) / 512"
_RSTD = 'rstd = torch.rsqrt(mean + params["eps"])'
_LATENT = "latent = (kv * rstd * w).bfloat16().float()"
_VALUES = "values = torch.cat([latent, k_pe], 1) * scale"
_CODES = "codes = to_e4m3(values)"
_INSIDE = "inside = (slots >= 0) & (slots < len(flat))"
_WRITE = "flat[slots[inside]] = codes[inside]"
_RETURN = 'return {"cache": cache}'
_CODE = "code = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)"
_NAN = "return torch.where(x.isnan(), 0x7F, code)"

ROWS = variants(
    "cache_insert",
    (
        (
            "minus-1-last-row",
            "Slot −1 writes the cache's last row.",
            _INSIDE,
            "inside = (slots >= -1) & (slots < len(flat))",
        ),
        ("minus-1-ends", "Slot −1 ends the call.", _INSIDE, _INSIDE + " & ((slots == -1).cumsum(0) == 0)"),
        (
            "below-minus-1",
            "Only −1 is skipped; lower slots write row 0.",
            _INSIDE,
            "inside = (slots != -1) & (slots < len(flat))\n    slots = slots.clamp(min=0)",
        ),
        (
            "beyond-clamped",
            "A slot beyond the cache writes its last row.",
            _INSIDE,
            "inside = slots >= 0\n    slots = slots.clamp(max=len(flat) - 1)",
        ),
        (
            "beyond-wraps",
            "A slot beyond the cache wraps.",
            _INSIDE,
            "inside = slots >= 0\n    slots = slots % len(flat)",
        ),
        (
            "last-row-outside",
            "The cache's last row counts as outside.",
            _INSIDE,
            "inside = (slots >= 0) & (slots < len(flat) - 1)",
        ),
        ("slot-0-skipped", "Slot 0 is skipped.", _INSIDE, "inside = (slots > 0) & (slots < len(flat))"),
        ("slots-32-bit", "Slots are cut to 32 bits.", _SLOTS, _SLOTS + ".to(torch.int32).long()"),
        (
            "slots-row-number",
            "Row i takes the slot of the row before if that one is skipped.",
            _WRITE,
            "flat[slots[inside]] = codes[: int(inside.sum())]",
        ),
        (
            "slot-of-first-page",
            "Offsets count within page 0 for every page from the third on.",
            _SLOTS,
            _SLOTS + '\n    size = inputs["cache"].shape[1]\n    slots = torch.where(slots '
            ">= 2 * size, slots % size, slots)",
        ),
        (
            "page-of-64",
            "Pages are taken to hold 64 rows.",
            _SLOTS,
            _SLOTS + '\n    size = inputs["cache"].shape[1]\n    slots = torch.where(slots '
            ">= 0, slots // size * 64 + slots % size, slots)",
        ),
        (
            "last-request-lost",
            "The last request is not written from two on.",
            _WRITE,
            "inside[1:] &= torch.arange(1, len(slots)) < len(slots) - 1\n    " + _WRITE,
        ),
        (
            "seventeenth-is-first",
            "Requests from the seventeenth on repeat the first sixteen.",
            _CODES,
            _CODES + "\n    codes[16:] = codes[: max(len(codes) - 16, 0)][: len(codes[16:])].clone() "
            "if len(codes) <= 32 else codes[16:]",
        ),
        ("norm-of-request-0", "Every request takes request 0's norm.", _RSTD, _RSTD + "[:1]"),
        (
            "pitch-of-kv",
            "The pitch of kv is taken for 512.",
            _KV,
            'own = inputs["kv"]\n    own = own.as_strided(own.shape, (512, 1))\n    '
            + _KV.replace('inputs["kv"]', "own"),
        ),
        (
            "pitch-of-k-pe",
            "The pitch of k_pe is taken for 64.",
            _KV,
            'own = inputs["k_pe"]\n    own = own.as_strided(own.shape, (64, 1))\n    '
            + _KV.replace('inputs["k_pe"]', "own"),
        ),
        (
            "pitch-shared",
            "k_pe is read at the pitch of kv.",
            _KV,
            'own = inputs["k_pe"]\n    kv_pitch = inputs["kv"].stride(0)\n'
            "    room = own.untyped_storage().nbytes() // 2 - own.storage_offset()\n"
            "    own = own.as_strided(own.shape, (kv_pitch, 1)) if (len(own) "
            "- 1) * kv_pitch + 64 <= room else own.roll(1, 0)\n    " + _KV.replace('inputs["k_pe"]', "own"),
        ),
        ("eps-missing", "There is no eps.", _RSTD, "rstd = torch.rsqrt(mean)"),
        ("eps-outside", "The eps is outside the root.", _RSTD, 'rstd = 1 / (mean.sqrt() + params["eps"])'),
        ("eps-twice", "The eps is added twice.", _RSTD, 'rstd = torch.rsqrt(mean + 2 * params["eps"])'),
        ("eps-1e-6", "The eps is always 1e-6.", _RSTD, "rstd = torch.rsqrt(mean + 1e-6)"),
        (
            "eps-of-sum",
            "The eps is added to the sum.",
            _RSTD,
            'rstd = torch.rsqrt(((kv * kv).sum(1, keepdim=True) + params["eps"]) / 512)',
        ),
        ("mean-of-576", "The mean is over 576.", _MEAN, "mean = (kv * kv).sum(1, keepdim=True) / 576"),
        (
            "mean-with-k-pe",
            "k_pe is part of the norm.",
            _MEAN,
            "mean = ((kv * kv).sum(1, keepdim=True) + (k_pe * k_pe).sum(1, keepdim=True)) / 512",
        ),
        (
            "mean-half",
            "The second warp's squares are lost.",
            _MEAN,
            "mean = (kv[:, :256] ** 2).sum(1, keepdim=True) / 512",
        ),
        (
            "mean-last-8-lost",
            "The last thread's squares are lost.",
            _MEAN,
            "mean = (kv[:, :-8] ** 2).sum(1, keepdim=True) / 512",
        ),
        ("layer-norm", "The mean is subtracted.", _MEAN, "kv = kv - kv.mean(1, keepdim=True)\n    " + _MEAN),
        ("squares-in-bf16", "The mean of squares is bf16.", _RSTD, "mean = mean.bfloat16().float()\n    " + _RSTD),
        (
            "squares-in-fp16",
            "The sum of squares is fp16: inf from 65520 on.",
            _MEAN,
            "mean = (kv * kv).sum(1, keepdim=True).half().float() / 512",
        ),
        (
            "rstd-in-bf16",
            "The norm's factor is bf16.",
            _LATENT,
            "latent = (kv * rstd.bfloat16().float() * w).bfloat16().float()",
        ),
        (
            "normed-in-bf16-first",
            "The row is rounded before the weight as well.",
            _LATENT,
            "latent = ((kv * rstd).bfloat16().float() * w).bfloat16().float()",
        ),
        ("latent-not-rounded", "The latent is not rounded to bf16.", _LATENT, "latent = kv * rstd * w"),
        ("latent-in-fp16", "The latent is rounded to fp16.", _LATENT, "latent = (kv * rstd * w).half().float()"),
        (
            "latent-cut",
            "The latent is cut to bf16.",
            _LATENT,
            "latent = ((kv * rstd * w).view(torch.int32) & -65536).view(torch.float32)",
        ),
        (
            "scale-before-rounding",
            "The scale is applied before the rounding to bf16.",
            _LATENT,
            "latent = (kv * rstd * w * scale).bfloat16().float()",
            _VALUES,
            "values = torch.cat([latent, k_pe * scale], 1)",
        ),
        ("weight-missing", "The weight is left out.", _LATENT, "latent = (kv * rstd).bfloat16().float()"),
        (
            "weight-plus-1",
            "The weight is taken for an offset from 1.",
            _LATENT,
            "latent = (kv * rstd * (1 + w)).bfloat16().float()",
        ),
        (
            "k-pe-normed",
            "k_pe is normalised too.",
            _VALUES,
            "values = torch.cat([latent, (k_pe * rstd).bfloat16().float()], 1) * scale",
        ),
        ("k-pe-unscaled", "k_pe is not scaled.", _VALUES, "values = torch.cat([latent * scale, k_pe], 1)"),
        ("k-pe-first", "k_pe comes before the latent.", _VALUES, "values = torch.cat([k_pe, latent], 1) * scale"),
        (
            "k-pe-interleaved",
            "k_pe's halves are interleaved.",
            _VALUES,
            "values = torch.cat([latent, k_pe.view(-1, 2, 32).transpose(1, 2).flatten(1)], 1) * scale",
        ),
        ("scale-divides", "The inverse scale divides.", _VALUES, "values = torch.cat([latent, k_pe], 1) / scale"),
        (
            "scale-in-bf16",
            "The scale is rounded to bf16.",
            _VALUES,
            "values = torch.cat([latent, k_pe], 1) * scale.bfloat16().float()",
        ),
        (
            "product-in-bf16",
            "The scaled value is rounded to bf16 before e4m3.",
            _VALUES,
            "values = (torch.cat([latent, k_pe], 1) * scale).bfloat16().float()",
        ),
        (
            "product-in-fp16",
            "The scaled value is rounded to fp16 before e4m3.",
            _VALUES,
            "values = (torch.cat([latent, k_pe], 1) * scale).half().float()",
        ),
        (
            "overflow-nan",
            "An overflow is NaN.",
            _CODE,
            "code = x.to(torch.float8_e4m3fn).view(torch.uint8)\n    code = torch.where(x.abs() > 464, 0x7F, code)",
        ),
        (
            "saturates-at-240",
            "It saturates at 240.",
            _CODE,
            "code = x.clamp(-240, 240).to(torch.float8_e4m3fn).view(torch.uint8)",
        ),
        (
            "negative-saturates-to-max",
            "−inf is +448.",
            _CODE,
            _CODE + "\n    code = torch.where(x == -torch.inf, 0x7E, code)",
        ),
        (
            "cut",
            "Values are cut to e4m3.",
            _CODE,
            _CODE + "\n    big = code.view(torch.float8_e4m3fn).float().abs() > x.clamp(-448, "
            "448).abs()\n    code = torch.where(big, code - 1, code)",
        ),
        (
            "ties-away",
            "Ties go away from zero.",
            _CODE,
            "y = x.clamp(-448, 448)\n    code = (y * (1 + 2**-22)).clamp(-448, "
            "448).to(torch.float8_e4m3fn).view(torch.uint8)",
        ),
        (
            "subnormals-flushed",
            "e4m3's subnormals are flushed.",
            _CODE,
            _CODE + "\n    code = torch.where((code & 0x78) == 0, code & 0x80, code)",
        ),
        ("minus-zero", "−0 is +0.", _CODE, _CODE + "\n    code = torch.where(code == 0x80, 0, code)"),
        (
            "e4m3fnuz",
            "The bias is 8.",
            _CODE,
            "code = (2 * x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)",
        ),
        ("e5m2", "The format is e5m2.", _CODE, "code = x.clamp(-57344, 57344).to(torch.float8_e5m2).view(torch.uint8)"),
        ("nan-448", "A NaN is 448.", _NAN, "return torch.where(x.isnan(), 0x7E, code)"),
        ("nan-0", "A NaN is 0.", _NAN, "return torch.where(x.isnan(), 0, code)"),
        ("nan-ff", "A NaN is 0xff.", _NAN, "return torch.where(x.isnan(), 0xFF, code)"),
        ("nan-of-neighbour", "A NaN row reaches all.", _VALUES, _VALUES + " + 0.0 * kv.sum()"),
        (
            "nan-of-k-pe",
            "A NaN in k_pe reaches its row's latent.",
            _VALUES,
            _VALUES + "\n    values = values + 0.0 * k_pe.sum(1, keepdim=True)",
        ),
        (
            "untouched-zero-sign",
            "Untouched rows lose the sign of zero.",
            _CACHE,
            _CACHE + "\n    cache[cache == 0x80] = 0",
        ),
        (
            "untouched-nan-sign",
            "Untouched rows lose the sign of a NaN.",
            _CACHE,
            _CACHE + "\n    cache[cache == 0xFF] = 0x7F",
        ),
        (
            "untouched-nan-448",
            "A NaN of an untouched row is 448.",
            _CACHE,
            _CACHE + "\n    cache[cache == 0x7F] = 0x7E",
        ),
        (
            "untouched-neighbour",
            "The row behind a written one loses its first 8 bytes.",
            _WRITE,
            "after = (slots[inside] + 1).clamp(max=len(flat) - 1)\n    flat[after, :8] = 0\n    " + _WRITE,
        ),
        (
            "untouched-row-0",
            "Skipped requests clear the first byte of row 0.",
            _WRITE,
            "if not inside.all():\n        flat[0, 0] ^= 1\n    " + _WRITE,
        ),
        (
            "untouched-neighbouring-code",
            "A byte of an untouched row is a code higher.",
            _WRITE,
            "flat[-1, 575] ^= 1\n    " + _WRITE,
        ),
        (
            "tail-not-written",
            "The last 16 bytes of a row are not written.",
            _WRITE,
            "flat[slots[inside], :560] = codes[inside, :560]",
        ),
        (
            "row-of-512",
            "Rows are 640 bytes apart in the writer's mind: columns 0 … 63 stay.",
            _WRITE,
            "flat[slots[inside], 64:] = codes[inside, 64:]",
        ),
        (
            "cache-in-fp32",
            "The cache comes back as fp32.",
            _RETURN,
            'return {"cache": cache.view(torch.float8_e4m3fn).float()}',
        ),
        ("cache-flat", "The cache comes back as rows.", _RETURN, 'return {"cache": flat}'),
        (
            "noise",
            "A race flips one code.",
            _WRITE,
            _WRITE + "\n    flat[slots[inside], 5] ^= int(torch.randint(2, ()))",
        ),
        ("one-in-97", "One code in 97 is the next.", _CODES, _CODES + "\n    codes.view(-1)[3::97] ^= 1"),
    ),
)
