"""KDA's cases."""

from typing import Any

from goldens.case import Case
from goldens.kda.recipes import RECIPES
from reference import kda as reference

SCALE = reference.D**-0.5


def make_case(
    tokens: int,
    heads: int = 1,
    values: str = "normal",
    offsets: str = "-",
    *,
    batch: int = 1,
    state: str = "-",
    final: str | None = None,
    lower_bound: float = -5.0,
    scale: float = SCALE,
    whole: bool = False,
    committed: bool = True,
    seed: int = 0,
    schedules: tuple[str, ...] = ("chunk16",),
) -> Case:
    """A case by its sizes, the recipe of its values, its offsets, and the types of its first and last state."""
    parts = [f"t{tokens}", f"h{heads}" if heads != 1 else "", f"b{batch}" if batch != 1 else ""]
    parts += [
        offsets if offsets != "-" else "",
        f"from-{state}" if state != "-" else "",
        f"to-{final}" if final else "",
    ]
    parts += [f"lb{lower_bound:g}" if lower_bound != -5 else "", f"scale{scale:g}" if scale != SCALE else "", values]
    parts += [f"s{seed}" if seed else ""]
    return Case(
        kernel="kda",
        name="-".join(part for part in parts if part),
        dims={"batch": batch, "tokens": tokens, "heads": heads},
        params={"scale": scale, "lower_bound": lower_bound, "final_state": final},
        recipe=f"{values}@{offsets}@{state}",
        seed=seed,
        schedules=schedules,
        committed=committed,
        exact_only=_exact_only(values, tokens, lower_bound),
        whole=whole,
    )


_SCAN64, _SCAN416, _SCAN512 = ((f"chunk16_scan{segment}",) for segment in reference.SEGMENTS)
_ACCUMULATES = "what does not decay keeps every chunk's error: in the worst case more than there is to output"


_NO_DECAY = ("repeated", "collinear", "bound-beside-none", "still", "probing", "settled")


def _exact_only(values: str, tokens: int, lower_bound: float) -> str | None:
    """Why the model is no judge: the derived bound is beyond the outputs."""
    lasting = abs(lower_bound) < 0.1 or values in _NO_DECAY
    return _ACCUMULATES if lasting and tokens > 2 * reference.CHUNK else None


def _large(tokens: int, heads: int = 1, values: str = "normal", offsets: str = "-", **more: Any) -> Case:
    return make_case(tokens, heads, values, offsets, committed=False, **more)


