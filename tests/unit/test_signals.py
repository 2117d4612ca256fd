"""Signals that ask a run to end."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from pytest_gputrain.utils.signals import Terminated, terminable, undisturbed

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_FORKS = """
import os, signal, sys
from pytest_gputrain.utils.signals import terminable

with terminable():
    child = os.fork()
    if not child:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) != -signal.SIGTERM)
"""


@pytest.fixture(autouse=True)
def _handlers(monkeypatch):
    """Python's own, whatever pytest runs under; unchanged afterwards."""
    before = {number: signal.getsignal(number) for number in ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handlers = {number: signal.getsignal(number) for number in ENDING}
    yield
    assert {number: signal.getsignal(number) for number in ENDING} == handlers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_process_is_taken_for_ctrl_c(number):
    with terminable(), pytest.raises(KeyboardInterrupt, match=f"ended by {number.name}") as caught:
        signal.raise_signal(number)
    assert caught.type is Terminated


def test_a_forked_process_ends_as_ever():
    # In a process that has one thread: under xdist, this one may have more.
    done = subprocess.run([sys.executable, "-c", _FORKS], check=False, timeout=600)
    assert done.returncode == 0


def test_a_handler_of_others_stays():
    came = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    with terminable():
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM] * 2
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_what_nohup_ignores_is_ignored_and_what_comes_at_the_end_of_a_run_is_dropped():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable(), undisturbed():
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with terminable(), undisturbed(to_the_end=True):
        for number in ENDING:
            signal.raise_signal(number)


@pytest.mark.parametrize("number", ENDING)
def test_a_second_one_waits_until_the_first_is_done(number):
    done = []

    def save():
        with undisturbed():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("saved")
        done.append("never")

    with terminable(), pytest.raises(KeyboardInterrupt):
        save()
    assert done == ["saved"]


def test_an_error_inside_is_told_and_what_came_as_well():
    def fail():
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("inside")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_may_not_set_handlers_and_need_none():
    passed = []

    def elsewhere():
        with terminable(), undisturbed():
            passed.append(os.getpid())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert passed
