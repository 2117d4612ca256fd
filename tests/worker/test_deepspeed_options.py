"""Further options of DeepSpeed reach its engine, change what it does, and are predicted."""

import pytest
from preloaded_worker import measured, run
from several_processes import needs_deepspeed, predicted
from test_prediction_shards import LLAMA

from pytest_gputrain.records import Crashed
from pytest_gputrain.worker.parallel.zero import configure

# A worker does not fail for what DeepSpeed warns of, and neither do these.
pytestmark = [pytest.mark.filterwarnings("default"), needs_deepspeed]

ZERO2 = LLAMA.replace(parallel="zero2", precision="bf16", gpus=2, steps=2, warmup=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "options"), [("zero2", {"reduce_bucket_size": 20_000_000_000}), ("zero3", {"sub_group_size": 1000})]
)
def test_it_is_another_measurement_and_predicted(parallel, options):
    case, options = ZERO2.replace(parallel=parallel), {"zero_optimization": options}
    plain, changed, prediction = measured(case), measured(case, deepspeed=options), predicted(case, deepspeed=options)
    assert changed.peak_allocated_bytes != plain.peak_allocated_bytes
    assert changed.losses == pytest.approx(plain.losses, rel=1e-2)
    more = changed.ranks[0].peak_allocated_bytes - prediction.peak_allocated_bytes
    # Threads of gloo let go of buffers when they come to it, later on a busy machine.
    assert 0 <= more <= 0.02 * prediction.peak_allocated_bytes


@pytest.mark.slow
def test_what_deepspeed_does_not_know_is_told():
    reply = run(ZERO2, deepspeed={"zero_optimization": {"reduce_bucket_sizes": 1}})
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
