"""Tests how a worker process can end: each end gives one sentence, and the next test is not affected."""

import contextlib
import itertools
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from leftovers import Leftovers
from plugin_project import BUILD, Project, failures, only_sentence

from pytest_gputrain import MiB
from pytest_gputrain.utils import linux

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
FROZEN = "setup.watch(torch.nn.Linear(4, 4).requires_grad_(False))"
STILL = "model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.0); setup.watch(model)"


NO = "gave no measurement"
AFTER = r"was measured \(.+\), but failed afterwards"
REPLY = "Path(sys.argv[1], 'rank0', 'reply.json')"
RAISED = {
    "raises_at_build": ("raise ValueError('no such data')", "pass", rf"{NO} \(build\): ValueError: no such data"),
    "raises_in_step": ("pass", "raise ValueError('bad batch')", rf"{NO} \(count\): ValueError: bad batch"),
    "raises_in_timed_step": (
        "pass",
        "assert len(calls) < 8, 'eighth call'",
        rf"{NO} \(measure in step 3\): AssertionError: eighth call",
    ),
    "nan": ("pass", "return float('nan')", rf"{AFTER} \(check\): the loss of timed step 1 is nan"),
    "still": (
        STILL,
        "model(torch.ones(1, 4)).sum().backward(); optimizer.step()",
        rf"{AFTER} \(check\): 1 of 2 trained tensors did not change in \d+ .+ \(first: weight\)",
    ),
    "frozen": (FROZEN, "pass", r".*no parameter requires a gradient: nothing trains"),
    "watches_twice": (
        f"{STILL}; setup.watch(torch.nn.Linear(1, 1))",
        "pass",
        r".*watches_twice called setup.watch\(\) with 2 models; .+",
    ),
    "no_function": (
        "return 5",
        "pass",
        r".*no_function returned int; it must build everything .+",
    ),
    "import_": ("import not_there", "pass", rf"{NO} \(build\): ModuleNotFoundError: No module named 'not_there'"),
}
"""Build, step, sentence."""
ENDED = {
    "exits": ("pass", "os._exit(3)", rf"{NO} \(count\): the worker ended with exit code 3 without a reply"),
    "sys_exit": ("sys.exit(0)", "pass", rf"{NO} \(build\): .+"),
    "segfault": (
        "pass",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        rf"{NO} \(count\): the worker ended by SIGSEGV without a reply",
    ),
    "aborts": ("pass", "os.abort()", rf"{NO} \(count\): the worker ended by SIGABRT without a reply"),
    "killed": (
        "pass",
        "os.kill(os.getpid(), signal.SIGKILL)",
        rf"{NO} \(count\): the worker ended by SIGKILL without a reply",
    ),
    "killed_for_memory": (
        "pass",
        "Path('counters').write_text('oom_kill 8'); os.kill(os.getpid(), signal.SIGKILL)",
        r"ran out of host memory \(count\): killed by the kernel's OOM killer; if that is .+",
    ),
    # As on a full disk, but for any user.
    "may_not_write": (
        "pass",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        rf"{NO} \(count\): the worker ended with exit code 1 without a reply",
    ),
    "memory_error": ("pass", "raise MemoryError", r"ran out of host memory \(count\): no message; if that is expected, .+"),
    "allocator": ("pass", "torch.empty(2**50)", r"ran out of host memory \(count\): .*DefaultCPUAllocator.+; if that is .+"),
    "limited": (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))",
        "torch.ones(2**29)",
        r"ran out of host memory \(count\): .*DefaultCPUAllocator.+; if that is .+",
    ),
}
REPLIED = {
    "garbage_reply": (
        f"atexit.register(lambda: {REPLY}.write_text('garbage'))",
        "pass",
        rf"{AFTER} \(reply\): the worker's reply cannot be read: .+",
    ),
    "reply_of_bytes": (
        f'atexit.register(lambda: {REPLY}.write_bytes(b\'{{"outcome": "\\xff"}}\'))',
        "pass",
        rf"{AFTER} \(reply\): the worker's reply cannot be read: .+",
    ),
    "truncated_reply": (
        f"atexit.register(lambda: {REPLY}.write_bytes({REPLY}.read_bytes()[:-9]))",
        "pass",
        rf"{AFTER} \(reply\): the worker's reply cannot be read: Input data was truncated",
    ),
    "reply_of_tomorrow": (
        f"atexit.register(lambda: {REPLY}.write_bytes({REPLY}.read_bytes().replace(b'\"format\":2', b'\"format\":3')))",
        "pass",
        rf"{AFTER} \(reply\): the worker's reply has format 3, this version reads format 2: the worker imports another .+",
    ),
    "reply_that_is_gone": (
        f"atexit.register(lambda: {REPLY}.unlink())",
        "pass",
        rf"{AFTER} \(reply\): the worker ended with exit code 0 without a reply",
    ),
    "fails_after_reply": (
        "atexit.register(os._exit, 5)",
        "pass",
        rf"{AFTER} \(reply\): the worker replied, then ended .+ code 5",
    ),
    # 300 MB, in two seconds or more.
    "flood": (
        "pass",
        "[(os.write(2, b'x' * 10**6), time.sleep(0.006)) for _ in range(300)]; raise ValueError('drowned')",
        rf"{NO} \(count\): ValueError: drowned",
    ),
}
NOISE = r"""
    import threading

    clock = time.time
    time.time = lambda: clock() - 10**9 * (len(calls) % 2)
    threading.Thread(target=lambda: (threading.main_thread().join(), sys.exit('thread'))).start()
    atexit.register(lambda: 1 / 0)
    os.write(1, b'\xff\x00' * 9999)
    sys.stderr.write('noise')
    print('{"outcome": "measured"}' * 1000)
"""
DAEMON = """
    import subprocess

    child = subprocess.Popen(['sleep', '600'])
    daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)
    Path('started.txt').write_text(f'{child.pid} {daemon.pid}')
    os.close(0), os.close(1), os.close(2)
"""
HARMLESS = {"noise": NOISE, "daemon": DAEMON}


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leftovers:
    return Leftovers(tmp_path, monkeypatch)


