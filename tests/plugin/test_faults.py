"""What can become of a worker process: each end is told in one sentence, and the next test runs as if nothing was."""

from __future__ import annotations

import re

import psutil
import pytest
from plugin_project import BUILD, Project, failures, only_sentence

FAULTY = """
import atexit
import os
import signal
import sys
import time
from pathlib import Path


def faulty(setup):
    import torch

    {build}
    calls = []

    def step():
        calls.append(1)
        {step}

    return step


def healthy(setup):
    return lambda: 1.0


def test_faulty(gputrain):
    gputrain.check(faulty, precision="fp32", steps=4, warmup=1)


def test_next(gputrain):
    gputrain.check(healthy, precision="fp32", steps=2, warmup=1)
"""
GARBAGE = "atexit.register(lambda: Path(sys.argv[1], 'rank0', 'reply.json').write_text('garbage'))"
FROZEN = "setup.watch(torch.nn.Linear(4, 4).requires_grad_(False))"
STILL = "model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.0); setup.watch(model)"


@pytest.mark.parametrize(
    ("build", "step", "sentence"),
    [
        ("raise ValueError('no such data')", "pass", r"gave no measurement \(build\): ValueError: no such data"),
        ("pass", "raise ValueError('bad batch')", r"gave no measurement \(count\): ValueError: bad batch"),
        (
            "pass",
            "assert len(calls) < 6, 'sixth call'",
            r"gave no measurement \(measure in step 3\): AssertionError: sixth call",
        ),
        ("pass", "os._exit(3)", r"gave no measurement \(count\): the worker ended with exit code 3 without a reply"),
        ("sys.exit(0)", "pass", r"gave no measurement \(build\): .+"),
        (
            "pass",
            "os.kill(os.getpid(), signal.SIGSEGV)",
            r"gave no measurement \(count\): the worker ended by SIGSEGV without a reply",
        ),
        (
            "pass",
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"gave no measurement \(count\): the worker ended by SIGKILL without a reply",
        ),
        (GARBAGE, "pass", r"gave no measurement \(reply\): the worker's reply cannot be read: .+"),
        ("atexit.register(os._exit, 5)", "pass", r"gave no measurement \(reply\): the worker replied, then ended .+ code 5"),
        ("pass", "return float('nan')", r"gave no measurement \(check\): the loss of timed step 1 is nan"),
        (
            STILL,
            "model(torch.ones(1, 4)).sum().backward(); optimizer.step()",
            r"gave no measurement \(check\): 1 of 2 trained tensors did not change in \d+ .+ \(first: weight\)",
        ),
        (FROZEN, "pass", r".*no parameter requires a gradient: nothing trains"),
        (f"{STILL}; setup.watch(model)", "pass", r".*faulty called setup.watch\(\) 2 times; wrap the models in one"),
        ("return 5", "pass", r".*faulty returned int; it must build everything and return a function that runs one step"),
        ("pass", "raise MemoryError", r"ran out of host memory \(count\): no message; if that is expected, record it .+"),
        ("pass", "torch.empty(2**50)", r"ran out of host memory \(count\): .*DefaultCPUAllocator.+; if that is .+"),
        ("import not_there", "pass", r"gave no measurement \(build\): ModuleNotFoundError: No module named 'not_there'"),
    ],
    ids=[
        *("raises-at-build", "raises-in-step", "raises-in-timed-step", "exits", "sys-exit", "segfault", "killed"),
        *("garbage-reply", "fails-after-reply", "nan", "still", "frozen", "watches-twice", "no-function"),
        *("memory-error", "allocator", "import"),
    ],
)
def test_a_fault_is_told_and_the_next_test_passes(project: Project, build: str, step: str, sentence: str) -> None:
    project.write(test_broken_code=FAULTY.format(build=build, step=step))
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    found = only_sentence(result, "test_faulty")
    assert re.fullmatch(f"faulty-fp32 {sentence}", found), found


