"""The helpers of tests that tell what a case has left behind."""

import os
import subprocess
import sys

import psutil
from leftovers import has_ended


def test_a_process_has_ended_as_soon_as_it_is_a_zombie_and_when_it_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ways = (child.pid, psutil.Process(child.pid))
    assert not any(map(has_ended, ways))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.pid_exists(child.pid), "nobody has waited for it"
    assert all(map(has_ended, ways))
    child.wait()
    assert all(map(has_ended, ways))
