"""Messages between a run and a candidate's process: JSON and safetensors, so that nothing sent can be more than data.

A message is two lengths, a JSON object, and tensors by their number; the object lists their names.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

LENGTHS = struct.Struct("<QQ")
MOST_TEXT = 1 << 20  # bytes of the JSON object that a candidate's process may send
MOST_NAMES = 64


class Garbage(Exception):
    """Bytes that are no message; the words say what is wrong."""


def pack(content: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """The bytes of a message; tensors are contiguous, on the CPU, and share no memory."""
    named = tensors or {}
    text = json.dumps({**content, "names": list(named)}).encode()
    body = save({str(i): x for i, x in enumerate(named.values())}) if named else b""
    return LENGTHS.pack(len(text), len(body)) + text + body


def unpack(read: Callable[[int], bytes | bytearray], most: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The message that ``read(count)`` gives the bytes of. Garbage if it is none, or holds more than ``most`` bytes."""
    text_bytes, body_bytes = LENGTHS.unpack(read(LENGTHS.size))
    if text_bytes > MOST_TEXT or body_bytes > most + MOST_TEXT:
        raise Garbage(f"a message of {text_bytes + body_bytes:,} bytes")
    text, body = read(text_bytes), read(body_bytes)
    try:
        content = json.loads(text.decode())
        names = content.pop("names")
        tensors = load(bytes(body)) if body else {}
        if len(names) > MOST_NAMES or set(tensors) != {str(i) for i in range(len(names))}:
            raise ValueError("names that are not those of the tensors")
        if not all(isinstance(name, str) for name in names) or not isinstance(content, dict):
            raise ValueError("a name that is no string")
        return content, {name: tensors[str(i)] for i, name in enumerate(names)}
    except RecursionError:
        raise Garbage("a message nested too deeply") from None
    except Exception as error:  # whatever a parser makes of foreign bytes
        raise Garbage(f"what is no message ({type(error).__name__})") from None
