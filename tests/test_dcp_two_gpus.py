"""What of the two-GPU run of decode context parallelism needs no GPU: inputs, shared memory's lifetime, failures."""

import gc
import importlib.util
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from cute_impl.mla_query import dcp
from reference import mla_query as reference

SCRIPT = Path(__file__).parent / "hopper" / "dcp_two_gpus.py"
CPU = torch.device("cpu")
SHAPE = (2, 1, 2, 576)

# Raises what the compiler raises, from a process whose sys.excepthook torch.distributed has replaced last.
FAILING = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dcp_two_gpus", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
from cutlass.base_dsl.common import DSLRuntimeError

def run():
    script.dist.init_process_group("gloo", store=script.dist.HashStore(), rank=0, world_size=1)
    raise DSLRuntimeError("a launch that failed")

script.leave(script.exit_code(run))
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("dcp_two_gpus", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ):
        spec.loader.exec_module(module)
    return module


class Handle:
    """One rank's end of a rendezvous, as torch's: buffers are views of addresses, which the handle does not own."""

    def __init__(self, addresses, rank=0, multicast_ptr=0):
        self.addresses, self.rank, self.world_size, self.multicast_ptr = addresses, rank, len(addresses), multicast_ptr

    def get_buffer(self, rank, shape, dtype):
        return SimpleNamespace(data_ptr=lambda: self.addresses[rank], shape=shape, dtype=dtype)


@pytest.fixture
def rendezvous(script, monkeypatch):
    """``rendezvous(peer)`` sets what the next one, of two ranks, returns; ``own`` stands for the tensor's address."""
    monkeypatch.setattr(script, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=None)))
    monkeypatch.setattr(script.symmetric, "empty", torch.empty)

    def prepare(peer, own=None, **options):
        def make(tensor, _):
            return Handle([tensor.data_ptr() if own is None else own, peer], **options)

        monkeypatch.setattr(script.symmetric, "rendezvous", make)

    return prepare


def test_shared_memory_lives_as_long_as_its_buffers_are_used(script, rendezvous):
    """torch's buffers keep neither the tensor nor the handle alive, and both are needed."""
    rendezvous(peer=0x1000)
    memory = script.SharedMemory(SHAPE, CPU)
    alive = weakref.ref(memory.own), weakref.ref(memory.handle)
    gc.collect()
    assert all(x() is not None for x in alive)
    assert bool((memory.own == 0xFF).all())
    assert [x.data_ptr() for x in memory.buffers] == [memory.own.data_ptr(), 0x1000]
    assert {(x.shape, x.dtype) for x in memory.buffers} == {(SHAPE, torch.uint8)}
    del memory
    gc.collect()
    assert all(x() is None for x in alive)


def test_rounds_keep_the_shared_memory(script, rendezvous, monkeypatch):
    """The fault this guards against: a mailbox of buffers whose memory went with the constructor's names."""
    rendezvous(peer=0x1000)
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0, raising=False)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 2, raising=False)
    monkeypatch.setattr(script, "ROUNDS_A_GRAPH", 1)
    made = []
    monkeypatch.setattr(script.symmetric, "empty", lambda *a, **k: _remember(made, torch.empty(*a, **k)))
    monkeypatch.setattr(script.dcp, "Mailbox", lambda buffers, rank, polls: SimpleNamespace(buffers=buffers, rank=rank))
    rounds = script.Rounds("small", 1, 1, CPU)
    gc.collect()
    assert made[0]() is not None
    assert rounds.box.buffers[0].data_ptr() == made[0]().data_ptr()
    assert [tuple(x.shape) for x in rounds.want] == [(1, 2, 576)]


def _remember(made, tensor):
    made.append(weakref.ref(tensor))
    return tensor


def test_multicast_is_refused(script, rendezvous):
    rendezvous(peer=0x1000, multicast_ptr=0x2000)
    with pytest.raises(RuntimeError, match="multicast must stay off"):
        script.SharedMemory(SHAPE, CPU)


def test_a_buffer_that_is_not_the_tensor_is_refused(script, rendezvous):
    rendezvous(peer=0x1000, own=0x3000)
    with pytest.raises(RuntimeError, match="rank 0's buffer is 0x3000, not the tensor's"):
        script.SharedMemory(SHAPE, CPU)


def test_multicast_variables_are_demanded():
    environment = os.environ | {"NCCL_NVLS_ENABLE": "1"}
    run = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "NCCL_NVLS_ENABLE: got '1', allowed is '0'" in run.stderr


def test_ranks_share_requests_and_differ_in_weights(script):
    zero, one = (script.weights(1, rank, CPU) for rank in range(2))
    for name in script.WEIGHTS:
        assert one[name].is_contiguous()
        assert not torch.equal(zero[name], one[name])
        assert torch.equal(zero[name].roll(1, dims=-1), one[name])
    assert script.weights(1, 1, CPU) is one, "drawn once, not in every round"
    (first, eps), (second, _) = (script.requests(2, round_, CPU) for round_ in range(2))
    reference.check(first | one, {"heads": 1, "eps": eps})
    assert not torch.equal(first["qkv"], second["qkv"])


def test_expected_bytes_are_the_ranks_in_order(script):
    shared, eps = script.requests(2, 0, CPU)
    want = script.expected(shared, eps, "small", 1, 2)
    assert want.is_contiguous()
    for rank in range(2):
        own = reference.exact(shared | script.weights(1, rank, CPU), {"heads": 1, "eps": eps}, "small")["output"]
        assert torch.equal(want[:, rank : rank + 1], own)
    assert not torch.equal(want[:, 0], want[:, 1])
    assert not bool((want.view(torch.int32) == dcp.SENTINEL).any())


def test_without_a_gpu_the_exit_code_is_3(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert script.exit_code(script.main) == 3
    assert "no sm_90 GPU of that number; found 0" in capsys.readouterr().err


def test_a_failure_is_told_with_its_rank(script, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")

    def run():
        raise ValueError("two\nlines")

    assert script.exit_code(run) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "rank 1: Traceback (most recent call last):"
    assert told[-2:] == ["rank 1: ValueError: two", "rank 1: lines"]


def test_the_compilers_errors_are_told_too():
    """Left to sys.excepthook they are lost: the compiler's hook exits within that of torch.distributed."""
    run = subprocess.run([sys.executable, "-c", FAILING, SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "rank 0: Traceback (most recent call last):" in run.stderr
    assert "a launch that failed" in run.stderr


@pytest.mark.parametrize("ranks", [2, 8])
def test_mailbox_of_peers(ranks):
    buffers = [dcp.Mailbox.empty(ranks, 12, 3, CPU) for _ in range(ranks)]
    box = dcp.Mailbox(buffers, ranks - 1, polls=5)
    assert (box.heads, box.capacity) == (12, 3)
    numbers = [x.value for x in dcp.to_list(box.buffers, box.state, box.status, box.rank, box.polls)]
    named, peers = dcp.fields(numbers)
    assert peers == [x.data_ptr() for x in buffers]
    assert (named["rank"], named["polls"], named["half_bytes"]) == (ranks - 1, 5, 3 * ranks * 12 * 576)
    assert len(numbers) == len(dcp.stand_in(ranks))
