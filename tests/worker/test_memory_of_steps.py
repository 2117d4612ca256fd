"""The memory of every step of own code that was asked for is known, and memory that steps begin to keep late is found."""

import itertools

import pytest
import torch
from zoo_examples import MINE, measured, refused, run, stepping

from pytest_gputrain.records.step_memory import OfStep, unfolded
from pytest_gputrain.utils.units import KiB
from pytest_gputrain.worker import step_memory

LARGE = 64 * KiB // 4


def memory_of(steps, builder, **knobs):
    reply = measured(MINE.replace(steps=steps, **knobs), builder)
    return [*unfolded(reply.memory_of_steps)], reply


def training(before_step=lambda number: None):
    """A builder of a training that calls this with the number of each step, from 1."""

    def build(setup):
        step, number = stepping(torch.nn.Linear(64, 64), torch.ones(8, 64)), 0
        while True:
            before_step(number)
            yield step()
            number += 1

    return build


def test_alike_steps_are_one_row_behind_the_first():
    steps, reply = memory_of(12, training())
    assert len(steps) == 12
    assert len(reply.memory_of_steps) <= 2
    two_losses = 8
    assert 0 <= reply.peak_allocated_bytes - max(step.peak for step in steps) <= two_losses
    assert steps[0].end < steps[0].peak


def test_a_larger_sample_shows_in_its_step_alone_by_its_bytes():
    plain, _ = memory_of(12, training())
    spiked, reply = memory_of(12, training(lambda number: number == 9 and torch.ones(LARGE).sum()))
    # It is there before the step allocates anything.
    highest = max(plain[8].peak, plain[8].end + 64 * KiB + 4)
    assert spiked == [*plain[:8], OfStep(highest, plain[8].end), *plain[9:]]
    assert max(step.peak for step in spiked) > reply.peak_allocated_bytes, "which is that of the first steps"


def test_tensors_of_all_origins_count_as_in_the_first_steps():
    def odd(number):
        given = torch.frombuffer(bytearray(40 * KiB), dtype=torch.uint8)
        half = given[: 20 * KiB].view(torch.float32).clone()
        half.untyped_storage().resize_(80 * KiB)
        torch.sparse_coo_tensor(torch.tensor([[1, 2]]), torch.ones(2), (4,), check_invariants=False).coalesce()
        torch.frombuffer(bytearray(200 * KiB), dtype=torch.float32).sum()  # which no operator returns

    steps, _ = memory_of(9, training(odd))
    assert len({step.peak for step in steps[1:]}) == 1, steps


def test_what_is_between_two_steps_is_of_none():
    def evaluated(setup):
        setup.evaluation(lambda: torch.ones(1024 * KiB // 4).sum())
        return training()(setup)

    assert memory_of(9, evaluated)[0] == memory_of(9, training())[0]


def test_gradients_are_accumulated_in_whole_rounds():
    def build(setup):
        model, batch = torch.nn.Linear(64, 64), torch.ones(8, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            for _ in range(2):
                yield
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for asked, counted in ((3, 8), (11, 12)):
        steps, _ = memory_of(asked, build, gradient_accumulation=2)
        assert len(steps) == counted
        assert steps[4:6] * ((counted - 4) // 2) == steps[4:]


def test_garbage_is_no_growth():
    def cycle(number):
        kept = [torch.ones(LARGE)]
        kept.append(kept)

    steps, reply = memory_of(12, training(cycle))
    assert reply.notes == ()
    assert len({step.end for step in steps[2:]}) == 1


@pytest.mark.parametrize("first", [5, 9])
def test_what_steps_keep_from_a_later_one_on_names_step_and_line(first):
    kept = []
    sentence = refused(MINE.replace(steps=14), training(lambda number: number >= first and kept.append(torch.ones(LARGE))))
    assert (
        f"mine keeps 64.0 KiB more of tensors after every step from step {first} on, most of it float32 [16384]" in sentence
    )
    assert "made by aten.ones in tests/worker/test_memory_of_steps.py:" in sentence


def test_what_every_third_step_keeps_is_told():
    kept = []
    _, reply = memory_of(16, training(lambda number: number % 3 == 1 and kept.append(torch.ones(LARGE))))
    assert reply.notes == ("its steps keep 64.0 KiB more of tensors after every 3 steps, from step 7 on",)


def test_a_cache_that_fills_and_small_numbers_are_no_growth():
    cache, numbers = {}, []

    def fill(number):
        cache.setdefault(min(number // 2, 5), torch.ones(LARGE))
        numbers.append(torch.ones(1))

    _, reply = memory_of(24, training(fill))
    assert reply.notes == ()


def test_a_test_may_allow_the_growth():
    builder = training(lambda number, kept=[]: number >= 6 and kept.append(torch.ones(LARGE)))
    case = MINE.replace(steps=12)
    assert "from step 6 on" in refused(case, builder, growth_bytes=63 * KiB)
    reply = run(case, builder, growth_bytes=64 * KiB)
    assert (reply.notes, reply.allowed_growth) == ((), 64 * KiB)
    ends = [step.end for step in unfolded(reply.memory_of_steps)]
    assert [later - earlier for earlier, later in itertools.pairwise(ends[4:])] == [64 * KiB] * 7


EPOCH = MINE.replace(steps=3, warmup=1, epoch=True)


def epoch_of(steps, before_step=lambda number: None):
    """A builder of a loop that ends."""

    def build(setup):
        loop = training(before_step)(setup)
        for _ in range(steps + 1):
            yield next(loop)

    return build


def test_an_epoch_is_followed_but_for_the_steps_of_checks():
    reply = measured(EPOCH, epoch_of(40, lambda number: number == 40 and torch.ones(LARGE).sum()))
    steps = [*unfolded(reply.memory_of_steps)]
    assert len(steps) == 40
    unknown = [number for number, step in enumerate(steps, start=1) if not step.peak]
    timed, counted = 3, 4
    assert unknown == [*range(counted + 1 + timed + 1, counted + 1 + timed + 1 + len(unknown))]
    assert len(unknown) <= 4
    assert (len(reply.step_seconds), reply.notes) == (3, ())
    alike, last = steps[20], steps[-1]
    assert {step for step in steps[4:-1] if step.peak} == {alike}
    assert last == OfStep(max(alike.peak, alike.end + 64 * KiB + 4), alike.end)


def test_what_the_last_steps_of_an_epoch_keep_is_told():
    kept = []
    figures = measured(EPOCH, epoch_of(40, lambda number: number > 30 and kept.append(torch.ones(LARGE))))
    assert "its steps keep 64.0 KiB more of tensors after each step, from step 31 on" in figures.notes


def test_an_epoch_that_is_too_short_or_has_no_end_says_so(monkeypatch):
    monkeypatch.setattr(step_memory, "_MOST_STEPS", 30)
    assert "the loop of mine ended after 6 steps, but more have to be measured" in refused(EPOCH, epoch_of(5))
    assert "the loop of mine has not ended after 30 steps, and epoch=True follows it to its end; give it fewer" in (
        refused(EPOCH, training())
    )
    assert "nothing tells where its epoch ends; yield after each step of its loop" in (
        refused(EPOCH, lambda setup: stepping(torch.nn.Linear(4, 4), torch.ones(1, 4)))
    )
