"""FMHA's cases."""

from goldens.case import Case
from goldens.fmha.recipes import RECIPES
from reference import fmha as reference


def make_case(
    d: int,
    causal: bool,
    n: int | tuple[int, int],
    recipe: str,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (1, 1),
    scale: float | None = None,
    seed: int = 0,
    committed: bool = True,
    schedules: tuple[str, ...] | None = None,
    packed: tuple[tuple[int, int], ...] = (),
    whole: bool = False,
) -> Case:
    """A case by its dimensions; n is N, or (Nq, Nk); heads is (Hq, Hkv) of one batch.

    schedules: whose exact outputs the golden holds, by default ``k2`` where it supports the shapes. packed: the
    (Nq, Nk) of each of several sequences, whose sums are n.
    """
    n_q, n_k = (n, n) if isinstance(n, int) else n
    if packed and (sum(q for q, _ in packed), sum(k for _, k in packed)) != (n_q, n_k):
        raise ValueError(f"packed: got {packed}, whose sums are not n = {(n_q, n_k)}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, allowed are {', '.join(RECIPES)}")
    if min(n_q, n_k, batch, *heads) < 1 or heads[0] % heads[1]:
        raise ValueError(f"n, batch, heads: got {n}, {batch}, {heads}; all are at least 1, Hq a multiple of Hkv")
    length = f"n{n_q}" if n_q == n_k else f"q{n_q}-k{n_k}"
    parts = [f"d{d}", "causal" if causal else "", length, f"b{batch}" if batch > 1 else ""]
    parts += [f"h{heads[0]}-{heads[1]}" if heads != (1, 1) else "", "" if scale is None else f"scale{scale:g}", recipe]
    parts += ["packed" + ".".join(f"{q}x{k}" for q, k in packed) if packed else "", f"s{seed}" if seed else ""]
    dims = {"batch": batch, "heads_q": heads[0], "heads_kv": heads[1], "n_q": n_q, "n_k": n_k, "d": d}
    dims |= {f"n_q{i}": q for i, (q, _) in enumerate(packed)} | {f"n_k{i}": k for i, (_, k) in enumerate(packed)}
    q, k = (batch * heads[0], n_q, d), (batch * heads[1], n_k, d)
    if schedules is None:
        schedules = () if packed or reference.k2_refusal(q, k) else ("k2",)
    return Case(
        kernel="fmha",
        name="-".join(part for part in parts if part),
        dims=dims,
        params={"causal": causal, "scale": scale},
        recipe=recipe,
        seed=seed,
        schedules=schedules,
        committed=committed,
        whole=whole,
    )


WGMMA = ("wgmma128", "wgmma176")
_HOSTILE = ("wide", "cancel", "ties", "subnormal", "zeros", "overflow", "constant", "halfway", "inf", "bits")
_RAGGED = ("wide", "cancel", "zeros", "overflow", "constant", "nan", "bits", "negative")
_PACKED = ((5, 9), (1, 1), (0, 4), (7, 0), (13, 46))
# Rows 64 … of a sequence start to visit a tile of 128 keys, or of 176, one key later, or have been for one key. Rows
# 0 … 63 of one see no key.
_PACKED_EDGES = ((82, 274), (66, 131), (0, 3), (82, 194), (66, 179), (3, 0), (80, 10))
_PACKED_THIRDS = ((3, 140), (0, 5), (5, 300), (2, 0), (4, 177))
_PACKED_LONG = ((180, 180), (1, 300), (0, 1), (64, 64), (5, 0), (150, 255), (100, 100))