def test_a_traceback_is_shown_below_the_sentence(project: Project) -> None:
    project.write(test_broken_code=FAULTY.format(build="raise ValueError('no such data')", step="pass"))
    result = project.run("-k", "faulty")
    result.stdout.fnmatch_lines(
        [
            "*worker of faulty-fp32*",
            "Traceback (most recent call last):",
            "*test_broken_code.py*in faulty",
            "ValueError: no such data",
        ]
    )


def test_the_stack_of_a_segmentation_fault_is_shown(project: Project) -> None:
    project.write(test_broken_code=FAULTY.format(build="pass", step="os.kill(os.getpid(), signal.SIGSEGV)"))
    project.run("-k", "faulty").stdout.fnmatch_lines(
        ["*worker of faulty-fp32*", "Fatal Python error: Segmentation fault", '*test_broken_code.py", line * in step']
    )


def test_a_hang_is_ended_and_told_with_phase_step_and_stacks(project: Project) -> None:
    # Steps longer than the pause between two progress events: every step is told.
    step = "time.sleep(0.3 if len(calls) < 6 else 600)"
    project.write(test_broken_code=FAULTY.format(build="Path('pid.txt').write_text(str(os.getpid()))", step=step))
    result = project.run("--gpu-timeout=10s")
    result.assert_outcomes(passed=1, failed=1)
    assert only_sentence(result, "test_faulty") == (
        "faulty-fp32 was ended after 10.0 s (measure in step 3); --gpu-timeout allows more"
    )
    result.stdout.fnmatch_lines(["*worker of faulty-fp32*", '*test_broken_code.py", line * in step'])
    assert not psutil.pid_exists(int((project.path / "pid.txt").read_text()))


def test_what_own_code_prints_is_harmless(project: Project) -> None:
    noise = "print('{\"outcome\": \"measured\"}' * 1000); sys.stderr.write('noise'); os.write(1, b'\\xff\\x00' * 9999)"
    project.write(test_broken_code=FAULTY.format(build="pass", step=noise))
    project.run().assert_outcomes(passed=2)


def test_own_code_that_closes_its_standard_streams_is_measured(project: Project) -> None:
    project.write(test_broken_code=FAULTY.format(build="os.close(0); os.close(1); os.close(2)", step="pass"))
    project.run().assert_outcomes(passed=2)


def test_children_of_the_worker_end_with_it(project: Project) -> None:
    build = "import subprocess; child = subprocess.Popen(['sleep', '600']); Path('pid.txt').write_text(str(child.pid))"
    project.write(test_broken_code=FAULTY.format(build=build, step="pass"))
    project.run("-k", "faulty").assert_outcomes(passed=1, deselected=1)
    child = int((project.path / "pid.txt").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_no_folder_of_a_worker_is_left(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = project.path / "temporary"
    aside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(aside))
    project.write(test_broken_code=FAULTY.format(build="pass", step="os._exit(3)"))
    assert list(failures(project.run())) == ["test_faulty"]
    assert [path for path in aside.iterdir() if path.name.startswith("gputrain-") and path.name != "gputrain-leases"] == []


def test_a_syntax_error_in_a_file_the_worker_alone_reads_is_told(project: Project) -> None:
    project.write(broken="def (\n")
    project.write(test_broken_code=FAULTY.format(build="import broken", step="pass"))
    assert "SyntaxError" in only_sentence(project.run("-k", "faulty"), "test_faulty")


def test_a_fault_does_not_spoil_the_cache_of_others(project: Project) -> None:
    project.write(
        test_twice=f"""{BUILD}

def bad(setup):
    raise ValueError("no such data")


def test_bad(gputrain):
    gputrain.check(bad, precision="fp32")


def test_bad_again(gputrain):
    gputrain.measure(bad, precision="fp32")


def test_good(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""
    )
    assert sorted(failures(project.run())) == ["test_bad", "test_bad_again"]
