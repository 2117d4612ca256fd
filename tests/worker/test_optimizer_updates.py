"""What an update does: clipped gradients, a schedule's rates, fp32 masters, and the optimizers of libraries."""

import math

import pytest
import torch
from diffusers.optimization import get_scheduler
from zoo_examples import example, measured, refused, trained

from pytest_gputrain import Case
from pytest_gputrain.worker.learning_rate import factor
from pytest_gputrain.worker.precision import Precision

CASE = Case(
    model="llama-3.1-8b",
    precision="fp32",
    batch_size=2,
    sequence_length=32,
    optimizer="sgd",
    learning_rate=0.5,
    steps=4,
    warmup=1,
)
HALVES = CASE.replace(precision="bf16", optimizer="adamw", learning_rate=0.0)
MASTERS = HALVES.replace(master_weights=True)


def moved(case, updates=1, micro_batches=1):
    """By how much each update moves the weights: the norm of their change."""
    training = trained(case)
    weights = [value for value in training.model.parameters() if value.requires_grad]
    norms = []
    for _ in range(updates):
        before = [value.detach().clone() for value in weights]
        for number in range(1, micro_batches + 1):
            training.step(number == micro_batches)
        norms.append(math.hypot(*((value - old).norm().item() for value, old in zip(weights, before, strict=True))))
    return norms


# Clipping and rates


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "fp16-amp"])
def test_clipping_bounds_an_update(precision):
    case = CASE.replace(precision=precision, method="lora", learning_rate=1.0)
    (free,) = moved(case)
    assert free > 0.02
    assert moved(case.replace(max_grad_norm=free / 10)) == pytest.approx([free / 10], rel=1e-3)
    assert moved(case.replace(max_grad_norm=free * 10)) == [free], "what is short enough stays as it is"


def test_gradients_of_all_micro_batches_are_clipped_together():
    case = CASE.replace(gradient_accumulation=2, learning_rate=1.0, max_grad_norm=0.5)
    assert moved(case, micro_batches=2) == pytest.approx([0.5], rel=1e-4)


def test_the_rates_of_a_schedule_reach_the_optimizer():
    # Gradients of norm 1 make the rate the length of an update.
    case = CASE.replace(method="lora", learning_rate=1e-3, max_grad_norm=1e-3, steps=12, warmup=0)
    assert moved(case, 3) == pytest.approx([1e-6] * 3, rel=1e-3)
    rising = moved(case.replace(lr_warmup_steps=10), 12)
    assert rising == pytest.approx([1e-7 * step for step in range(1, 11)] + [1e-6] * 2, rel=1e-3)
    falling = moved(case.replace(lr_scheduler="linear"), 13)
    assert falling == pytest.approx([1e-6 * (12 - step) / 12 for step in range(12)] + [0], rel=1e-3)


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_updates", [0, 5])
def test_the_fall_is_that_of_diffusers(name, warmup_updates):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = get_scheduler(name, optimizer, num_warmup_steps=warmup_updates, num_training_steps=20)
    case = CASE.replace(lr_scheduler=name, lr_warmup_steps=warmup_updates, warmup=4, steps=16)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    mine = [factor(case, update) for update in range(20)]
    assert mine[warmup_updates:] == pytest.approx(rates[warmup_updates:])
    assert mine[:warmup_updates] == pytest.approx([(update + 1) / 5 for update in range(warmup_updates)])
    assert factor(case, 20) == factor(case, 1000) == 0


def test_updates_count_and_not_micro_batches_and_a_warm_up_may_be_all_there_is():
    case = CASE.replace(lr_scheduler="linear", gradient_accumulation=4, warmup=0, steps=8)
    assert [factor(case, update) for update in range(3)] == [1.0, 0.5, 0.0]
    assert factor(CASE.replace(lr_scheduler="cosine", lr_warmup_steps=100), 4) == 0.05


