"""Own code that keeps more memory from step to step fails, with the tensor and the line; what is sound passes."""

import copy
import gc
import mmap

import numpy
import pytest
import torch
from zoo_examples import MINE, measured, refused, run, stepping, task_of

from pytest_gputrain import Case
from pytest_gputrain.records import Crashed, Measurement
from pytest_gputrain.utils.units import KiB, MiB
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.group import ALONE
from pytest_gputrain.worker.growth import Growth, _steady_growth, malloc_bytes, resident_bytes

MINE = MINE.replace(steps=3)
LARGE = 256 * KiB // 4


def keeping(make, every=1):
    """A builder of steps of which each, or every so many, keeps one thing more."""
    kept, calls = [], []

    def step():
        calls.append(1)
        if len(calls) % every == 0:
            kept.append(make())

    return lambda setup: step


def _large():
    return torch.ones(LARGE)


class Sound:
    """Steps that keep nothing, or not more and more."""

    @staticmethod
    def plain(setup):
        return stepping(torch.nn.Linear(64, 64), torch.ones(8, 64))

    @staticmethod
    def metrics(setup):
        step, kept = Sound.plain(setup), []
        return lambda: kept.append(step().detach().clone())

    @staticmethod
    def late_average(setup):
        step, model, averages = Sound.plain(setup), torch.nn.Linear(64, 64), []
        yield step()
        averages.append(copy.deepcopy(model))
        while True:
            yield step()

    @staticmethod
    def variable_lengths(setup):
        for length in [5, 9, 2, 8, 1, 7, 3, 6] * 9:
            batch = torch.ones(length, 4 * KiB)
            yield
            batch.add_(1)

    @staticmethod
    def batches_sorted_by_length(setup):
        for length in range(1, 99):
            batch = torch.ones(length, 4 * KiB)
            yield
            batch.add_(1)

    @staticmethod
    def a_cache_that_fills(setup):
        cache = {}
        while True:
            cache.setdefault(len(cache) % 3 if len(cache) < 3 else 0, torch.ones(LARGE))
            yield

    @staticmethod
    def cycles(setup):
        def step():
            cycle = [torch.ones(LARGE)]
            cycle.append(cycle)

        return step

    @staticmethod
    def experts_that_are_seldom_chosen(setup, forgets=True):
        model = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))
        optimizer = torch.optim.AdamW(model.parameters())
        setup.watch(model)
        for turn in range(99):
            loss = model[turn % 12](torch.ones(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=forgets)
            yield loss

    @staticmethod
    def experts_that_keep_gradients(setup):
        return Sound.experts_that_are_seldom_chosen(setup, forgets=False)

    @staticmethod
    def sparse_gradients_that_differ_in_size(setup):
        table = torch.nn.Embedding(1000, 64, sparse=True)
        optimizer = torch.optim.SparseAdam(list(table.parameters()))
        for rows in range(25, 1000, 25):
            optimizer.zero_grad()
            loss = table(torch.arange(rows)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss


SOUND = [value for value in vars(Sound).values() if isinstance(value, staticmethod)]


@pytest.mark.parametrize("build", SOUND, ids=lambda build: build.__name__)
def test_sound_steps_pass(build):
    assert measured(MINE.replace(steps=9), build).notes == ()


def test_growth_of_a_case_of_the_zoo_is_its_own():
    gc.collect()
    measured(Case(model="word2vec", precision="fp32", optimizer="sgd", steps=2, warmup=1))


KEPT = "mine keeps 256 KiB more of tensors after every"


def test_a_tensor_that_every_step_keeps_fails_the_case():
    reply = run(MINE, keeping(_large))
    assert isinstance(reply, Crashed)
    assert reply.phase == "count"
    assert f"{KEPT} step, most of it float32 [65536] (256 KiB) made by aten.ones" in reply.sentence
    assert reply.sentence.endswith('allow it with @pytest.mark.gpu_tolerance(growth="320 KiB")')


@pytest.mark.parametrize(
    ("others", "described"),
    [
        (0, ", most of it 2 x float32 [65536] (512 KiB) made by aten.ones in "),
        (3, ", including 2 x float32 [65536] (512 KiB) made by aten.ones in "),
        (60, "; do not keep them"),
    ],
)
def test_the_named_part_of_the_growth_has_the_bytes_of_all_its_tensors(others, described):
    def build(setup):
        kept = []

        def step():
            kept.append([torch.ones(LARGE) for _ in range(2)])
            kept.append([torch.zeros(LARGE + number) for number in range(others)])

        return step

    assert f"more of tensors after every step{described}" in refused(MINE, build)


def test_a_storage_that_every_round_gives_to_another_tensor_is_no_part_of_the_growth():
    def build(setup):
        kept, weights = [], torch.ones(4 * LARGE)

        def step():
            torch.empty(0).set_(weights.untyped_storage(), 0, (4 * LARGE,), (1,))  # as an LSTM does on a GPU
            kept.append(torch.zeros(LARGE))

        return step

    assert "most of it float32 [65536] (256 KiB) made by aten.zeros in " in refused(MINE, build)


LEAKING = """\
import torch

KEEP = []


def build(setup):
    model, x = torch.nn.Linear(256, 256), torch.ones(64, 256)

    def step():
        KEEP.append(model(x).square().mean())

    return step
"""


def test_the_line_of_the_user_s_file_is_named(tmp_path):
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    sentence = refused(MINE.replace(code="test_leaking.py::build"), root=str(tmp_path))
    assert "made by aten.addmm in test_leaking.py:10; do not keep them (a loss that is kept without detach()" in sentence


def test_what_an_optimizer_collects_is_kept():
    class Collects(torch.optim.SGD):
        def step(self, closure=None):
            (weight,) = self.param_groups[0]["params"]
            self.state[weight].setdefault("past", []).append(weight.detach().clone())
            return super().step(closure)

    def build(setup):
        weight = torch.nn.Parameter(torch.ones(LARGE))
        optimizer = Collects([weight], lr=0.1)
        while True:
            weight.grad = torch.ones(LARGE)
            optimizer.step()
            yield

    assert f"{KEPT} step" in refused(MINE, build)


def test_growth_is_judged_by_rounds_of_an_accumulation():
    assert f"{KEPT} round of 4 steps" in refused(MINE.replace(gradient_accumulation=4, steps=4), keeping(_large, every=4))


@pytest.mark.parametrize(("allowed", "kind"), [(256 * KiB, Measurement), (256 * KiB - 1, Crashed)])
def test_growth_that_the_test_allows_passes(allowed, kind):
    assert isinstance(run(MINE, keeping(_large), growth_bytes=allowed), kind)


def test_a_curve_is_of_steps_and_not_of_growth():
    step = keeping(_large)(None)
    assert isinstance(run(MINE, lambda setup: lambda: step() or 1.0, curve=True), Measurement)


def test_further_rounds_leave_the_peak_as_it_is():
    cycles = measured(MINE, Sound.cycles).peak_allocated_bytes
    assert cycles == 2 * LARGE * 4, "garbage of two rounds, as long as nothing collects it"


def fresh(size):
    """Resident memory that was not the process's before, whatever was freed before."""
    memory = numpy.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=numpy.uint8)
    memory[:] = 1
    return memory


def test_memory_of_the_process_that_every_step_keeps_fails_the_case_or_is_told_in_few_steps():
    build = keeping(lambda: fresh(6 * MiB))
    reply = run(MINE.replace(steps=10), build)
    assert isinstance(reply, Crashed)
    assert reply.phase == "check"
    assert "the process of mine grows by 6.0" in reply.sentence
    assert "in 10 of 10 timed steps" in reply.sentence
    (note,) = measured(MINE, build).notes
    assert note.startswith("the process grew by 6.0")
    allowed = run(MINE.replace(steps=10), build, growth_bytes=8 * MiB)
    assert isinstance(allowed, Measurement)
    assert allowed.notes == ()
    measured(MINE.replace(steps=12), keeping(lambda: fresh(8 * MiB), every=3))  # now and then


class Once:
    """Makes something in one call alone: a step after the counted ones and those of the warm-up."""

    def __init__(self, make, call):
        self.make, self.to_come = make, call

    def __call__(self):
        self.to_come -= 1
        return self.make() if not self.to_come else None


@pytest.mark.parametrize("make", [fresh, lambda size: numpy.ones(size // 8)], ids=["mapped", "of malloc"])
def test_memory_of_the_process_that_one_step_keeps_is_no_growth(make):
    assert measured(MINE.replace(steps=10), keeping(Once(lambda: make(100 * MiB), 10))).notes == ()


def test_arrays_that_every_second_step_keeps_are_told():
    notes = measured(MINE.replace(steps=10), keeping(lambda: numpy.ones(20 * MiB // 8), every=2)).notes
    assert "the process grew by 10.0 MiB a step on average, beside the tensors that are counted" in notes


@pytest.mark.parametrize(
    ("ends", "growth"),
    [
        ([0, 8, 16, 24, 32], 8),
        ([0, 0, 16, 16, 32, 32], 6.4),
        ([0, 40, 40, 40, 80, 80, 80, 120, 120, 120, 160], 16),
        ([0, 40, 41, 40, 80, 82, 80, 80, 120, 120, 121, 160], 160 / 11),
        # Once, twice in one half, to and fro, and so little that nobody looks for it.
        ([0, 0, 0, 100, 100, 100], 0),
        ([0, 100, 200, 200, 200, 200], 0),
        ([0, 90, 10, 80, 0, 90, 20, 90], 0),
        ([0, 1, 2, 3, 4, 5], 0),
        ([0, 50], 0),
        ([], 0),
    ],
)
def test_growth_goes_on_where_both_halves_of_the_steps_have_it(ends, growth):
    assert _steady_growth(ends, 4) == growth


def test_what_a_step_leaves_on_the_heap_is_known_in_bytes():
    kept = measured(MINE.replace(steps=10), keeping(lambda: bytearray(100 * KiB))).heap_growth
    if kept is None:
        pytest.skip("malloc is not that of glibc from 2.33 on")
    assert kept == pytest.approx(100 * KiB, rel=0.1)
    assert measured(MINE.replace(steps=10), keeping(lambda: bytearray(1 * KiB))).heap_growth == 0
    assert measured(MINE.replace(steps=10), keeping(Once(lambda: bytearray(200 * KiB), 10))).heap_growth == 0


def test_malloc_tells_exactly_what_it_has_handed_out():
    before = malloc_bytes()
    if before is None:
        pytest.skip("malloc is not that of glibc from 2.33 on")
    kept = numpy.ones(32 * MiB // 8)
    assert malloc_bytes() - before == pytest.approx(kept.nbytes, rel=0.001)


def test_resident_memory_is_read():
    before = resident_bytes()
    kept = fresh(32 * MiB)
    assert resident_bytes() - before == pytest.approx(kept.nbytes, rel=0.1)


class Steps:
    """A stand-in for a training on a device whose allocator knows what lives."""

    def __init__(self, more):
        self.bytes, self.more, self.losses, self.kept = 0, iter(more), [], []

    def step(self, update):
        self.kept.append(torch.ones(LARGE))  # on the host, so that it is not named
        self.bytes += next(self.more)

    def check(self, growth):
        """What the check says, having had its further steps run."""
        checking = growth.check(self, lambda: self.bytes)
        while True:
            try:
                self.step(next(checking))
            except StopIteration as end:
                return end.value


@pytest.mark.parametrize("grown", [[MiB] * 9, [MiB, 0] * 9, [MiB] * 6 + [0] * 3, [64] * 9])
def test_on_a_gpu_the_timed_steps_tell_of_growth_that_goes_on(grown):
    training = Steps(grown)
    growth = Growth(task_of(MINE, device_type="gpu"), ALONE)
    for _ in range(6):
        growth.begin_step()
        training.step(True)
        growth.end_step(training, training.bytes)
    if grown == [MiB] * 9:
        with pytest.raises(CheckFailed, match=r"mine keeps 1\.00 MiB more of tensors after every step; do"):
            training.check(growth)
    else:
        assert training.check(growth) == ""
