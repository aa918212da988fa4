"""AttnRes' cases, input recipes, tolerances, and where in a schedule an element is made."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from goldens import inputs as draw
from goldens.case import Case, Kernel, Tensors
from reference import attn_res as reference
from reference.numerics.formats import to_bf16

_UNIT = 2.0**-24  # u: half an ULP of 1 in fp32
_TINY = 2.0**-126
_LEAST = 2.0**-149
D = reference.D

# Inputs.

Fill = Callable[[str, tuple[int, ...]], Tensor]
_QUERY = 2.0**-6  # scores of normal rows are then about 1


def _rows(case: Case, fill: Fill, query: float = _QUERY) -> Tensors:
    """delta, prefix and blocks by ``fill``, normal weights, the query's times ``query``."""
    tokens, rows, capacity = (case.dims[name] for name in ("tokens", "rows", "capacity"))
    slots = case.params["slots"]
    shapes = {
        "delta": (slots, capacity, D) if slots else (tokens, D),
        "prefix": (tokens, D),
        "blocks": (tokens, rows, D),
    }
    x = {name: fill(f"{case.id}/{name}", shape) for name, shape in shapes.items()}
    scales = {"norm": 1.0, "query": query, "gamma": 1.0}
    return x | {name: draw.normal_bf16(f"{case.id}/{name}", (D,), scale) for name, scale in scales.items()}


def _scaled(scale: float) -> Fill:
    return lambda label, shape: draw.normal_bf16(label, shape, scale)


def _set_new_prefix(case: Case, x: Tensors, p: Tensor) -> None:
    """Make the new prefix ``p`` [T, D]."""
    x["delta"].zero_()
    if case.params["has_delta"]:
        x["prefix"] = p
    elif case.params["slots"]:
        x["delta"][0, : p.shape[0]] = p
    else:
        x["delta"] = p


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent of int64 exponents."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _normal(case: Case) -> Tensors:
    return _rows(case, _scaled(1.0))


def _small(case: Case) -> Tensors:
    """Rows of rms near 1e-3, whose mean squares are near the epsilons, and scores near 80."""
    x = _rows(case, _scaled(1.0), query=2.0**-4)
    lean = (x["norm"].to(torch.float32) * x["query"].to(torch.float32)).sign()
    rows = {n: to_bf16((x[n].to(torch.float32) + lean) * 2.0**-10) for n in ("delta", "prefix", "blocks")}
    return x | rows


def _wide(case: Case) -> Tensors:
    """Exponents far apart within every row."""
    x = _rows(case, lambda label, shape: draw.wide_bf16(label, shape, -20, 20))
    return x | {"norm": draw.wide_bf16(f"{case.id}/norm", (D,), -6, 2), "gamma": draw.wide_bf16(case.id, (D,), -8, 8)}


def _cancel(case: Case) -> Tensors:
    """The second slot undoes the large first one, so the order of the sum decides; without slots the prefix does."""
    x = _normal(case)
    large = draw.wide_bf16(f"{case.id}/large", x["prefix"].shape, 8, 28)
    if case.params["slots"] > 1:
        x["delta"][0, : large.shape[0]] = large
        x["delta"][1, : large.shape[0]] = -large
    else:
        x["prefix"] = large
        kept = x["delta"].view(-1, *large.shape[1:])[: large.shape[0], ::8].clone()
        x["delta"].view(-1, D)[: large.shape[0]] = -large
        x["delta"].view(-1, D)[: large.shape[0], ::8] = kept
    return x


def _opposing(case: Case) -> Tensors:
    """x_0 = −p of rms 100 and scores near 0: cluster7's square of the mixture cancels, down to NaN."""
    x = _rows(case, _scaled(100.0), query=2.0**-20)
    _set_new_prefix(case, x, -x["blocks"][:, 0])
    return x


