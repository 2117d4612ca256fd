"""Tests how a worker process can end: each end gives one sentence, and the next test is not affected."""

import itertools
import json
import re
import time

import pytest
from leftovers import Leftovers, has_ended
from plugin_project import failures

from pytest_gputrain.utils import linux

IMPORTS = "import atexit\nimport os\nimport signal\nimport sys\nimport time\nfrom pathlib import Path\n\n\n"
FAULTY = """def {name}(setup):
    import torch

    {build}
    calls = []

    def step():
        calls.append(1)
        {step}

    return step


def test_{name}(gputrain):
    gputrain.check({name}, precision='fp32', steps=4, warmup=1)
"""
"""The tenth call is the step after the timed ones, whose operations are counted."""

NO = "gave no measurement"
AFTER = r"was measured \(.+\), but failed afterwards"
FULL_HOST = r"ran out of host memory \(count\): {}; if that is expected, .+"
REPLY = "Path(os.readlink('/proc/self/fd/1')).with_name('reply.json')"
MODEL = "model = torch.nn.Linear(4, 4); setup.watch(model)"
FAULTS = {
    "raises_at_build": ("raise ValueError('no such data')", "pass", rf"{NO} \(build\): ValueError: no such data"),
    "interrupts": ("raise KeyboardInterrupt", "pass", rf"{NO} \(build\): KeyboardInterrupt: no message"),
    "imports": ("import not_there", "pass", rf"{NO} \(build\): ModuleNotFoundError: No module named 'not_there'.*"),
    "misspells": ("import misspelt", "pass", rf"{NO} \(build\): SyntaxError: .+"),
    "watches_twice": (f"{MODEL}; {MODEL}", "pass", r".*watches_twice called setup.watch\(\) with 2 models; .+"),
    "frozen": (f"{MODEL}; model.requires_grad_(False)", "pass", r".*no parameter requires a gradient: nothing trains"),
    "raises_in_timed_step": (
        "pass",
        "assert len(calls) < 8, 'eighth call'",
        rf"{NO} \(measure in step 3\): AssertionError: eighth call",
    ),
    # What fails after the timed steps keeps their figures.
    "nan": ("pass", "return float('nan')", rf"{AFTER} \(check\): the loss of timed step 1 is nan"),
    "raises_afterwards": ("pass", "assert len(calls) < 10, 'no luck'", rf"{AFTER} \(check\): AssertionError: no luck"),
    "full_afterwards": (
        "pass",
        "if len(calls) == 10: raise torch.OutOfMemoryError('CUDA: full')",
        rf"{AFTER} \(check\): OutOfMemoryError: CUDA: full",
    ),
    "exits_afterwards": (
        "pass",
        "len(calls) < 10 or os._exit(3)",
        rf"{AFTER} \(check\): the worker ended with exit code 3 without a reply",
    ),
    "fails_after_reply": (
        "atexit.register(os._exit, 5)",
        "pass",
        rf"{AFTER} \(reply\): the worker replied, then ended .+ code 5",
    ),
    "truncated_reply": (
        f"atexit.register(lambda: {REPLY}.write_bytes({REPLY}.read_bytes()[:-9]))",
        "pass",
        rf"{AFTER} \(reply\): the worker's reply cannot be read: Input data was truncated",
    ),
    # The process ends.
    "sys_exit": ("sys.exit(0)", "pass", rf"{NO} \(build\): .+"),
    "parses_arguments": (
        "import argparse; options = argparse.ArgumentParser(); options.add_argument('--data', required=True); "
        "options.parse_args()",
        "pass",
        rf"{NO} \(build\): argparse found 'the following arguments are required: --data', because the process that trains "
        "has no command line: .+",
    ),
    "segfault": (
        "pass",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        rf"{NO} \(count\): the worker ended by SIGSEGV without a reply",
    ),
    # As on a full disk, but for any user.
    "may_not_write": (
        "pass",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        rf"{NO} \(count\): the worker ended with exit code 1 without a reply",
    ),
    "killed_for_memory": (
        "pass",
        "Path('proc/vmstat').write_text('oom_kill 8'); os.kill(os.getpid(), signal.SIGKILL)",
        FULL_HOST.format("killed by the kernel's OOM killer"),
    ),
    "limited": (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))",
        "torch.ones(2**29)",
        FULL_HOST.format(".*DefaultCPUAllocator.+"),
    ),
    # 300 MB, in two seconds or more.
    "flood": (
        "pass",
        "[(os.write(2, b'x' * 10**6), time.sleep(0.006)) for _ in range(300)]; raise ValueError('drowned')",
        rf"{NO} \(count\): ValueError: drowned",
    ),
}
"""Build, step, sentence."""
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
HARMLESS = {"noise": NOISE, "daemon": DAEMON, "closed": "sys.stdout.close(); sys.stderr.close()"}
SHOWN = [
    [
        "*worker of raises_at_build-fp32*",
        "Traceback (most *",
        "*test_broken_code.py*in raises_at_build",
        "ValueError: no such data",
    ],
    ["*worker of parses_arguments-fp32*", "usage: test_broken_code.py *--data DATA*"],
    ["*worker of segfault-fp32*", "Fatal Python error: Segmentation fault", '*broken_code.py", line * in step'],
    ["*worker of flood-fp32*", "*xxxxx*", "ValueError: drowned"],
]


