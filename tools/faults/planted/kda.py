"""Faults in ``reference/kda.py``: gates, chunks, the triangular solve, the state."""

from tools.faults.patch import Edit, Fault

FILE = "reference/kda.py"


def _fault(name: str, what: str, case: str, *edits: tuple[str, str], schedule: str = "chunk16") -> Fault:
    return Fault(name, "kda", schedule, what, case, tuple(Edit(FILE, *edit) for edit in edits))


_ROOTS = "(rsqrt_approx_ftz(add_rn(_squares(x), eps))[..., None] for x in (q, k))  # 1, 2"
_SCALED = "mul_rn(q, mul_rn(r_q, scale))"
_PADDED = "torch.where(_inside(tokens, x), x, 0.0).transpose(1, 2) for x in (q, k, gate, b)"
_SUMS = "total = torch.stack(list(_running_sums(gate)), 2)"
_K_END = "k_end = mul_rn(k_down, decay[:, :, None])"
_SOLVE = "t[..., l, None, :], t[..., l + 1 :, :])"
_STATE = 'state = mul_rn(state, x["decay"][:, :, None])  # 12'
_UPDATE = '    for k_end in (x["k_low"], x["k_high"]):\n        state = mma(u, k_end.transpose(-1, -2), state)\n'
_O = 'to_bf16(mma(u, x["p"], mma(s, x["q_up"])))'
_LOOP = "    for living in counts:\n"

