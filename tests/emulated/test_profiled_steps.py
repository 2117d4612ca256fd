"""Steps under torch's profiler are counted as the stand-ins count them, and what goes wrong there loses no other figure."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pytest_gputrain
from pytest_gputrain.hardware.emulation import boards
from pytest_gputrain.hardware.emulation.environment import emulated_environment

ROOT = Path(pytest_gputrain.__file__).parents[1]


@pytest.fixture
def run(stand_ins, tmp_path):
    """Run a program on an emulated H100 which nothing else counts or records: what it printed."""

    def run(program):
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environ = emulated_environment(environ, stand_ins, boards.describe(boards.board("h100"), kernels=90, devices=1))
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


COUNTS = """
    import ctypes, json, threading, torch
    import torch.distributed as dist
    from torch import nn
    from pytest_gputrain.worker.device import Accelerator
    from pytest_gputrain.worker.profiled_steps import StepProfile, find_gpu
    from pytest_gputrain.worker.step_counts import StepCounter

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    convolution = nn.Conv2d(3, 8, 3).cuda()
    here, pinned = torch.randn(16, 64), torch.randn(16, 64).pin_memory()
    there, images = torch.randn(16, 64, device="cuda"), torch.randn(2, 3, 16, 16, device="cuda")
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = (there * 2).relu().sum()
    sizes = iter(range(2, 100))

    def train():
        loss = model(here.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), file=log)

    def copy():
        pinned.to("cuda", non_blocking=True)
        there.cpu()
        pinned.copy_(there, non_blocking=True)
        there.clone()

    def select():
        there[there > 0].sum()
        ctypes.CDLL(None).cudaMemsetAsync(ctypes.c_void_p(there.data_ptr()), 0, 64, None)

    def two_streams():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there.sin()
        event.record(side)
        event.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        there.cos()

    def allocate():
        torch.cuda.empty_cache()
        torch.empty(100 << 20, dtype=torch.uint8, device="cuda").fill_(1)

    def allocate_expandable():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        allocate()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")

    def replay():
        graph.replay()
        graph.replay()
        there.sin()

    def wait_elsewhere():
        there.sin()
        thread = threading.Thread(target=lambda: there.sum().item())
        thread.start()
        thread.join()

    def compile_again():
        @torch.compile(backend="eager", dynamic=False)
        def double(values):
            return values * 2
        double(there[:next(sizes)])

    def convolve():
        convolution(images).sum().backward()

    def exchange():
        dist.all_reduce(there.sin())

    device, found, log = Accelerator(emulated=True), {}, open("log.txt", "w")
    names = ["h2d_pageable", "h2d_pinned", "d2h_pageable", "d2h_pinned"]
    find_gpu()
    for step in (train, copy, select, two_streams, allocate, allocate_expandable, replay, wait_elsewhere, compile_again,
                 convolve, exchange):
        counter, profile = StepCounter(None), StepProfile(device)
        for update in profile.steps([True, False, True]):
            counter.begin_step()
            step()
            counter.end_step(update=update)
        (seconds, profiled), emulated = profile.read(), counter.counts()
        names += [name for name in profiled.figures if name not in ("kernels", "pageable", *names)]
        assert len(seconds.seconds) == len(seconds.collective_seconds) == len(profiled.steps) == 3
        assert bool(sum(seconds.collective_seconds)) == (step is exchange)
        found[step.__name__] = [
            {"figures": [{name: getattr(of, name) for name in names} for of in steps],
             "kernels": [of.kernels or of.launches + of.library_calls + of.replayed for of in steps],
             "updates": [of.update for of in steps],
             "of threads": sorted([one.what, one.by, one.counts[-1]] for one in counts.others if one.what == "waits"),
             "of graphs": sum(one.counts[-1] for one in counts.causes if one.replayed)}
            for counts, steps in (
                (profiled, [profiled.of_step(at) for at in range(3)]),
                (emulated, [emulated.of_step(at) for at in range(1, 4)]),
            )
        ]
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as user:
        train()
    user.export_chrome_trace("trace.json")
    found["of operators"] = {event.name: len(event.kernels) for event in user.events() if event.kernels}
    print(json.dumps(found))