@pytest.fixture
def leftovers(tmp_path, monkeypatch):
    return Leftovers(tmp_path, monkeypatch)


def write(project, faults, sound):
    """One after the other in one file, where each is the next of another, and in the end sound ones."""
    tests = [FAULTY.format(name=name, build=build, step=step) for name, (build, step, _) in faults.items()]
    tests += [FAULTY.format(name=name, build=build, step="pass") for name, build in sound.items()]
    project.write(test_broken_code=IMPORTS + "\n\n".join(tests))


@pytest.mark.slow
def test_every_fault_is_told_and_none_touches_the_next(project, leftovers, monkeypatch):
    (project.path / "misspelt.py").write_text("def (\n")
    (project.path / "proc").mkdir()
    (project.path / "proc" / "vmstat").write_text("oom_kill 7")
    monkeypatch.setattr(linux, "_ROOT", project.path)
    jumps = itertools.cycle([0.0, 10.0**10])
    monkeypatch.setattr(time, "time", lambda: next(jumps))  # no time-out and no duration hangs on it
    write(project, FAULTS, HARMLESS)
    result = project.run("--gpu-json=report.json", "--gpu-history=history.jsonl")
    result.assert_outcomes(passed=len(HARMLESS), failed=len(FAULTS))
    sentences = {name: text.strip() for name, text in failures(result).items()}
    for name, (_, _, sentence) in FAULTS.items():
        place = r"( \(at test_broken_code\.py:\d+\))?"
        assert re.fullmatch(f"{name}-fp32 {sentence}{place}", sentences[f"test_{name}"]), sentences[f"test_{name}"]
    for lines in SHOWN:
        result.stdout.fnmatch_lines(lines)
    assert leftovers.all() == []
    assert all(has_ended(int(pid)) for pid in (project.path / "started.txt").read_text().split())

    replies = {entry["case"]["model"]: entry["replies"][0] for entry in project.report()["results"]}
    outcomes = {name: reply["outcome"] for name, reply in replies.items()}
    assert outcomes.keys() == {*FAULTS, *HARMLESS}
    out_of_memory = {name for name, (*_, sentence) in FAULTS.items() if sentence.startswith("ran out")}
    assert {name for name, outcome in outcomes.items() if outcome == "out_of_memory"} == out_of_memory
    assert {name for name, outcome in outcomes.items() if outcome == "measured"} == {*HARMLESS}
    lines_of_history = map(json.loads, (project.path / "history.jsonl").read_text().splitlines())
    assert {line["model"]: line["outcome"] for line in lines_of_history} == outcomes
    for name, (*_, sentence) in FAULTS.items():
        if sentence.startswith(AFTER):
            assert len(replies[name]["measured"]["step_seconds"]) == 4
    assert all(0 < seconds < 60 for name in HARMLESS for seconds in replies[name]["step_seconds"])
    project.run("--gpu-baseline-update", "-k", "full_afterwards or noise")
    assert list(project.baselines("broken_code")) == ["noise-fp32@tiny"]


COMPILES = "exec(compile('time.sleep(600)', '/torch/_dynamo/convert_frame.py', 'exec'))"
HANGS = {
    # Steps longer than the pause between two progress events: every step is told.
    "in_a_step": ("pass", f"time.sleep(0.3) if len(calls) < 8 else {COMPILES}", "measure in step 3"),
    "afterwards": ("pass", "time.sleep(0 if len(calls) < 10 else 600)", "check"),
    "at_exit": ("import threading; threading.Thread(target=lambda: time.sleep(600)).start()", "pass", "reply"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "pass", "build"),
}
"""Build, step, place."""


@pytest.mark.slow
def test_hangs_are_ended_in_time_and_told_with_phase_step_and_stacks(project, leftovers):
    write(project, HANGS, {"healthy": "pass"})
    result = project.run("--gpu-timeout=20s", "--gpu-json=report.json")
    result.assert_outcomes(passed=1, failed=len(HANGS))
    sentences = {name: text.strip() for name, text in failures(result).items()}
    for name, (_, _, place) in HANGS.items():
        beginning = r"was measured \(.+\), but " if place in ("check", "reply") else ""
        advice = ", and torch.compile was compiling" if name == "in_a_step" else ""
        advice += ", and a function that trains in a loop of its own has to yield .*" if place == "build" else ""
        end = re.escape(f"was ended after 20.0 s ({place}); --gpu-timeout allows more") + advice
        assert re.fullmatch(f"{name}-fp32 {beginning}{end}", sentences[f"test_{name}"])
    result.stdout.fnmatch_lines(["*worker of in_a_step-fp32*", '*test_broken_code.py", line * in step'])
    assert max(report.duration for report in result.reprec.getreports("pytest_runtest_logreport")) < 90, "of 600 seconds"
    assert leftovers.all() == []
    outcomes = [entry["replies"][0]["outcome"] for entry in project.report()["results"]]
    assert outcomes == [*["timed_out"] * len(HANGS), "measured"]
