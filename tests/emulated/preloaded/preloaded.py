"""Forks programs that find torch imported, as `sitecustomize` beside this module asks: ``python preloaded.py DESCRIPTOR``.

The descriptor is of the listening socket. Before the fork nothing is done but imports, of what the first optimizer of a
program imports anyway. The package's own ``sitecustomize`` runs in the forked process, so that whatever records and counts
begins there. This process ends with its stdin.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types

from sitecustomize import FORKS_WORKERS

from pytest_gputrain.hardware.emulation.environment import STARTUP
from pytest_gputrain.utils.linux import PARENT


def serve(listening):
    """Fork as asked until stdin ends; return the program's request in a forked process."""
    asking = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([0, *[listening] * (len(asking) < MOST), woken, *asking.values()], [], [])
        if 0 in ready:
            for pid in asking:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if listening in ready:
            connection, _ = listening.accept()
            line, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
            if not line.endswith(b"\n"):
                line += connection.makefile("rb").readline()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (woken, wake, listening.detach(), *(one.detach() for one in (connection, *asking.values()))):
                    os.close(each)
                return json.loads(line), descriptors
            asking[pid] = connection
            for descriptor in descriptors:
                os.close(descriptor)
        if woken in ready:
            os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    connection = asking.pop(ended[0])
                    with contextlib.suppress(BrokenPipeError):
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                    connection.close()
        for pid, connection in asking.items():
            if connection in ready:  # whoever asked has been killed
                os.kill(pid, signal.SIGKILL)


def become(arguments, environment, folder, descriptors):
    """Run what was asked for, with what the process that asks got from its start."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if PARENT in environment:
        os.environ[PARENT] = str(os.getppid())
    ctypes.CDLL(None).gputrain_read_gpu_again()
    sys.modules["torch"].default_generator.seed()  # which each process takes at random
    sys.orig_argv[1:] = arguments
    # Without the folder of this module, where the `sitecustomize` lies that would ask once more.
    given = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if entry and entry != os.path.dirname(__file__)]
    sys.path[:] = dict.fromkeys([*given, *OTHERS])
    sys.modules.pop("sitecustomize", None)
    runpy.run_path(str(STARTUP / "sitecustomize.py"))
    if arguments == FORKS_WORKERS:
        sys.argv[1:] = []
        runpy.run_module(arguments[-1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        script = os.path.abspath(arguments[0])
        sys.path.insert(0, os.path.dirname(script))
        run_script(script)


def run_script(script):
    """Run it as the main module, which stays: functions of it may be called at the very end."""
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = script, __builtins__
    sys.modules["__main__"] = main
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    try:
        exec(code, main.__dict__)
    except Exception as error:
        # As Python does for an exception that nobody caught, but without the frame of this function.
        error.__traceback__ = error.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
        sys.exit(1)


MOST = 32
"""Forked processes at a time: more than tests ask for, and few enough for the machine if one ever asks without end."""
OTHERS = [entry for entry in sys.path[1:] if entry not in os.environ["PYTHONPATH"].split(os.pathsep)]
"""Where Python looks after PYTHONPATH."""


if __name__ == "__main__":
    for name in ("torch._dynamo", "torch._inductor", "pytest_gputrain.worker.program_counts", "pytest_gputrain.worker.run"):
        importlib.import_module(name)
    gc.freeze()
    request, descriptors = serve(socket.socket(fileno=int(sys.argv[1])))
    become(**request, descriptors=descriptors)
