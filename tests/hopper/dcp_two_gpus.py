"""Decode context parallelism over GPUs of one host, 10,000 rounds: run by torchrun, not by pytest.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 tests/hopper/dcp_two_gpus.py

Mailboxes are torch.distributed symmetric memory, written by ordinary peer stores. NVLink multicast stays off: the
script sets and demands the variables that switch it off, before torch is imported. Exit codes: 0 pass, 1 fail, 3 the
GPUs are missing.
"""

import os
import sys

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
for name, value in OFF.items():
    if os.environ.setdefault(name, value) != value:
        sys.exit(f"{name}: got {os.environ[name]!r}, allowed is {value!r}: NVLink multicast must stay off")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._symmetric_memory as symmetric  # noqa: E402

from cute_impl import mla_query as module  # noqa: E402
from cute_impl.attn_res import mailbox as on_device  # noqa: E402
from cute_impl.mla_query import dcp  # noqa: E402
from goldens.mla_query import KERNEL, make_case  # noqa: E402
from reference import mla_query as reference  # noqa: E402

VARIANTS = (("small", 12, 2), ("small", 6, 5), ("tiled", 12, 64))
ROUNDS_A_GRAPH, REPLAYS = 8, 1250
POLLS = 1 << 24


def rank_inputs(heads, rows, rank, round_, device):
    """One rank's inputs of a round: the same requests, its own heads (another row order of the same weights)."""
    case = make_case(heads, rows, pages=9, page_size=16, seed=700 + round_)
    x = {name: t.to(device) for name, t in KERNEL.inputs(case).items()}
    for weight in ("w_qb", "w_uk"):
        x[weight] = x[weight].roll(rank, dims=-1).contiguous()
    return x, dict(case.params)


class Rounds:
    """This rank's rounds of one variant: kernel, then a check of its whole half on the device."""

    def __init__(self, schedule, heads, rows, device):
        self.schedule = schedule
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shape = (2, rows, ranks * heads, 576)
        own = symmetric.empty(shape, dtype=torch.uint8, device=device).fill_(0xFF)
        handle = symmetric.rendezvous(own, dist.group.WORLD)
        self.box = dcp.Mailbox([handle.get_buffer(i, shape, torch.uint8) for i in range(ranks)], rank, POLLS)
        self.x, self.want = [], []
        for i in range(ROUNDS_A_GRAPH):
            outputs = []
            for other in range(ranks):
                x, self.params = rank_inputs(heads, rows, other, i, device)
                outputs.append(reference.exact(x, self.params, schedule)["output"])
                if other == rank:
                    self.x.append(x)
            self.want.append(torch.cat(outputs, dim=1).contiguous())
        self.wrong = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize()
        dist.barrier()

    def round(self, i):
        module.mla_query(**self.x[i], eps=self.params["eps"], schedule=self.schedule, mailbox=self.box)
        half = self.box.buffers[self.box.rank][i % 2]
        on_device.check([half], [self.want[i]], [None], self.wrong)

    def run(self):
        """Wrong words, and whether a wait was given up."""
        for i in range(ROUNDS_A_GRAPH):
            self.round(i)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(ROUNDS_A_GRAPH):
                self.round(i)
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        return int(self.wrong), int(self.box.status[0]), int(self.box.state[0])


def main():
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


if __name__ == "__main__":
    sys.exit(main())