"""

TRAININGS = """
    import itertools, json, os, torch
    from torch import nn
    from torch.autograd import profiler
    from pytest_gputrain.records import Case, Task
    from pytest_gputrain.worker.case_run import CaseRun
    from pytest_gputrain.worker.device import Accelerator
    from pytest_gputrain.worker.group import ALONE
    from pytest_gputrain.worker.measuring import Measuring
    from pytest_gputrain.worker.own_code import OwnCode
    from pytest_gputrain.worker.own_lines import OwnLines
    from pytest_gputrain.worker.progress import Progress

    def train(setup):
        model = nn.Linear(64, 64).to(setup.device)
        optimizer = torch.optim.SGD(model.parameters())
        batch = torch.randn(16, 64, device=setup.device)
        def step():
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            return loss
        return step

    def ends(setup):
        step = train(setup)
        for _ in range(9):
            yield step()

    def profiles_itself(setup):
        step = train(setup)
        while True:
            with profiler.profile(use_cpu=True, use_kineto=True):
                loss = step()
            yield loss

    def fails(setup):
        step, number = train(setup), itertools.count()
        def fail():
            if next(number) == 9:
                raise OSError("no space is left\\nanywhere")
            return step()
        return fail

    def accumulates(setup):
        step, number = train(setup), itertools.count(1)
        loss_of = nn.Linear(64, 1).to(setup.device)
        def accumulate():
            if next(number) % 2:
                return loss_of(torch.ones(64, device=setup.device)).sum()
            return step()
        return accumulate

    device = Accelerator(emulated=True)
    device.computes = True  # so that it is measured as a real one
    def measured(builder, more, **case):
        task = Task(case=Case(model="own", steps=4, warmup=2, precision="fp32", **case), scale="full", device_type="cuda",
                    root=os.getcwd(), **more)
        own = OwnCode(task, ALONE, counts_memory=False)
        with device.keeping_peaks(), own.running():
            run = CaseRun(task, Progress(None), device, ALONE, lambda figures: None, OwnLines.of_case(task, builder), own)
            figures = Measuring(run).run(builder)
        counts = figures.counts
        return {"steps": len(figures.step_seconds), "seconds": figures.gpu_steps and len(figures.gpu_steps.seconds),
                "share": figures.gpu_busy_share, "notes": [note for note in figures.notes if "GPU seconds" in note],
                "attached": any(note.startswith("timed with torch's profiler attached") for note in figures.notes),
                "asked": counts and [[counts.of_step(at).waits, counts.of_step(at).d2d, counts.of_step(at).update]
                                     for at in range(len(counts.steps))]}
    found = {builder.__name__: measured(builder, {}) for builder in (train, ends, profiles_itself, fails)}
    found["accumulates"] = measured(accumulates, {}, gradient_accumulation=2)
    for more in ({"counts": False}, {"curve": True}, {"memory_only": True}):
        found[next(iter(more))] = measured(train, more)
    print(json.dumps(found))
"""


def test_the_profiler_counts_what_the_stand_ins_count(run):
    found = json.loads(run(COUNTS).stdout)
    of_operators, seen = found.pop("of operators"), set()
    for step, (profiled, emulated) in found.items():
        if step == "allocate_expandable":  # in which the driver is asked for 5 parts of 20 MiB, and torch counts one block
            assert [[one[name] for name in ("mallocs", "frees")] for one in profiled["figures"]] == [[1, 1]] * 3
            for one in (*profiled["figures"], *emulated["figures"]):
                one["mallocs"] = one["frees"] = 0
        assert profiled == emulated, step
        seen |= {figure for figure, number in profiled["figures"][-1].items() if number}
    unseen = {"captures", "graph_breaks"}
    assert seen == set(found["train"][0]["figures"][0]) - unseen
    # A program's own profile has the kernels of its operators.
    assert of_operators["aten::addmm"] == 1


def test_a_training_is_profiled_behind_its_checks_and_loses_nothing_if_that_fails(run):
    found = json.loads(run(TRAININGS).stdout)
    assert {of["steps"] for case, of in found.items() if case != "curve"} == {4}
    # The copy of the loss is none of the program's.
    assert found["train"]["asked"] == [[1, 0, True]] * 5
    assert found["train"]["seconds"] == 5
    assert 0 < found["train"]["share"] < 1
    assert found["counts"] == found["train"] | {"asked": None, "share": found["counts"]["share"], "attached": True}
    assert [case for case, of in found.items() if not of["attached"]] == ["train"], "which is the first of the process"
    # Whole rounds of the accumulation.
    assert found["accumulates"]["asked"] == [[0, 1, False], [1, 0, True]] * 3
    failed = "without GPU seconds, because a step under torch's profiler failed"
    for case, note in (
        (
            "ends",
            f"{failed} (LoopEnded: the loop of own ended after 9 steps, but more have to be measured; let it run for",
        ),
        ("fails", f"{failed} (OSError: no space is left)"),
        ("profiles_itself", "without GPU seconds, because torch's profiler saw no work of the GPU; end other profilers"),
    ):
        assert found[case]["seconds"] is found[case]["share"] is found[case]["asked"] is None
        (said,) = found[case]["notes"]
        assert said.startswith(note)
    for case in ("curve", "memory_only"):
        assert not any((found[case]["seconds"], found[case]["asked"], found[case]["notes"])), case


def test_other_profilers_are_told_of(run):
    program = """
        import contextlib, ctypes, torch
        from torch.autograd import profiler
        from pytest_gputrain.worker.device import Accelerator
        from pytest_gputrain.worker.gpu_events import CannotTell
        from pytest_gputrain.worker.profiled_steps import StepProfile
        device, cupti = Accelerator(emulated=True), ctypes.CDLL("libcupti.so.13")
        assert cupti.cuptiSubscribe(ctypes.byref(ctypes.c_void_p()), None, None) == 0
        for of_program in (contextlib.nullcontext(), profiler.profile(use_cpu=True, use_kineto=True)):
            profile = StepProfile(device)
            with of_program:
                for _ in profile.steps([True]):
                    torch.zeros(4, device="cuda")
            try:
                profile.read()
            except CannotTell as error:
                print(error)
    """
    done = run(program)
    assert done.stdout.splitlines() == [
        "torch's profiler saw no work of the GPU; end other profilers, such as Nsight Systems, of which the driver accepts "
        "one at a time",
        "the program uses torch's profiler itself",
    ]
    assert done.stderr == ""
