"""Further options of DeepSpeed reach its engine, change what it does, and are predicted."""

import pytest
from preloaded_worker import PRELOADED
from test_prediction_shards import CPU, LLAMA, needs_deepspeed

from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Measurement, Prediction, Task
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.parallel.zero import configure
from pytest_gputrain.worker.prediction.predict import predict
from pytest_gputrain.worker.progress import Progress

# A worker does not fail for what DeepSpeed warns of, and neither do these.
pytestmark = [pytest.mark.filterwarnings("default"), needs_deepspeed]

ZERO2 = LLAMA.replace(parallel="zero2", precision="bf16", gpus=2, steps=2, warmup=1)


def task(case, options, target=None):
    return Task(case=case, scale="tiny", device_type="cpu", root=".", processes=case.gpus, deepspeed=options, target=target)


def replied(case, options):
    return launcher.in_process(task(case, options), gpus=(), timeout_seconds=300, fork_server=PRELOADED)


def measured(case, options):
    reply = replied(case, options)
    assert isinstance(reply, Measurement), reply
    return reply


def predicted(case, options):
    load(case)
    reply = predict(task(case, options, CPU), Progress(None))
    assert isinstance(reply, Prediction), reply
    return reply


OPTIONS = [
    ("zero2", {"zero_optimization": {"reduce_bucket_size": 20_000_000_000}}),
    ("zero3", {"zero_optimization": {"sub_group_size": 1000}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "options"), OPTIONS, ids=str)
def test_it_is_another_measurement_and_predicted(parallel, options):
    case = ZERO2.replace(parallel=parallel)
    plain, changed, prediction = measured(case, {}), measured(case, options), predicted(case, options)
    assert changed.peak_allocated_bytes != plain.peak_allocated_bytes
    assert changed.losses == pytest.approx(plain.losses, rel=1e-2)
    more = changed.ranks[0].peak_allocated_bytes - prediction.peak_allocated_bytes
    # Threads of gloo let go of buffers when they come to it, later on a busy machine.
    assert 0 <= more <= 0.02 * prediction.peak_allocated_bytes


@pytest.mark.slow
def test_what_deepspeed_does_not_know_is_told():
    reply = replied(ZERO2, {"zero_optimization": {"reduce_bucket_sizes": 1}})
    assert isinstance(reply, Crashed)
    assert "reduce_bucket_sizes" in reply.sentence + reply.detail


def test_options_are_merged_into_ours():
    options = {
        "zero_optimization": {"reduce_bucket_size": 2e8, "round_robin_gradients": True, "offload_optimizer": {"ratio": 0.5}},
        "fp16": {"initial_scale_power": 12},
    }
    case = ZERO2.replace(offload_optimizer=True)
    ours, merged = configure(case, 1.0, on_gpu=True), configure(case, 1.0, options, on_gpu=True)
    assert merged["zero_optimization"].pop("round_robin_gradients")
    assert merged["zero_optimization"]["offload_optimizer"].pop("ratio") == 0.5
    assert merged["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    assert merged["fp16"] == {"enabled": False, "initial_scale_power": 12}
    merged["fp16"], merged["zero_optimization"]["reduce_bucket_size"] = ours["fp16"], 500_000_000
    assert merged == ours
    tiny = configure(case, 0.001, options, on_gpu=False)["zero_optimization"]
    assert tiny["reduce_bucket_size"] == 200_000, "a tiny model's buffers shrink with it"
    nothing = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    assert configure(case, 0.001, nothing, on_gpu=False)["zero_optimization"]["stage3_param_persistence_threshold"] == 0