CASES = (
    # Two chunks, in a file that needs no code; then every way to begin and to end a state, every tail, sequences side
    # by side.
    make_case(20, 1, "normal", whole=True),
    make_case(17, 1, "normal", state="fp32", final="fp32"),
    make_case(2, 2, "normal", state="bf16"),
    make_case(1, 1, "normal", final="bf16"),
    make_case(18, 1, "bound-beside-none", final="fp32"),
    make_case(136, 1, "normal", "tails"),
    make_case(281, 1, "normal", "lengths"),
    make_case(5, 1, "normal", "first-empty", state="bf16", final="bf16"),
    make_case(3, 2, "normal", batch=2, lower_bound=0.1),
    make_case(18, 1, "normal", lower_bound=0.0, scale=1.0),
    make_case(7, 1, "reading", state="fp32", lower_bound=-1.0),
    # Hostile values.
    make_case(18, 1, "cancel", state="fp32"),
    # Seeds of which one notices the order of the norm's sum and its root, the other the root again.
    make_case(4, 1, "still", seed=464),
    make_case(4, 1, "still", seed=8),
    make_case(19, 1, "repeated"),
    make_case(18, 1, "collinear"),
    make_case(18, 1, "saturated"),
    make_case(9, 1, "inf-gates"),
    make_case(6, 1, "faint"),
    # Seeds that tell eps from the fp32 number above it; scale times the root of the norm from scale times the normed;
    # substitution in fp32 from one in fp64.
    *(make_case(4, 1, "faint", seed=seed) for seed in (1771, 1664)),
    make_case(12, 1, "collinear", seed=2219),
    make_case(1, 1, "whispering", state="bf16", scale=1.5),
    make_case(1, 1, "subnormal", scale=2.0**-20),  # sums below the least fp32
    make_case(7, 1, "zeros"),
    make_case(9, 1, "sizes"),
    make_case(5, 1, "subnormal", state="fp32"),
    make_case(9, 1, "wide"),
    make_case(21, 1, "nan", "thirds"),
    make_case(3, 1, "inf-state", state="fp32"),
    # Three segments of 64 tokens, the last of one, behind a short sequence and an empty one; a decay that leaves much.
    make_case(131, 1, "normal", "scan", state="bf16", lower_bound=-0.0625, schedules=_SCAN64),
    # Lengths about a chunk and four of them, and such that their order is no involution, with states, and a decay that
    # leaves much; a batch with states; one-token sequences behind others, without.
    make_case(370, 1, "rows", "around-chunks", state="fp32", final="fp32", lower_bound=-0.0625),
    make_case(60, 2, "rows", "cycle", state="bf16", final="bf16"),
    make_case(17, 2, "rows", batch=3, state="fp32", final="fp32", lower_bound=-1.3),
    make_case(21, 1, "normal", "ones"),
    make_case(5, 1, "strange", "first-empty", state="bf16", final="bf16", lower_bound=-1.0),
    # Gates of many heads, in the last bit of a state that only decays; decays and states that are next to nothing.
    make_case(2, 16, "rows", state="fp32", final="fp32", lower_bound=-0.9),
    make_case(18, 1, "fading", state="fp32", final="fp32"),
    make_case(18, 1, "opposed", state="fp32"),
    make_case(48, 1, "settled", state="fp32", final="fp32"),
    # More than 16 chunks; more than 8 segments; segments of a state that is next to nothing.
    make_case(290, 1, "rows", lower_bound=-0.0625),
    make_case(660, 1, "rows", lower_bound=-0.0625, schedules=_SCAN64),
    make_case(66, 1, "subnormal", state="fp32", lower_bound=-0.0625, schedules=_SCAN64),
    # Seeds: T at a tie; the last bits of the norms and of eps, ties of K⁺ and Q⁺, in 64 tokens.
    make_case(18, 1, "probing", state="bf16", seed=17),
    *(make_case(4, 16, "faint", state="bf16", lower_bound=0.0, seed=seed) for seed in (59, 365)),
    # For a candidate of no schedule: where its own roundings are small beside a fault's.
    make_case(71, 1, "resting", "one-behind", state="fp32", final="fp32", lower_bound=-0.25),
    make_case(16, 1, "balanced", state="fp32", final="fp32"),
    # Segments: whole ones too, two long sequences, two heads; just beyond the longer ones.
    make_case(195, 2, "asked", "around-64", state="fp32", final="fp32", lower_bound=-0.0625, schedules=_SCAN64),
    make_case(420, 1, "asked", "beyond-416", state="bf16", final="bf16", lower_bound=-0.0078125, schedules=_SCAN416),
    make_case(514, 1, "asked", "beyond-512", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    # On demand: every recipe over several chunks with states of either type.
    *(_large(100, 2, values, state="fp32", final="fp32", schedules=("chunk16", *_SCAN64)) for values in RECIPES),
    *(_large(77, 2, values, state="bf16", final="bf16", batch=2, lower_bound=-1.0) for values in RECIPES),
    _large(64, 2, "normal", "empty-i32", state="fp32", final="fp32"),
    _large(0, 2, "normal", "nothing", state="fp32", final="fp32"),
    _large(0, 2, "normal", "nothing", final="bf16"),
    _large(136, 3, "normal", "tails", state="bf16", final="bf16"),
    _large(281, 4, "normal", "lengths", state="fp32", final="fp32"),
    _large(1024, 2, "normal", "mixed-i32", state="fp32", final="fp32"),
    _large(64, 40, "normal", final="fp32"),
    _large(33, 2, "normal", batch=9, state="bf16", final="bf16"),
    _large(1024, 4, "normal", lower_bound=0.0, final="fp32"),
    _large(1024, 4, "bound-beside-none", final="fp32"),
    _large(8192, 1, "normal", "six", state="bf16", final="bf16"),
    _large(4096, 1, "repeated", final="fp32"),
    _large(16384, 1, "repeated", final="fp32"),
    # Segments: NaN in the second of two sequences; every kind of state; lengths about whole segments.
    _large(140, 1, "nan", "two-of-70", state="bf16", final="bf16", lower_bound=-0.0625, schedules=_SCAN64),
    _large(322, 2, "normal", "scan-i32", state="bf16", final="bf16", lower_bound=-0.0625, schedules=_SCAN64),
    _large(193, 1, "normal", batch=2, final="fp32", lower_bound=-0.0625, schedules=_SCAN64),
    _large(1682, 1, "normal", "scan416-i32", state="bf16", final="bf16", lower_bound=-0.0078125, schedules=_SCAN416),
    _large(2048, 1, "repeated", final="fp32", schedules=_SCAN416),
    _large(512, 1, "normal", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    _large(513, 2, "normal", state="fp32", final="fp32", lower_bound=-0.0078125, schedules=_SCAN512),
    _large(1024, 1, "normal", lower_bound=-0.0078125, final="bf16", schedules=_SCAN512),
    _large(1300, 1, "bound-beside-none", state="bf16", final="bf16", schedules=_SCAN512),
    _large(2048, 1, "repeated", state="fp32", final="fp32", schedules=_SCAN512),
)
