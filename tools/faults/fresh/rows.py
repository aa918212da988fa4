"""How the lists of this folder are written: a fault a row."""

from collections.abc import Iterable

from tools.faults.patch import Edit, Fault


def faults(kernel: str, rows: Iterable[tuple[str, ...]]) -> tuple[Fault, ...]:
    """The rows (name, schedule, what, old, new, and a second old, new if it takes two) as faults of the reference."""
    return tuple(_fault(kernel, *row) for row in rows)


def _fault(kernel: str, name: str, schedule: str, what: str, *texts: str) -> Fault:
    pairs = zip(texts[::2], texts[1::2], strict=True)
    edits = tuple(Edit(f"reference/{kernel}.py", old, new) for old, new in pairs)
    return Fault(name, kernel, schedule, what, case="", edits=edits)
