"""Runs that take long: thousands of cases under a clock that is set back, recordings that are killed, three workers.

Once a week in full. ``GPUTRAIN_SOAK_CASES`` and ``GPUTRAIN_SOAK_KILLS`` make them shorter, and ``GPUTRAIN_SOAK_SEED`` has
the same kills again.
"""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from leftovers import Leftovers, wait_for, wait_until
from plugin_project import BUILD

from pytest_gputrain.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.weekly]

CASES = int(os.environ.get("GPUTRAIN_SOAK_CASES", "3000"))
KILLS = int(os.environ.get("GPUTRAIN_SOAK_KILLS", "50"))
HOUR = 3600
SUITE = f"""import os

import pytest

{BUILD.replace("64, 64", 'int(os.environ.get("SIDE", "64")), 64')}

@pytest.mark.parametrize("number", range({{}}))
def test_many(gputrain, number):
    gputrain.check(build, precision="fp32", steps=1, warmup=0, model=f"m{{{{number:05}}}}")
"""
RECORDING = ("-q", "--gpu-platform=cpu", "--gpu-baseline-update")
REPORTS = ("--gpu-json=report.json", "--gpu-history=history.jsonl")

# A clock of the whole process, of C and of Python, and of all processes that it starts. No other program's is touched.
CLOCK = """
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, which, now);
    const char *sign = getenv("CLOCK_SET_BACK");
    if (!failed && which == CLOCK_REALTIME && sign && !access(sign, F_OK))
        now->tv_sec -= 3600;
    return (int)failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    return now ? (*now = exact.tv_sec) : exact.tv_sec;
}
"""

# What each process of the run holds after each twentieth part of its tests; halfway, the clock is set back.
SAMPLING = """
import gc
import json
import os
import tempfile
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


class Sampling:
    done = every = 0

    def pytest_collection_finish(self, session):  # not where xdist collects elsewhere
        self.every = max(1, len(session.items) // 20 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
        self.half = len(session.items) // 2

    def pytest_runtest_logfinish(self):
        self.done += 1
        if not self.every or self.done % self.every:
            return
        if not WORKER and self.done >= self.half:
            (HERE / "set-back").touch()
        gc.collect()
        me = psutil.Process()
        children = me.children(recursive=True)
        sample = {"worker": WORKER, "done": self.done, "clock": time.time(), "children": len(children)}
        for name, process in (("pytest", me), *(("source", child) for child in children)):
            sample |= {f"{name} bytes": process.memory_info().rss, f"{name} descriptors": process.num_fds()}
        sample["files"] = sum(len(files) for _, _, files in os.walk(tempfile.gettempdir()))
        with open(HERE / "samples.jsonl", "a") as file:
            print(json.dumps(sample), file=file)


def pytest_configure(config):
    config.pluginmanager.register(Sampling())
"""


@pytest.fixture
def leftovers(tmp_path, project, monkeypatch):
    return Leftovers(tmp_path, monkeypatch)


@pytest.fixture
def seed():
    """Shown where a test fails."""
    seed = int(os.environ.get("GPUTRAIN_SOAK_SEED", secrets.randbelow(2**32)))
    print(f"GPUTRAIN_SOAK_SEED={seed}")
    return seed


