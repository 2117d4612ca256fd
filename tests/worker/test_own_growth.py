"""Own code that keeps more memory from step to step fails, with the tensor and the line; what is sound passes."""

import copy
import gc
import mmap
import textwrap

import numpy
import pytest
import torch
from zoo_examples import run as run_here

from pytest_gputrain import Case
from pytest_gputrain.records import Crashed, Measurement, Task
from pytest_gputrain.utils.units import KiB, MiB
from pytest_gputrain.worker import run as worker_run
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.group import ALONE
from pytest_gputrain.worker.growth import Growth, resident_bytes
from pytest_gputrain.worker.progress import Progress

MINE = Case(model="mine", method="custom", code="inline", precision="fp32", steps=3, warmup=1)
LARGE = 256 * KiB // 4


def run(step, case=MINE, growth_bytes=0, root="."):
    task = Task(case=case, scale="tiny", device_type="cpu", root=str(root), growth_bytes=growth_bytes)
    return worker_run.run(task, Progress(None), lambda setup: step)


def keeping(size, kept):
    return lambda: kept.append(torch.ones(size))


class Sound:
    """Steps that keep nothing, or not more and more."""

    @staticmethod
    def plain():
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            loss = model(torch.ones(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    @staticmethod
    def metrics():
        step, kept = Sound.plain(), []
        return lambda: kept.append(step().detach().clone())

    @staticmethod
    def late_average():
        step, model, calls, averages = Sound.plain(), torch.nn.Linear(64, 64), [], []

        def averaged():
            loss = step()
            calls.append(1)
            if len(calls) == 2:
                averages.append(copy.deepcopy(model))
            return loss

        return averaged

    @staticmethod
    def variable_lengths():
        lengths, held = iter([5, 9, 2, 8, 1, 7, 3, 6] * 9), {}

        def step():
            held["batch"] = torch.ones(next(lengths), 4 * KiB)

        return step

    @staticmethod
    def a_cache_that_fills():
        cache = {}

        def step():
            cache.setdefault(len(cache) % 3 if len(cache) < 3 else 0, torch.ones(LARGE))

        return step

    @staticmethod
    def cycles():
        def step():
            cycle = [torch.ones(LARGE)]
            cycle.append(cycle)

        return step


@pytest.mark.parametrize("how", [value.__name__ for value in vars(Sound).values() if isinstance(value, staticmethod)])
def test_sound_steps_pass(how):
    reply = run(getattr(Sound, how)())
    assert isinstance(reply, Measurement), reply
    assert reply.notes == ()


def test_a_tensor_that_every_step_keeps_fails_the_case():
    reply = run(keeping(LARGE, []))
    assert isinstance(reply, Crashed)
    assert reply.phase == "count"
    assert "mine keeps 256 KiB more of tensors after every step, most of it float32 [65536] (256 KiB) made by aten.ones" in (
        reply.sentence
    )
    assert reply.sentence.endswith('allow it with @pytest.mark.gpu_tolerance(growth="320 KiB")')


def test_the_line_of_the_user_s_file_is_named(tmp_path):
    file = tmp_path / "test_leaking.py"
    file.write_text(
        textwrap.dedent(
            """\
            import torch

            KEEP = []


            def build(setup):
                model, x = torch.nn.Linear(256, 256), torch.ones(64, 256)

                def step():
                    KEEP.append(model(x).square().mean())

                return step
            """
        )
    )
    case = MINE.replace(code="test_leaking.py::build")
    reply = worker_run.run(Task(case=case, scale="tiny", device_type="cpu", root=str(tmp_path)), Progress(None))
    assert isinstance(reply, Crashed)
    assert (
        "made by aten.addmm in test_leaking.py:10; do not keep them (a loss that is kept without detach()" in reply.sentence
    )


def experts(forgets):
    def build(setup):
        model = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))
        optimizer, turns = torch.optim.AdamW(model.parameters()), iter(range(99))
        setup.watch(model)

        def step():
            loss = model[next(turns) % 12](torch.ones(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=forgets)
            return loss

        return step

    return build


def sparse(setup):
    table = torch.nn.Embedding(1000, 64, sparse=True)
    optimizer, rows = torch.optim.SparseAdam(list(table.parameters())), iter(range(50, 1000, 50))

    def step():
        optimizer.zero_grad()
        loss = table(torch.arange(next(rows))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("build", [experts(True), experts(False), sparse], ids=["experts", "with gradients", "sparse"])
def test_experts_that_are_seldom_chosen_and_gradients_that_differ_in_size_are_no_growth(build):
    reply = run_here(MINE.replace(steps=9), build)
    assert isinstance(reply, Measurement), reply


def test_growth_of_a_case_of_the_zoo_is_its_own():
    gc.collect()
    assert isinstance(run_here(Case(model="word2vec", precision="fp32", optimizer="sgd", steps=2, warmup=1)), Measurement)


def test_what_an_optimizer_collects_is_kept():
    class Collects(torch.optim.SGD):
        def step(self, closure=None):
            (weight,) = self.param_groups[0]["params"]
            self.state[weight].setdefault("past", []).append(weight.detach().clone())
            return super().step(closure)

    weight = torch.nn.Parameter(torch.ones(LARGE))
    optimizer = Collects([weight], lr=0.1)

    def step():
        weight.grad = torch.ones(LARGE)
        optimizer.step()

    reply = run(step)
    assert isinstance(reply, Crashed), reply
    assert "mine keeps 256 KiB more of tensors after every step" in reply.sentence


def test_growth_is_judged_by_rounds_of_an_accumulation():
    kept, calls = [], []

    def step():
        calls.append(1)
        if len(calls) % 4 == 0:
            kept.append(torch.ones(LARGE))

    reply = run(step, MINE.replace(gradient_accumulation=4, steps=4))
    assert isinstance(reply, Crashed)
    assert "keeps 256 KiB more of tensors after every round of 4 steps" in reply.sentence


@pytest.mark.parametrize(("allowed", "kind"), [(256 * KiB, Measurement), (256 * KiB - 1, Crashed)])
def test_growth_that_the_test_allows_passes(allowed, kind):
    assert isinstance(run(keeping(LARGE, []), growth_bytes=allowed), kind)


def test_a_curve_is_of_steps_and_not_of_growth():
    task = Task(case=MINE, scale="tiny", device_type="cpu", root=".", curve=True)
    step = keeping(LARGE, [])
    assert isinstance(worker_run.run(task, Progress(None), lambda setup: lambda: step() or 1.0), Measurement)


def test_further_rounds_leave_the_peak_as_it_is():
    assert run(Sound.plain()).peak_allocated_bytes == run(Sound.plain()).peak_allocated_bytes
    cycles = run(Sound.cycles()).peak_allocated_bytes
    assert cycles == 2 * LARGE * 4, "garbage of two rounds, as long as nothing collects it"


def fresh(size):
    """Resident memory that was not the process's before, whatever was freed before."""
    memory = numpy.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=numpy.uint8)
    memory[:] = 1
    return memory


def numbers(kept, size=6 * MiB):
    return lambda: kept.append(fresh(size))


def test_memory_of_the_process_that_every_step_keeps_fails_the_case_or_is_told_in_few_steps():
    reply = run(numbers([]), MINE.replace(steps=10))
    assert isinstance(reply, Crashed)
    assert reply.phase == "check"
    assert "the process of mine grows by 6.0" in reply.sentence
    assert "in 10 of 10 timed steps" in reply.sentence
    (note,) = run(numbers([]), MINE.replace(steps=3)).notes
    assert note.startswith("the process grew by 6.0")
    allowed = run(numbers([]), MINE.replace(steps=10), growth_bytes=8 * MiB)
    assert isinstance(allowed, Measurement)
    assert allowed.notes == ()


def test_memory_that_the_process_takes_now_and_then_passes():
    kept, calls = [], []

    def step():
        calls.append(1)
        if len(calls) % 3 == 0:
            kept.append(fresh(8 * MiB))

    reply = run(step, MINE.replace(steps=12))
    assert isinstance(reply, Measurement), reply


def test_resident_memory_is_read():
    before = resident_bytes()
    kept = fresh(32 * MiB)
    assert resident_bytes() - before == pytest.approx(kept.nbytes, rel=0.1)


class Steps:
    """A stand-in for a training on a device whose allocator knows what lives."""

    def __init__(self, more):
        self.bytes, self.more, self.losses, self.kept = 0, more, [], []

    def step(self, update):
        self.kept.append(torch.ones(LARGE))
        self.bytes += next(self.more)

    def check(self, growth):
        """What the check says, having had its further steps run."""
        checking = growth.check(self, lambda: self.bytes)
        while True:
            try:
                self.step(next(checking))
            except StopIteration as end:
                return end.value


def timed(grown, steps=6):
    """The growth of timed steps that take such bytes."""
    training = Steps(iter(grown))
    growth = Growth(Task(case=MINE, scale="tiny", device_type="gpu", root="."), ALONE)
    for _ in range(steps):
        growth.begin_step()
        training.step(True)
        growth.end_step(training, training.bytes)
    return growth, training


@pytest.mark.parametrize("grown", [[MiB] * 9, [MiB, 0] * 9, [MiB] * 6 + [0] * 3, [64] * 9])
def test_on_a_gpu_the_timed_steps_tell_of_growth_that_goes_on(grown):
    growth, training = timed(grown)
    if grown == [MiB] * 9:
        with pytest.raises(CheckFailed, match=r"mine keeps 1\.00 MiB more of tensors after every step, most of it float32"):
            training.check(growth)
    else:
        assert training.check(growth) == ""
