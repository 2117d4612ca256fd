"""Tests how kills for want of memory are counted, on made-up files of Linux."""

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