def test_an_update_that_fp16_drops_leaves_the_rate_as_it_is(monkeypatch):
    monkeypatch.setattr(Precision, "scaler", lambda self, device: torch.amp.GradScaler("cpu", init_scale=2.0**30))
    case = CASE.replace(precision="fp16-amp", method="lora", max_grad_norm=1e-3, lr_warmup_steps=10)
    dropped, *_, last = moves = moved(case, 25)
    assert dropped == 0
    assert next(move for move in moves if move) == pytest.approx(0.1 * 0.5 * 1e-3, rel=1e-2)
    assert last > 0


# fp32 masters of 16-bit weights, outside of DeepSpeed


def test_the_optimizer_holds_fp32_and_the_model_16_bits():
    training = trained(MASTERS.replace(learning_rate=1e-3))
    training.step(True)
    optimizer = training._engine._optimizer
    masters, weights = optimizer.param_groups[0]["params"], list(training.model.parameters())
    assert {value.dtype for value in weights} == {torch.bfloat16}
    assert {value.dtype for value in masters} == {torch.float32}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in zip(weights, masters, strict=True))
    assert all(weight.grad is None for weight in weights)


def test_gradients_of_micro_batches_are_added_up_in_fp32():
    training = trained(MASTERS.replace(gradient_accumulation=3))
    weight, master = list(training.model.parameters())[-2], training._engine._masters.parameters[-2]
    gradients = []
    weight.register_hook(gradients.append)
    for _ in range(3):
        training.step(False)
        assert weight.grad is None
    assert torch.equal(master.grad, sum(gradient.float() for gradient in gradients))
    assert not torch.equal(master.grad, sum(gradients).float()), "bf16 would have been as good"


def test_updates_too_small_for_bf16_add_up():
    def norm_after(case):
        training = trained(case.replace(optimizer="adam", learning_rate=1e-3))
        for _ in range(8):
            training.step(True)
        return float((training.model.get_submodule("model.norm").weight.detach().float() - 1).abs().max())

    assert norm_after(HALVES) == 0, "weights of one round an update of 1e-3 away"
    assert norm_after(MASTERS) > 3e-3


# Optimizers of bitsandbytes and transformers

LLAMA = example("llama-3.1-8b", activation_checkpointing=True)


def states(optimizer):
    """Weights of tiny Llama after one step, each with the tensors of the optimizer's state for it."""
    training = trained(LLAMA.replace(optimizer=optimizer, precision="bf16"))
    training.step(True)
    return [(value, training._engine._optimizer.state[value]) for value in training.model.parameters()]


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_large_states_have_8_bits(name):
    found = states(name)
    assert {value.numel() >= 4096 for value, _ in found} == {True, False}
    for value, state in found:
        expected = torch.uint8 if value.numel() >= 4096 else torch.float32
        assert state["state1"].dtype == state["state2"].dtype == expected
        assert state["state1"].shape == value.shape
        if expected == torch.uint8:
            assert state["absmax1"].numel() == -(-value.numel() // 256)


def test_adafactor_keeps_rows_and_columns():
    for value, state in states("adafactor"):
        if value.dim() > 1:
            assert state["exp_avg_sq_row"].numel() + state["exp_avg_sq_col"].numel() == sum(value.shape)
        assert "exp_avg" not in state


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "adafactor"])
@pytest.mark.parametrize("precision", ["fp16-amp", "bf16-amp"])
def test_they_train_under_autocast_with_clipped_gradients(optimizer, precision):
    case = LLAMA.replace(optimizer=optimizer, precision=precision, max_grad_norm=1.0, lr_warmup_steps=2, steps=2, warmup=1)
    losses = measured(case).losses
    assert losses[-1] < losses[0]


def test_an_old_bitsandbytes_is_told(monkeypatch):
    # As 0.46, which has no such operator.
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    assert "has optimizers for GPUs only" in refused(LLAMA.replace(optimizer="adamw_8bit"))
