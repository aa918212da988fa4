"""Faults in ``reference/mla_query.py``: the norm, both schedules' sums, the conversion of the query."""

from tools.faults.patch import Edit, Fault

FILE = "reference/mla_query.py"


def _fault(schedule: str, name: str, what: str, case: str, *edits: tuple[str, str]) -> Fault:
    return Fault(name, "mla_query", schedule, what, case, tuple(Edit(FILE, *edit) for edit in edits))


_RR = "rsqrt_approx(add_rn(div_rn(total, width), offset))"
_X_HAT = "to_bf16(mul_rn(mul_rn(x, rr[:, None]), w))"
_BYTES = "to_e4m3(mul_rn(values, scale))"
_BY_LANE = "x.unflatten(1, (-1, LANES, COLUMNS)).permute(1, 3, 0, 2)"
_SMALL_Q = "to_bf16(butterfly(lanes, (16, 8, 4, 2, 1))[..., 0]).view(rows, heads, HEAD)"
_SMALL_LATENT = "to_bf16(chain_add(strided_fma(w_groups, q_groups, 2), dim=-2))"
_SMALL_END = 'return _to_bytes(latent, q, inputs["q_scale_inv"])'
_PARTIAL = "mma(x_warps, w_warps, k_order=q_b_order(x.device))"

