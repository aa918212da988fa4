"""The MLA query's cases."""

from goldens.case import Case
from goldens.mla_query.recipes import RECIPES
from reference import mla_query as reference


def make_case(
    heads: int,
    rows: int,
    values: str = "normal",
    slots: str = "spread",
    *,
    pages: int = 1,
    page_size: int = 3,
    width: int = reference.QKV,
    whole: bool = False,
    committed: bool = True,
    seed: int = 0,
) -> Case:
    """A case by heads, B, the recipe of its values and the pattern of its slots; ``whole`` keeps the large weights in
    its file."""
    parts = [f"h{heads}", f"b{rows}", f"w{width}" if width != reference.QKV else ""]
    parts += [f"p{pages}x{page_size}" if (pages, page_size) != (1, 3) else ""]
    parts += [slots if slots != "spread" else "", values, f"s{seed}" if seed else ""]
    return Case(
        kernel="mla_query",
        name="-".join(part for part in parts if part),
        dims={"rows": rows, "width": width, "pages": pages, "page_size": page_size},
        params={"heads": heads, "eps": RECIPES[values].eps},
        recipe=f"{values}@{slots}",
        seed=seed,
        schedules=("tiled",) if reference.small_refusal(heads, rows) else ("small", "tiled"),
        committed=committed,
        whole=whole,
    )


def _large(heads: int, rows: int, values: str = "normal", width: int = reference.QKV) -> Case:
    """A case on demand, in a larger cache."""
    return make_case(heads, rows, values, pages=9, page_size=16, width=width, committed=False)


CASES = (
    # One head. The first file is whole; the others have its weights, or some that their recipe makes.
    make_case(1, 1, "normal"),
    make_case(1, 4, "padded", "alternate", pages=2),
    make_case(1, 1, "ties", page_size=1),
    make_case(1, 2, "cancel", "beyond", page_size=1),
    make_case(1, 1, "cancel-latent", "none", page_size=1),
    # Seeds that between them notice, in both schedules, each wrong order, division and root of the norm tried.
    *(make_case(1, 1, "halfway", page_size=1, seed=seed) for seed in (10, 990, 3546)),
    make_case(1, 1, "underflow", page_size=1),
    make_case(1, 1, "scale-huge", page_size=1),
    # The norm of five rows each, an ULP up or down.
    make_case(1, 5, "edge", "crossing", pages=2),
    make_case(1, 5, "edge-more", "none", page_size=1),
    make_case(1, 2, "sevenths", "mixed", pages=2),
    make_case(1, 2, "operands", "none", page_size=1),
    make_case(1, 2, "faint", "page", page_size=2),
    make_case(1, 2, "zeros", "crossing", pages=2, page_size=1),
    make_case(1, 3, "bits", "page"),
    *(make_case(1, 1, values, page_size=1) for values in ("saturating", "subnormal", "scale-tiny", "scale-zero")),
    # Several heads: both sizes of cluster, the most rows that small takes, a row pitch. Where q or the latent is what
    # the roundings leave, each head's and row's order of sums decides.
    make_case(6, 2, "normal", "page", pages=2, width=2176),
    make_case(6, 2, "wide", "none", page_size=1, width=2120),
    make_case(6, 5, "cancel-latent", "mixed", pages=2, width=2176),
    make_case(12, 1, "normal", "page", page_size=1),
    make_case(12, 3, "cancel", "crossing", pages=2, width=2128),
    # Many rows: each tile of tiled, and its last row; rows of NaN beside others in a tile.
    make_case(1, 64, "cancel", "page", pages=2, page_size=40, width=2176),
    make_case(1, 17, "padded", "page", pages=2, page_size=8),
    # On demand: every recipe with one head, every B of small, a row pitch.
    *(_large(1, 5, values) for values in RECIPES),
    *(_large(1, rows, width=2176) for rows in (1, 2, 3, 4, 6, 17, 64)),
    # The two head counts in use, on both sides of the switch and of each tile's edge.
    *(_large(12, rows) for rows in (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64)),
    *(_large(6, rows) for rows in (1, 2, 3, 4, 5, 6, 16, 31, 64)),
    *(_large(heads, 3, values) for heads in (12, 6) for values in RECIPES if values != "normal"),
    *(
        make_case(heads, rows, "padded", slots, pages=3, page_size=32, committed=False)
        for heads, rows in ((6, 5), (12, 64))
        for slots in ("alternate", "none", "page", "crossing", "beyond")
    ),
    _large(12, 64, "wide"),
    _large(12, 64, "cancel"),
)