def _aligned(case: Case, query: float) -> Tensors:
    """One source, the prefix if there is but one block, has the signs of the weights."""
    x = _rows(case, _scaled(1.0), query)
    w = x["norm"].to(torch.float32) * x["query"].to(torch.float32)
    if case.params["nb"] > 1:
        row = x["blocks"][:, case.params["nb"] // 2]
        row.copy_(torch.where(w < 0, -row.abs(), row.abs()))
    else:
        p = draw.normal_bf16(f"{case.id}/p", x["prefix"].shape).abs()
        _set_new_prefix(case, x, torch.where(w < 0, -p, p))
    return x


def _dominant(case: Case) -> Tensors:
    """One source outweighs the others by about e^80."""
    return _aligned(case, 2.0**-5.5)


def _flushed(case: Case) -> Tensors:
    """One source outweighs the others by more than 2^126: their weights are flushed to 0."""
    return _aligned(case, 2.0**-4.75)


def _equal(case: Case) -> Tensors:
    """Equal weights and integer rows: means of 2^n integers, many halfway between two bf16."""
    return _rows(case, lambda label, shape: to_bf16(draw.integers(label, shape, 128, 256).to(torch.float32)), 0.0)


def _halfway(case: Case) -> Tensors:
    """For nb = 0: every output is halfway between two bf16 if 1/rms is 2^8, which the square of the new prefix hits to
    a fraction of an ULP. So one ULP in a sum, in an epsilon or in rsqrt turns thousands of roundings.

    The new prefix is odd integers 107 … 169 and gamma 1.5, times powers of two: a product has nine bits, the last set.
    """
    x = _normal(case)
    exponent = draw.integers(f"{case.id}/exponent", (D,), 15, 19)
    exponent += 8 * (draw.integers(f"{case.id}/fine", (D,), 0, 8) == 0)
    odd = 2 * draw.integers(f"{case.id}/odd", (D,), 53, 85) + 1
    unit = 1 << 2 * (26 - exponent)  # of squares, in 2^-52
    mean = 2.0**-16 + 0.4 * 2.0**-39 - case.params["out_eps"]  # 0.4 of the ULP above 2^-16
    missing = round(mean * D * 2.0**52) - int((odd * odd * unit).sum())
    for i in exponent.sort(stable=True).indices.tolist():  # the coarse ones first
        u, n = int(unit[i]), int(odd[i])
        if abs(missing) > 200 * u:  # half of the least change
            left = {m: missing - (m * m - n * n) * u for m in range(107, 170, 2)}
            odd[i] = best = min(left, key=lambda m: abs(left[m]))
            missing = left[best]
    sign = 1 - 2 * draw.integers(f"{case.id}/sign", (D,), 0, 2)
    p = to_bf16((sign * odd).to(torch.float32) * _power_of_two(-exponent))
    _set_new_prefix(case, x, p.expand(x["prefix"].shape).contiguous())
    return x | {"gamma": to_bf16(_power_of_two(draw.integers(f"{case.id}/power", (D,), -3, 4)) * 1.5)}


def _half(case: Case) -> Tensors:
    """Two different rows of equal length and equal score 168, in FP64 and in any order: each weight is exactly ½.

    Of each pair of columns the block has (1, 7) and the prefix (5, 5) where the weights are (1, 2) / 64, all with
    random signs. Rounding x / rms to bf16 before the score would move the weights by 4 %.
    """
    x = _normal(case)
    sign = 1.0 - 2.0 * draw.integers(f"{case.id}/sign", (D,), 0, 2).to(torch.float32)
    pairs = {name: sign * torch.tensor(pair).repeat(D // 2) for name, pair in (("x", [1.0, 7.0]), ("w", [1.0, 2.0]))}
    x["norm"], x["query"] = to_bf16(pairs["w"]), torch.full((D,), 2.0**-6, dtype=torch.bfloat16)
    x["blocks"][:, 0] = to_bf16(pairs["x"])
    _set_new_prefix(case, x, to_bf16(5.0 * sign).expand(x["prefix"].shape).contiguous())
    return x


def _half_nan(case: Case) -> Tensors:
    """Token 0 is any bits, so its new prefix is every kind of number and its output NaN; the others are ``half``'s."""
    x = _half(case)
    for name in ("delta", "prefix"):
        x[name][..., 0, :] = draw.bits_bf16(f"{case.id}/bits/{name}", x[name][..., 0, :].shape)
    return x


def _nan(case: Case) -> Tensors:
    """A NaN in a block of token 0, one in the new prefix of the last token."""
    x = _normal(case)
    x["blocks"][0, 0, 5] = torch.nan
    x["delta"][..., case.dims["tokens"] - 1, 7] = torch.nan
    return x


def _inf(case: Case) -> Tensors:
    """+inf in a block of token 0, −inf in the new prefix of the last token."""
    x = _normal(case)
    x["blocks"][0, 0, 5] = torch.inf
    x["delta"][..., case.dims["tokens"] - 1, 7] = -torch.inf
    return x


def _zeros(case: Case) -> Tensors:
    """Zeros of both signs everywhere but in the weights."""

    def zeros(label: str, shape: tuple[int, ...]) -> Tensor:
        return to_bf16(torch.where(draw.integers(label, shape, 0, 2) == 1, -0.0, 0.0))

    return _rows(case, zeros)


def _subnormal(case: Case) -> Tensors:
    return _rows(case, lambda label, shape: draw.wide_bf16(label, shape, -127, -124))


def _overflow(case: Case) -> Tensors:
    """Rows whose Σx² is around the largest fp32."""
    return _rows(case, _scaled(2.0**57.5))


RECIPES: dict[str, Callable[[Case], Tensors]] = {
    "normal": _normal,
    "small": _small,
    "wide": _wide,
    "cancel": _cancel,
    "opposing-sources": _opposing,
    "dominant": _dominant,
    "flushed": _flushed,
    "equal": _equal,
    "halfway": _halfway,
    "half": _half,
    "half-nan": _half_nan,
    "nan": _nan,
    "inf": _inf,
    "zeros": _zeros,
    "subnormal": _subnormal,
    "overflow": _overflow,
}
_EXACT_ONLY = {
    "overflow": "whether a sum of squares overflows depends on its order",
}


def inputs(case: Case) -> Tensors:
    """The tensors of a case, all bf16. What the kernel must not read is any bits: blocks from nb on, the mailbox's rows
    from T on, the prefix if the delta replaces it."""
    x, params, tokens = RECIPES[case.recipe](case), case.params, case.dims["tokens"]
    x["blocks"][:, params["nb"] :] = draw.bits_bf16(f"{case.id}/unread/blocks", x["blocks"][:, params["nb"] :].shape)
    if not params["has_delta"]:
        x["prefix"] = draw.bits_bf16(f"{case.id}/unread/prefix", x["prefix"].shape)
    if params["slots"]:
        published = x["delta"][:, :tokens].view(torch.int32)
        published.masked_fill_(published == reference.SENTINEL, 0)  # a row that is read has none
        x["delta"][:, tokens:] = draw.bits_bf16(f"{case.id}/unread/delta", x["delta"][:, tokens:].shape)
    return x


# Cases.

# Different, so that one in the other's place is noticed; both as fp32 holds them.
_EPS = {1e-5: float.fromhex("0x1.4f8b58p-17"), 1e-6: float.fromhex("0x1.0c6f7ap-20")}


def make_case(
    nb: int,
    tokens: int,
    recipe: str = "normal",
    *,
    rows: int | None = None,
    slots: int = 0,
    capacity: int | None = None,
    has_delta: bool = True,
    write: int = -1,
    final: bool = False,
    eps: tuple[float, float] = (1e-6, 1e-5),
    aux: int = 0,
    seed: int = 0,
    direct: bool = False,
    committed: bool = True,
) -> Case:
    """A case by its dimensions. rows is R (nb, at least 1, unless given), capacity the mailbox's (T unless given),
    eps is (eps, out_eps), direct asks for the outputs of ``cluster7_direct`` too."""
    rows = max(nb, 1) if rows is None else rows
    capacity = tokens if capacity is None else capacity
    parts = [f"nb{nb}", f"t{tokens}", f"r{rows}" if rows != max(nb, 1) else ""]
    parts += [f"slots{slots}" if slots else "", f"cap{capacity}" if capacity != tokens else ""]
    parts += ["" if has_delta else "replace", f"w{write}" if write >= 0 else "", "final" if final else ""]
    parts += [f"eps{eps[0]:g}-{eps[1]:g}" if eps != (1e-6, 1e-5) else "", f"aux{aux}" if aux else "", recipe]
    parts += [f"s{seed}" if seed else ""]
    return Case(
        kernel="attn_res",
        name="-".join(part for part in parts if part),
        dims={"tokens": tokens, "rows": rows, "capacity": capacity},
        params={
            "nb": nb,
            "slots": slots,
            "has_delta": has_delta,
            "write": write,
            "final": final,
            "eps": _EPS[eps[0]],
            "out_eps": _EPS[eps[1]],
            "aux": aux,
        },
        recipe=recipe,
        seed=seed,
        schedules=("cluster7", "cluster7_direct") if direct else ("cluster7",),
        committed=committed,
        exact_only=_EXACT_ONLY.get(recipe),
        regenerated=("blocks", "norm", "query", "gamma") if committed and nb > 1 else (),
    )


def _grid(i: int) -> Case:
    """The i-th of 36 cases in which every two parameters meet in all their values (tests/test_attn_res.py counts)."""
    nb, final, tokens = i % 9, (i + i // 5) % 2 == 1, 1 + (i // 3 + i // 4) % 3
    return make_case(
        nb,
        tokens,
        rows=nb + 1,
        slots=i % 4,
        capacity=tokens + i // 6 % 2 if i % 4 else None,
        has_delta=(i + i // 4) % 2 == 0,
        write=(-1, nb // 2, nb)[(i + i // 4) % 3],
        final=final,
        eps=((1e-6, 1e-5), (1e-5, 1e-6))[(i + i // 12) % 2],
        aux=(i + i // 9) % 3,
        direct=nb > 0 and not final,
        committed=False,
    )


_CASES = (
    # Every branch once, in as few rows of 14 KiB as that takes.
    # Seeds are ones that tell out_eps from the fp32 number above it; and eps from both its neighbours, a mean in two
    # roundings, and the unit's root from the nearest.
    make_case(0, 1, "halfway", write=0, seed=1),
    make_case(1, 1, "small", has_delta=False, write=0, final=True, aux=2, eps=(1e-5, 1e-6), seed=634),
    make_case(1, 1, "opposing-sources", direct=True),
    make_case(1, 2, "half-nan"),
    make_case(1, 1, "zeros", slots=1, write=0, aux=1),
    make_case(1, 1, "cancel", slots=3, final=True),
    make_case(2, 1, rows=3, slots=2, capacity=2, write=2),
    make_case(8, 1, "dominant", write=3),
    # On demand: the parameters pairwise, every recipe in both branches, and sizes.
    *(_grid(i) for i in range(36)),
    *(make_case(1, 3, recipe, direct=True, committed=False) for recipe in RECIPES if recipe != "halfway"),
    *(make_case(3, 2, r, slots=2, has_delta=False, final=True, committed=False) for r in RECIPES if r != "halfway"),
    make_case(1, 256, "opposing-sources", direct=True, committed=False),
    make_case(2, 64, seed=1, direct=True, committed=False),
    make_case(3, 64, final=True, committed=False),
    make_case(8, 64, write=7, direct=True, committed=False),
    make_case(4, 256, "wide", slots=3, capacity=300, final=True, committed=False),
    make_case(1, 4096, committed=False),
)


# Tolerances.

# Roundings, in units u = 2^-24 of fp32. A sum's terms pass through
#   cluster7: 8 FMAs of a thread, 5 butterfly stages, 2 of the warps, 4 of the CTAs: 19
#   model:    1 product and 13 levels of halving 7168: 14
# and the weights' product norm · query adds one to the scores. With A = Σ|x·w|, ρ = 1 / sqrt(mean(x²) + eps), R the
# distance of a score below the largest:
#   score:    |δ logit| ≤ u · [(sum + 1) · A·ρ + |logit| · ((sum + 2) / 2 + root + 1)]
#             mean(x²) + eps has its sum's roundings and two more and is under a root; root is rsqrt.approx, at most
#             2.5 ULP = 5u (measured: 2 ULP from the correctly rounded), or a root and a division.
#   weight:   E = δ logit / u + range · R + exp, relative, of a weight before it is divided by their sum:
#             x · log2e and log2e itself round, ex2 errs by at most 2^-22 = 4u, and cluster7 takes a block's weight from
#             two of them, exp(logit − m) · exp(m − top), whose distances add up to R.
#   value, total: roundings of a term of the mixture and of the sum of weights, nb + 3 and nb + 1 FMAs and products (in
#             the model a division, a product and the halving of nb + 1).
# So, w being the weights of sum 1 and M = Σ w·x the mixture:
#   mixture:  |δM| ≤ u · Σ w|x|(E + value), before the division; δd = u · Σ w(E + total) of the divisor, relative;
#             |δr| ≤ δM + |M|(δd + u) after it. final rounds to bf16: δr is then the distance between the roundings of
#             M − δr and M + δr, nothing unless a tie lies between.
#   norm:     S = sqrt(mean(M²) + out_eps) is the length of a vector, so |δS| ≤ sqrt(mean(δr²)) (triangle inequality,
#             no linearisation). Where the division comes out of the norm, cluster7 not final, S is the length of
#             (M, den), |δS| ≤ sqrt(mean(δM²) + out_eps · δd²).
#   output:   |δ output| ≤ |gamma| · [(δr + |M|·δS/S) / (S − δS) · (1 + q) + |M|/S · (q + 2u)]
# where q holds the roundings of the norm itself:
#   direct, final, nb = 0, model:  u · ((sum + 2) / 2 + root)
#   cluster7's quad:  1/sqrt(1 − v) − 1 + u·root, v the relative error of mean square + eps: each of its terms is
#             a sum and at most 4 roundings more, relative to its terms, that is 23u · κ of quad, κ = (a²·mm +
#             2ae·Σ|mix·p| + e²·ss) / quad; 2 for the FMA with fp32(1/7168) and 2 for (out_eps · den) · den.
# At κ > 2^20, or when v reaches 1 and a NaN is possible, cluster7 has no bound and exact alone judges.
# exp flushes below 2^-126, which drops at most that of a weight, twice; products and sums of the last steps lose 2^-149
# each. Sums of squares and scores that underflow vanish beside eps ≥ 2^-100. A factor 1.01 pays for products of errors.

_KAPPA_LIMIT = 2.0**20


def _roundings(nb: int, schedule: str) -> dict[str, float]:
    if schedule in reference.SCHEDULES:
        return {"sum": 19, "root": 5, "range": 3, "exp": 8, "value": nb + 3, "total": nb + 1}
    if schedule == "model":
        halving = nb.bit_length() if nb else 0
        return {"sum": 14, "root": 2, "range": 1, "exp": 2, "value": halving + 2, "total": halving}
    names = ", ".join(reference.SCHEDULES)
    raise ValueError(f"schedule: got {schedule!r}, a bound is derived for {names} and model")


def bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str) -> Tensors:
    """fp64 bounds on |output − oracle| before output is rounded to its format; none where κ is beyond its limit.

    The other outputs are copies of the new prefix, which has no tolerance.
    """
    tokens = [_bound(tensors, params, schedule, t) for t in range(tensors["prefix"].shape[0])]
    if any(x is None for x in tokens):
        return {}
    return {"output": torch.stack([x for x in tokens if x is not None])}


def _bound(tensors: Mapping[str, Tensor], params: Mapping[str, Any], schedule: str, token: int) -> Tensor | None:
    """The bound of one token, [D]."""
    nb, c = params["nb"], _roundings(params["nb"], schedule)
    one = {name: x[..., token : token + 1, :] for name, x in tensors.items() if name in ("delta", "prefix")}
    p = reference.new_prefix(one, params)
    x = torch.cat([tensors["blocks"][token, :nb], p]).to(torch.float64)  # [nb + 1, D]
    gamma = tensors["gamma"].to(torch.float64).abs()
    if nb == 0:
        m, moved, divisor = x[0], torch.zeros_like(x[0]), torch.zeros((), dtype=torch.float64)
    else:
        weights, errors = _weights(x, tensors, params["eps"], c)
        m = weights @ x
        moved = 1.01 * _UNIT * ((weights * (errors + c["value"])) @ x.abs())
        moved = moved + 4 * (nb + 1) * _TINY * x.abs().amax() + c["value"] * _LEAST
        divisor = 1.01 * _UNIT * (weights @ (errors + c["total"]))
    square = (m * m).mean() + params["out_eps"]
    length = square.sqrt()
    if schedule == "cluster7" and nb and not params["final"]:
        kappa = _kappa(x, weights)
        relative = _UNIT * (23 * kappa * (m * m).mean() / square + 4)
        if kappa > _KAPPA_LIMIT or relative >= 1:
            return None
        stretched = ((moved * moved).mean() + params["out_eps"] * divisor**2).sqrt()
        norm = 1 / (1 - relative).sqrt() - 1 + _UNIT * c["root"]
    else:
        if nb:
            moved = moved + m.abs() * (divisor + _UNIT)
        if nb and params["final"]:
            low, high = (to_bf16(y.to(torch.float32)).to(torch.float64) for y in (m - moved, m + moved))
            moved, m = high - low, torch.maximum(low.abs(), high.abs())
        stretched = (moved * moved).mean().sqrt()
        norm = _UNIT * ((c["sum"] + 2) / 2 + c["root"])
    # The length never falls below that of out_eps alone.
    shortest = torch.maximum(length - stretched, torch.tensor(0.99 * params["out_eps"] ** 0.5, dtype=torch.float64))
    error = (moved + m.abs() * stretched / length) / shortest * (1 + norm) + m.abs() / length * (norm + 2 * _UNIT)
    return 1.01 * gamma * error + 4 * _LEAST * (1 + gamma)


def _weights(x: Tensor, tensors: Mapping[str, Tensor], eps: float, c: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The softmax weights of the sources x [S, D], and E of each: [S], [S]."""
    w = tensors["norm"].to(torch.float64) * tensors["query"].to(torch.float64)
    rstd = 1 / ((x * x).mean(1) + eps).sqrt()
    logit = (x @ w) * rstd
    score = (c["sum"] + 1) * (x.abs() @ w.abs()) * rstd + logit.abs() * ((c["sum"] + 2) / 2 + c["root"] + 1)
    distance = logit.amax() - logit
    return torch.softmax(logit, 0), score + c["range"] * distance + c["exp"]


def _kappa(x: Tensor, weights: Tensor) -> Tensor:
    """κ of cluster7's quad; inf if that is 0 while its terms are not."""
    mix, last = weights[:-1] @ x[:-1], weights[-1] * x[-1]
    terms = (mix * mix).sum() + 2 * (mix * last).abs().sum() + (last * last).sum()
    quad = ((mix + last) ** 2).sum()
    return torch.where(terms == 0, 1.0, terms / quad)


def locate(case: Case, schedule: str, output: str, index: tuple[int, ...]) -> dict[str, int]:
    """The cluster (one a token), CTA rank, warp, lane and register that made an element of any output."""
    rank, column = divmod(index[-1], D // reference.CTAS)
    thread, register = divmod(column, reference.COLUMNS)
    token = index[1] if output == "delta" else index[0]
    return {"cluster": token, "rank": rank, "warp": thread // 32, "lane": thread % 32, "register": register}


KERNEL = Kernel("attn_res", reference, _CASES, inputs, bound, locate)
