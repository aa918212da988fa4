"""KDA's speed and accuracy on this GPU as Markdown tables: ``python -m tools.bench_kda [speed | clusters | accuracy]``.

Time of one call: a CUDA graph of some calls back to back on one set of tensors, bf16 states in and out, lower_bound −5.
Beside it fla-core's ``chunk_kda`` in the same run and in a graph as well (by events where it cannot be captured), if
``fla`` can be imported: it needs fla-core and triton, for instance ``PYTHONPATH=/path/to/flash-linear-attention``. It
has fp32 states; Triton tunes its kernels on the first shape, and what is found there serves the others. GB/s counts q,
k, v, g, beta and out once, and the states. The scans are timed where sequences and heads are fewer than half of the
GPU's multiprocessors. After timing some heads are compared with the exact model: a launch that failed must not look
fast. ``clusters`` times every cluster size, ``accuracy`` prints the relative RMS error of both against FP64, both with
fp32 states.
"""

import gc
import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.bench import graph_milliseconds, milliseconds, require_gpu
from tools.environment import headline

D, SCALE, LOWER_BOUND = 128, 128**-0.5, -5.0
LAUNCHES, REPLAYS = 10, 7
CHECKED_HEADS = 2
SCANS = ("chunk16_scan416", "chunk16_scan512")
# Of a sequence, at most: the model takes its chunks one by one.
CHECKED_TOKENS = {"chunk16": 512} | dict.fromkeys(SCANS, 1280)


class Shape(NamedTuple):
    """Heads and the sequences' lengths; ms of FlashKDA and of FLA as published in specs/kda.md, for the same card."""

    heads: int
    lengths: tuple[int, ...]
    flash: float | None = None
    fla: float | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


SIX = (1300, 547, 2048, 963, 271, 3063)
SHAPES = (
    Shape(96, (8192,), 1.559, 3.320),
    Shape(96, SIX, 1.482, 3.521),
    Shape(96, (1024,) * 8, 1.254, 3.276),
    Shape(64, (8192,), 1.311, 2.146),
    Shape(64, SIX, 1.039),
    Shape(12, (2048,)),
    Shape(12, (2048,) * 4),
    Shape(16, (8192,)),
    Shape(4, (65536,)),
)


def tensors(shape: Shape) -> dict[str, Tensor]:
    """Normal inputs; offsets also where there is one sequence."""
    generator = torch.Generator("cuda").manual_seed(shape.tokens + shape.heads)

    def normal(*extents: int) -> Tensor:
        return torch.randn(extents, device="cuda", generator=generator)

    x = {name: normal(1, shape.tokens, shape.heads, D).to(torch.bfloat16) for name in ("q", "k", "v", "g")}
    x["beta"] = normal(1, shape.tokens, shape.heads).to(torch.bfloat16)
    x["A_log"], x["dt_bias"] = normal(shape.heads), normal(shape.heads, D)
    x["initial_state"] = normal(len(shape.lengths), shape.heads, D, D).to(torch.bfloat16)
    x["cu_seqlens"] = torch.tensor([0, *shape.lengths], device="cuda").cumsum(0)
    return x


def ours(x: dict[str, Tensor], **options: Any) -> tuple[Callable[[], None], Tensor, Tensor]:
    """A call of our kernel, and where it writes out and final_state."""
    from cute_impl.kda import fwd

    out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    arguments: dict[str, Any] = {**x, "out": out, "final_state": final}
    return (lambda: fwd(**arguments, scale=SCALE, lower_bound=LOWER_BOUND, **options)), out, final


def theirs(x: dict[str, Tensor]) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """A call of fla-core's kernel on the same tensors, or None if it cannot be imported."""
    try:
        chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    except ImportError:
        return None
    arguments: dict[str, Any] = {name: x[name] for name in ("q", "k", "v", "g", "beta", "A_log", "cu_seqlens")}
    arguments["initial_state"] = x["initial_state"].float().transpose(-1, -2).contiguous()
    arguments["dt_bias"] = x["dt_bias"].flatten()
    switches = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    arguments |= dict.fromkeys((*switches, "output_final_state"), True)

    def call() -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            o, final = chunk_kda(**arguments, scale=SCALE, lower_bound=LOWER_BOUND)
        return o, final.transpose(-1, -2)

    return call


