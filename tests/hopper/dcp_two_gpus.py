"""Decode context parallelism over GPUs of one host, 10,000 rounds: run by torchrun, not by pytest.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 tests/hopper/dcp_two_gpus.py

Mailboxes are torch.distributed symmetric memory, written by ordinary peer stores. NVLink multicast stays off: the
script sets and demands the variables that switch it off, before torch is imported. Exit codes: 0 pass, 1 fail, 3 the
GPUs are missing.
"""

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
for name, value in OFF.items():
    if os.environ.setdefault(name, value) != value:
        sys.exit(f"{name}: got {os.environ[name]!r}, allowed is {value!r}: NVLink multicast must stay off")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._symmetric_memory as symmetric  # noqa: E402
from torch import Tensor  # noqa: E402

from cute_impl import mla_query as module  # noqa: E402
from cute_impl.attn_res import mailbox as on_device  # noqa: E402
from cute_impl.mla_query import dcp  # noqa: E402
from goldens.mla_query import KERNEL, make_case  # noqa: E402
from reference import mla_query as reference  # noqa: E402

VARIANTS = (("small", 12, 2), ("small", 6, 5), ("tiled", 12, 64))
WEIGHTS = ("w_qb", "w_uk")
ROUNDS_A_GRAPH, REPLAYS = 8, 1250
POLLS = 1 << 24
CLOSE_S = 10


@functools.cache
def weights(heads: int, rank: int, device: torch.device) -> dict[str, Tensor]:
    """One rank's weights, of every round: the same for all ranks but for a rotation of the last dimension."""
    if rank:
        return {name: x.roll(rank, dims=-1) for name, x in weights(heads, 0, device).items()}
    drawn = KERNEL.inputs(make_case(heads, 1))
    return {name: drawn[name].to(device) for name in WEIGHTS}


def requests(rows: int, round_: int, device: torch.device) -> tuple[dict[str, Tensor], float]:
    """What all ranks share in a round: the inputs but the weights, and eps."""
    case = make_case(1, rows, pages=9, page_size=16, seed=700 + round_)
    drawn = KERNEL.inputs(case)
    return {name: x.to(device) for name, x in drawn.items() if name not in WEIGHTS}, case.params["eps"]


def expected(shared: dict[str, Tensor], eps: float, schedule: str, heads: int, ranks: int) -> Tensor:
    """The bytes [rows, ranks · heads, 576] that every rank holds after a round."""
    device, params = shared["qkv"].device, {"heads": heads, "eps": eps}
    outputs = [
        reference.exact(shared | weights(heads, rank, device), params, schedule)["output"] for rank in range(ranks)
    ]
    return torch.cat(outputs, dim=1)


class SharedMemory:
    """Bytes 0xff of a shape on every rank, and ``buffers``: each rank's as this process sees them.

    The buffers are bare addresses that keep nothing alive: they are unmapped with ``own`` and ``handle``.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        self.own = symmetric.empty(shape, dtype=torch.uint8, device=device).fill_(0xFF)
        self.handle = symmetric.rendezvous(self.own, dist.group.WORLD)
        if self.handle.multicast_ptr:
            raise RuntimeError("symmetric memory: got a multicast mapping; NVLink multicast must stay off")
        self.buffers = [self.handle.get_buffer(i, shape, torch.uint8) for i in range(self.handle.world_size)]
        mine = self.buffers[self.handle.rank].data_ptr()
        if mine != self.own.data_ptr():
            raise RuntimeError(f"symmetric memory: rank {self.handle.rank}'s buffer is {mine:#x}, not the tensor's")


class Rounds:
    """This rank's rounds of one variant: kernel, then a check of its whole half on the device."""

    def __init__(self, schedule: str, heads: int, rows: int, device: torch.device):
        self.schedule = schedule
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.memory = SharedMemory((2, rows, ranks * heads, 576), device)
        self.box = dcp.Mailbox(self.memory.buffers, rank, POLLS)
        self.x, self.want = [], []
        for i in range(ROUNDS_A_GRAPH):
            shared, self.eps = requests(rows, i, device)
            self.x.append(shared | weights(heads, rank, device))
            self.want.append(expected(shared, self.eps, schedule, heads, ranks))
        self.wrong = torch.zeros(1, dtype=torch.int32, device=device)

    def round(self, i: int, box: dcp.Mailbox, wrong: Tensor) -> None:
        options = {"schedule": self.schedule, "mailbox": box, "weights_complete": True}
        module.mla_query(**self.x[i], eps=self.eps, **options)
        on_device.check([box.buffers[box.rank][i % 2]], [self.want[i]], [None], wrong)

    def load(self) -> None:
        """Compile and load the kernels in a round that waits for nobody: later no rank waits for another's compiler."""
        local = dcp.Mailbox([torch.full_like(self.memory.own, 0xFF) for _ in self.box.buffers], self.box.rank, polls=1)
        self.round(0, local, torch.zeros_like(self.wrong))
        torch.cuda.synchronize()
        dist.barrier()

    def run(self) -> tuple[int, int, int]:
        """Wrong words, whether a wait was given up, and rounds."""
        self.load()
        for i in range(ROUNDS_A_GRAPH):
            self.round(i, self.box, self.wrong)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for its events from another thread meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for i in range(ROUNDS_A_GRAPH):
                self.round(i, self.box, self.wrong)
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        return int(self.wrong), int(self.box.status[0]), int(self.box.state[0])


def main() -> int:
    """All variants; returns the exit code."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= local or torch.cuda.get_device_capability(local) != (9, 0):
        print(f"rank {local}: no sm_90 GPU of that number; found {torch.cuda.device_count()}", file=sys.stderr)
        return 3
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    failed = False
    for schedule, heads, rows in VARIANTS:
        wrong, given_up, rounds = Rounds(schedule, heads, rows, device).run()
        bad = wrong or given_up or rounds != ROUNDS_A_GRAPH * (REPLAYS + 1)
        failed |= bool(bad)
        print(
            f"rank {dist.get_rank()} of {dist.get_world_size()}: {schedule}, {heads} heads, B = {rows}: "
            f"{rounds} rounds, {wrong} wrong words{', a wait was given up' if given_up else ''}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


def exit_code(run: Callable[[], int]) -> int:
    """What ``run`` returns; if it raises, 1, after its traceback with the rank on each line.

    Not left to sys.excepthook: the compiler's hook exits on its own errors, and torch.distributed's, which calls it
    with stderr redirected, then drops the text.
    """
    try:
        return run()
    except Exception:
        rank = os.environ.get("RANK", "0")
        print(
            "".join(f"rank {rank}: {line}\n" for line in traceback.format_exc().splitlines()), end="", file=sys.stderr
        )
        return 1


def leave(code: int) -> None:
    """End the process: after a failure neither a peer that is gone nor a GPU in error may hold it up."""
    if dist.is_initialized():
        closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(exit_code(main))
