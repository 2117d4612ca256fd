"""Cases of several processes on fakes: what the first of them allocates, against baselines of real processes on a CPU."""

import msgspec
import pytest
from test_dry_run_suite import CPU, H100, STORE, declared
from zoo_examples import example

from pytest_gputrain.baselines import key_of
from pytest_gputrain.judge import SHARED_CPU_RATIO
from pytest_gputrain.records import Prediction, Task
from pytest_gputrain.worker.dry_run.predict import predict
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.progress import Progress

# A worker does not fail for what DeepSpeed and FSDP warn of, and neither do these.
pytestmark = pytest.mark.filterwarnings("default")

RECORDED = [(suite, case) for suite, case in declared(several=True) if STORE.get("cpu", suite, key_of(case, "tiny"))]
ONE_OF_EACH = {(suite, case.parallel): (suite, case) for suite, case in reversed(RECORDED)}.values()
"""Of each suite and parallelism."""


def predicted(case, target=CPU, processes=2, servers=0):
    load(case)
    task = Task(case=case, scale="tiny", device_type="cpu", root=".", target=target, processes=processes, servers=servers)
    reply = predict(task, Progress(None))
    assert isinstance(reply, Prediction), reply
    return reply


@pytest.mark.parametrize(("suite", "case"), ONE_OF_EACH, ids=str)
def test_as_recorded(suite, case):
    run = STORE.get("cpu", suite, key_of(case, "tiny")).runs[-1]
    servers = min(case.servers, 2)
    processes = run.environment.device_count - servers
    prediction = predicted(case, processes=processes, servers=servers)
    # Real threads of gloo let go of a buffer sooner or later.
    off = 0 if processes == 1 else SHARED_CPU_RATIO
    assert prediction.peak_allocated_bytes == pytest.approx(run.peak_allocated_bytes, rel=off)
    assert prediction.flops_per_step * processes == (run.flops_per_step or 0)


LLAMA = example("llama-3.1-8b", parallel="fsdp", gpus=8)


def test_more_gpus_hold_smaller_shards():
    eight, two = (predicted(LLAMA, H100, processes=count) for count in (8, 2))
    assert eight.peak_allocated_bytes < two.peak_allocated_bytes


@pytest.mark.parametrize(
    ("case", "knob"),
    [(LLAMA, "cpu_offload"), (example("pangu-350m", precision="bf16", parallel="zero2", gpus=2), "offload_optimizer")],
    ids=["fsdp", "zero2"],
)
def test_what_is_offloaded_is_on_the_host(case, knob):
    on_device, offloaded = (predicted(case.replace(**{knob: value}), H100) for value in (False, True))
    assert offloaded.phase_peak_bytes["optimizer"] < on_device.phase_peak_bytes["optimizer"]
    assert offloaded.host_bytes > on_device.host_bytes


def test_the_same_every_time():
    first, second = (msgspec.json.encode(predicted(LLAMA, H100, processes=8)) for _ in range(2))
    assert first == second
