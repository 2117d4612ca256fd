"""Has a process on an emulated GPU run in a fork of one that has imported torch, as imports take most of its time.

Programs do so, and the processes from which pytest forks its workers. Python imports this module when it starts, after the
package's own ``sitecustomize``, whose folder comes first.
"""

import os
import sys

ADDRESS = "GPUTRAIN_TESTS_PRELOADED"
"""Environment variable: the name of the socket on which that process listens. What a program starts does not find it."""
FORKS_WORKERS = ["-P", "-m", "pytest_gputrain.worker.preload"]


def run_there(address):
    """Have it run there with everything that this process got, and end as it ends."""
    import contextlib
    import json
    import signal
    import socket

    request = {"arguments": sys.orig_argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")  # in no folder, since the path of one may be too long
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        status = int(connection.makefile().readline())
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if ADDRESS in os.environ and "GPUTRAIN_EMULATED_DEVICE" in os.environ and os.environ.get("LD_PRELOAD"):
    if sys.orig_argv[1:] == FORKS_WORKERS:
        run_there(os.environ[ADDRESS])
    elif len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith(".py"):
        run_there(os.environ.pop(ADDRESS))
