"""The cache insert's cases."""

from goldens.cache_insert.recipes import RECIPES
from goldens.case import Case


def make_case(
    rows: int,
    values: str,
    slots: str = "spread",
    *,
    pages: int = 2,
    page_size: int = 2,
    committed: bool = True,
    whole: bool = False,
    seed: int = 0,
) -> Case:
    """A case by B, the recipe of its values and the pattern of its slots."""
    size = f"p{pages}x{page_size}" if (pages, page_size) != (2, 2) else ""
    parts = [f"b{rows}", size, slots if slots != "spread" else "", values, f"s{seed}" if seed else ""]
    return Case(
        kernel="cache_insert",
        name="-".join(part for part in parts if part),
        dims={"rows": rows, "pages": pages, "page_size": page_size},
        params={"eps": RECIPES[values].eps},
        recipe=f"{values}@{slots}",
        seed=seed,
        schedules=("insert",),
        committed=committed,
        whole=whole,
    )


CASES = (
    # The pitfalls' two, by hand in tests/test_cache_insert.py.
    make_case(1, "unit", pages=1, page_size=1),
    make_case(4, "padded", "alternate", pages=2, page_size=3, whole=True),
    # What the numbers may be.
    make_case(2, "normal", "crossing"),
    make_case(1, "ties", pages=1, page_size=1),
    make_case(1, "saturating", pages=1, page_size=1),
    make_case(1, "subnormal", pages=1, page_size=1),
    make_case(2, "zeros", "page", pages=1, page_size=2),
    make_case(1, "scale-zero", pages=1, page_size=1),
    make_case(1, "scale-tiny", pages=1, page_size=1),
    make_case(1, "scale-huge", pages=1, page_size=1),
    make_case(1, "underflow", pages=1, page_size=1),
    make_case(3, "bits", pages=1, page_size=3),
    # Two seeds that between them notice each wrong order, rounding or root of the norm that is tried.
    *(make_case(1, "halfway", pages=1, page_size=1, seed=seed) for seed in (60, 447)),
    make_case(1, "faint-halfway", pages=1, page_size=1, seed=109),  # tells eps from the fp32 number above it
    # Rows whose norm, an ULP up or down, moves a byte.
    make_case(12, "edge", pages=3, page_size=5),
    make_case(2, "sevenths", pages=1, page_size=2),
    make_case(3, "specials", "page", pages=1, page_size=3),
    make_case(3, "padded", "page", pages=1, page_size=3),
    make_case(1, "scale-negative", pages=1, page_size=1),
    # What the slots may be.
    make_case(3, "normal", "page", pages=2, page_size=3),
    make_case(8, "normal", "beyond", pages=1, page_size=2),
    make_case(2, "normal", "none", pages=1, page_size=1),
    make_case(16, "normal", "mixed", pages=4, page_size=4),
    make_case(4, "normal", pages=7, page_size=1),
    make_case(33, "normal", pages=5, page_size=8),
    # On demand: every recipe and pattern in a larger cache.
    *(make_case(16, values, pages=5, page_size=16, committed=False) for values in RECIPES),
    *(
        make_case(64, "normal", slots, pages=3, page_size=64, committed=False)
        for slots in ("spread", "alternate", "none", "page", "crossing", "beyond")
    ),
    make_case(64, "wide", "spread", pages=1, page_size=64, committed=False),
)
