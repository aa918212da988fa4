"""One of N parts of a list: together the parts hold every item once, and always the same ones."""

import re
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def parse(text: str) -> tuple[int, int]:
    """(I, N) of "I/N" with I from 1 to N; ValueError for anything else."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"shard: got {text!r}, allowed is I/N with I from 1 to N, such as 1/4")
    return int(found[1]), int(found[2])


def part(items: Sequence[Item], text: str | None) -> list[Item]:
    """Every N-th of ``items`` from the I-th on; all without ``text``. ValueError for a text that is no I/N."""
    if text is None:
        return list(items)
    number, count = parse(text)
    return list(items[number - 1 :: count])
