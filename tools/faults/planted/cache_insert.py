"""Faults in ``reference/cache_insert.py``: slots, rows, the norm and the conversion."""

from tools.faults.patch import Edit, Fault

FILE = "reference/cache_insert.py"


def _fault(name: str, what: str, case: str, *edits: tuple[str, str]) -> Fault:
    return Fault(name, "cache_insert", "insert", what, case, tuple(Edit(FILE, *edit) for edit in edits))


_INSIDE = "((slots >= 0) & (slots < flat.shape[0]))"
_AT = "slots.index_select(0, inside)"
_WRITE = "return flat.index_copy_(0, slots.index_select(0, inside), rows.index_select(0, inside)).view(cache.shape)"
_RR = "rsqrt_approx_ftz(fma_rn(add_rn(warps[:, 0], warps[:, 1]), share, offset))"
_LATENT = "to_bf16(mul_rn(mul_rn(kv, rr[:, None]), w_kva)).to(torch.float32)"
_BYTES = 'to_e4m3(mul_rn(torch.cat([latent, k_pe], dim=1), inputs["k_scale_inv"]))'

FAULTS = (
    _fault(
        "minus-one-written",
        "slot −1 written, to the cache's last row",
        "b2-p1x1-none-normal",
        (_INSIDE, "(slots < flat.shape[0])"),
        (_AT, f"{_AT} % flat.shape[0]"),
    ),
    _fault(
        "beyond-written",
        "slots beyond the cache written, modulo its rows",
        "b8-p1x2-beyond-normal",
        (_INSIDE, "(slots >= 0)"),
        (_AT, f"{_AT} % flat.shape[0]"),
    ),
    _fault(
        "page-off-by-one",
        "row written a page further on",
        "b2-crossing-normal",
        (_AT, f"({_AT} + cache.shape[1]) % flat.shape[0]"),
    ),
    _fault(
        "last-byte-kept",
        "last byte of a row not written",
        "b1-p1x1-halfway-s447",
        (
            _WRITE,
            f"flat[:, :-1].index_copy_(0, {_AT}, rows.index_select(0, inside)[:, :-1])\n"
            "    return flat.view(cache.shape)",
        ),
    ),
    _fault(
        "latent-unrounded",
        "latent not rounded to bf16 before its scale",
        "b1-p1x1-halfway-s447",
        (_LATENT, _LATENT[8:-19]),
    ),
    _fault(
        "weight-first",
        "weight multiplied before the root",
        "b1-p1x1-halfway-s447",
        (_LATENT, "to_bf16(mul_rn(mul_rn(kv, w_kva), rr[:, None])).to(torch.float32)"),
    ),
    _fault(
        "eps-one-ulp",
        "eps one ULP too large",
        "b1-p1x1-faint-halfway-s109",
        (_RR, _RR.replace("offset", "torch.nextafter(offset, offset + 1)")),
    ),
    _fault(
        "eps-outside-the-mean",
        "eps added to the sum of squares",
        "b1-p1x1-halfway-s447",
        (_RR, "rsqrt_approx_ftz(mul_rn(add_rn(add_rn(warps[:, 0], warps[:, 1]), offset), share))"),
    ),
    _fault("eps-twice", "eps added twice", "b1-p1x1-halfway-s447", (_RR, _RR.replace("offset", "offset + offset"))),
    _fault(
        "rsqrt-to-nearest",
        "reciprocal root correctly rounded",
        "b1-p1x1-halfway-s60",
        (_RR, "(1.0 / portable.sqrt(fma_rn(add_rn(warps[:, 0], warps[:, 1]), share, offset).double())).float()"),
    ),
    _fault(
        "columns-descending",
        "a thread's chain over descending columns",
        "b1-p1x1-halfway-s447",
        ("chain_fma(threads, threads)", "chain_fma(threads.flip(0), threads.flip(0))"),
    ),
    _fault(
        "butterfly-ascending",
        "butterfly with offsets 1, 2, 4, 8, 16",
        "b1-p1x1-halfway-s60",
        ("(16, 8, 4, 2, 1))[..., 0]  # [B, 2]", "(1, 2, 4, 8, 16))[..., 0]  # [B, 2]"),
    ),
    _fault(
        "scale-inverted",
        "divided by the inverse scale",
        "b1-p1x1-halfway-s447",
        (_BYTES, _BYTES.replace("mul_rn(torch.cat([latent, k_pe], dim=1), ", "torch.cat([latent, k_pe], dim=1) / (")),
    ),
    _fault(
        "rope-unscaled",
        "rope part not scaled",
        "b1-p1x1-halfway-s447",
        (_BYTES, 'to_e4m3(torch.cat([mul_rn(latent, inputs["k_scale_inv"]), k_pe], dim=1))'),
    ),
    _fault(
        "scale-before-rounding",
        "scale multiplied before the latent is rounded to bf16",
        "b1-p1x1-halfway-s447",
        (_LATENT, 'to_bf16(mul_rn(mul_rn(mul_rn(kv, rr[:, None]), w_kva), inputs["k_scale_inv"])).to(torch.float32)'),
        (_BYTES, 'to_e4m3(torch.cat([latent, mul_rn(k_pe, inputs["k_scale_inv"])], dim=1))'),
    ),
    _fault(
        "converted-by-bf16",
        "scaled values rounded to bf16, then to e4m3",
        "b1-p1x1-halfway-s447",
        (_BYTES, _BYTES.replace("to_e4m3(", "to_e4m3(to_bf16(", 1) + ".to(torch.float32))"),
    ),
)