CASES = (
    # Every recipe, each with and without a mask where the mask changes what is computed.
    make_case(64, False, 64, "normal"),
    make_case(64, True, 64, "normal", whole=True),
    *(make_case(64, True, 128, recipe) for recipe in ("nan", "dominant", "inf", "bits")),
    *(make_case(64, False, 64, recipe) for recipe in ("ties", "subnormal", "zeros", "overflow", "constant", "wide")),
    *(make_case(64, True, 64, recipe) for recipe in ("negative", "cancel")),
    # Both widths, several tiles, batches, a scale of the caller's.
    make_case(128, False, 64, "normal"),
    make_case(128, True, 128, "normal"),
    make_case(128, True, 64, "wide"),
    make_case(64, False, 128, "halfway"),
    make_case(64, True, 64, "normal", batch=2),
    make_case(64, False, 64, "normal", scale=0.5),
    make_case(64, True, 512, "normal"),
    # Beyond k2: other lengths, ragged ends, rows without keys, grouped heads.
    make_case(64, True, (65, 64), "normal"),
    make_case(64, True, (17, 80), "normal"),
    make_case(64, False, (1, 65), "normal"),
    make_case(64, True, 33, "normal", heads=(4, 2)),
    # Tensor cores. Diagonal, full and ragged tiles; rows without keys; a group of rows that skips a tile; other tiles.
    make_case(64, True, (70, 134), "normal", schedules=WGMMA),
    make_case(64, True, (20, 9), "normal", schedules=WGMMA[:1]),
    make_case(128, True, (16, 132), "normal", schedules=WGMMA),
    make_case(64, False, (3, 129), "negative", schedules=WGMMA[:1]),
    make_case(64, False, (4, 144), "dominant", schedules=WGMMA[:1]),
    make_case(64, True, (6, 33), "normal", heads=(4, 2), scale=0.3, schedules=WGMMA[:1], whole=True),
    make_case(64, False, (33, 40), "nan", schedules=WGMMA[:1]),
    # Three tiles of either width, grouped heads of two batches, infinities beyond the mask.
    make_case(64, False, (5, 400), "normal", batch=2, heads=(6, 3), schedules=WGMMA),
    make_case(64, True, (70, 134), "inf", schedules=WGMMA),
    make_case(64, False, (3, 400), "ties", schedules=WGMMA),
    make_case(64, True, (9, 400), "halfway", schedules=WGMMA),
    make_case(64, True, (9, 400), "subnormal", schedules=WGMMA),
    # Scores that no finite mask is below.
    make_case(64, True, (66, 190), "far", schedules=WGMMA),
    make_case(64, True, 64, "far"),
    make_case(64, True, 64, "overflow"),
    make_case(64, True, 192, "subnormal"),
    # Weights' sums near 1 and lse below it, where lg2 is cut; a scale that times fp32(log2 e) is not c.
    make_case(64, False, (2, 3), "normal", scale=0.9, seed=7, schedules=WGMMA[:1]),
    # A neighbour full of NaN, a sequence without keys, one without queries, one of a single row.
    make_case(64, True, (26, 60), "normal", heads=(2, 1), packed=_PACKED, schedules=WGMMA[:1]),
    # Both widths of tiles: five tiles and more, many heads, groups of three, later sequences, rows beyond 128, a second
    # CTA of rows; roundings of a row's sum and reciprocal that decide an output; every hostile recipe on two tiles.
    make_case(64, True, (200, 530), "near-one", schedules=WGMMA),
    make_case(64, False, (2, 1000), "near-one", batch=2, heads=(9, 3), scale=0.21, schedules=WGMMA),
    make_case(128, False, (2, 900), "near-one", batch=3, heads=(4, 2), schedules=WGMMA),
    make_case(128, False, (14, 622), "near-one", heads=(3, 1), packed=_PACKED_THIRDS, schedules=WGMMA),
    make_case(64, True, (14, 622), "near-one", heads=(4, 2), packed=_PACKED_THIRDS, schedules=WGMMA),
    make_case(64, True, (379, 791), "marks", packed=_PACKED_EDGES, schedules=WGMMA),
    make_case(64, True, (40, 494), "means", schedules=WGMMA),
    make_case(64, True, 190, "means", schedules=WGMMA),
    make_case(64, True, 20, "normal", schedules=WGMMA),
    make_case(64, True, (20, 400), "far-below", scale=0.9, schedules=WGMMA),
    make_case(64, True, (20, 400), "faint", schedules=WGMMA),
    make_case(64, True, (12, 400), "vanishing", schedules=WGMMA),
    make_case(64, True, (12, 200), "hidden", schedules=WGMMA),
    *(make_case(64, True, (6, 184), recipe, schedules=WGMMA) for recipe in _RAGGED),
    make_case(128, False, (3, 180), "wide", schedules=WGMMA),
    # The same for k2: five tiles, nine sequences, ties after every even number of keys.
    make_case(64, False, 320, "halfway"),
    make_case(64, True, 320, "own"),
    make_case(64, True, 64, "own", batch=9),
    make_case(64, True, 64, "cancel", batch=3),
    make_case(64, True, 320, "means"),
    *(make_case(64, True, 128, recipe) for recipe in ("far-below", "faint", "marks")),
    make_case(64, False, 64, "vanishing"),
    make_case(128, False, 64, "normal", scale=0.21),
    # On demand.
    make_case(64, False, (300, 500), "normal", heads=(2, 1), schedules=WGMMA, committed=False),
    make_case(128, True, (200, 300), "normal", heads=(2, 1), schedules=WGMMA, committed=False),
    *(make_case(64, True, (200, 336), recipe, schedules=WGMMA, committed=False) for recipe in _HOSTILE),
    make_case(128, True, 1024, "normal", seed=1, schedules=WGMMA, committed=False),
    make_case(128, True, (500, 900), "normal", heads=(2, 2), packed=_PACKED_LONG, schedules=WGMMA, committed=False),
    make_case(128, True, 256, "normal", committed=False),
    make_case(128, False, 512, "normal", committed=False),
    make_case(64, True, 1024, "dominant", committed=False),
    make_case(128, False, 1024, "normal", committed=False),
    make_case(64, False, 2048, "wide", committed=False),
    make_case(128, True, 4096, "normal", committed=False),
)
