"""What both schedules of ``mla_query`` share on the device: sizes, the row's scale, the insert of a warp's row."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cute_impl import ptx
from cute_impl.mla_query.insert import LATENT, ROPE, insert_row, load_weights
from cute_impl.ptx import add_rn, div_rn, rsqrt_approx

QUERY = 1536  # columns of the query latent
NOPE = 128  # q of a head that are absorbed
HEAD = NOPE + ROPE
THREADS = 256
WARPS = THREADS // 32
ROW_BYTES = 2 * QUERY  # of x̂, and of a row of Q_B
NAMES = ("qkv", "w_qa", "w_kva", "w_qb", "w_uk", "cache", "slots", "q_scale_inv", "k_scale_inv", "output")


def chain(values: list) -> Float32:
    """((v0 + v1) + v2) + …"""
    total = values[0]
    for value in values[1:]:
        total = add_rn(total, value)
    return total


def rstd(total: Float32, eps: Float32) -> Float32:
    """1 / √(mean + eps) of the query latent from its sum of squares."""
    return rsqrt_approx(add_rn(div_rn(total, Float32(QUERY)), eps))


def clamp(x: Int32, low: int, high: int) -> Int32:
    x = select_(x < low, Int32(low), x)
    return select_(x > high, Int32(high), x)


@cute.jit
def insert_rows(at: dict, pitch: Int64, capacity: Int64, row: Int32, rows: Int32, eps: Float32):
    """A warp's part of the insert: row ``row`` if there is one."""
    if row < rows:
        lane = cute.arch.lane_idx()
        weights = load_weights(at["w_kva"], lane)
        cute.arch.griddepcontrol_wait()
        kv = at["qkv"] + pitch * row + 2 * QUERY
        insert_row(
            kv, kv + 2 * LATENT, weights, at["cache"], at["slots"] + Int64(row) * 8, at["k_scale_inv"], capacity, eps
        )


def put(out: Int64, request_bytes: Int32, row: Int32, offset: Int32, words: list, shared_round) -> None:
    """1 or 4 words of a head's output, at byte ``offset`` of row ``row``; to the mailboxes too if there is a round."""
    where = out + row * request_bytes + offset
    if len(words) == 4:
        ptx.st_v4("global", where, words)
    else:
        ptx.st_b32("global", where, words[0])
    if shared_round is not None:
        shared_round.publish(row, offset, words)
