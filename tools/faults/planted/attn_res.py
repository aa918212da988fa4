"""Faults in ``reference/attn_res.py``: the new prefix, the mailbox, norms and the cluster's sums."""

from tools.faults.patch import Edit, Fault

FILE = "reference/attn_res.py"


def _fault(name: str, what: str, case: str, *edits: tuple[str, str], schedule: str = "cluster7") -> Fault:
    return Fault(name, "attn_res", schedule, what, case, tuple(Edit(FILE, *edit) for edit in edits))


_RSTD = "rsqrt_approx_ftz(fma_rn(total, _fp32(1.0 / D, total.device), eps))"
_MEAN = "mul_rn(total, _fp32(1.0 / D, total.device))"
_WARPS = "butterfly(x.unflatten(-1, (CTAS, WARPS, LANES)), (16, 8, 4, 2, 1))"
_SLOTS = 'd = chain_add(inputs["delta"][:, : prefix.shape[0]].to(torch.float32), 0)'
_FIRST_SLOT = 'inputs["delta"][0, : prefix.shape[0]].to(torch.float32)'
_ARMED = 'outputs["delta"].view(torch.int32)[:, : p.shape[0]] = SENTINEL'

FAULTS = (
    _fault(
        "eps-one-ulp",
        "eps one ULP too large",
        "nb0-t1-w0-halfway-s1",
        (_RSTD, _RSTD.replace("eps)", "torch.nextafter(eps, eps + 1))")),
    ),
    _fault(
        "eps-outside-the-mean",
        "eps added to the sum of squares",
        "nb0-t1-w0-halfway-s1",
        (_RSTD, "rsqrt_approx_ftz(mul_rn(add_rn(total, eps), _fp32(1.0 / D, total.device)))"),
    ),
    _fault(
        "eps-outside-the-root",
        "eps added to the root",
        "nb0-t1-w0-halfway-s1",
        (_RSTD, f"1.0 / (portable.sqrt({_MEAN}) + eps)"),
    ),
    _fault("eps-twice", "eps added twice", "nb0-t1-w0-halfway-s1", (_RSTD, _RSTD.replace("eps)", "add_rn(eps, eps))"))),
    _fault(
        "eps-swapped",
        "eps and out_eps swapped",
        "nb0-t1-w0-halfway-s1",
        (
            "for x in epsilons(params))\n    output = torch.empty_like(p)",
            "for x in epsilons(params)[::-1])\n    output = torch.empty_like(p)",
        ),
    ),
    _fault(
        "mean-in-two-roundings",
        "mean square and eps rounded apart",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        (_RSTD, f"rsqrt_approx_ftz(add_rn({_MEAN}, eps))"),
    ),
    _fault(
        "rsqrt-to-nearest",
        "reciprocal root correctly rounded",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        (
            _RSTD,
            _RSTD.replace("rsqrt_approx_ftz(", "(1.0 / portable.sqrt(").replace("eps))", "eps).double())).float()"),
        ),
    ),
    _fault(
        "normalised-in-bf16",
        "source normalised and rounded to bf16 before its score",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        (
            "logit = mul_rn(_sum_of_products(p, w), _rstd(ss, eps))",
            "logit = _sum_of_products(to_bf16(mul_rn(p, _rstd(ss, eps)[:, None])).float(), w)",
        ),
    ),
    _fault(
        "butterfly-ascending",
        "butterfly with offsets 1, 2, 4, 8, 16",
        "nb0-t1-w0-halfway-s1",
        (_WARPS, _WARPS.replace("(16, 8, 4, 2, 1)", "(1, 2, 4, 8, 16)")),
    ),
    _fault(
        "warps-in-a-chain",
        "four warps' sums as a chain, not pairwise",
        "nb0-t1-w0-halfway-s1",
        ("strided(pairwise(warps))", "strided(chain_add(warps))"),
    ),
    _fault(
        "ranks-in-a-chain",
        "seven CTAs' sums as one chain",
        "nb0-t1-w0-halfway-s1",
        ("strided(pairwise(warps))", "chain_add(pairwise(warps))"),
    ),
    _fault(
        "columns-descending",
        "a thread's chain over descending columns",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        ("_exchange(chain_fma(a, b))", "_exchange(chain_fma(a.flip(0), b.flip(0)))"),
    ),
    _fault(
        "stale-maximum",
        "maximum of the first source alone",
        "nb5-t3-r7-slots2-cap6-w3-final-aux1-ties-s1",
        ("m = max_f32(m, logits[:, b])", "m = logits[:, 0]"),
    ),
    _fault(
        "source-left-out",
        "last saved row left out of the mixture",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        (
            "mix = chain_fma(e_blocks.t()[:, None, :, None], x.movedim(2, 0))",
            "mix = chain_fma(e_blocks.t()[:-1, None, :, None], x.movedim(2, 0)[:-1])\n"
            "    mix = mix if x.shape[2] > 1 else torch.zeros_like(p)",
        ),
    ),
    _fault(
        "mixture-unrounded",
        "final mixture not rounded to bf16",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        ("r = to_bf16(r).to(torch.float32) if final else r", "r = r * 1.0"),
    ),
    _fault(
        "cross-term-halved",
        "cross term of the quad form without its 2",
        "nb1-t1-opposing-sources",
        ("mul_rn(add_rn(a, a), e)", "mul_rn(a, e)"),
    ),
    _fault(
        "quad-form-in-direct",
        "norm by the quad form where the direct one is due",
        "nb1-t1-opposing-sources",
        ("if final or direct:", "if final:"),
        schedule="cluster7_direct",
    ),
    _fault(
        "slots-unrounded",
        "sum of several slots not rounded to bf16",
        "nb5-t3-r7-slots2-cap6-w3-final-aux1-ties-s1",
        ('if params["slots"] > 1:', "if False:"),
    ),
    _fault(
        "mailbox-minus-zero",
        "one slot's −0 kept: its row copied, not added to 0",
        "nb1-t1-slots1-w0-aux1-zeros",
        (_SLOTS, f"{_SLOTS}\n        d = {_FIRST_SLOT} if params['slots'] == 1 else d"),
    ),
    _fault(
        "mailbox-zeroed",
        "fragments armed with +0, +0 in place of the sentinel",
        "nb1-t1-slots1-w0-aux1-zeros",
        (_ARMED, _ARMED.replace("SENTINEL", "0")),
    ),
    _fault(
        "mailbox-armed-beyond",
        "fragments beyond the tokens armed too",
        "nb5-t3-r7-slots2-cap6-w3-final-aux1-ties-s1",
        (_ARMED, _ARMED.replace(": p.shape[0]", ":")),
    ),
    _fault(
        "written-row-read",
        "new prefix written before the saved rows are read",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        ("SCHEDULES[schedule](inputs, params, p)", 'SCHEDULES[schedule]({**inputs, "blocks": blocks}, params, p)'),
    ),
    _fault(
        "write-off-by-one",
        "new prefix written to the row before",
        "nb5-t3-r7-slots2-cap6-w3-final-aux1-ties-s1",
        ('blocks[:, params["write"]] = p', 'blocks[:, params["write"] - 1] = p'),
    ),
    _fault(
        "prefix-always-added",
        "old prefix added where it is to be replaced",
        "nb1-t1-replace-w0-final-eps1e-05-1e-06-aux2-small-s634",
        ('if params["has_delta"] else d)', "if True else d)"),
    ),
)