class Found(dict):
    """A tuner's results that answer every key with the first."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> Any:
        return next(iter(self.values()))


def keep_tuning() -> None:
    """What Triton's tuners have found so far serves all shapes: tuning for each H takes a minute."""
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for x in gc.get_objects():
        if isinstance(x, tuner) and x.cache:
            x.cache = Found(x.cache)


def peer_milliseconds(call: Callable[[], object]) -> tuple[float, str]:
    """The peer's time, and a mark if it is one by events."""
    call()
    keep_tuning()
    try:
        return graph_milliseconds(call), ""
    except RuntimeError:
        torch.cuda.synchronize()
        return milliseconds(lambda: [call() for _ in range(LAUNCHES)], REPLAYS) / LAUNCHES, "*"


def some_heads(x: dict[str, Tensor], lengths: tuple[int, ...], sequence: int, tokens: int) -> dict[str, Tensor]:
    """The first tokens of one sequence, its first heads."""
    start, heads = sum(lengths[:sequence]), slice(0, CHECKED_HEADS)
    part = slice(start, start + min(lengths[sequence], tokens))
    few = {name: x[name][:, part, heads].contiguous() for name in ("q", "k", "v", "g", "beta")}
    few |= {name: x[name][heads].contiguous() for name in ("A_log", "dt_bias")}
    return few | {"initial_state": x["initial_state"][sequence : sequence + 1, heads].contiguous()}


def require_exact(x: dict[str, Tensor], shape: Shape, out: Tensor, final: Tensor, schedule: str = "chunk16") -> None:
    """RuntimeError if the last sequence's first heads, up to a number of tokens, are not the exact model's."""
    from reference import kda as reference

    last = len(shape.lengths) - 1
    few = some_heads(x, shape.lengths, last, CHECKED_TOKENS[schedule])
    params = {"scale": SCALE, "lower_bound": LOWER_BOUND, "final_state": "bf16"}
    want = reference.exact(few, params, schedule)
    start, tokens = sum(shape.lengths[:last]), few["q"].shape[1]
    wrong = int((out[:, start : start + tokens, :CHECKED_HEADS] != want["out"]).sum())
    if tokens == shape.lengths[last]:
        wrong += int((final[last, :CHECKED_HEADS] != want["final_state"][0]).sum())
    if wrong:
        where = f"{schedule}, H = {shape.heads}, lengths {shape.lengths}"
        raise RuntimeError(f"{where}: {wrong} values are not the exact model's")


def gigabytes(shape: Shape) -> float:
    """q, k, v, g, out and beta once; bf16 states in and out."""
    states = 2 * len(shape.lengths) * D * D
    return 2e-9 * shape.heads * (shape.tokens * (5 * D + 1) + states)


def describe(lengths: tuple[int, ...]) -> str:
    return f"{len(lengths)} × {lengths[0]}" if len(set(lengths)) == 1 else ", ".join(map(str, lengths))


