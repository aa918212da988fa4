"""The main program of a candidate's process; tools.worker.Worker starts it.

Nothing of ``goldens`` may be imported here before the guard is up.
"""

import json
import signal
import socket
import sys

from tools.sandbox import guard, keeper


def main() -> None:
    """``sys.argv[1]`` says in JSON what to do.

    channel, control: sockets, of the calls and of the keeper. candidate, device. path: ``sys.path``. goldens: where
    that package is. folders: what the process may not have, none for a candidate that needs it. forget: whether the
    candidate may import a package ``tools`` of its own.
    """
    start = json.loads(sys.argv[1])
    channel, control = (socket.socket(fileno=start[name]) for name in ("channel", "control"))
    keeper.fork(control, channel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when this process ends
    hidden = "nothing"
    if start["folders"]:
        guard.stand_in(start["goldens"])
    from tools.sandbox.message import pack
    from tools.sandbox.serve import serve

    if start["folders"]:
        hidden = "mounted" if guard.hide(start["folders"]) else "refused"
        guard.refuse(start["folders"])
    channel.sendall(pack({"hidden": hidden}))
    sys.path[:] = start["path"]
    if start["forget"]:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
            del sys.modules[name]
    serve(channel, start["candidate"], start["device"])
