"""Tests how kills for want of memory are counted, and waits for a core, on made-up files of Linux."""

import pytest

from pytest_gputrain.utils import linux

OF_HOST = {"proc/vmstat": "nr_free_pages 1\noom_kill 9\n"}


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        pytest.param({}, 0, id="no /proc"),
        pytest.param(OF_HOST, 9, id="no control group"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 9, id="version 2, the root group"),
        pytest.param(
            {"proc/self/cgroup": "0::/user/job\n", "sys/fs/cgroup/user/job/memory.events": "oom 3\noom_kill 2\n"},
            2,
            id="version 2",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill 2\n"}, 2, id="version 2, a container"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:pids:/\n4:cpu,memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 4\n",
            },
            9,
            id="two controllers in one mount",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:pids:/\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 4\n",
            },
            2,
            id="version 1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 2\n",
            },
            2,
            id="version 1, a container",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\n"},
            9,
            id="version 1, an old kernel",
        ),
    ],
)
def test_kills_are_those_of_this_control_group(tmp_path, monkeypatch, files, kills):
    of_host = OF_HOST if files else {}
    for name, text in {**of_host, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(linux, "_ROOT", tmp_path)
    assert linux.oom_kills() == kills


def test_threads_wait_for_a_core_together_for_no_longer_than_the_time(tmp_path, monkeypatch):
    now = [10_000]
    monkeypatch.setattr(linux, "_ROOT", tmp_path)
    monkeypatch.setattr(linux.time, "monotonic_ns", lambda: now[0])
    waits = linux.CoreWait()
    now[0] += 1000
    assert waits.share() is None, "the kernel does not tell"

    def waited(*nanoseconds):
        for thread, waiting in enumerate(nanoseconds):
            file = tmp_path / "proc/self/task" / str(thread) / "schedstat"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"77 {waiting} 5\n")

    waited(100, 50)
    waits = linux.CoreWait()
    waited(300, 100)
    now[0] += 1000
    assert waits.share() == 0.25
    waited(3000, 100)
    assert waits.share() == 1.0
