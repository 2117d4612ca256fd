"""The optimizers of bitsandbytes and transformers: their states, and what is predicted of them."""

import pytest
import torch
from test_prediction import H100, compare, predicted
from zoo_examples import example, measured, run

from pytest_gputrain.cases.libraries import libraries
from pytest_gputrain.records import Crashed
from pytest_gputrain.worker.training import Training

LLAMA = example("llama-3.1-8b", activation_checkpointing=True)
OTHERS = ["adamw_8bit", "paged_adamw_8bit", "adafactor"]


def states(**knobs):
    """The tensors of an optimizer's state by the weight's name, after one step of tiny Llama, with the weight."""
    torch.manual_seed(0)
    training = Training(LLAMA.replace(**knobs), "tiny", torch.device("cpu"))
    training.step(True)
    optimizer = training._engine._optimizer
    return {name: (value, optimizer.state[value]) for name, value in training.model.named_parameters()}


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_large_states_have_8_bits(name):
    found = states(optimizer=name, precision="bf16")
    assert {value.numel() >= 4096 for value, _ in found.values()} == {True, False}
    for value, state in found.values():
        expected = torch.uint8 if value.numel() >= 4096 else torch.float32
        assert state["state1"].dtype == state["state2"].dtype == expected
        assert state["state1"].shape == value.shape
        if expected == torch.uint8:
            assert state["absmax1"].numel() == -(-value.numel() // 256)


def test_adafactor_keeps_rows_and_columns():
    found = states(optimizer="adafactor", precision="bf16")
    for value, state in found.values():
        kept = state["exp_avg_sq_row"].numel() + state["exp_avg_sq_col"].numel() if value.dim() > 1 else value.numel()
        assert kept == (sum(value.shape) if value.dim() > 1 else value.numel())
        assert "exp_avg" not in state


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize("knobs", [{}, {"precision": "fp32"}, {"master_weights": True}, {"method": "qlora"}], ids=str)
def test_a_prediction_counts_them_in_every_phase(optimizer, knobs):
    compare(LLAMA.replace(optimizer=optimizer, **knobs))


@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize("precision", ["fp16-amp", "bf16-amp"])
def test_they_train_under_autocast_with_clipped_gradients(optimizer, precision):
    case = LLAMA.replace(optimizer=optimizer, precision=precision, max_grad_norm=1.0, lr_warmup_steps=2, steps=2, warmup=1)
    losses = measured(case).losses
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_paged_states_are_not_of_the_device():
    whole, paged = (predicted(LLAMA.replace(optimizer=name), H100, scale="full") for name in OTHERS[:2])
    elements = 8_030_261_248 - 65 * 4096  # all but the norms, whose weights have less than 100,000 each
    assert paged.host_bytes - whole.host_bytes == pytest.approx(2 * elements, rel=1e-6)
    # Blocks of some sizes are rounded up.
    assert whole.peak_allocated_bytes - paged.peak_allocated_bytes == pytest.approx(2 * elements, rel=0.001)
    assert whole.fits
    assert paged.fits


def test_an_old_bitsandbytes_is_told(monkeypatch):
    # As 0.46, which has no such operator.
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    reply = run(LLAMA.replace(optimizer="adamw_8bit"))
    assert isinstance(reply, Crashed)
    assert "has optimizers for GPUs only, so neither a CPU nor a prediction can use them" in reply.sentence


def test_their_libraries_are_known():
    pangu = example("pangu-350m")
    assert "bitsandbytes" in libraries(pangu.replace(optimizer="adamw_8bit"))
    assert "transformers" in libraries(pangu.replace(optimizer="adafactor"))
    assert not {"bitsandbytes", "transformers"} & set(libraries(pangu))
