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


NO = "gave no measurement"
FAULTS = {
    "raises_at_build": ("raise ValueError('no such data')", "pass", rf"{NO} \(build\): ValueError: no such data"),
    "raises_in_step": ("pass", "raise ValueError('bad batch')", rf"{NO} \(count\): ValueError: bad batch"),
    "raises_in_timed_step": (
        "pass",
        "assert len(calls) < 6, 'sixth call'",
        rf"{NO} \(measure in step 3\): AssertionError: sixth call",
    ),
    "exits": ("pass", "os._exit(3)", rf"{NO} \(count\): the worker ended with exit code 3 without a reply"),
    "sys_exit": ("sys.exit(0)", "pass", rf"{NO} \(build\): .+"),
    "segfault": (
        "pass",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        rf"{NO} \(count\): the worker ended by SIGSEGV without a reply",
    ),
    "killed": (
        "pass",
        "os.kill(os.getpid(), signal.SIGKILL)",
        rf"{NO} \(count\): the worker ended by SIGKILL without a reply",
    ),
    "garbage_reply": (GARBAGE, "pass", rf"{NO} \(reply\): the worker's reply cannot be read: .+"),
    "fails_after_reply": (
        "atexit.register(os._exit, 5)",
        "pass",
        rf"{NO} \(reply\): the worker replied, then ended .+ code 5",
    ),
    "nan": ("pass", "return float('nan')", rf"{NO} \(check\): the loss of timed step 1 is nan"),
    "still": (
        STILL,
        "model(torch.ones(1, 4)).sum().backward(); optimizer.step()",
        rf"{NO} \(check\): 1 of 2 trained tensors did not change in \d+ .+ \(first: weight\)",
    ),
    "frozen": (FROZEN, "pass", r".*no parameter requires a gradient: nothing trains"),
    "watches_twice": (
        f"{STILL}; setup.watch(model)",
        "pass",
        r".*watches_twice called setup.watch\(\) 2 times; .+",
    ),
    "no_function": (
        "return 5",
        "pass",
        r".*no_function returned int; it must build everything .+",
    ),
    "memory_error": ("pass", "raise MemoryError", r"ran out of host memory \(count\): no message; if that is expected, .+"),
    "allocator": ("pass", "torch.empty(2**50)", r"ran out of host memory \(count\): .*DefaultCPUAllocator.+; if that is .+"),
    "import_": ("import not_there", "pass", rf"{NO} \(build\): ModuleNotFoundError: No module named 'not_there'"),
}
"""Build, step, sentence."""


def test_every_fault_is_told_and_none_touches_the_next(project: Project) -> None:
    """One after the other in one pytest, where each is the next of another; in the end a sound one."""
    head, _, rest = FAULTY.partition("def faulty(setup):")
    body, _, _ = rest.partition("def healthy")
    tests = [
        f"def {name}(setup):{body.format(build=build, step=step)}\n"
        f"def test_{name}(gputrain):\n    gputrain.check({name}, precision='fp32', steps=4, warmup=1)\n"
        for name, (build, step, _) in FAULTS.items()
    ]
    sound = (
        "def healthy(setup):\n    return lambda: 1.0\n\n\ndef test_next(gputrain):\n    gputrain.check(healthy, steps=2)\n"
    )
    project.write(test_broken_code="\n\n".join([head, *tests, sound]))
    result = project.run()
    result.assert_outcomes(passed=1, failed=len(FAULTS))
    told = {name: text.strip() for name, text in failures(result).items()}
    assert told.keys() == {f"test_{name}" for name in FAULTS}
    for name, (_, _, sentence) in FAULTS.items():
        assert re.fullmatch(f"{name}-fp32 {sentence}", told[f"test_{name}"]), told[f"test_{name}"]


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