class Sizes(threading.Thread):
    """Bytes that a folder takes of the disk, looked at again and again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self.most = 0
        self.over = False

    def run(self) -> None:
        while not self.over:
            with contextlib.suppress(OSError):  # gone meanwhile
                self.most = max(self.most, sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*")))
            time.sleep(0.01)


def _tests(name: str, build: str, step: str = "pass") -> str:
    body = FAULTY.partition("def faulty(setup):")[2].partition("def healthy")[0].format(build=build, step=step)
    return (
        f"def {name}(setup):{body}\n"
        f"def test_{name}(gputrain):\n    gputrain.check({name}, precision='fp32', steps=4, warmup=1)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("faults", [RAISED, ENDED, REPLIED], ids=["raised", "ended", "replied"])
def test_every_fault_is_told_and_none_touches_the_next(
    project: Project, leftovers: Leftovers, monkeypatch: pytest.MonkeyPatch, faults: dict[str, tuple[str, str, str]]
) -> None:
    """One after the other in one pytest, where each is the next of another, and in the end sound ones."""
    (project.path / "counters").write_text("oom_kill 7")
    monkeypatch.setattr(linux, "_COUNTERS", project.path / "counters")
    jumps = itertools.cycle([0.0, 10.0**10])
    monkeypatch.setattr(time, "time", lambda: next(jumps))  # no time-out and no duration hangs on it
    sound = HARMLESS if faults is REPLIED else {"healthy": "pass"}
    tests = [_tests(name, build, step) for name, (build, step, _) in faults.items()]
    tests += [_tests(name, build) for name, build in sound.items()]
    project.write(test_broken_code="\n\n".join([FAULTY.partition("def faulty")[0], *tests]))
    sizes = Sizes(tmp := Path(tempfile.gettempdir()))
    sizes.start()
    result = project.run("--gpu-json=report.json", "--gpu-history=history.jsonl")
    sizes.over = True
    result.assert_outcomes(passed=len(sound), failed=len(faults))
    sentences = {name: text.strip() for name, text in failures(result).items()}
    assert sentences.keys() == {f"test_{name}" for name in faults}
    for name, (_, _, sentence) in faults.items():
        place = r"( \(at test_broken_code\.py:\d+\))?(; install it for .*)?"
        assert re.fullmatch(f"{name}-fp32 {sentence}{place}", sentences[f"test_{name}"]), sentences[f"test_{name}"]
    assert leftovers.all() == []
    assert sizes.most < 100 * MiB, tmp
    _assert_all_is_kept(project, faults, sound)
    if faults is RAISED:
        result.stdout.fnmatch_lines(
            [
                "*worker of raises_at_build-fp32*",
                "Traceback (most recent call last):",
                "*test_broken_code.py*in raises_at_build",
                "ValueError: no such data",
            ]
        )
    elif faults is ENDED:
        stack = ["*worker of segfault-fp32*", "Fatal Python error: Segmentation fault", '*broken_code.py", line * in step']
        result.stdout.fnmatch_lines(stack)
    else:
        result.stdout.fnmatch_lines(["*worker of flood-fp32*", "*xxxxx*", "ValueError: drowned"])
        for pid in map(int, (project.path / "started.txt").read_text().split()):
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _assert_all_is_kept(project: Project, faults: Iterable[str], sound: Iterable[str]) -> None:
    """Every case is in the report and in the history, as what it was."""
    outcomes = {}
    for case_result in project.report()["results"]:
        (reply,) = case_result["replies"]
        outcomes[case_result["case"]["model"]] = reply["outcome"]
        assert all(0 < seconds < 60 for seconds in reply.get("step_seconds", ()))
    assert outcomes.keys() == {*faults, *sound}
    out_of_memory = {"killed_for_memory", "memory_error", "allocator", "limited"}
    assert {name for name, outcome in outcomes.items() if outcome == "out_of_memory"} == out_of_memory & {*faults}
    assert {name for name, outcome in outcomes.items() if outcome == "measured"} == {*sound}
    lines = map(json.loads, (project.path / "history.jsonl").read_text().splitlines())
    assert {line["model"]: line["outcome"] for line in lines} == outcomes


HANGS = {
    # Steps longer than the pause between two progress events: every step is told.
    "in_a_step": ("pass", "time.sleep(0.3 if len(calls) < 8 else 600)", "measure in step 3"),
    "at_exit": ("import threading; threading.Thread(target=lambda: time.sleep(600)).start()", "pass", "reply"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "pass", "build"),
}
"""Build, step, place."""


@pytest.mark.slow
def test_hangs_are_ended_in_time_and_told_with_phase_step_and_stacks(project: Project, leftovers: Leftovers) -> None:
    tests = [_tests(name, build, step) for name, (build, step, _) in HANGS.items()]
    project.write(test_broken_code="\n\n".join([FAULTY.partition("def faulty")[0], *tests, _tests("healthy", "pass")]))
    result = project.run("--gpu-timeout=10s", "--gpu-json=report.json")
    result.assert_outcomes(passed=1, failed=len(HANGS))
    sentences = {name: text.strip() for name, text in failures(result).items()}
    assert sentences.keys() == {f"test_{name}" for name in HANGS}
    for name, (_, _, place) in HANGS.items():
        beginning = r"was measured \(.+\), but " if place == "reply" else ""
        end = re.escape(f"was ended after 10.0 s ({place}); --gpu-timeout allows more") + "(, and a function .*)?"
        assert re.fullmatch(f"{name}-fp32 {beginning}{end}", sentences[f"test_{name}"])
    result.stdout.fnmatch_lines(["*worker of in_a_step-fp32*", '*test_broken_code.py", line * in step'])
    assert max(report.duration for report in result.reprec.getreports("pytest_runtest_logreport")) < 90, "of 600 seconds"
    assert leftovers.all() == []
    assert [case_result["replies"][0]["outcome"] for case_result in project.report()["results"]] == [
        *["timed_out"] * 3,
        "measured",
    ]


@pytest.mark.slow
def test_a_syntax_error_in_a_file_the_worker_alone_reads_is_told(project: Project) -> None:
    project.write(broken="def (\n")
    project.write(test_broken_code=FAULTY.format(build="import broken", step="pass"))
    assert "SyntaxError" in only_sentence(project.run("-k", "faulty"), "test_faulty")


@pytest.mark.slow
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