def pytest_of(project, *arguments, **variables):
    """A pytest that has started in the project."""
    with (project.path / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=project.path,
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def assert_flat(samples, report_bytes):
    """Nothing grows with the number of cases but the memory of what the report says of them.

    Args:
        report_bytes: of a case, in the report.
    """
    early, late = samples[len(samples) // 4], samples[-1]
    counts = ("children", "files", "pytest descriptors", "source descriptors")
    assert {name: late[name] for name in counts} == {name: early[name] for name in counts}
    assert late["source bytes"] < 1.1 * early["source bytes"]
    grown, cases = late["pytest bytes"] - early["pytest bytes"], late["done"] - early["done"]
    allowed = 6 * report_bytes * cases + 0.1 * early["pytest bytes"]
    assert grown < allowed, f"pytest keeps {grown / cases:.0f} bytes of each case, the report {report_bytes:.0f}"


def test_thousands_of_cases_leave_nothing_behind_though_the_clock_is_set_back(project, leftovers, tmp_path):
    if not (compiler := shutil.which(os.environ.get("CC", "cc"))):
        pytest.skip("the clock needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", tmp_path / "clock.so", tmp_path / "clock.c"], check=True)
    project.write(conftest=SAMPLING, test_soaked=SUITE.format(CASES))
    sign = project.path / "set-back"
    began = time.time()
    run = pytest_of(
        project, *RECORDING, *REPORTS, LD_PRELOAD=str(tmp_path / "clock.so"), CLOCK_SET_BACK=str(sign)
    )  # fmt: skip
    assert run.wait() == 0, (project.path / "output.txt").read_text()[-4000:]

    samples = [json.loads(line) for line in (project.path / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["clock"] >= began
    assert samples[-1]["clock"] < time.time() - HOUR + 60, "the clock was set back"
    results = project.report()["results"]
    assert_flat(samples, (project.path / "report.json").stat().st_size / CASES)
    replies = [reply for result in results for reply in result["replies"]]
    assert len(replies) == len(results) == len(project.baselines("soaked")) == CASES
    assert all(0 < reply["step_seconds"][0] < 60 for reply in replies)
    assert len({reply["peak_allocated_bytes"] for reply in replies}) == 1, "what came before a case changes no figure"
    assert len((project.path / "history.jsonl").read_text().splitlines()) == CASES
    assert main(["check-baselines", str(project.path / "baselines")]) == 0
    assert leftovers.all() == []


def test_three_workers_record_in_one_folder_and_leave_nothing_behind(project, leftovers):
    pytest.importorskip("xdist")
    number = max(12, CASES // 10)
    project.write(conftest=SAMPLING, test_soaked=SUITE.format(number))
    run = pytest_of(project, *RECORDING, *REPORTS, "-n3")
    assert run.wait() == 0, (project.path / "output.txt").read_text()[-4000:]
    assert len(project.baselines("soaked")) == len(project.report()["results"]) == number
    samples = [json.loads(line) for line in (project.path / "samples.jsonl").read_text().splitlines()]
    for worker in ("gw0", "gw1", "gw2"):
        of_one = [sample for sample in samples if sample["worker"] == worker]
        assert of_one[-1]["pytest descriptors"] == of_one[0]["pytest descriptors"]
    assert sorted(path.name for path in (project.path / "baselines").rglob("*")) == ["cpu", "soaked.json"]
    assert leftovers.all() == []


ENDING = """
from pathlib import Path


def pytest_sessionfinish():
    Path(__file__).with_name("ending").touch()
"""


def test_recordings_that_are_killed_leave_whole_baselines_and_no_process(project, leftovers, seed):
    rng = random.Random(seed)
    project.write(conftest=ENDING, test_killed=SUITE.format(3))
    file, ending = project.baseline_file("killed"), project.path / "ending"

    def undisturbed(side):
        """Seconds until the tests are over, and from then on."""
        began = time.monotonic()
        run = pytest_of(project, *RECORDING, SIDE=side)
        wait_for(ending, seconds=600)
        tests_over = time.monotonic()
        assert run.wait() == 0, (project.path / "output.txt").read_text()[-4000:]
        assert {path.name for path in file.parent.iterdir()} == {file.name}, "a part of an earlier file is removed"
        ending.unlink()
        return tests_over - began, time.monotonic() - tests_over

    def peaks():
        return [entry["runs"][0]["peak_allocated_bytes"] for entry in project.baselines("killed").values()]

    recorded = {}
    for side in ("65", "64"):
        before, after = undisturbed(side)
        recorded[side] = peaks()
        assert len(set(recorded[side])) == 1
    now, changes = recorded["64"], 0
    for number in range(KILLS):
        side = rng.choice(sorted(recorded))
        run = pytest_of(project, *RECORDING, SIDE=side)
        if number % 2:
            wait_until(lambda run=run: ending.exists() or run.poll() is not None, seconds=600)
        time.sleep(rng.uniform(0, after if number % 2 else before))
        victims = [run.pid] * 3
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        victim, by = rng.choice(victims), rng.choice((signal.SIGKILL, signal.SIGTERM))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, by)
        run.wait(600)
        told = f"kill {number} of {victim} ({'pytest' if victim == run.pid else 'a child'}) by {by!r}"
        left = peaks()
        changes += left != now
        whole = {tuple(now), tuple(recorded[side])}
        # A worker that was killed fails its test, and SIGTERM ends pytest as Ctrl-C does: what was measured is recorded.
        some = victim != run.pid or by == signal.SIGTERM
        mixed = some and set(left) <= {*now, *recorded[side]} and len(left) == len(now)
        assert tuple(left) in whole or mixed, told
        assert main(["check-baselines", str(file.parent.parent)]) == 0, told
        wait_until(lambda: not leftovers.processes(), seconds=60)
        now = left
        ending.unlink(missing_ok=True)
    assert KILLS < 20 or 0 < changes < KILLS, "some were killed before they had written, and some afterwards"
    undisturbed("64")
    assert leftovers.all() == []
