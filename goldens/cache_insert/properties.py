"""What rows that are written to a paged cache owe bit for bit; ``goldens.mla_query`` shares it."""

from collections.abc import Callable

import torch

from goldens.case import Case, Params, Part, Property, Tensors, Variant
from goldens.invariance import nan_like, some, strides


def _row_parts(inputs: Tensors, row: int, mine: int) -> tuple[Part, ...]:
    """A row's output, and its place in the cache if it has one."""
    parts = [Part("output", (slice(mine, mine + 1),), (slice(row, row + 1),))]
    page_size, slot = inputs["cache"].shape[1], int(inputs["slots"][row])
    if 0 <= slot < inputs["cache"].shape[0] * page_size:
        place = (slot // page_size, slot % page_size)
        parts.append(Part("cache", place, place))
    return tuple(parts)


def rows(*names: str, takes: Callable[[Case, int], bool] = lambda case, count: True) -> Property:
    """Rows of the tensors ``names``: alone, in reverse order, with all others NaN, behind one that is not inserted.

    takes: whether every schedule of the case takes so many rows.
    """

    def of_rows(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
        rows_of = {name: inputs[name] for name in (*names, "slots")}
        count, variants = len(inputs["slots"]), []
        for row in some(count):
            alone = inputs | {name: x[row : row + 1].contiguous() for name, x in rows_of.items()}
            nan = inputs | {name: nan_like(x) if name != "slots" else x for name, x in rows_of.items()}
            for name in names:
                nan[name][row] = inputs[name][row]
            variants += [
                Variant(f"row {row} alone", alone, params, _row_parts(inputs, row, 0), batch=True),
                Variant(f"row {row} amid NaN", nan, params, _row_parts(inputs, row, row), batch=True),
            ]
        if count > 1:
            back = inputs | {name: x.flip(0) for name, x in rows_of.items()}
            order = torch.arange(count).flip(0)
            parts = (Part("output", mine=(order,)), Part("cache"))
            variants.append(Variant("reverse order", back, params, parts, batch=True))
        if takes(case, count + 1):
            more = {name: torch.cat([x[:1].flip(-1), x]) for name, x in rows_of.items() if name != "slots"}
            more["slots"] = torch.cat([torch.full_like(inputs["slots"][:1], -1), inputs["slots"]])
            parts = (Part("output", mine=(slice(1, None),)), Part("cache"))
            variants.append(Variant("behind another", inputs | more, params, parts, batch=True))
        return variants

    return of_rows


def places(case: Case, inputs: Tensors, params: Params) -> list[Variant]:
    """The same rows at other places of the cache: its rows in reverse order, and all of them in one page."""
    cache, slots = inputs["cache"], inputs["slots"]
    total = cache.shape[0] * cache.shape[1]
    row = torch.arange(total, device=cache.device)
    place, mirrored = ((x // cache.shape[1], x % cache.shape[1]) for x in (row, row.flip(0)))
    inside = (slots >= 0) & (slots < total)
    back = {
        "cache": cache.flatten(0, 1).flip(0).view(cache.shape),
        "slots": torch.where(inside, total - 1 - slots, slots),
    }
    paged = {"cache": cache.reshape(1, total, -1)}
    return [
        Variant("cache reversed", inputs | back, params, (Part("output"), Part("cache", mirrored, place))),
        Variant("one page", inputs | paged, params, (Part("output"), Part("cache", (0,), place))),
    ]


PROPERTIES = (rows("kv", "k_pe"), places, strides("kv", "k_pe"))
