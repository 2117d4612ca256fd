"""Tests how kills for want of memory are counted, and waits for a core, on made-up files of Linux."""

import threading

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


def test_the_thread_that_trains_waits_for_a_core_from_never_to_all_the_time(tmp_path, monkeypatch):
    now = [10_000]
    monkeypatch.setattr(linux, "_ROOT", tmp_path)
    monkeypatch.setattr(linux.time, "monotonic_ns", lambda: now[0])

    def waited(nanoseconds, thread=None, ran=77, name="python"):
        file = tmp_path / "proc/self/task" / str(thread or threading.get_native_id()) / "schedstat"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{ran} {nanoseconds} 5\n")
        (file.parent / "comm").write_text(name)

    waited(0, ran=0)
    for _ in range(2):
        waits = linux.CoreWait()
        now[0] += 1000
        assert waits.share() is None, "the kernel does not tell"
        (tmp_path / "proc/self/task" / str(threading.get_native_id()) / "schedstat").unlink(missing_ok=True)
    waited(100)
    waited(50, thread=1)
    waited(30, thread=2, name="pt_autograd_0")
    waits = linux.CoreWait()
    waited(5000, thread=1)
    waited(130, thread=2, name="pt_autograd_0")
    now[0] += 1000
    for until, share in ((250, 0.25), (3000, 1.0), (-50, 0.0)):
        waited(until)
        assert waits.share() == share
