"""Loss curves: every loss from the first step on, up to the first that is not finite."""

import math

import pytest
from zoo_examples import MINE, run

from pytest_gputrain import Case
from pytest_gputrain.records import Crashed, Measurement

STEPS = 24
ZOO = Case(model="llama-3.1-8b", method="lora", sequence_length=32, learning_rate=1e-3)


def _curve(case, builder=None, steps=STEPS):
    return run(case.replace(steps=steps, warmup=0), builder, curve=True)


def _own(losses, taken, **fields):
    """Own code that goes through ``losses`` and keeps how many were taken."""

    def build(setup):
        supply = iter(losses)

        def step():
            taken.append(1)
            return next(supply)

        return step

    return _curve(MINE.replace(**fields), build)


@pytest.mark.parametrize("accumulation", [1, 4, 40])
def test_a_curve_has_every_loss_from_the_first_on(accumulation):
    losses = [float(number) for number in range(100)]
    reply = _own(losses, [], gradient_accumulation=accumulation)
    assert isinstance(reply, Measurement)
    assert reply.losses == tuple(losses[:STEPS])


@pytest.mark.parametrize(("step", "bad"), [(1, math.nan), (2, math.inf), (3, -math.inf), (10, math.nan), (STEPS, math.inf)])
def test_a_curve_ends_before_the_first_loss_that_is_not_finite(bad, step):
    losses = [1.0] * (step - 1) + [bad] + [1.0] * 100
    taken = []
    reply = _own(losses, taken)
    assert isinstance(reply, Measurement)
    assert reply.losses == (1.0,) * (step - 1)
    assert len(taken) <= max(step, 3) + 1  # nothing is trained beyond it but the step that counts


def test_a_step_without_a_loss_has_no_curve():
    reply = _own([None] * 100, [])
    assert isinstance(reply, Crashed)
    assert reply.sentence == "mine returns no loss from its step, so it has no curve; return the loss of every step"


def test_curves_of_one_case_are_the_same_and_fall_from_the_same_weights_in_each_precision():
    first, second = (_curve(ZOO.replace(precision="fp32"), steps=12) for _ in range(2))
    assert first.losses == second.losses
    assert len(first.losses) == 12
    assert first.losses[-1] < first.losses[0]
    for precision in ("bf16-amp", "fp16-amp"):
        assert _curve(ZOO.replace(precision=precision), steps=1).losses[0] == pytest.approx(first.losses[0], rel=1e-2)


def test_weights_that_overflow_are_a_finding():
    reply = _curve(ZOO.replace(precision="fp32", optimizer="sgd", learning_rate=1e38))
    assert isinstance(reply, Measurement)
    assert 1 <= len(reply.losses) < STEPS
