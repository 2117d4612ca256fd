"""Runs pytest on a machine whose GPU waits for the host: the machine that recorded, and another one."""

import pytest
from plugin_project import GEMMA, H100, only_sentence, recorded

TEST = f"test_tuning[{GEMMA}]"
ONE_CASE = "-k", "gemma"


def _answer(slower=1.0, *, busy=0.23, waits=0):
    reply = recorded(slower=slower)
    counts = {"steps": [0], "kinds": [{"waits": waits}], "profiled": True}
    return reply | {"gpu_steps": {"seconds": [4.7 * busy] * 5, "collective_seconds": [0.0] * 5}, "counts": counts}


@pytest.fixture
def waiting(suite):
    suite.answer(_answer())
    suite.run("--gpu-baseline-update", *ONE_CASE).assert_outcomes(passed=1, deselected=2)
    return suite


def test_a_slower_host_fails_on_the_machine_that_recorded_and_nowhere_else(waiting):
    waiting.answer(_answer(slower=1.6))
    here = waiting.run(*ONE_CASE)
    assert "; the GPU waits for the host in 77 % of this step (" in only_sentence(here, TEST)
    waiting.machine(H100, name="another")
    waiting.answer(_answer(slower=1.6))
    launched = len(waiting.launches)
    elsewhere = waiting.run(*ONE_CASE)
    elsewhere.assert_outcomes(passed=1, deselected=2)
    elsewhere.stdout.fnmatch_lines(["*60.0 % * on another machine*", "not compared: step time of 1 case"])
    assert len(waiting.launches) == launched + 1, "it is not measured again"
    allowed = waiting.run(*ONE_CASE, "-o", "gpu_host_time_tolerance=70%")
    allowed.stdout.fnmatch_lines(["*step time is held to 70.0 % on another machine*"])
    assert "not compared" not in allowed.stdout.str()


def test_a_wait_more_fails_on_any_machine_of_this_gpu(waiting):
    waiting.machine(H100, name="another")
    waiting.answer(_answer(waits=1))
    assert "waits for the GPU 1 time a step (0 before)" in only_sentence(waiting.run(*ONE_CASE), TEST)
