"""Real worker processes for tests that look at what is computed, without waiting for imports each time."""

from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.records import Measurement, Task

PRELOADED = ForkServer()


def run(case, *, processes=None, timeout_seconds=300.0, watch=lambda event: None, preloaded=PRELOADED, deepspeed=None):
    """The reply of a case of the zoo from as many processes as it has GPUs, and its servers."""
    task = Task(
        case=case,
        scale="tiny",
        device_type="cpu",
        processes=case.gpus if processes is None else processes,
        servers=case.servers,
        root=".",
        deepspeed=deepspeed or {},
    )
    return launcher.in_process(task, gpus=(), timeout_seconds=timeout_seconds, watch=watch, fork_server=preloaded)


def measured(case, **options):
    reply = run(case, **options)
    assert isinstance(reply, Measurement), reply
    return reply
