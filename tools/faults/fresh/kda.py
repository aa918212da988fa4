"""Faults of the kda models."""

from tools.faults.patch import Edit, Fault


def _fault(name: str, schedule: str, what: str, *edits: tuple[str, str]) -> Fault:
    file = "reference/kda.py"
    return Fault(name, "kda", schedule, what, "", tuple(Edit(file, old, new) for old, new in edits))


_STEP = ("for living in counts:", "for step, living in enumerate(counts):")
_KEEP = ("state[:living] = s\n", "state[:living] = {}\n")
_OUT = ("out = torch.empty_like(v)\n    first = 0", "out = torch.zeros_like(v)\n    first = 0")
_X = "{name: x[part] for name, x in prepared.items()}"


def _keep(new: str) -> tuple[str, str]:
    """What is kept of the state ``s`` after a chunk."""
    return _KEEP[0], _KEEP[1].format(new)


FAULTS = (
    # The model.
    _fault(
        "model-no-eps",
        "model",
        "no 1e-6 under the roots: a zero key is 0 / 0",
        ("portable.total(x * x) + eps)", "portable.total(x * x))"),
    ),
    _fault(
        "model-eps-outside-root",
        "model",
        "1e-6 is added to the root",
        (
            "portable.sqrt(portable.total(x * x) + eps)[..., None]",
            "(portable.sqrt(portable.total(x * x)) + eps)[..., None]",
        ),
    ),
    _fault(
        "model-q-not-normalised",
        "model",
        "only k is normalised",
        (
            "q, k = (x / portable.sqrt(portable.total(x * x) + eps)[..., None] for x in (q, k))",
            "k = k / portable.sqrt(portable.total(k * k) + eps)[..., None]",
        ),
    ),
    _fault(
        "model-rate-of-head-0",
        "model",
        "all heads take A_log of head 0",
        ('portable.exp(inputs["A_log"].to(dtype))[:, None]', 'portable.exp(inputs["A_log"].to(dtype))[:1, None]'),
    ),
    _fault(
        "model-bias-after-rate",
        "model",
        "dt_bias is added after the rate",
        ('-(rate * (g + inputs["dt_bias"].to(dtype)))', '-(rate * g + inputs["dt_bias"].to(dtype))'),
    ),
    _fault(
        "model-bias-of-head-0",
        "model",
        "all heads take dt_bias of head 0",
        ('g + inputs["dt_bias"].to(dtype)', 'g + inputs["dt_bias"][:1].to(dtype)'),
    ),
    _fault(
        "model-growth-clipped",
        "model",
        "gates above 0 become 0; seen only with lower_bound > 0",
        ("decay = portable.exp(gate)", "decay = portable.exp(gate.clamp(max=0.0))"),
    ),
    _fault(
        "model-gate-by-division",
        "model",
        "lower_bound / (1 + e^x): one rounding less",
        ("gate = bound * (one / (one +", "gate = (bound / (one +"),
    ),
    _fault(
        "model-gate-bf16",
        "model",
        "the gate is rounded to bf16",
        ("decay = portable.exp(gate)", "decay = portable.exp(to_bf16(gate.to(torch.float32)).to(dtype))"),
    ),
    _fault(
        "model-beta-bf16",
        "model",
        "sigmoid(beta) is rounded to bf16",
        (
            "b = one / (one + portable.exp(-beta))",
            "b = to_bf16((one / (one + portable.exp(-beta))).to(torch.float32)).to(dtype)",
        ),
    ),
    _fault(
        "model-beta-of-head-0",
        "model",
        "all heads take beta of head 0",
        ("portable.exp(-beta))", "portable.exp(-beta[:, :1].expand_as(beta)))"),
    ),
    _fault(
        "model-seen-before-decay",
        "model",
        "the delta rule looks at the state before its decay",
        (
            "s = state[:living].mul_(decay_t)\n        seen = portable.total(s * k_t)",
            "seen = portable.total(state[:living] * k_t)\n        s = state[:living].mul_(decay_t)",
        ),
    ),
    _fault(
        "model-decay-after-update",
        "model",
        "the state decays after the update",
        ("s = state[:living].mul_(decay_t)", "s = state[:living]"),
        ("s.add_(u[..., None] * k_t)", "s.add_(u[..., None] * k_t).mul_(decay_t)"),
    ),
    _fault(
        "model-out-before-update",
        "model",
        "the output is read from the state before the update",
        (
            "s.add_(u[..., None] * k_t)\n        out.index_copy_(0, token, scale * portable.total(s * q_t))",
            "out.index_copy_(0, token, scale * portable.total(s * q_t))\n        s.add_(u[..., None] * k_t)",
        ),
    ),
    _fault(
        "model-scale-in-q",
        "model",
        "scale multiplies q, not the sum: other roundings",
        ("scale * portable.total(s * q_t)", "portable.total(s * (q_t * scale))"),
    ),
    _fault(
        "model-scale-fixed",
        "model",
        "128^-½ whatever scale says",
        ("scale * portable.total(s * q_t)", "D**-0.5 * portable.total(s * q_t)"),
    ),
    _fault(
        "model-b-distributed",
        "model",
        "b v − b S k̂ instead of b (v − S k̂)",
        (
            "b.index_select(0, token)[..., None] * (v.index_select(0, token) - seen)",
            "b.index_select(0, token)[..., None] * v.index_select(0, token) - b.index_select(0, token)[..., None] * "
            "seen",
        ),
    ),
    _fault(
        "model-b-on-key",
        "model",
        "b multiplies k̂ in the update, not the row: other roundings",
        (
            "u = b.index_select(0, token)[..., None] * (v.index_select(0, token) - seen)\n"
            "        s.add_(u[..., None] * k_t)",
            "u = v.index_select(0, token) - seen\n"
            "        s.add_(u[..., None] * (b.index_select(0, token)[..., None, None] * k_t))",
        ),
    ),
    _fault(
        "model-seen-order",
        "model",
        "S k̂ adds neighbouring channels first",
        ("portable.total(s * k_t)", "portable.total(portable.total((s * k_t).unflatten(-1, (-1, 2))))"),
    ),
    _fault(
        "model-nan-payload",
        "model",
        "NaN keep the payload and the sign that the machine gives them",
        ("canonical_nan(x) if dtype == torch.float32 else x for", "x for"),
    ),
    _fault(
        "model-state-in-order",
        "model",
        "last states stay in the order of falling lengths",
        ('made["final_state"] = _back(state, order)', 'made["final_state"] = state'),
    ),
    _fault(
        "model-empty-sequence-zero",
        "model",
        "the last state of a sequence without tokens is 0",
        (
            'made["final_state"] = _back(state, order)',
            'made["final_state"] = _back(state * (torch.tensor(lengths) > 0)[:, None, None, None], order)',
        ),
    ),
    _fault(
        "model-stops-at-256",
        "model",
        "tokens from 256 on change no state",
        ("s.add_(u[..., None] * k_t)", "s.add_(u[..., None] * k_t if step < 256 else 0.0)"),
    ),
    # What the model and the schedules share.
    _fault(
        "state-fp32-by-way-of-bf16",
        "chunk16",
        "an FP32 first state is rounded to bf16",
        (
            "torch.tensor(order, device=q.device)).to(dtype)",
            "torch.tensor(order, device=q.device)).to(torch.bfloat16).to(dtype)",
        ),
    ),
    _fault(
        "state-packed-by-way-of-bf16",
        "chunk16",
        "with cu_seqlens an FP32 first state is rounded to bf16",
        (
            "torch.tensor(order, device=q.device)).to(dtype)",
            'torch.tensor(order, device=q.device)).to(torch.bfloat16 if "cu_seqlens" in inputs else dtype).to(dtype)',
        ),
    ),
    _fault(
        "state-transposed",
        "chunk16",
        "the first state is read as [K, V]",
        (
            "torch.tensor(order, device=q.device)).to(dtype)",
            "torch.tensor(order, device=q.device)).to(dtype).mT.contiguous()",
        ),
    ),
    _fault(
        "state-not-ordered",
        "chunk16",
        "the sequences of falling length take the first states in the caller's order",
        ("index_select(0, torch.tensor(order, device=q.device))", "clone()"),
    ),
    _fault(
        "back-inverse",
        "chunk16",
        "last states are put back by the inverse order; the same for two sequences, not for three in turn",
        ("torch.empty_like(state).index_copy_(0, places, state)", "state.index_select(0, places)"),
    ),
    _fault(
        "batch-as-one-sequence",
        "chunk16",
        "without cu_seqlens and states, B rows are one sequence",
        (
            "return [n * tokens for n in range(batch + 1)]",
            'return [n * tokens for n in range(batch + 1)] if "initial_state" in inputs else [0, batch * tokens]',
        ),
    ),
    _fault(
        "eps-small",
        "model",
        "1e-12 under the root of q and k instead of 1e-6; seen where they are tiny",
        ("\nEPS = 1e-6", "\nEPS = 1e-12"),
    ),
    _fault(
        "round-state-after-256",
        "chunk16",
        "the state is rounded to bf16 once, after 256 tokens",
        _STEP,
        _keep("to_bf16(s).to(torch.float32) if step == 15 else s"),
    ),
    _fault(
        "tail-leaves-state",
        "chunk16",
        "a partial last chunk does not reach the state",
        _keep("torch.where((tokens[part][:, -1] >= 0)[:, None, None, None], s, state[:living])"),
    ),
    _fault(
        "single-token-tail",
        "chunk16",
        "a last chunk of one token does not reach the state",
        _keep("torch.where((tokens[part][:, 1] >= 0)[:, None, None, None], s, state[:living])"),
    ),
    _fault(
        "ring-decay-stale",
        "chunk16",
        "each fourth chunk uses the decay of the one before",
        _STEP,
        (
            _X,
            '{name: x[first - living : first] if name == "decay" and step % 4 == 3 else x[part] for name, x in '
            "prepared.items()}",
        ),
    ),
    _fault(
        "ring-t-stale",
        "chunk16",
        "the third chunk and each third after it uses T of the one before",
        _STEP,
        (
            _X,
            '{name: x[first - living : first] if name == "t" and step % 3 == 2 else x[part] for name, x in '
            "prepared.items()}",
        ),
    ),
    _fault(
        "ring-k-low-stale",
        "chunk16",
        "from the seventeenth chunk on Kᵉ_low is that of the chunk before: 256 tokens go right",
        _STEP,
        (
            _X,
            '{name: x[first - living : first] if name == "k_low" and step > 15 else x[part] for name, x in '
            "prepared.items()}",
        ),
    ),
    _fault(
        "v-of-chunk-before",
        "chunk16",
        "each fifth chunk reads v of the one before",
        _STEP,
        ("_rows(v, tokens[part])", "_rows(v, tokens[first - living : first] if step % 5 == 4 else tokens[part])"),
    ),
    _fault(
        "first-token-not-written",
        "chunk16",
        "token 0 of out stays as it was",
        ("inside = (used >= 0)", "inside = (used > 0)"),
        _OUT,
    ),
    _fault(
        "final-fp32-by-way-of-bf16",
        "chunk16",
        "an FP32 last state is rounded to bf16",
        (
            'made["final_state"] = to_bf16(state) if params["final_state"] == "bf16" else state',
            'made["final_state"] = to_bf16(state) if params["final_state"] == "bf16" else to_bf16(state).to('
            "torch.float32)",
        ),
    ),
    _fault(
        "final-truncated",
        "chunk16",
        "a bf16 last state is cut, not rounded",
        (
            'made["final_state"] = to_bf16(state) if',
            'made["final_state"] = (state.view(torch.int32) & -65536).view(torch.float32).bfloat16() if',
        ),
    ),
    _fault(
        "empty-sequence-has-a-chunk",
        "chunk16",
        "a sequence without tokens runs one masked chunk: a −0 of its state becomes +0",
        (
            "for start, end in sequences if start + step < end]",
            "for start, end in sequences if start + step < max(end, start + 1)]",
        ),
    ),
    _fault(
        "padding-reads-token-0",
        "chunk16",
        "padding rows of v hold token 0: its NaN or inf reaches every partial chunk, finite values do not",
        ("return torch.where(_inside(tokens, rows), rows, 0.0)", "return rows"),
    ),
    _fault(
        "padding-decays",
        "chunk16",
        "the gate of padding is not masked: sigmoid(0) decays the state",
        (
            "torch.where(_inside(tokens, x), x, 0.0).transpose(1, 2) for x in (q, k, gate, b)",
            "(x if x is gate else torch.where(_inside(tokens, x), x, 0.0)).transpose(1, 2) for x in (q, k, gate, b)",
        ),
    ),
    _fault(
        "parts-lose-chunk",
        "chunk16",
        "the preparation's second part of 256 chunks starts with the last of the first",
        (
            "made = [_prepare_part(inputs, params, part) for part in parts]",
            "made = [_prepare_part(inputs, params, part) for part in parts]\n    for a, b in pairwise(made):\n"
            '        b["k_up"][0] = a["k_up"][-1]',
        ),
    ),
    # chunk16: gates.
    _fault(
        "rate-exact",
        "chunk16",
        "exp(A_log) is correctly rounded, not ex2.approx",
        ('ex2_approx_ftz(mul_rn(inputs["A_log"], log2e))', 'portable.exp(inputs["A_log"])'),
    ),
    _fault(
        "rate-of-two-heads",
        "chunk16",
        "head h takes A_log of h mod 2: wrong from the third on",
        ('mul_rn(inputs["A_log"], log2e)', 'mul_rn(inputs["A_log"][torch.arange(q.shape[2]) % 2], log2e)'),
    ),
    _fault(
        "bias-of-four-heads",
        "chunk16",
        "head h takes dt_bias of h mod 4: wrong from the fifth on",
        ('add_rn(g, inputs["dt_bias"])', 'add_rn(g, inputs["dt_bias"][torch.arange(q.shape[2]) % 4])'),
    ),
    _fault(
        "bias-shifted",
        "chunk16",
        "dt_bias is read one channel off",
        ('add_rn(g, inputs["dt_bias"])', 'add_rn(g, inputs["dt_bias"].flatten().roll(-1).view(-1, D))'),
    ),
    _fault(
        "bias-fused",
        "chunk16",
        "a · g + a · dt_bias in an fma",
        ('mul_rn(a, add_rn(g, inputs["dt_bias"]))', 'fma_rn(a, g, mul_rn(a, inputs["dt_bias"]))'),
    ),
    _fault(
        "bias-sum-bf16",
        "chunk16",
        "g + dt_bias is rounded to bf16",
        ('add_rn(g, inputs["dt_bias"])', 'to_bf16(add_rn(g, inputs["dt_bias"])).to(torch.float32)'),
    ),
    _fault(
        "bound-in-double",
        "chunk16",
        "lower_bound · log2 e is made in fp64 and rounded once",
        (
            "bound = mul_rn(lower_bound, log2e)",
            'bound = torch.tensor(params["lower_bound"] * LOG2_E, dtype=torch.float32, device=q.device)',
        ),
    ),
    _fault(
        "bound-after-sigmoid",
        "chunk16",
        "log2 e is multiplied after lower_bound · sigmoid",
        ("gate = mul_rn(bound, _sigmoid(", "gate = mul_rn(log2e, mul_rn(lower_bound, _sigmoid("),
        ('inputs["dt_bias"]))))  # 3', 'inputs["dt_bias"])))))  # 3'),
    ),
    _fault(
        "gate-nearly-zero-flushed",
        "chunk16",
        "decays of less than 2^-10 of an octave a token are taken for none",
        ("  # 3\n", "  # 3\n    gate = torch.where(gate.abs() < 2.0**-10, 0.0, gate)\n"),
    ),
    _fault(
        "sigmoid-exact-division",
        "chunk16",
        "the sigmoid divides, without rcp.approx",
        (
            "rcp_approx_ftz(add_rn(torch.ones_like(x), ex2_approx_ftz(x)))",
            "torch.ones_like(x) / add_rn(torch.ones_like(x), ex2_approx_ftz(x))",
        ),
    ),
    _fault(
        "sigmoid-clamped",
        "chunk16",
        "the sigmoid's exponent is clamped at 30: very negative logits are not quite 0",
        (
            "add_rn(torch.ones_like(x), ex2_approx_ftz(x))",
            "add_rn(torch.ones_like(x), ex2_approx_ftz(x.clamp(max=30.0)))",
        ),
    ),
    _fault(
        "beta-bf16",
        "chunk16",
        "sigmoid(beta) is rounded to bf16",
        ("b = _sigmoid(mul_rn(beta, -log2e))", "b = to_bf16(_sigmoid(mul_rn(beta, -log2e))).to(torch.float32)"),
    ),
    _fault(
        "beta-head-major",
        "chunk16",
        "beta is read as [chunk, H, 16], not [chunk, 16, H]",
        (
            "b = _sigmoid(mul_rn(beta, -log2e))",
            "b = _sigmoid(mul_rn(beta.transpose(1, 2).reshape(beta.shape), -log2e))",
        ),
    ),
    _fault(
        "gates-summed-in-a-tree",
        "chunk16",
        "the running sums of a chunk's gates by doubling, not one by one",
        (
            "total = torch.stack(list(_running_sums(gate)), 2)",
            "total = gate\n    for n in (1, 2, 4, 8):\n"
            "        total = torch.cat([total[:, :, :n], add_rn(total[:, :, n:], total[:, :, :-n])], 2)",
        ),
    ),
    _fault(
        "down-by-reciprocal",
        "chunk16",
        "E⁻ is rcp(E⁺), not ex2(−G)",
        (
            "ex2_approx_ftz(total), ex2_approx_ftz(-total)",
            "ex2_approx_ftz(total), rcp_approx_ftz(ex2_approx_ftz(total))",
        ),
    ),
    _fault(
        "decay-bf16",
        "chunk16",
        "the chunk's decay is rounded to bf16",
        ("decay = up[:, :, -1]", "decay = to_bf16(up[:, :, -1]).to(torch.float32)"),
    ),
    _fault(
        "decay-of-token-14",
        "chunk16",
        "the state decays up to the chunk's last token but one",
        ("decay = up[:, :, -1]", "decay = up[:, :, -2]"),
    ),
    _fault(
        "gates-exclusive",
        "chunk16",
        "a token's own gate is not in its sum",
        (
            "total = torch.stack(list(_running_sums(gate)), 2)",
            "total = torch.stack(list(_running_sums(gate)), 2)\n"
            "    total = torch.cat([torch.zeros_like(total[:, :, :1]), total[:, :, :-1]], 2)",
        ),
    ),
    # chunk16: norms and operands.
    _fault("no-eps", "chunk16", "no 1e-6: a zero key is 0 · inf", ("add_rn(_squares(x), eps)", "_squares(x)")),
    _fault(
        "eps-as-floor",
        "chunk16",
        "max(Σ, 1e-6) instead of Σ + 1e-6; seen where q or k is tiny",
        ("add_rn(_squares(x), eps)", "torch.maximum(_squares(x), eps)"),
    ),
    _fault(
        "rsqrt-correctly-rounded",
        "chunk16",
        "1 / √ in IEEE arithmetic instead of the approximation",
        ("rsqrt_approx_ftz(add_rn(_squares(x), eps))", "(1 / portable.sqrt(add_rn(_squares(x), eps)))"),
    ),
    _fault(
        "scale-after-norm",
        "chunk16",
        "q̂ is (q · r) · scale: other roundings unless scale is a power of two",
        ("mul_rn(q, mul_rn(r_q, scale))", "mul_rn(mul_rn(q, r_q), scale)"),
    ),
    _fault(
        "scale-bf16",
        "chunk16",
        "scale is rounded to bf16",
        ("mul_rn(r_q, scale)", "mul_rn(r_q, to_bf16(scale).to(torch.float32))"),
    ),
    _fault(
        "squares-of-halves",
        "chunk16",
        "a thread's two channels are u and u + 32",
        ("pairs = x.unflatten(-1, (2, LANES, 2))", "pairs = x.unflatten(-1, (2, 2, LANES)).mT"),
    ),
    _fault(
        "k-rounded-before-decay",
        "chunk16",
        "k̂ is rounded to bf16 before it meets E⁺",
        ("to_bf16(mul_rn(k, up)), to_bf16", "to_bf16(mul_rn(to_bf16(k).to(torch.float32), up)), to_bf16"),
    ),
    _fault(
        "k-end-by-difference",
        "chunk16",
        "kᵉ takes ex2(G_15 − G), not E⁻ · decay",
        (
            "k_end = mul_rn(k_down, decay[:, :, None])",
            "k_end = mul_rn(k, ex2_approx_ftz(sub_rn(total[:, :, -1:], total)))",
        ),
    ),
    _fault(
        "k-end-one-part",
        "chunk16",
        "Kᵉ has its high part only",
        ("k_low, k_high = _two_parts(k_end)", "k_low, k_high = torch.zeros_like(k_up), to_bf16(k_end)"),
    ),
    _fault(
        "k-down-one-part",
        "chunk16",
        "K⁻ has its high part only",
        ("scored = _by_block(*_two_parts(k_down))", "scored = _by_block(torch.zeros_like(k_up), to_bf16(k_down))"),
    ),
    _fault(
        "k-down-high-first",
        "chunk16",
        "in each block of channels the high part comes before the low one",
        ("_by_block(*_two_parts(k_down))", "_by_block(*reversed(_two_parts(k_down)))"),
    ),
    _fault(
        "parts-cut",
        "chunk16",
        "the high part is cut to bf16, so the low one has the rest and less room",
        ("high = to_bf16(x)\n", "high = (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()\n"),
    ),
    _fault(
        "parts-not-by-block",
        "chunk16",
        "all low parts come first, then all high ones",
        (
            "torch.stack([x.unflatten(-1, (-1, CHUNK)) for x in (first, second)], -2).flatten(-3)",
            "torch.cat([first, second], -1)",
        ),
    ),
    _fault(
        "blocks-descending",
        "chunk16",
        "κ and π run over the channels from the last block down",
        ("for x in (first, second)], -2).flatten(-3)", "for x in (first, second)], -2).flip(-3).flatten(-3)"),
    ),
    _fault(
        "b-of-column",
        "chunk16",
        "L_ij takes b of token j",
        ("mul_rn(b[..., None], mma(", "mul_rn(b[..., None, :], mma("),
    ),
    _fault(
        "p-without-diagonal",
        "chunk16",
        "a token does not see itself",
        ("torch.where(before | (position[:, None] == position), to_bf16", "torch.where(before, to_bf16"),
    ),
    _fault(
        "p-only-half",
        "chunk16",
        "P is empty for tokens 8 … 15 against 0 … 7",
        (
            "torch.where(before | (position[:, None] == position), to_bf16",
            "torch.where((before | (position[:, None] == position)) & ~((position[:, None] > 7) & (position < 8)), "
            "to_bf16",
        ),
    ),
    # chunk16: inverse, step and update.
    _fault(
        "inverse-not-fused",
        "chunk16",
        "the substitution multiplies and subtracts apart",
        (
            "fma_rn(-lower[..., l + 1 :, l, None], t[..., l, None, :], t[..., l + 1 :, :])",
            "sub_rn(t[..., l + 1 :, :], mul_rn(lower[..., l + 1 :, l, None], t[..., l, None, :]))",
        ),
    ),
    _fault(
        "inverse-rounded-rows",
        "chunk16",
        "the substitution goes on with rows rounded to bf16",
        (
            "t[..., l, None, :], t[..., l + 1 :, :])",
            "to_bf16(t[..., l, None, :]).to(torch.float32), t[..., l + 1 :, :])",
        ),
    ),
    _fault(
        "inverse-last-row",
        "chunk16",
        "row 15 does not take row 14",
        ("for l in range(CHUNK - 1):", "for l in range(CHUNK - 2):"),
    ),
    _fault(
        "state-operand-cut",
        "chunk16",
        "the state is cut to bf16 as an operand",
        ("s = to_bf16(state)\n", "s = (state.view(torch.int32) & -65536).view(torch.float32).bfloat16()\n"),
    ),
    _fault("w-one-chain", "chunk16", "W is one chain of 8 MMAs", ("add_rn(low, high)", 'mma(s, x["k_up"])')),
    _fault(
        "w-subtracted-apart",
        "chunk16",
        "(v − low) − high instead of v − (low + high)",
        (
            "rest = sub_rn(v.to(torch.float32).permute(0, 2, 3, 1), add_rn(low, high))",
            "rest = sub_rn(sub_rn(v.to(torch.float32).permute(0, 2, 3, 1), low), high)",
        ),
    ),
    _fault(
        "w-half-for-late-rows",
        "chunk16",
        "rows of V from 64 on lack the second chain",
        ("add_rn(low, high)", "add_rn(low, torch.where((torch.arange(D) < 64)[:, None], high, 0.0))"),
    ),
    _fault(
        "rest-rounded",
        "chunk16",
        "v − W is rounded to bf16 before b",
        ('mul_rn(x["b"][:, :, None], rest)', 'mul_rn(x["b"][:, :, None], to_bf16(rest).to(torch.float32))'),
    ),
    _fault(
        "b-in-t",
        "chunk16",
        "b is in T, not in R",
        ('r = to_bf16(mul_rn(x["b"][:, :, None], rest))', "r = to_bf16(rest)"),
        ('"t": _inverse(lower)', '"t": to_bf16(mul_rn(_inverse(lower).to(torch.float32), b[:, :, None]))'),
    ),
    _fault(
        "nan-spreads",
        "chunk16",
        "a NaN or inf of one sequence reaches the others that run beside it",
        ("r = to_bf16(mul_rn(", "r = to_bf16(0.0 * rest.sum(0) + mul_rn("),
    ),
    _fault("t-transposed", "chunk16", "T is read by columns", ('mma(r, x["t"])', 'mma(r, x["t"].mT)')),
    _fault(
        "o-scores-first",
        "chunk16",
        "the output's chain starts with U · P",
        ('mma(u, x["p"], mma(s, x["q_up"]))', 'mma(s, x["q_up"], mma(u, x["p"]))'),
    ),
    _fault(
        "o-two-sums",
        "chunk16",
        "S · Q and U · P are added at the end",
        ('mma(u, x["p"], mma(s, x["q_up"]))', 'add_rn(mma(u, x["p"]), mma(s, x["q_up"]))'),
    ),
    _fault("o-of-r", "chunk16", "the output takes R for U", ('mma(u, x["p"], mma(', 'mma(r, x["p"], mma(')),
    _fault(
        "update-high-first",
        "chunk16",
        "Kᵉ_high is added before Kᵉ_low",
        ('(x["k_low"], x["k_high"])', '(x["k_high"], x["k_low"])'),
    ),
    _fault(
        "update-added-at-end",
        "chunk16",
        "U · Kᵉ is summed from 0 and added to the state",
        (
            '    for k_end in (x["k_low"], x["k_high"]):\n        state = mma(u, k_end.transpose(-1, -2), state)\n'
            "    return state",
            '    k_low, k_high = x["k_low"].mT, x["k_high"].mT\n'
            "    return add_rn(state, mma(u, k_high, mma(u, k_low)))",
        ),
    ),
    _fault(
        "update-decay-of-head-0",
        "chunk16",
        "the state of every head decays as head 0's",
        ('mul_rn(state, x["decay"][:, :, None])', 'mul_rn(state, x["decay"][:, :1, None])'),
    ),
    _fault(
        "update-rows-decay",
        "chunk16",
        "the decay multiplies rows of V, not channels of K",
        ('mul_rn(state, x["decay"][:, :, None])', 'mul_rn(state, x["decay"][..., None])'),
    ),
    # The scans.
    _fault(
        "scan-tail-joins",
        "chunk16_scan64",
        "a last segment of less than a chunk belongs to the one before",
        ("range(a, max(b, a + 1), segment)", "range(a, max(b - CHUNK + 1, a + 1), segment)"),
    ),
    _fault(
        "scan-empty-segment",
        "chunk16_scan64",
        "a length of whole segments gets an empty one more: the last state is S · M + C",
        ("range(a, max(b, a + 1), segment)", "range(a, b + 1, segment)"),
    ),
    _fault(
        "scan512-empty-segment",
        "chunk16_scan512",
        "512 tokens are two segments, the second one empty",
        ("range(a, max(b, a + 1), segment)", "range(a, b + 1 if segment == 512 else max(b, a + 1), segment)"),
    ),
    _fault(
        "scan416-is-384",
        "chunk16_scan416",
        "segments are rounded down to 64s: 384 tokens",
        ("partial(_scan, segment=segment)", "partial(_scan, segment=segment & -64)"),
    ),
    _fault(
        "scan-operators-bf16",
        "chunk16_scan64",
        "C and M are stored in bf16",
        (
            "_operators(rows, shared, fp32, edges, segment)",
            '_operators(rows, shared, dict(params, final_state="bf16"), edges, segment)',
        ),
    ),
    _fault(
        "scan-m-tf32",
        "chunk16_scan416",
        "M is cut to tf32's ten bits",
        ("    return c, m\n", "    return c, (m.view(torch.int32) & -8192).view(torch.float32)\n"),
    ),
    _fault(
        "scan-m-sees-v",
        "chunk16_scan64",
        "M is found without clearing v",
        ('part | {"v": torch.zeros_like(part["v"]), "initial_state": unit}', 'part | {"initial_state": unit}'),
    ),
    _fault("scan-m-transposed", "chunk16_scan64", "M is read by columns", ("m[..., k, None, :]", "m[..., None, :, k]")),
    _fault(
        "scan-states-bf16",
        "chunk16_scan64",
        "a segment's first state is rounded to bf16",
        ("living) + j, c)", "living) + j, to_bf16(c).to(torch.float32))"),
    ),
    _fault(
        "scan-eighth-state-bf16",
        "chunk16_scan64",
        "the first state of each eighth segment is rounded to bf16: 448 tokens go right",
        ("living) + j, c)", "living) + j, to_bf16(c).to(torch.float32) if j % 8 == 7 else c)"),
    ),
    _fault(
        "scan-not-fused",
        "chunk16_scan64",
        "S · M multiplies and adds apart",
        (
            "c = fma_rn(before[..., k, None], m[..., k, None, :], c)",
            "c = add_rn(c, mul_rn(before[..., k, None], m[..., k, None, :]))",
        ),
    ),
    _fault(
        "scan-k-descending",
        "chunk16_scan512",
        "the chain of S · M runs from channel 127 down",
        ("for k in range(D):", "for k in reversed(range(D)):"),
    ),
    _fault(
        "scan-c-last",
        "chunk16_scan416",
        "S · M is summed from 0 and C added at the end",
        (
            "        for k in range(D):\n            c = fma_rn(before[..., k, None], m[..., k, None, :], c)\n",
            "        total = torch.zeros_like(c)\n        for k in range(D):\n"
            "            total = fma_rn(before[..., k, None], m[..., k, None, :], total)\n"
            "        c = add_rn(total, c)\n",
        ),
    ),
    _fault(
        "scan-four-chains",
        "chunk16_scan64",
        "each warp sums 32 channels of S · M, and the sums are added",
        (
            "        for k in range(D):\n            c = fma_rn(before[..., k, None], m[..., k, None, :], c)\n",
            "        for start in range(0, D, 32):\n            total = torch.zeros_like(c)\n"
            "            for k in range(start, start + 32):\n"
            "                total = fma_rn(before[..., k, None], m[..., k, None, :], total)\n"
            "            c = add_rn(c, total)\n",
        ),
    ),
    _fault(
        "scan-operators-ring",
        "chunk16_scan64",
        "operators are kept in a ring of 8: wrong from the tenth segment on",
        ("slot.index_select(0, living) + (j - 1)) for x", "slot.index_select(0, living) + (j - 1) % 8) for x"),
    ),
    _fault(
        "scan-operators-of-sequence-0",
        "chunk16_scan64",
        "later sequences use the operators of the first",
        ("slot = place - torch.arange(len(edges), device=state.device)", "slot = place * 0"),
    ),
    _fault(
        "scan-always-from-first",
        "chunk16_scan64",
        "S · M starts from the sequence's first state each time: two segments go right",
        (
            "before = firsts.index_select(0, place.index_select(0, living) + (j - 1))",
            "before = firsts.index_select(0, place.index_select(0, living))",
        ),
    ),
    _fault(
        "scan-first-state-bf16",
        "chunk16_scan512",
        "an FP32 first state is rounded to bf16 on its way to the segments",
        ("firsts.index_copy_(0, place, state)", "firsts.index_copy_(0, place, to_bf16(state).to(torch.float32))"),
    ),
    _fault(
        "scan-state-of-sequence-0-only",
        "chunk16_scan64",
        "sequences after the first start from 0",
        (
            "firsts.index_copy_(0, place, state)",
            "firsts.index_copy_(0, place, state * (place == 0)[:, None, None, None])",
        ),
    ),
    _fault(
        "scan-final-from-operators",
        "chunk16_scan64",
        "the last state is the last segment's first one",
        ('made["final_state"].index_select(0, last)', "firsts.index_select(0, last)"),
    ),
    _fault(
        "scan-final-truncated",
        "chunk16_scan512",
        "a bf16 last state is cut, not rounded",
        (
            'outputs["final_state"] = to_bf16(state) if',
            'outputs["final_state"] = (state.view(torch.int32) & -65536).view(torch.float32).bfloat16() if',
        ),
    ),
    _fault(
        "scan-operator-lacks-chunk",
        "chunk16_scan512",
        "C and M of a segment leave its last 16 tokens out",
        ("torch.arange(segment, device=device)).flatten()", "torch.arange(segment - CHUNK, device=device)).flatten()"),
        ("unflatten(0, (-1, segment))", "unflatten(0, (-1, segment - CHUNK))"),
    ),
    _fault(
        "scan-operator-one-token-late",
        "chunk16_scan64",
        "C and M are found from tokens one too far, but for the last segment that has them",
        ("token = (begin[:, None] +", "token = (begin[:, None] + (begin[:, None] < begin.max()).long() +"),
    ),
)
