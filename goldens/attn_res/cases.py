"""AttnRes' cases."""

from goldens.attn_res.recipes import RECIPES
from goldens.case import Case

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
    whole: bool = False,
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
        whole=whole,
    )


def grid(i: int) -> Case:
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


# Not those of one block or none, nor of many tokens.
_ON_DEMAND = [recipe for recipe in RECIPES if recipe not in ("halfway", "three-kinds")]

CASES = (
    # Every branch once, in as few rows of 14 KiB as that takes.
    # Seeds are ones that tell out_eps from the fp32 number above it; and eps from both its neighbours, a mean in two
    # roundings, and the unit's root from the nearest.
    make_case(0, 1, "halfway", write=0, seed=1, whole=True),
    make_case(1, 1, "small", has_delta=False, write=0, final=True, aux=2, eps=(1e-5, 1e-6), seed=634, direct=True),
    make_case(1, 1, "opposing-sources", direct=True),
    make_case(1, 2, "half-nan"),
    make_case(1, 1, "zeros", slots=1, write=0, aux=1, direct=True),
    make_case(8, 1, "dominant", write=3),
    # Every scalar and every order at a turning point of a rounding, in each token: the quad form and the direct norm,
    # final with a mailbox, and the other numbers of blocks.
    make_case(8, 3, "ties", rows=9, has_delta=False, eps=(1e-5, 1e-6), direct=True, seed=2),
    make_case(5, 3, "ties", rows=7, slots=2, capacity=6, write=3, final=True, aux=1, seed=1, direct=True),
    make_case(0, 2, "ties", has_delta=False, final=True, seed=2, direct=True),
    make_case(3, 1, "nearly-opposing", rows=5, has_delta=False, direct=True, seed=1),
    make_case(4, 1, "nearly-opposing", rows=6, has_delta=False, final=True, eps=(1e-5, 1e-6), seed=16, direct=True),
    make_case(6, 1, "nearly-opposing", rows=8, has_delta=False, eps=(1e-5, 1e-6), seed=4),
    make_case(7, 1, "ties", rows=9, final=True, direct=True),
    # A delta that replaces the prefix, of any bits in three slots and with a NaN: converted, not copied.
    make_case(1, 1, "half-nan", slots=3, capacity=2, has_delta=False, direct=True),
    make_case(0, 1, "nan", has_delta=False, direct=True),
    # Weights on both sides of 2^-126, and scores that a floor in place of −inf would reach.
    make_case(2, 2, "edge-of-flush", has_delta=False),
    make_case(2, 1, "far-below", has_delta=False),
    # More tokens than a warp, two warps and four have lanes, and slots that no power of two holds.
    make_case(1, 131, "three-kinds", write=0, direct=True),
    make_case(1, 3, "ties", slots=7, capacity=4),
    # On demand: the parameters pairwise, every recipe in both branches, and sizes.
    *(grid(i) for i in range(36)),
    *(make_case(1, 3, recipe, direct=True, committed=False) for recipe in _ON_DEMAND),
    *(make_case(3, 2, r, slots=2, has_delta=False, final=True, committed=False) for r in _ON_DEMAND),
    make_case(1, 256, "opposing-sources", direct=True, committed=False),
    make_case(2, 64, seed=1, direct=True, committed=False),
    make_case(3, 64, final=True, committed=False),
    make_case(8, 64, write=7, direct=True, committed=False),
    make_case(4, 256, "wide", slots=3, capacity=300, final=True, committed=False),
    make_case(1, 4096, committed=False),
)
