"""``goldens.place``: where failures lie, in words that name the dimensions of the interface."""

import pytest
import torch

from goldens.compare import against_exact, against_model
from goldens.place import place

SHAPE, AXES = torch.Size((16, 4, 128)), ("token", "head", "channel")
EVERY = slice(None)
PLACES = {
    "block": ((6, EVERY, slice(40, 48)), "all 32 failures in token 6, channels 40 to 47, every element there"),
    "rows": ((slice(12, 16),), "all 2,048 failures in tokens 12 to 15, every element there"),
    "steps": ((EVERY, EVERY, slice(3, None, 8)), "channels 3 to 123 in steps of 8, every element there"),
    "few": (([1, 5, 7], 0, EVERY), "all 384 failures in tokens 1, 5 and 7, head 0, every element there"),
    "pair": (([0, 15], 2, 0), "all 2 failures in tokens 0 and 15, head 2, channel 0, every element there"),
    "diagonal": (([3, 4, 5], [0, 1, 2], 9), "all 3 failures in tokens 3 to 5, heads 0 to 2, channel 9"),
    "gaps": (([0, 1, 3, 4, 9], 1, 0), "all 5 failures in tokens 0 to 9, head 1, channel 0"),
    "all": ((EVERY,), "all 8,192 elements fail"),
    "one": ((1, 2, 3), ""),
    "none": (([],), ""),
}


@pytest.mark.parametrize(("index", "words"), PLACES.values(), ids=PLACES)
def test_failures_are_placed_by_dimension(index: tuple, words: str) -> None:
    failing = torch.zeros(SHAPE, dtype=torch.bool)
    failing[index] = True
    found = place(SHAPE, failing.reshape(-1).nonzero().squeeze(1), AXES)
    assert found.endswith(words) if words else found == ""


def test_scattered_failures_have_no_place() -> None:
    where = torch.tensor([0, 130, 260, 390])
    assert place(torch.Size((4, 130)), where + torch.tensor([0, 1, 2, 3]), ("row", "column")) != ""
    everywhere = torch.arange(16) * 17 % 256
    assert place(torch.Size((16, 16)), everywhere.sort().values, ("row", "column")) == ""


def test_dimensions_without_names_are_numbered() -> None:
    assert place(torch.Size((4, 4)), torch.tensor([4, 6])) == (
        "all 2 failures in dimension 0: 1, dimension 1: 0 and 2, every element there"
    )
    assert place(torch.Size((3, 2)), torch.tensor([0, 2]), ("batch", "box")).startswith(
        "all 2 failures in batches 0 to 1"
    )
    assert place(torch.Size(()), torch.tensor([0])) == ""


def test_both_verdicts_say_it() -> None:
    want = torch.ones(16, 128)
    got = want.clone()
    got[6, 40:48] = 2.0
    exact = against_exact("o", got, want, axes=("token", "channel"))
    model = against_model(
        "o", got, want, want.double(), torch.full(want.shape, 0.5).double(), axes=("token", "channel")
    )
    assert exact.place == model.place == "all 8 failures in token 6, channels 40 to 47, every element there"
    assert against_exact("o", want, want).place == ""
