"""FSDP's choice between forward and backward: to let go of the parameters that it gathered, or to keep them."""

import pytest
from preloaded_worker import measured
from several_processes import predicted
from test_prediction_shards import H100, LLAMA

# A worker does not fail for what FSDP warns of, and neither do these.
pytestmark = pytest.mark.filterwarnings("default")

CASE = LLAMA.replace(model="llama-3.1-70b", parallel="fsdp", gpus=2, steps=2)  # of three tiny blocks


@pytest.mark.slow
def test_at_full_size_all_blocks_are_there_after_forward():
    case = LLAMA.replace(precision="bf16", parallel="fsdp", gpus=8)
    default, kept, let_go = (
        predicted(case.replace(reshard_after_forward=value), H100, scale="full") for value in (None, False, True)
    )
    blocks = 2 * 32 * 218_112_000
    assert kept.phase_peak_bytes["forward"] - default.phase_peak_bytes["forward"] > 0.8 * blocks
    assert kept.phase_peak_bytes["optimizer"] == default.phase_peak_bytes["optimizer"]
    # The head and the embedding lie outside of the blocks.
    assert let_go.phase_peak_bytes["forward"] <= default.phase_peak_bytes["forward"]


@pytest.mark.slow
def test_what_is_kept_takes_memory_and_changes_no_loss():
    default, kept, let_go = (measured(CASE.replace(reshard_after_forward=value)) for value in (None, False, True))
    assert default.losses == kept.losses == let_go.losses
    assert kept.phase_peak_bytes["forward"] > 1.05 * default.phase_peak_bytes["forward"]
