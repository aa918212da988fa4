"""Mistakes in kda: norms, gate, beta, recurrence, chunks, states, sequences, memory."""

from tools.faults.plain.rows import variants

_LOAD = 'q, k, v, g, beta = (inputs[name].flatten(0, 1).float() for name in ("q", "k", "v", "g", "beta"))'
_NQ = "q = q * torch.rsqrt((q * q).sum(2, keepdim=True) + 1e-6)"
_NK = "k = k * torch.rsqrt((k * k).sum(2, keepdim=True) + 1e-6)"
_RATE = 'rate = exp(inputs["A_log"])[:, None]'
_GATE = 'gate = params["lower_bound"] * sigmoid(rate * (g + inputs["dt_bias"]))'
_B = "b = sigmoid(beta)[..., None]"
_STATES = 'states = inputs["initial_state"].float().clone()'
_ZEROS = "states = torch.zeros(sequences, heads, 128, 128)"
_OUT = "out = torch.zeros_like(v)\n    step"
_LOOP = "for n in range(sequences):"
_OWN = "own = slice(starts[n], starts[n + 1])"
_STEP = 'out[own], states[n] = step(states[n], q[own], k[own], v[own], gate[own], b[own], params["scale"])'
_MADE = 'made = {"out": out.bfloat16().view(inputs["v"].shape)}'
_IF_FINAL = 'if params["final_state"] is not None:'
_FINAL = 'made["final_state"] = states.to(STATES[params["final_state"]])'
_RETURN = "    return made\n"
_DECAY = "decay = exp(gate)"
_S = "s = s * decay[t][:, None]"
_SEEN = "seen = (s @ k[t][..., None])[..., 0]"
_U = "u = b[t] * (v[t] - seen)"
_ADD = "s = s + u[..., None] * k[t][:, None]"
_O = "out[t] = (s @ q[t][..., None])[..., 0] * scale"
_CHUNK = ("CHUNK = 0", "CHUNK = 16")
_SUMS = "sums = gc.cumsum(1)"
_UP = "up, down = exp(sums), exp(-sums)"
_KS = "k_up, q_up, k_down = kc * up, qc * up, kc * down"
_LOWER = "lower = (bc * (k_up @ k_down.transpose(1, 2))).tril(-1)"
_UC = "u = bc * (vc - k_up @ s.transpose(1, 2))"
_SOLVE = "for i in range(1, u.shape[1]):"
_SUB = "u[:, i] -= (lower[:, i, None, :i] @ u[:, :i])[:, 0]"
_SCORES = "scores = (q_up @ k_down.transpose(1, 2)).tril()"
_INTER = "inter = q_up @ s.transpose(1, 2)"
_INTRA = "intra = scores @ u"
_OC = "out[part] = ((inter + intra) * scale).transpose(0, 1)"
_LAST = "last = up[:, -1]"
_SC = "s = s * last[:, None] + u.transpose(1, 2) @ k_end"

