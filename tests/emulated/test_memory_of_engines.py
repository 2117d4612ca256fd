"""What engines and optimizers keep on an emulated GPU, and what they keep on the host or in other processes instead."""

import os

import pytest

from pytest_gputrain import Case
from pytest_gputrain.session.fit_engines import EmulatedCells

LLAMA = Case(model="llama-3.2-1b", precision="bf16", sequence_length=512)
PANGU = Case(model="pangu-350m", precision="bf16", sequence_length=512)


@pytest.fixture(scope="module")
def figures_of(preloaded, tmp_path_factory):
    """Give the figures of a case on an emulated H100."""
    cells = EmulatedCells(["h100"], tmp_path_factory.mktemp("cells"), 300, {**os.environ, **preloaded({})}, None)
    yield lambda case, **knobs: cells.figures(case.replace(**knobs), "h100")
    cells.close()


def test_fewer_shards_are_larger_and_what_fsdp_offloads_is_on_the_host(figures_of):
    two, eight, offloaded = (
        figures_of(LLAMA, parallel="fsdp", **knobs) for knobs in ({"gpus": 2}, {"gpus": 8}, {"gpus": 2, "cpu_offload": True})
    )
    assert two.model_bytes == pytest.approx(4 * eight.model_bytes, rel=0.01)
    # Adam's states, gradients and weights, for all but what is gathered.
    assert two.phase_peak_bytes["optimizer"] > 2.5 * eight.phase_peak_bytes["optimizer"]
    shards = 3 * two.model_bytes  # weights and Adam's two states, at rest
    saved = two.phase_peak_bytes["forward"] - offloaded.phase_peak_bytes["forward"]
    assert saved == pytest.approx(shards, rel=0.1)


def test_all_blocks_of_fsdp_are_there_after_forward_unless_they_are_let_go(figures_of):
    default, kept, let_go = (
        figures_of(LLAMA, parallel="fsdp", gpus=8, reshard_after_forward=value).phase_peak_bytes
        for value in (None, False, True)
    )
    blocks = 2 * 16 * 60_821_504
    assert kept["forward"] - default["forward"] > 0.8 * blocks
    assert let_go["forward"] <= default["forward"]


def test_a_stage_of_zero_needs_less_for_the_update_and_no_states_where_they_are_offloaded(figures_of):
    whole, sharded = (figures_of(PANGU, gpus=8, parallel=engine).phase_peak_bytes for engine in ("zero0", "zero1"))
    update = [max(peaks.get("optimizer", 0), peaks["between"]) for peaks in (whole, sharded)]
    assert update[1] < 0.6 * update[0], "the states are those of an eighth"
    here, there = (figures_of(PANGU, gpus=2, parallel="zero2", offload_optimizer=value) for value in (False, True))
    masters = 3 * 4 * here.parameters // 2  # fp32 weights and Adam's two states of a half
    assert here.peak_allocated_bytes - there.peak_allocated_bytes > 0.9 * masters
    larger = figures_of(PANGU, gpus=2, parallel="zero2", offload_optimizer=True, reduce_bucket_size=1_000_000_000)
    growth = larger.peak_allocated_bytes - there.peak_allocated_bytes
    assert growth == pytest.approx(2 * 500_000_000, rel=0.001), "a buffer of 16 bits for each element more"


def test_fp32_masters_take_eight_bytes_more_at_rest_and_save_16_bit_gradients(figures_of):
    halves, masters = (figures_of(LLAMA, optimizer="adamw-fused", master_weights=value) for value in (False, True))
    assert halves.model_bytes == masters.model_bytes

    def grown(phase):
        return (masters.phase_peak_bytes[phase] - halves.phase_peak_bytes[phase]) / halves.parameters

    # Bf16 weights and two states of bf16, against bf16 weights and fp32 masters with two states of fp32.
    assert grown("forward") == pytest.approx(14 - 6, rel=0.01)
    # Then gradients too: eight bytes a parameter, against eighteen.
    assert grown("optimizer") == pytest.approx(18 - 8, rel=0.01)


def test_paged_states_are_not_in_the_memory_of_torch(figures_of):
    whole, paged = (figures_of(LLAMA, optimizer=name) for name in ("adamw_8bit", "paged_adamw_8bit"))
    elements = whole.parameters - 33 * 2048  # all but the norms, whose states are too small
    assert whole.peak_allocated_bytes - paged.peak_allocated_bytes == pytest.approx(2 * elements, rel=0.02)


def test_a_full_model_trains_the_parameters_of_its_adapters(figures_of):
    rank, width, keys = 8, 2048, 512
    run = figures_of(LLAMA, method="lora", lora_targets="q_proj+v_proj", dora=True)
    assert run.trainable_parameters == 16 * (rank * (width + width) + width + rank * (width + keys) + keys)
