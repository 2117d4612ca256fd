"""Calls of Python functions, counted by the own line that they come from."""

import gc
import itertools
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from zoo_examples import MINE, run

import pytest_gputrain
from pytest_gputrain.records import CountCause, Counts, Place, StepCounts
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.python_calls import CannotCount, PythonCalls, with_python_calls

PACKAGE = Path(pytest_gputrain.__file__).parent


@pytest.fixture
def imported(tmp_path):
    """Define what a file has, which is not written: an own one, or one of an installed package."""

    def define(text, file="train.py", **names):
        exec(compile(text, str(tmp_path / file), "exec"), names)
        return names

    return define


@pytest.fixture
def counted(tmp_path):
    """Count the calls of one step by own line; by the file of a library, or nothing, where no own line led to them."""

    def count(step, *arguments, own=True):
        calls = PythonCalls(OwnLines([tmp_path]) if own else None, torch.device("cpu"))
        with calls.counting():
            step(*arguments)
        found = {}
        for cause, number in calls.causes():
            place = cause.own.line if cause.own else cause.library.file if cause.library else None
            found[place] = found.get(place, 0) + number
        assert sum(found.values()) == calls.total
        return found

    return count


STEP = """def helper(number):
    return number

def numbers(count):
    for number in range(count):
        yield number

def step():
    helper(1)
    for number in numbers(3):
        helper(number)
    sorted([2, 1], key=lambda number: number)
"""


def test_a_call_counts_for_the_own_line_that_makes_it_and_a_generator_that_goes_on_is_no_call(imported, counted):
    found = counted(imported(STEP)["step"])
    assert {line: number for line, number in found.items() if line and line > 8} == {9: 1, 10: 1, 11: 3, 12: 2}


def test_what_a_library_calls_counts_for_the_own_line_that_led_to_it(imported, counted):
    library = imported("def inner():\n    pass\n\ndef call():\n    inner()\n    inner()\n", "site-packages/library/call.py")
    step = imported("def step():\n    call()\n    call()\n", call=library["call"])["step"]
    found = counted(step)
    assert (found[2], found[3]) == (3, 3)


def test_a_generator_of_a_library_counts_for_the_line_that_resumes_it(imported, counted):
    text = "def inner():\n    pass\n\ndef numbers():\n    yield\n    inner()\n    yield\n    inner()\n"
    numbers = imported(text, "site-packages/library/numbers.py")["numbers"]()
    next(numbers)
    found = counted(imported("def step():\n    next(numbers)\n    next(numbers, None)\n", numbers=numbers)["step"])
    assert (found[2], found[3]) == (1, 1)


def test_a_built_in_model_counts_for_the_files_of_libraries(counted):
    net = torch.nn.Sequential(*[torch.nn.ReLU() for _ in range(3)])
    found = counted(net, torch.ones(2), own=False)
    assert found["torch/nn/modules/module.py"] == 2 * 4, "in each of four modules it calls itself, and then forward()"
    assert found["torch/nn/modules/activation.py"] == 3


def test_equal_steps_have_equal_calls(imported, counted):
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    optimizer = torch.optim.AdamW(net.parameters())
    text = "def step():\n    net(batch).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    step = imported(text, net=net, optimizer=optimizer, batch=torch.ones(2, 4))["step"]
    step()
    first = counted(step)
    assert first == counted(step)
    assert min(first[2], first[3]) > 9


def test_collections_of_garbage_call_nothing_in_the_step(imported, counted):
    text = """class Ring:
    def __init__(self):
        self.ring = self
    def __del__(self):
        helper()

def helper():
    pass

def step():
    for _ in range(5000):
        Ring()
"""
    assert gc.isenabled()
    found = counted(imported(text)["step"])
    assert (found[12], found.get(5)) == (5000, None)
    assert gc.isenabled()


def test_other_threads_are_not_counted_and_neither_is_what_waits_for_them(imported, counted):
    text = """def helper():
    pass

def step():
    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()
    helper()
"""
    found = counted(imported(text, threading=threading)["step"])
    assert {line: number for line, number in found.items() if line and line > 4} == {8: 1}


def test_a_progress_bar_is_left_out_and_what_it_iterates_over_is_not(imported, counted):
    bar = imported(
        "class Bar:\n"
        "    def __init__(self, numbers):\n        self.numbers = numbers\n"
        "    def __iter__(self):\n        for number in self.numbers:\n            yield number\n            self.update()\n"
        "    def update(self):\n        self.draw()\n"
        "    def draw(self):\n        pass\n",
        "site-packages/tqdm/std.py",
    )["Bar"]
    text = "def numbers():\n    yield helper()\n    yield helper()\n\ndef helper():\n    pass\n\n"
    step = imported(f"{text}def step():\n    for _ in Bar(numbers()):\n        helper()\n", Bar=bar)["step"]
    found = counted(step)
    assert {line: number for line, number in found.items() if line and line != 8} == {2: 1, 3: 1, 9: 1, 10: 2}


def test_the_plugin_s_own_functions_and_what_they_call_are_left_out_unless_they_train(imported, counted):
    library = imported("def inner():\n    pass\n\ndef call():\n    inner()\n", "site-packages/library/call.py")["call"]
    text = "def call(function):\n    function()\n"

    def ours(file):
        names = {}
        exec(compile(text, str(PACKAGE / "worker" / file), "exec"), names)
        return names["call"]

    def calls(file):
        step = imported("def step():\n    ours(library)\n", ours=ours(file), library=library)["step"]
        return {place: number for place, number in counted(step).items() if place not in (1, None)}

    assert calls("growth.py") == {}
    assert sum(calls("loops.py").values()) == 2


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring has room for several tools")
def test_a_program_that_profiles_itself_is_not_counted(imported, counted):
    with pytest.raises(CannotCount, match="the step profiles itself"):
        counted(sys.setprofile, lambda *event: None)
    sys.setprofile(lambda *event: None)
    try:
        with pytest.raises(CannotCount, match="the program profiles itself"):
            counted(lambda: None)
    finally:
        sys.setprofile(None)


def test_the_calls_are_those_of_one_kind_of_step(imported, counted, tmp_path):
    calls = PythonCalls(OwnLines([tmp_path]), torch.device("cpu"))
    with calls.counting():
        imported("def step():\n    pass\n")["step"]()
    wait = CountCause(what="waits", counts=(1, 2))
    counts = Counts(steps=(0, 1), kinds=(StepCounts(waits=1), StepCounts(waits=2)), causes=(wait,))
    found = with_python_calls(counts, calls, 1)
    assert [kind.python_calls for kind in found.kinds] == [0, calls.total]
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.causes[0] == wait
    own = Place("train.py", "step", "", 1)
    assert CountCause(what="python_calls", own=own, counts=(0, 1)) in found.causes


@pytest.mark.parametrize(("accumulation", "counted_steps"), [(1, [1, 1]), (2, [1, 0])])
def test_a_run_on_a_cpu_has_the_calls_of_one_further_step(accumulation, counted_steps):
    def train(setup):
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters())
        steps = itertools.count(1)

        def step():
            net(torch.ones(2, 4)).sum().backward()
            if next(steps) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()

        return step

    case = msgspec.structs.replace(MINE, gradient_accumulation=accumulation)
    counts = run(case, train).counts
    assert [bool(counts.of_step(index).python_calls) for index in (0, 1)] == counted_steps
    own = {cause.own.text for cause in counts.causes if cause.what == "python_calls" and cause.own}
    assert ("optimizer.step()" in own) == (accumulation == 1)
    assert counts == run(case, train).counts