ROWS = variants(
    "kda",
    (
        ("q-not-normed", "q is not normalised.", _NQ, "pass"),
        ("k-not-normed", "k is not normalised.", _NK, "pass"),
        ("q-eps-missing", "q's norm has no eps.", _NQ, _NQ.replace(" + 1e-6", "")),
        ("k-eps-missing", "k's norm has no eps.", _NK, _NK.replace(" + 1e-6", "")),
        ("k-eps-outside", "k's eps is outside the root.", _NK, "k = k / ((k * k).sum(2, keepdim=True).sqrt() + 1e-6)"),
        (
            "k-eps-as-clamp",
            "k's norm is at least 1e-6, without an eps.",
            _NK,
            "k = k / (k * k).sum(2, keepdim=True).sqrt().clamp(min=1e-6)",
        ),
        (
            "k-eps-of-mean",
            "k's norm is RMS over 128.",
            _NK,
            "k = k * torch.rsqrt((k * k).mean(2, keepdim=True) + 1e-6) * 128**-0.5",
        ),
        ("q-eps-1e-5", "q's eps is 1e-5.", _NQ, _NQ.replace("1e-6", "1e-5")),
        ("k-eps-1e-5", "k's eps is 1e-5.", _NK, _NK.replace("1e-6", "1e-5")),
        (
            "k-normed-in-bf16",
            "The normalised k is bf16 in the recurrence.",
            _NK,
            _NK + "\n    k = k.bfloat16().float()",
        ),
        (
            "q-normed-in-bf16",
            "The normalised q is bf16 in the recurrence.",
            _NQ,
            _NQ + "\n    q = q.bfloat16().float()",
        ),
        ("k-normed-in-e4m3", "The normalised k is e4m3.", _NK, _NK + "\n    k = k.to(torch.float8_e4m3fn).float()"),
        ("k-norm-over-heads", "k's norm sums over the heads too.", _NK, _NK.replace("sum(2,", "sum((1, 2),")),
        ("rate-of-head-0", "Every head takes A_log of head 0.", _RATE, _RATE.replace('["A_log"]', '["A_log"][:1]')),
        ("rate-not-exp", "A_log is not exponentiated.", _RATE, 'rate = inputs["A_log"][:, None]'),
        (
            "rate-negative",
            "The rate is −exp(A_log), as in other linear attentions.",
            _RATE,
            'rate = -exp(inputs["A_log"])[:, None]',
        ),
        ("rate-in-bf16", "The rate is bf16.", _RATE, _RATE + ".bfloat16().float()"),
        (
            "bias-of-head-0",
            "Every head takes dt_bias of head 0.",
            _GATE,
            _GATE.replace('["dt_bias"]', '["dt_bias"][:1]'),
        ),
        ("bias-missing", "dt_bias is left out.", _GATE, _GATE.replace(' + inputs["dt_bias"]', "")),
        (
            "bias-after-rate",
            "dt_bias is added behind the rate.",
            _GATE,
            _GATE.replace('rate * (g + inputs["dt_bias"])', 'rate * g + inputs["dt_bias"]'),
        ),
        (
            "bias-in-bf16",
            "g + dt_bias is rounded to bf16.",
            _GATE,
            _GATE.replace('(g + inputs["dt_bias"])', '(g + inputs["dt_bias"]).bfloat16().float()'),
        ),
        ("gate-in-bf16", "The gate is bf16.", _GATE, _GATE + "\n    gate = gate.bfloat16().float()"),
        ("gate-in-fp16", "The gate is fp16.", _GATE, _GATE + "\n    gate = gate.half().float()"),
        (
            "gate-sigmoid-in-bf16",
            "The gate's sigmoid is bf16.",
            _GATE,
            _GATE.replace('inputs["dt_bias"]))', 'inputs["dt_bias"])).bfloat16().float()'),
        ),
        (
            "gate-by-tanh",
            "The sigmoid is by a tanh that is 1e-3 off.",
            _GATE,
            _GATE.replace('inputs["dt_bias"]))', 'inputs["dt_bias"])).mul(1.001)'),
        ),
        (
            "gate-softplus",
            "The gate is −softplus, as without a lower bound.",
            _GATE,
            'gate = -rate * torch.nn.functional.softplus(g + inputs["dt_bias"])',
        ),
        ("gate-bound-minus-5", "The lower bound is always −5.", _GATE, _GATE.replace('params["lower_bound"]', "-5.0")),
        ("gate-positive-cut", "A positive gate is cut to 0.", _GATE, _GATE + "\n    gate = gate.clamp(max=0)"),
        ("gate-base-2", "The decay is 2^γ.", _DECAY, "decay = torch.exp2(gate)"),
        (
            "gate-of-channel-0",
            "A head has one decay, of channel 0.",
            _DECAY,
            "decay = exp(gate)[..., :1].expand_as(gate)",
        ),
        (
            "gate-mean",
            "A head has one decay, the mean gate's.",
            _DECAY,
            "decay = exp(gate.mean(2, keepdim=True)).expand_as(gate)",
        ),
        ("decay-in-bf16", "The decay is bf16.", _DECAY, _DECAY + "\n    decay = decay.bfloat16().float()"),
        ("decay-in-fp16", "The decay is fp16.", _DECAY, _DECAY + "\n    decay = decay.half().float()"),
        ("beta-without-sigmoid", "beta is not passed through the sigmoid.", _B, "b = beta[..., None]"),
        ("beta-in-bf16", "sigmoid(beta) is bf16.", _B, _B + ".bfloat16().float()"),
        ("beta-in-fp16", "sigmoid(beta) is fp16.", _B, _B + ".half().float()"),
        ("beta-doubled", "b is 2 sigmoid(beta).", _B, "b = 2 * " + _B[4:]),
        ("beta-of-head-0", "Every head takes head 0's beta.", _B, _B + "\n    b = b[:, :1].expand(-1, heads, -1)"),
        ("beta-previous-token", "b is that of the token before.", _U, "u = b[max(t - 1, 0)] * (v[t] - seen)"),
        (
            "decay-after-update",
            "The decay comes after the update.",
            _S,
            "pass",
            _ADD,
            "s = (s + u[..., None] * k[t][:, None]) * decay[t][:, None]",
        ),
        (
            "seen-before-decay",
            "What the key sees is the state before the decay.",
            _S,
            "old = s\n        " + _S,
            _SEEN,
            _SEEN.replace("(s @", "(old @"),
        ),
        ("decay-on-v", "The decay is along V.", _S, "s = s * decay[t][..., None]"),
        ("no-delta-rule", "The update does not subtract what is there.", _U, "u = b[t] * v[t]"),
        ("seen-not-scaled-by-b", "b scales v alone.", _U, "u = b[t] * v[t] - seen"),
        (
            "out-before-update",
            "The output is that of the state before the update.",
            _ADD,
            "old = s\n        " + _ADD,
            _O,
            _O.replace("(s @", "(old @"),
        ),
        ("scale-missing", "The scale is missing.", _O, "out[t] = (s @ q[t][..., None])[..., 0]"),
        ("scale-always-default", "The scale is always 1/√128.", _O, _O.replace("scale", "128**-0.5")),
        ("scale-absolute", "The scale's sign is lost.", _O, _O.replace("scale", "abs(scale)")),
        ("scale-in-bf16", "The scale is bf16.", _O, _O.replace("scale", "torch.tensor(scale).bfloat16().float()")),
        ("state-in-bf16", "The state is bf16 between tokens.", _ADD, _ADD + "\n        s = s.bfloat16().float()"),
        ("state-in-fp16", "The state is fp16 between tokens.", _ADD, _ADD + "\n        s = s.half().float()"),
        ("update-in-bf16", "u is bf16 in the recurrence.", _U, _U + "\n        u = u.bfloat16().float()"),
        (
            "state-in-transposed",
            "The initial state is read [K, V].",
            _STATES,
            _STATES + ".transpose(2, 3).contiguous()",
        ),
        (
            "state-out-transposed",
            "The final state is written [K, V].",
            _FINAL,
            'made["final_state"] = states.transpose(2, 3).contiguous().to(STATES[params["final_state"]])',
        ),
        ("state-in-ignored", "The initial state is ignored.", _STATES, _ZEROS),
        (
            "first-state-in-bf16",
            "An fp32 initial state is rounded to bf16.",
            _STATES,
            'states = inputs["initial_state"].bfloat16().float()',
        ),
        (
            "state-out-in-bf16",
            "An fp32 final state has passed bf16.",
            _FINAL,
            _FINAL.replace("states.to", "states.bfloat16().to"),
        ),
        (
            "state-out-cut",
            "A bf16 final state is cut.",
            _FINAL,
            _FINAL + '\n        if params["final_state"] == "bf16":\n            made["final_state"] '
            "= (states.view(torch.int32) & -65536).view(torch.float32).bfloat16()",
        ),
        (
            "state-out-always-fp32",
            "The final state is fp32 whatever is asked for.",
            _FINAL,
            'made["final_state"] = states',
        ),
        (
            "state-out-unasked",
            "A final state is returned that was not asked for.",
            _IF_FINAL,
            "if True:",
            _FINAL,
            'made["final_state"] = states.to(STATES[params["final_state"] or "fp32"])',
        ),
        (
            "state-out-missing-without-initial",
            "Without an initial state none is returned.",
            _IF_FINAL,
            'if params["final_state"] is not None and "initial_state" in inputs:',
        ),
        ("state-head-swap", "Each head starts from the next head's state.", _STATES, _STATES + ".roll(1, 1)"),
        (
            "state-of-sequence-before",
            "A sequence starts from the one before.",
            _STEP,
            "states[n] += states[n - 1] if n else 0.0\n        " + _STEP,
        ),
        (
            "state-last-token-lost",
            "The final state leaves the last token out from 17 tokens on.",
            _STEP,
            _STEP + "\n        if starts[n + 1] - starts[n] > 16:\n            first "
            '= (inputs["initial_state"][n].float() if "initial_state" in '
            "inputs else torch.zeros(heads, 128, 128))\n"
            "            states[n] = step(first, *(x[own][:-1] for x in (q, "
            'k, v, gate, b)), params["scale"])[1]',
        ),
        (
            "empty-sequence-zero",
            "A sequence without tokens returns zeros.",
            _STEP,
            _STEP + "\n        if starts[n] == starts[n + 1]:\n            states[n] = 0",
        ),
        (
            "empty-sequence-ends",
            "A sequence without tokens ends the call.",
            _OWN,
            "if starts[n] == starts[n + 1]:\n            break\n        " + _OWN,
        ),
        (
            "last-sequence-lost",
            "The last sequence from two on is not visited.",
            _LOOP,
            "for n in range(max(sequences - 1, 1)):",
        ),
        (
            "sequences-one-token-late",
            "From the second sequence on the last token of the one before comes first.",
            _STEP,
            "own = slice(max(starts[n] - (n > 0), 0), starts[n + 1])\n        " + _STEP,
        ),
        (
            "nan-of-sequence",
            "A NaN of one sequence reaches all.",
            _STEP,
            _STEP + "\n    out = out + 0.0 * states.sum()",
        ),
        ("nan-of-head", "A NaN of one head reaches all.", _O, _O + "\n        out[t] += 0.0 * s.sum()"),
        (
            "nan-out-0",
            "NaN outputs are 0.",
            _MADE,
            _MADE.replace("out.bfloat16", "out.nan_to_num(0.0, torch.inf, -torch.inf).bfloat16"),
        ),
        (
            "out-cut",
            "The output is cut to bf16.",
            _MADE,
            _MADE.replace("out.bfloat16", "(out.view(torch.int32) & -65536).view(torch.float32).bfloat16"),
        ),
        ("out-in-fp16", "The output passes fp16.", _MADE, _MADE.replace("out.bfloat16", "out.half().bfloat16")),
        ("out-fp32", "The output is fp32.", _MADE, _MADE.replace("out.bfloat16()", "out")),
        (
            "noise",
            "A race adds noise to the last output.",
            _MADE,
            "out[-1:, -1, -1] *= 1 + 0.1 * torch.rand(1).item()\n    " + _MADE,
        ),
        ("one-in-2003", "One output in 2003 is 5 % off.", _MADE, "out.view(-1)[11::2003] *= 1.05\n    " + _MADE),
        ("token-256-restart", "The state is lost at token 256.", _S, "s = s * 0.0 if t == 256 else s\n        " + _S),
        (
            "token-192-twice",
            "Token 192 is applied twice.",
            _ADD,
            _ADD + "\n        s = s + (u[..., None] * k[t][:, None] if t == 192 else 0.0)",
        ),
        (
            "state-damaged",
            "The caller's initial state is overwritten.",
            _STATES,
            'states = inputs["initial_state"].float().clone()\n        inputs["initial_state"].zero_()',
        ),
        (
            "chunk-state-in-bf16",
            "The state is bf16 between chunks.",
            *_CHUNK,
            _SC,
            _SC + "\n        s = s.bfloat16().float()",
        ),
        (
            "chunk-state-in-fp16",
            "The state is fp16 between chunks.",
            *_CHUNK,
            _SC,
            _SC + "\n        s = s.half().float()",
        ),
        (
            "chunk-state-sum-in-bf16",
            "A chunk's update of the state is bf16.",
            *_CHUNK,
            _SC,
            "s = s * last[:, None] + (u.transpose(1, 2) @ k_end).bfloat16().float()",
        ),
        (
            "chunk-inverse-in-bf16",
            "The triangular matrix is bf16.",
            *_CHUNK,
            _LOWER,
            _LOWER + "\n        lower = lower.bfloat16().float()",
        ),
        (
            "chunk-neumann-3",
            "The inverse is a Neumann series of three terms.",
            *_CHUNK,
            _SOLVE,
            "u = u - lower @ (u - lower @ u)\n        for i in range(0):",
        ),
        (
            "chunk-neumann-fp16",
            "The inverse is a Neumann product in fp16.",
            *_CHUNK,
            _SOLVE,
            "eye = torch.eye(u.shape[1])\n        inverse, power = eye - "
            "lower, lower\n        for _ in range(3):\n"
            "            power = (power @ power).half().float()\n            "
            "inverse = (inverse @ (eye + power)).half().float()\n        "
            "u = inverse @ u\n        for i in range(0):",
        ),
        (
            "chunk-solve-short",
            "The last row of sixteen is not substituted.",
            *_CHUNK,
            _SOLVE,
            "for i in range(1, min(u.shape[1], 15)):",
        ),
        (
            "chunk-solve-two-blocks",
            "The lower left 8 × 8 block is left out.",
            *_CHUNK,
            _LOWER,
            _LOWER + "\n        lower[:, 8:, :8] = 0",
        ),
        (
            "chunk-lower-beta-of-column",
            "b scales the columns of the triangle.",
            *_CHUNK,
            _LOWER,
            "lower = (k_up @ k_down.transpose(1, 2) * bc.transpose(1, 2)).tril(-1)",
        ),
        (
            "chunk-lower-diagonal",
            "The triangle holds its diagonal.",
            *_CHUNK,
            _SUB,
            "u[:, i] -= (lower[:, i, None, :i] @ u[:, :i])[:, 0] + (bc[:, "
            "i] * (kc[:, i] ** 2).sum(1, keepdim=True)) * u[:, i]",
        ),
        (
            "chunk-scores-strict",
            "A token does not see its own update.",
            *_CHUNK,
            _SCORES,
            _SCORES.replace("tril()", "tril(-1)"),
        ),
        (
            "chunk-scores-full",
            "A token sees later ones of its chunk.",
            *_CHUNK,
            _SCORES,
            _SCORES.replace(".tril()", ""),
        ),
        ("chunk-scores-in-fp16", "The scores are fp16.", *_CHUNK, _SCORES, _SCORES + ".half().float()"),
        (
            "chunk-scores-in-e4m3",
            "The scores are e4m3.",
            *_CHUNK,
            _SCORES,
            _SCORES + ".clamp(-448, 448).to(torch.float8_e4m3fn).float()",
        ),
        (
            "chunk-down-in-fp16",
            "The growing decays are fp16: inf from e^11 on.",
            *_CHUNK,
            _UP,
            "up, down = exp(sums), exp(-sums).half().float()",
        ),
        (
            "chunk-down-cut",
            "The growing decays are at most e^20.",
            *_CHUNK,
            _UP,
            "up, down = exp(sums), exp((-sums).clamp(max=20))",
        ),
        (
            "chunk-sums-exclusive",
            "The sums of gates leave their own token out.",
            *_CHUNK,
            _SUMS,
            "sums = gc.cumsum(1) - gc",
        ),
        ("chunk-sums-in-bf16", "The sums of gates are bf16.", *_CHUNK, _SUMS, _SUMS + ".bfloat16().float()"),
        ("chunk-sums-in-fp16", "The sums of gates are fp16.", *_CHUNK, _SUMS, _SUMS + ".half().float()"),
        (
            "chunk-inter-undecayed",
            "The state that a query sees is not decayed.",
            *_CHUNK,
            _INTER,
            "inter = qc @ s.transpose(1, 2)",
        ),
        (
            "chunk-state-undecayed",
            "The state is not decayed over a chunk.",
            *_CHUNK,
            _SC,
            "s = s + u.transpose(1, 2) @ k_end",
        ),
        (
            "chunk-decay-of-full",
            "A partial chunk decays the state by its last gate once more.",
            *_CHUNK,
            _LAST,
            "last = up[:, -1] * (exp(gc[:, -1]) if gc.shape[1] < CHUNK else 1.0)",
        ),
        (
            "chunk-tail-not-written",
            "The tokens behind the last whole chunk are not written from 16 on.",
            *_CHUNK,
            _OC,
            "if qc.shape[1] < CHUNK and start:\n            continue\n        " + _OC,
        ),
        (
            "chunk-tail-padded-gate",
            "Padding tokens decay the state by half the bound.",
            *_CHUNK,
            _LAST,
            "last = up[:, -1] * exp(gate.min() / 2 * (CHUNK - gc.shape[1]))",
        ),
        ("chunk-of-64", "Chunks are 64 tokens: the decays overflow.", "CHUNK = 0", "CHUNK = 64"),
        (
            "chunk-third-stale",
            "From the third chunk on outputs take the state of the chunk before.",
            *_CHUNK,
            _INTER,
            "inter = q_up @ (s if start < 2 * CHUNK else before).transpose(1, 2)\n        before = s",
        ),
        (
            "chunk-u-in-bf16-before-solve",
            "The right side is bf16 and so is each row found.",
            *_CHUNK,
            _SUB,
            _SUB + "\n            u[:, i] = u[:, i].bfloat16().float()",
        ),
        (
            "chunk-intra-unscaled",
            "The scale reaches the state's part alone.",
            *_CHUNK,
            _OC,
            "out[part] = (inter * scale + intra).transpose(0, 1)",
        ),
    ),
)
