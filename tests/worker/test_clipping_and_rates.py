"""What an update does beside its optimizer: gradients are clipped, and the learning rate follows its schedule."""

import math

import pytest
import torch
from diffusers.optimization import get_scheduler
from test_prediction import compare

from pytest_gputrain import Case
from pytest_gputrain.worker.learning_rate import factor
from pytest_gputrain.worker.precision import Precision
from pytest_gputrain.worker.run import SEED
from pytest_gputrain.worker.training import Training

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
CLIPPED, SCHEDULED = {"max_grad_norm": 0.5}, {"lr_scheduler": "cosine", "lr_warmup_steps": 3}


def moved(case, updates=1):
    """By how much each update moves the weights: the norm of their change."""
    torch.manual_seed(SEED)
    training = Training(case, "tiny", torch.device("cpu"))
    trained = [value for value in training.model.parameters() if value.requires_grad]
    norms = []
    for _ in range(updates):
        before = [value.detach().clone() for value in trained]
        training.step(True)
        norms.append(math.hypot(*((value - old).norm().item() for value, old in zip(trained, before, strict=True))))
    return norms


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "fp16-amp"])
def test_clipping_bounds_an_update(precision):
    case = CASE.replace(precision=precision, method="lora", learning_rate=1.0)
    (free,) = moved(case)
    assert free > 0.02
    assert moved(case.replace(max_grad_norm=free / 10)) == pytest.approx([free / 10], rel=1e-3)
    assert moved(case.replace(max_grad_norm=free * 10)) == [free], "what is short enough stays as it is"


def test_gradients_of_all_micro_batches_are_clipped_together():
    torch.manual_seed(SEED)
    training = Training(CASE.replace(gradient_accumulation=2, learning_rate=1.0, **CLIPPED), "tiny", torch.device("cpu"))
    before = [value.detach().clone() for value in training.model.parameters()]
    training.step(False)
    training.step(True)
    changes = [(value - old).norm().item() for value, old in zip(training.model.parameters(), before, strict=True)]
    assert math.hypot(*changes) == pytest.approx(0.5, rel=1e-4)


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


@pytest.mark.parametrize("knobs", [{}, {"precision": "fp16-amp"}, {"method": "lora", "optimizer": "adamw"}], ids=str)
def test_a_prediction_counts_what_clipping_allocates(knobs):
    compare(CASE.replace(**knobs, **CLIPPED, **SCHEDULED))