FAULTS = (
    _fault(
        "eps-one-ulp",
        "eps one ULP too large",
        "t4-faint-s1771",
        (_ROOTS, _ROOTS.replace(", eps)", ", torch.nextafter(eps, eps + 1))")),
    ),
    _fault(
        "eps-outside-the-root",
        "eps added to the root",
        "t6-faint",
        (_ROOTS, "((1.0 / (portable.sqrt(_squares(x)) + eps))[..., None] for x in (q, k))  # 1, 2"),
    ),
    _fault(
        "eps-of-the-mean",
        "norm by the mean of squares, not their sum",
        "t4-still-s464",
        (_ROOTS, _ROOTS.replace("_squares(x)", "_squares(x) * (1.0 / D)")),
    ),
    _fault(
        "scale-after-the-norm",
        "q normalised, then scaled: two roundings",
        "t4-faint-s1664",
        (_SCALED, "mul_rn(mul_rn(q, r_q), scale)"),
    ),
    _fault("scale-missing", "q not scaled", "t4-still-s464", (_SCALED, "mul_rn(q, r_q)")),
    _fault(
        "gate-in-natural-log",
        "gate's bound not in log2",
        "t6-faint",
        ("bound = mul_rn(lower_bound, log2e)", "bound = lower_bound"),
    ),
    _fault(
        "rate-in-natural-log",
        "exp(A_log) as 2^A_log",
        "t6-faint",
        ('ex2_approx_ftz(mul_rn(inputs["A_log"], log2e))', 'ex2_approx_ftz(inputs["A_log"])'),
    ),
    _fault(
        "bias-after-the-rate",
        "dt_bias added to the product",
        "t6-faint",
        ('mul_rn(a, add_rn(g, inputs["dt_bias"]))', 'add_rn(mul_rn(a, g), inputs["dt_bias"])'),
    ),
    _fault(
        "beta-without-sigmoid",
        "beta's logit taken as it is",
        "t4-still-s464",
        ("b = _sigmoid(mul_rn(beta, -log2e))", "b = beta"),
    ),
    _fault(
        "decay-of-padded-tokens",
        "tokens beyond the end decay: sigmoid of 0 is not 0",
        "t1-to-bf16-normal",
        (
            _PADDED,
            "torch.where(_inside(tokens, x) | (x is gate), x, 0.0).transpose(1, 2) for x in (q, k, gate, b)",
        ),
    ),
    _fault(
        "decay-one-token-early",
        "decay of a chunk without its last token",
        "t18-collinear",
        ("decay = up[:, :, -1]", "decay = up[:, :, -2]"),
    ),
    _fault(
        "sums-descending",
        "gates summed from the last token on",
        "t6-faint",
        (_SUMS, "total = torch.stack(list(_running_sums(gate.flip(2))), 2).flip(2)"),
    ),
    _fault(
        "sums-in-fp64",
        "gates summed in fp64",
        "t17-from-fp32-to-fp32-normal",
        (_SUMS, "total = gate.double().cumsum(2).float()"),
    ),
    _fault(
        "k-end-rounded-twice",
        "K⁻ rounded to bf16 before the decay",
        "t18-lb0-scale1-normal",
        (_K_END, _K_END.replace("mul_rn(k_down", "mul_rn(to_bf16(k_down).to(torch.float32)")),
    ),
    _fault(
        "solve-first-order",
        "T as I − L: Neumann's series cut after its second term",
        "t4-still-s464",
        (_SOLVE, "torch.eye(CHUNK)[l], t[..., l + 1 :, :])"),
    ),
    _fault(
        "solve-in-fp64",
        "rows substituted in fp64",
        "t12-collinear-s2219",
        (
            "return to_bf16(t)",
            "solved = torch.linalg.inv((lower + torch.eye(CHUNK)).double())\n    return to_bf16(solved.float())",
        ),
    ),
    _fault(
        "scores-of-the-upper-half",
        "κ and π by K⁻ rounded to bf16",
        "t18-lb0-scale1-normal",
        ("_by_block(*_two_parts(k_down))", "_by_block(torch.zeros_like(k_high), to_bf16(k_down))"),
    ),
    _fault(
        "b-in-the-inverse",
        "b times T, not times the rest of v",
        "t20-normal",
        ('mul_rn(x["b"][:, :, None], rest)', "rest"),
        ('"t": _inverse(lower)', '"t": to_bf16(mul_rn(_inverse(lower).to(torch.float32), b[..., None, :]))'),
    ),
    _fault(
        "b-missing",
        "the rest of v not times b",
        "t4-still-s464",
        ('mul_rn(x["b"][:, :, None], rest)', "rest"),
    ),
    _fault(
        "scores-strict",
        "a token's output without its own value",
        "t4-still-s464",
        ("torch.where(before | (position[:, None] == position), to_bf16", "torch.where(before, to_bf16"),
    ),
    _fault(
        "state-in-bf16",
        "state rounded to bf16 between chunks",
        "t18-from-fp32-cancel",
        (_STATE, 'state = mul_rn(to_bf16(state).to(torch.float32), x["decay"][:, :, None])'),
    ),
    _fault(
        "state-decayed-late",
        "update decayed with the state",
        "t18-collinear",
        (_STATE, ""),
        (_UPDATE, _UPDATE + '    state = mul_rn(state, x["decay"][:, :, None])\n'),
    ),
    _fault(
        "update-high-first",
        "update by the upper half of Kᵉ before the lower",
        "t18-to-fp32-bound-beside-none",
        ('(x["k_low"], x["k_high"])', '(x["k_high"], x["k_low"])'),
    ),
    _fault(
        "update-without-the-lower-half",
        "update by Kᵉ rounded to bf16",
        "t18-lb0-scale1-normal",
        ('(x["k_low"], x["k_high"])', '(x["k_high"],)'),
    ),
    _fault(
        "halves-in-one-chain",
        "S k as one chain of MMAs, not two halves",
        "t18-from-fp32-cancel",
        ("low, high = mma(*halves)", 'low, high = mma(s, x["k_up"]), torch.zeros((), device=s.device)'),
    ),
    _fault(
        "outputs-added",
        "o's two products rounded apart, then added",
        "t1-from-bf16-scale1.5-whispering",
        (_O, 'to_bf16(add_rn(mma(u, x["p"]), mma(s, x["q_up"])))'),
    ),
    _fault(
        "state-transposed",
        "initial state read as [K, V]",
        "t3-from-fp32-inf-state",
        (
            "state = _first_state(inputs, order, torch.float32)",
            "state = _first_state(inputs, order, torch.float32).transpose(-1, -2).contiguous()",
        ),
    ),
    _fault(
        "final-state-transposed",
        "final state written as [K, V]",
        "t1-to-bf16-normal",
        (
            "        state = _back(state, order)\n",
            "        state = _back(state, order).transpose(-1, -2).contiguous()\n",
        ),
    ),
    _fault(
        "final-state-of-others",
        "final states in the order of lengths",
        "t5-first-empty-from-bf16-to-bf16-normal",
        ("        state = _back(state, order)\n", ""),
    ),
    _fault(
        "history-dropped",
        "state forgotten after 64 tokens",
        "t281-lengths-normal",
        (
            _LOOP,
            "    for number, living in enumerate(counts):\n        if number and number % 4 == 0:\n"
            "            state.zero_()\n",
        ),
    ),
    _fault(
        "model-decay-late",
        "state decayed after its update",
        "t6-faint",
        ("s.add_(u[..., None] * k_t)", "s.add_(u[..., None] * k_t).mul_(decay_t)"),
        schedule="model",
    ),
    _fault(
        "model-delta-missing",
        "v written without what the state holds of it",
        "t4-still-s464",
        ("(v.index_select(0, token) - seen)", "v.index_select(0, token)"),
        schedule="model",
    ),
)