def speed() -> None:
    """Print the table of times."""
    columns = ["H", "lengths", "cluster", "ours, ms", "GB/s", *(f"{name}, ms" for name in SCANS)]
    columns += ["FlashKDA, ms", "ratio", "FLA here, ms", "ratio", "ratio of the faster scan", "FLA published, ms"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    from cute_impl.kda import cluster_for

    units = torch.cuda.get_device_properties(0).multi_processor_count
    missing = False
    for shape in SHAPES:
        x = tensors(shape)
        call, out, final = ours(x)
        time = graph_milliseconds(call)
        require_exact(x, shape, out, final)
        cells = [str(shape.heads), describe(shape.lengths), str(cluster_for(shape.heads * len(shape.lengths), units))]
        cells += [f"{time:.3f}", f"{1e3 * gigabytes(shape) / time:.0f}"]
        few = 2 * shape.heads * len(shape.lengths) < units
        scans = [scan_milliseconds(x, shape, name) for name in SCANS] if few else []
        cells += [f"{scan:.3f}" for scan in scans] or [""] * len(SCANS)
        cells += [f"{shape.flash:.3f}", f"{shape.flash / time:.2f}"] if shape.flash else ["", ""]
        other = theirs(x)
        missing = missing or other is None
        peer, mark = peer_milliseconds(other) if other is not None else (None, "")
        cells += [f"{peer:.3f}{mark}", f"{peer / time:.2f}"] if peer else ["", ""]
        cells.append(f"{peer / min(scans):.2f}" if peer and scans else "")
        cells.append(f"{shape.fla:.3f}" if shape.fla else "")
        print("| " + " | ".join(cells) + " |", flush=True)
    if missing:
        print("\nfla cannot be imported (PYTHONPATH to flash-linear-attention, and triton): its columns are empty")


def scan_milliseconds(x: dict[str, Tensor], shape: Shape, schedule: str) -> float:
    """Of a scan, its workspace allocated beforehand."""
    from cute_impl.kda import get_workspace_size

    size = get_workspace_size(shape.tokens, shape.heads, len(shape.lengths), schedule)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    call, out, final = ours(x, schedule=schedule, workspace=workspace)
    time = graph_milliseconds(call)
    require_exact(x, shape, out, final, schedule)
    return time


def clusters() -> None:
    """Print the times of all cluster sizes."""
    from cute_impl.kda import CLUSTERS

    print("| H | lengths | " + " | ".join(f"cluster {c}, ms" for c in CLUSTERS) + " |")
    print("|---|---|" + "---|" * len(CLUSTERS))
    for shape in SHAPES:
        x = tensors(shape)
        times = []
        for cluster in CLUSTERS:
            call, out, final = ours(x, cluster=cluster)
            times.append(graph_milliseconds(call))
            require_exact(x, shape, out, final)
        cells = [str(shape.heads), describe(shape.lengths), *(f"{time:.3f}" for time in times)]
        print("| " + " | ".join(cells) + " |", flush=True)


# Accuracy.

Values = Callable[[Tensor], Tensor]


def constant(value: float) -> Values:
    return lambda x: torch.full_like(x, value)


def either_sign(value: float) -> Values:
    return lambda x: torch.sign(torch.randn_like(x)) * value


def uniform(x: Tensor) -> Tensor:
    return torch.empty_like(x).uniform_(-8.0, 8.0)


def broad(x: Tensor) -> Tensor:
    return torch.randn_like(x) * 8.0


GATES = {f"g = {value:g}": constant(value) for value in (-8.0, -4.0, 0.0, 8.0)}
GATES |= {"g uniform in ±8": uniform, "g = 8 · normal": broad}
BIASES = {"±4": either_sign(4.0), "±8": either_sign(8.0), "uniform in ±8": uniform, "8 · normal": broad}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def accuracy() -> None:
    """Print the table of errors: out and final state, the median of three seeds."""
    from reference import kda as reference

    print("| gate | dt_bias | ours, out | FLA, out | ours, state | FLA, state |\n|---|---|---|---|---|---|")
    shape = Shape(2, (512, 77))
    for gate, of_gate in GATES.items():
        for bias, of_bias in BIASES.items():
            rows: list[list[float]] = []
            for seed in range(3):
                torch.manual_seed(seed)
                x = tensors(shape)
                x["g"], x["dt_bias"] = of_gate(x["g"]), of_bias(x["dt_bias"])
                x["initial_state"] = x["initial_state"].float()
                params = {"scale": SCALE, "lower_bound": LOWER_BOUND, "final_state": "fp32"}
                want = reference.model(x, params, torch.float64)
                call, out, final = ours(x)
                call()
                peer = theirs(x)
                o, state = peer() if peer is not None else (None, None)
                pairs = ((out, "out"), (o, "out"), (final, "final_state"), (state, "final_state"))
                rows.append([relative_error(y, want[name]) if y is not None else float("nan") for y, name in pairs])
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            print(f"| {gate} | {bias} | " + " | ".join(f"{e:.2e}" for e in medians) + " |", flush=True)


def main(kinds: list[str]) -> None:
    """Print the tables asked for, ``speed`` by default."""
    require_gpu()
    tables = {"speed": speed, "clusters": clusters, "accuracy": accuracy}
    unknown = [kind for kind in kinds if kind not in tables]
    if unknown:
        raise SystemExit(f"got {', '.join(unknown)}, allowed are {', '.join(tables)}")
    print(f"{headline()}\n")
    for kind in kinds or ["speed"]:
        tables[kind]()
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
