"""How the tables of this package are written: a candidate a row."""

from collections.abc import Iterable

from tools.faults.patch import Edit, Fault


def variants(kernel: str, rows: Iterable[tuple[str, ...]]) -> tuple[Fault, ...]:
    """The rows (name, what, old, new, and further old, new if it takes more) as edits of the plain candidate."""
    return tuple(_variant(kernel, *row) for row in rows)


def _variant(kernel: str, name: str, what: str, *texts: str) -> Fault:
    pairs = zip(texts[::2], texts[1::2], strict=True)
    edits = tuple(Edit(f"tools/faults/plain/{kernel}.py", old, new) for old, new in pairs)
    return Fault(name, kernel, "model", what, case="", edits=edits)