FAULTS = (
    _fault(
        "small",
        "eps-one-ulp",
        "eps one ULP too large",
        "h1-b1-p1x1-underflow",
        (_RR, _RR.replace("offset", "torch.nextafter(offset, offset + 1)")),
    ),
    _fault(
        "small",
        "eps-outside-the-mean",
        "eps added to the sum of squares",
        "h1-b1-p1x1-halfway-s3546",
        (_RR, "rsqrt_approx(div_rn(add_rn(total, offset), width))"),
    ),
    _fault(
        "small",
        "eps-twice",
        "eps added twice",
        "h1-b1-p1x1-halfway-s3546",
        (_RR, _RR.replace("offset", "offset + offset")),
    ),
    _fault(
        "small",
        "mean-by-reciprocal",
        "sum of squares times 1 / 1536",
        "h1-b1-p1x1-halfway-s3546",
        (_RR, _RR.replace("div_rn(total, width)", "mul_rn(total, 1.0 / width)")),
    ),
    _fault(
        "small",
        "rsqrt-to-nearest",
        "reciprocal root correctly rounded",
        "h1-b1-p1x1-halfway-s990",
        (_RR, "(1.0 / portable.sqrt(add_rn(div_rn(total, width), offset).double())).float()"),
    ),
    _fault("small", "norm-unrounded", "x̂ not rounded to bf16", "h1-b1-p1x1-halfway-s3546", (_X_HAT, _X_HAT[8:-1])),
    _fault(
        "small",
        "weight-first",
        "weight multiplied before the root",
        "h1-b1-p1x1-halfway-s3546",
        (_X_HAT, "to_bf16(mul_rn(mul_rn(x, w), rr[:, None]))"),
    ),
    _fault(
        "small",
        "norm-in-a-butterfly",
        "warps' sums of squares pairwise, not a chain",
        "h1-b1-p1x1-halfway-s10",
        (
            'chain_add(warps), params["eps"]',
            '(warps[:, 0] + warps[:, 1]) + (warps[:, 2] + warps[:, 3]) + (warps[:, 4] + warps[:, 5]), params["eps"]',
        ),
    ),
    _fault(
        "small",
        "lane-columns",
        "lane j owns columns j, j + 32, …, not 8 neighbours",
        "h1-b2-p1x1-beyond-cancel",
        (_BY_LANE, "x.unflatten(1, (-1, COLUMNS, LANES)).permute(1, 2, 0, 3)"),
    ),
    _fault(
        "small",
        "one-chain-a-lane",
        "a lane sums in one chain, not in two",
        "h1-b2-p1x1-beyond-cancel",
        (
            "strided_fma(w_lanes[:, None], x_lanes[:, :, None], 2)",
            "strided_fma(w_lanes[:, None], x_lanes[:, :, None], 1)",
        ),
    ),
    _fault(
        "small",
        "q-unrounded",
        "q not rounded to bf16 before absorption",
        "h1-b1-p1x1-none-cancel-latent",
        (_SMALL_Q, _SMALL_Q.replace("to_bf16(", "(", 1)),
    ),
    _fault(
        "small",
        "latent-unrounded",
        "latent not rounded to bf16 before its scale",
        "h1-b1-p1x1-scale-huge",
        (_SMALL_LATENT, _SMALL_LATENT[8:-1]),
    ),
    _fault(
        "small",
        "absorb-in-two-chains",
        "absorption in two chains of 64, not one pair a group",
        "h1-b1-p1x1-none-cancel-latent",
        (
            _SMALL_LATENT,
            "to_bf16(strided_fma(w_uk.movedim(1, 0)[:, None], q[..., :NOPE].float().movedim(2, 0)[..., None], 2))",
        ),
    ),
    _fault(
        "small",
        "rope-unscaled",
        "rope part not scaled",
        "h1-b1-p1x1-halfway-s3546",
        (_BYTES, "to_e4m3(torch.cat([mul_rn(values[..., :LATENT], scale), values[..., LATENT:]], dim=-1))"),
    ),
    _fault(
        "small",
        "scale-inverted",
        "divided by the inverse scale",
        "h1-b1-p1x1-halfway-s3546",
        (_BYTES, "to_e4m3(values / scale)"),
    ),
    _fault(
        "small",
        "scale-of-the-cache",
        "query converted with the cache's scale",
        "h1-b1-p1x1-halfway-s3546",
        (_SMALL_END, _SMALL_END.replace("q_scale", "k_scale")),
    ),
    _fault(
        "small",
        "rope-from-nope",
        "rope part from the first 64 of q",
        "h1-b1-p1x1-halfway-s3546",
        (
            "torch.cat([latent, q[..., NOPE:]], dim=-1).to(torch.float32)",
            "torch.cat([latent, q[..., :ROPE]], dim=-1).to(torch.float32)",
        ),
    ),
    _fault(
        "tiled",
        "tiled-k-ascending",
        "MMAs over ascending k, not by halves of 8",
        "h1-b2-p1x1-beyond-cancel",
        (_PARTIAL, "mma(x_warps, w_warps)"),
    ),
    _fault(
        "tiled",
        "tiled-one-chain",
        "one chain of MMAs over K = 1536, not eight",
        "h1-b2-p1x1-beyond-cancel",
        (_PARTIAL, "mma(x_hat, w_qb)[None]"),
    ),
    _fault(
        "tiled",
        "tiled-parts-descending",
        "partial sums added in descending order",
        "h1-b2-p1x1-beyond-cancel",
        ("chain_add(partial, 0)", "chain_add(partial.flip(0), 0)"),
    ),
    _fault(
        "tiled",
        "tiled-norm-two-ways",
        "sum of squares in two chains a lane, not four",
        "h1-b1-p1x1-halfway-s990",
        ("strided_fma(lanes, lanes, 4)", "strided_fma(lanes, lanes, 2)"),
    ),
    _fault(
        "tiled",
        "tiled-latent-unrounded",
        "latent not rounded to bf16 before its scale",
        "h1-b1-p1x1-scale-huge",
        ("to_bf16(latent).transpose(0, 1)", "latent.transpose(0, 1)"),
    ),
    _fault(
        "tiled",
        "tiled-latent-fp32",
        "absorption in scalar fp32, not on the tensor cores",
        "h1-b1-p1x1-none-cancel-latent",
        (
            "mma(q[..., :NOPE].transpose(0, 1), w_uk.transpose(1, 2))",
            "chain_fma(q[..., :NOPE].float().permute(2, 1, 0)[..., None], w_uk.float().movedim(1, 0)[:, :, None])",
        ),
    ),
)
