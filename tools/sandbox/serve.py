"""Calls answered in a candidate's process, until the run lets go of the channel."""

import os
import socket
import sys
from typing import Any

import torch

from goldens.call import CallFailed, Tensors, Unsupported, clean, words
from tools.adapters import Missing
from tools.sandbox.held import Held, is_broken
from tools.sandbox.load import CandidateError
from tools.sandbox.message import pack, unpack


def serve(channel: socket.socket, candidate: str, device: str) -> None:
    """Import the candidate, say what it declares, answer each request by a message with the request's number."""
    me = os.getpid()
    try:
        held = Held(candidate, torch.device(device))
    except CandidateError as error:
        return channel.sendall(pack({"unknown": clean(str(error))}))
    except Missing as error:
        return channel.sendall(pack({"missing": clean(str(error))}))
    except Exception as error:  # of attributes that do more than to be there
        return channel.sendall(pack({"unknown": f"{candidate}: looking at it {words(error)}"}))
    channel.sendall(pack({"claims": held.claims, "outputs": held.outputs, "batch_invariant": held.batch_invariant}))
    while True:
        try:
            request, inputs = unpack(lambda count: _read(channel, count), sys.maxsize)
        except EOFError:
            return None
        number = request.pop("number")
        for name, (shape, stride) in request.pop("strides").items():
            inputs[name] = inputs[name].as_strided(shape, stride)
        answer = _answer(held, inputs, request, number)
        if os.getpid() != me:  # a fork that the candidate let return
            os._exit(0)
        channel.sendall(answer)


def _answer(held: Held, inputs: Tensors, request: dict[str, Any], number: int) -> bytes:
    content: dict[str, Any]
    try:
        return pack({"number": number}, held.call(inputs=inputs, **request))
    except Unsupported as refused:
        content = {"unsupported": clean(str(refused))}
    except Missing as error:
        content = {"missing": clean(str(error))}
    except CallFailed as error:
        broken = held.device.type == "cuda" and is_broken()
        content = {"failed": clean(str(error)), "refusal": error.refusal, "broken": broken}
    except Exception as error:  # what was returned has no form in which it could be sent
        content = {"failed": f"its outputs cannot be sent: {words(error)}", "refusal": False}
    return pack({"number": number, **content})


def _read(channel: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while len(view):
        received = channel.recv_into(view)
        if received == 0:
            raise EOFError
        view = view[received:]
    return buffer
