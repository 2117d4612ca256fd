"""fp32 masters of 16-bit weights outside of DeepSpeed: what they hold, what they change, what they cost."""

import math

import pytest
import torch
from test_prediction import H100, compare, predicted
from zoo_examples import example, measured

from pytest_gputrain.worker.run import SEED
from pytest_gputrain.worker.training import Training

MASTERS = {"master_weights": True}
LLAMA = example("llama-3.1-8b", precision="bf16", batch_size=2, sequence_length=32, steps=4, warmup=1)


def training(case):
    torch.manual_seed(SEED)
    return Training(case, "tiny", torch.device("cpu"))


def test_the_optimizer_holds_fp32_and_the_model_16_bits():
    trained = training(LLAMA.replace(**MASTERS))
    trained.step(True)
    optimizer = trained._engine._optimizer
    masters = optimizer.param_groups[0]["params"]
    weights = list(trained.model.parameters())
    assert {value.dtype for value in weights} == {torch.bfloat16}
    assert {value.dtype for value in masters} == {torch.float32}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in zip(weights, masters, strict=True))
    assert all(weight.grad is None for weight in weights)


def test_gradients_of_micro_batches_are_added_up_in_fp32():
    trained = training(LLAMA.replace(gradient_accumulation=3, **MASTERS))
    weight, master = list(trained.model.parameters())[-2], trained._engine._masters.parameters[-2]
    gradients = []
    weight.register_hook(gradients.append)
    for _ in range(3):
        trained.step(False)
        assert weight.grad is None
    assert master.grad.dtype == torch.float32
    assert torch.equal(master.grad, sum(gradient.float() for gradient in gradients))
    assert not torch.equal(master.grad, sum(gradients).float()), "bf16 would have been as good"


def test_updates_too_small_for_bf16_add_up():
    """A rate at which one update rounds away in bf16 moves the weights after some."""

    def moved(case):
        trained = training(case)
        norm_weight = trained.model.get_submodule("model.norm").weight
        for _ in range(8):
            trained.step(True)
        return float((norm_weight.detach().float() - 1).abs().max())

    case = LLAMA.replace(optimizer="adam", learning_rate=1e-3)
    assert moved(case) == 0, "weights of one round an update of 1e-3 away"
    assert moved(case.replace(**MASTERS)) > 3e-3


def test_losses_follow_those_of_fp32_more_closely():
    def losses(**knobs):
        return measured(LLAMA.replace(learning_rate=1e-4, steps=12, warmup=0, **knobs)).losses

    exact, stored, masters = losses(precision="fp32"), losses(), losses(**MASTERS)

    def distance(curve):
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(curve, exact, strict=True)))

    assert distance(masters) < distance(stored)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"optimizer": "adamw-fused"},
        {"optimizer": "momentum", "learning_rate": 0.1},
        {"gradient_accumulation": 3, "activation_checkpointing": True},
        {"max_grad_norm": 0.5},
        {"model": "llava-1.6-7b", "method": "pretrain", "resolution": "336x336", "sequence_length": 2048},
    ],
    ids=str,
)
def test_a_prediction_is_what_a_worker_counts(knobs):
    compare(LLAMA.replace(**MASTERS, **knobs))


def test_they_take_fourteen_bytes_more_and_save_the_16_bit_gradients():
    plain, masters = (measured(LLAMA.replace(master_weights=on)) for on in (False, True))
    assert masters.model_bytes == plain.model_bytes
    # At rest: bf16 weights and two states of bf16, against bf16 weights and fp32 masters with two states of fp32.
    rest = {case: predicted(LLAMA.replace(master_weights=case), H100).phase_peak_bytes["forward"] for case in (False, True)}
    assert rest[True] - rest[False] == pytest.approx((14 - 6) * plain.parameters, rel=0.01)
    update = {case: predicted(LLAMA.replace(master_weights=case, optimizer="adamw-fused"), H100) for case in (False, True)}
    peaks = {case: prediction.phase_peak_bytes["optimizer"] for case, prediction in update.items()}
    # Then gradients too: eight bytes a parameter, against eighteen.
    assert peaks[True] - peaks[False] == pytest.approx((18 - 8) * plain.parameters, rel=0.01)
