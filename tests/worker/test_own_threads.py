"""Own code that computes on other threads is counted, or fails."""

import _thread
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from zoo_examples import MINE, measured, refused, task_of

from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.group import ALONE
from pytest_gputrain.worker.growth import _Makers
from pytest_gputrain.worker.own_code import OwnCode
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.threads import countable_threads

WIDTH = 256
MATRIX = 4 * WIDTH**2
FLOPS = 2 * WIDTH**3


def work():
    left = torch.ones(WIDTH, WIDTH)
    return (left @ left + 1).sum()


class Own(threading.Thread):
    def run(self):
        work()


def in_a_thread(kind=lambda: threading.Thread(target=work)):
    def step():
        thread = kind()
        thread.start()
        thread.join()

    return step


def in_a_pool(**options):
    pool = ThreadPoolExecutor(1, **options)
    return lambda: pool.submit(work).result()


def in_a_loop(name=None, work=work):
    asked, done = queue.Queue(), queue.Queue()

    def loop():
        while asked.get():
            done.put(work())

    threading.Thread(target=loop, daemon=True, name=name).start()

    def step():
        asked.put(True)
        return done.get()

    return step


@pytest.mark.parametrize(
    "how",
    [
        in_a_thread,
        lambda: in_a_thread(Own),
        in_a_pool,
        lambda: in_a_pool(initializer=torch.ones, initargs=(1,)),
        in_a_loop,
    ],
    ids=["thread", "subclass", "pool", "pool with an initializer", "loop"],
)
def test_what_another_thread_computes_is_counted_as_if_it_were_this_one(how):
    here, there = measured(MINE, lambda setup: work), measured(MINE, lambda setup: how())
    assert there.peak_allocated_bytes == pytest.approx(here.peak_allocated_bytes, abs=64)
    assert here.peak_allocated_bytes >= 3 * MATRIX
    assert there.flops_per_step == here.flops_per_step == FLOPS
    assert (here.counts_exactly, there.counts_exactly) == (True, False)
    assert there.notes == ()


def test_two_threads_at_once_are_counted_together():
    pool, meeting = ThreadPoolExecutor(2), threading.Barrier(2)

    def half():
        matrix = torch.ones(WIDTH, WIDTH)
        meeting.wait(timeout=600)
        return matrix @ matrix

    def step():
        halves = [pool.submit(half) for _ in range(2)]
        [future.result() for future in halves]

    reply = measured(MINE, lambda setup: step)
    assert reply.flops_per_step == 2 * FLOPS
    assert 3 * MATRIX <= reply.peak_allocated_bytes <= 4 * MATRIX + 64
    assert reply.counted_threads >= 2


def test_a_pool_that_was_there_before_is_counted():
    step = in_a_pool()
    step()
    assert measured(MINE, lambda setup: step).flops_per_step == FLOPS


def beside_threading():
    def step():
        done = threading.Lock()
        done.acquire()
        _thread.start_new_thread(lambda: (work(), done.release()), ())
        done.acquire()

    return step


def test_a_thread_that_was_there_before_or_beside_python_s_threading_fails_the_case():
    for step, said in (
        (in_a_loop("prefetcher"), "on the thread 'prefetcher', where they are not counted (first: aten::"),
        (beside_threading(), "on a thread that Python's threading did not start"),
    ):
        assert said in refused(MINE, lambda setup, step=step: step)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_a_thread_of_torch_s_own_computes_is_counted():
    def products(x):
        return torch.jit.wait(torch.jit.fork(torch.mm, x, x))

    x, step = torch.ones(WIDTH, WIDTH), torch.jit.script(products)
    reply = measured(MINE, lambda setup: lambda: step(x).sum())
    assert reply.flops_per_step == FLOPS
    assert not reply.counts_exactly


def test_where_an_allocator_counts_memory_only_products_of_other_threads_matter():
    def checked(step):
        own = OwnCode(task_of(MINE, device_type="gpu"), ALONE, counts_memory=False)
        with own.running(), own.recording_threads(), count_flops() as flops:
            step()
        return own.check(flops, SimpleNamespace(model=None))

    copying = checked(in_a_loop("copier", lambda: torch.ones(8) + 1))
    multiplying = checked(in_a_loop("looper"))
    assert copying == ((), True)
    assert not multiplying.knows_flops
    (note,) = multiplying.notes
    assert note.startswith("FLOPs are not known, because a step runs operators on the thread 'looper', where they are not")


def test_operators_of_a_step_that_profiles_itself_are_still_counted():
    step = in_a_loop()

    def profiled():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return step()

    reply = measured(MINE, lambda setup: profiled)
    (note,) = reply.notes
    assert note.startswith("other threads were not searched")


def test_processes_that_a_step_starts_are_told_once():
    loader = DataLoader(torch.ones(4, 4), num_workers=1)
    reply = measured(MINE.replace(warmup=0), lambda setup: lambda: sum(float(batch.sum()) for batch in loader))
    (note,) = reply.notes
    assert "such as those of a DataLoader, are not counted" in note


def test_threads_and_processes_are_as_before_afterwards():
    started, worked = threading.Thread._bootstrap_inner, threading.Thread.run
    measured(MINE, lambda setup: work)
    assert (threading.Thread._bootstrap_inner, threading.Thread.run) == (started, worked)


def test_what_ends_after_the_count_is_no_part_of_it():
    begun, over = threading.Event(), threading.Event()

    def slow():
        begun.set()
        over.wait(timeout=600)
        return torch.ones(8)

    with AllocationCounter() as counter:
        torch.ones(4)
        counter.begin_step()
        thread = threading.Thread(target=counter.__torch_dispatch__, args=(slow, ()))
        thread.start()
        begun.wait(timeout=600)
    events = list(counter.trace.events)
    over.set()
    thread.join()
    assert list(counter.trace.events) == events


def test_a_thread_may_compute_before_the_rounds_that_look_closer():
    with countable_threads(), _Makers(OwnLines([]), "cpu") as makers, ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.ones, 4).result().numel() == 4
    assert makers.largest(16.0) == ""


def test_recomputation_of_one_thread_is_not_that_of_another():
    begun, computed = threading.Event(), threading.Event()

    def recompute():
        with flops.recomputing():
            begun.set()
            computed.wait(timeout=600)
            work()

    with countable_threads(), count_flops() as flops, ThreadPoolExecutor(1) as pool:
        pool.submit(recompute)
        begun.wait(timeout=600)
        work()
        computed.set()
    assert (flops.total, flops.recomputed) == (2 * FLOPS, FLOPS)
