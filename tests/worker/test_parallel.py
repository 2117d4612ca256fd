"""Cases of several processes, with real ones on the CPU: what they compute, what they measure, how they end."""

import importlib.util
import tempfile

import psutil
import pytest
import torch

from pytest_gputrain import Case, launch
from pytest_gputrain.records import Crashed, Event, Measurement, OutOfMemory, Task, TimedOut
from pytest_gputrain.spread import widest
from pytest_gputrain.worker import recipe
from pytest_gputrain.worker.run import SEED

LLAMA = Case(model="llama-3.1-8b", precision="fp32", batch_size=2, sequence_length=32, learning_rate=1e-2, steps=4, warmup=1)

FAULTS = """
import os, signal, time
import torch
import torch.distributed as dist

def _step(setup, fault):
    weight = torch.ones(8, requires_grad=True)
    def step():
        if setup.rank == 1:
            fault()
        total = torch.ones(1)
        dist.all_reduce(total)  # the other rank waits here for ever
        return float(total)
    return step

def sound(setup):
    return _step(setup, lambda: None)

def raises(setup):
    def fault():
        raise ValueError("a bad day")
    return _step(setup, fault)

def killed(setup):
    return _step(setup, lambda: os.kill(os.getpid(), signal.SIGKILL))

def memory(setup):
    def fault():
        raise MemoryError("no room")
    return _step(setup, fault)

def straggles(setup):
    def step():
        time.sleep(0.12 if setup.rank == 1 else 0.02)
        setup.own_work_done()
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)
    return step

def hangs(setup):
    return _step(setup, lambda: time.sleep(600))
"""


def run(case, *, processes=2, timeout_seconds=120.0, root=".", watch=lambda event: None):
    task = Task(case=case, scale="tiny", device_type="cpu", processes=processes, root=str(root))
    return launch.in_process(task, gpus=(), timeout_seconds=timeout_seconds, watch=watch)


def measured(case, **options):
    reply = run(case, **options)
    assert isinstance(reply, Measurement), reply
    return reply


def losses_of_one_process(case, processes):
    """Timed losses of a plain training on the batches of all processes at once."""
    torch.manual_seed(SEED)
    training = recipe.Training(case.replace(parallel="single", gpus=1), "tiny", torch.device("cpu"))
    batches = []
    for rank in range(processes):
        torch.manual_seed(SEED + rank)
        batches.append(training._workload.batch(torch.device("cpu")).inputs)
    optimizer = recipe.OPTIMIZERS[case.optimizer](list(training.model.parameters()), case.learning_rate)
    losses = []
    for _ in range(2 + case.warmup + case.steps):  # two counted steps come first
        loss = sum(training._workload.loss(batch) for batch in batches) / processes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-case.steps :]


def _engine(name, **knobs):
    marks = [pytest.mark.skipif(not _has_deepspeed(), reason="needs deepspeed")] if name.startswith("zero") else []
    return pytest.param({"parallel": name, **knobs}, marks=marks, id="-".join([name, *knobs]))


def _has_deepspeed():
    return importlib.util.find_spec("deepspeed") is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        _engine("ddp"),
        _engine("fsdp"),
        _engine("fsdp", cpu_offload=True),
        _engine("zero0"),
        _engine("zero1"),
        _engine("zero2", offload_optimizer=True),
        _engine("zero3"),
        _engine("zero3", offload_optimizer=True, offload_param=True),
    ],
)
def test_losses_are_those_of_one_process_on_the_whole_batch(knobs):
    case = LLAMA.replace(gpus=2, **knobs)
    reply = measured(case)
    expected = losses_of_one_process(case, 2)
    assert reply.losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.1, "a curve that stays where it is would prove nothing"


@pytest.mark.slow
def test_figures_are_those_of_all_ranks():
    sharded, whole = (measured(LLAMA.replace(parallel=name, gpus=2)) for name in ("fsdp", "ddp"))
    assert sharded.batch_size == whole.batch_size == 4
    assert len(sharded.ranks) == 2
    assert sharded.environment.device_count == 2
    for step, seconds in enumerate(sharded.step_seconds):
        assert seconds == max(rank.step_seconds[step] for rank in sharded.ranks)
    assert sharded.peak_allocated_bytes == max(rank.peak_allocated_bytes for rank in sharded.ranks)
    assert sharded.peak_host_bytes == sum(rank.peak_host_bytes for rank in sharded.ranks)
    for rank in whole.ranks:
        assert all(0 < own < step for own, step in zip(rank.own_seconds, rank.step_seconds, strict=True))
    assert {rank.own_seconds for rank in sharded.ranks} == {()}, "its forward pass waits for the shards of the others"
    assert 0.45 * whole.model_bytes < sharded.model_bytes < 0.55 * whole.model_bytes
    assert sharded.flops_per_step == whole.flops_per_step == 2 * measured(LLAMA, processes=1).flops_per_step


@pytest.fixture
def faults(tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text(FAULTS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run_fault(name, **options):
        case = Case(
            model=name, method="custom", precision="fp32", parallel="ddp", gpus=2, code=f"code.py::{name}", steps=2, warmup=0
        )
        reply = run(case, root=tmp_path, **options)
        return reply, [pid for pid in psutil.pids() if _is_told(pid, str(tmp_path))]

    return run_fault


def _is_told(pid, folder):
    """Whether the process was started with something in ``folder``, as workers are."""
    try:
        return any(word.startswith(folder) for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def test_own_code_of_two_processes_can_talk(faults):
    reply, left = faults("sound")
    assert isinstance(reply, Measurement), reply
    assert reply.losses == (2.0, 2.0)
    assert widest([reply]).slowest is None, "its steps do not tell their own work"
    assert left == []


def test_a_straggler_is_told_though_all_steps_take_as_long(faults):
    reply, _ = faults("straggles")
    assert isinstance(reply, Measurement), reply
    fast, slow = reply.ranks
    assert min(fast.step_seconds) > 0.1, "the other process waits for it"
    assert [len(rank.own_seconds) for rank in reply.ranks] == [2, 2]
    assert max(fast.own_seconds) < 0.1 < min(slow.own_seconds)
    found = widest([reply])
    assert found is not None
    assert (found.slowest, found.lag > 1) == (1, True)
    assert found.lag_seconds == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("raises", Crashed, "ValueError: a bad day"),
        ("killed", Crashed, "ended by SIGKILL"),
        ("memory", OutOfMemory, "no room"),
    ],
)
def test_one_rank_s_end_ends_the_case_with_its_own_reason(faults, name, kind, says):
    reply, left = faults(name, timeout_seconds=300)
    assert isinstance(reply, kind), reply
    assert reply.rank == 1
    assert says in (reply.sentence if kind is Crashed else reply.message)
    assert left == []


def test_a_hang_shows_where_every_rank_stands(faults):
    reply, left = faults("hangs", timeout_seconds=25)
    assert isinstance(reply, TimedOut), reply
    first, second = reply.detail.split("rank 1:")
    assert "all_reduce" in first
    assert "code.py" in second
    assert "all_reduce" not in second
    assert left == []


def test_ranks_leave_no_folder(tmp_path, faults):
    reply, _ = faults("killed")
    assert isinstance(reply, Crashed)
    assert [path.name for path in tmp_path.iterdir()] == ["code.py"]


def test_progress_is_that_of_the_first_rank():
    events = []
    measured(LLAMA.replace(parallel="ddp", gpus=2), watch=events.append)
    assert all(isinstance(event, Event) for event in events)
    assert [event.phase for event in events if event.step is None].count("measure") == 1
