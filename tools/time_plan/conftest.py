"""Has GPU seconds judged in the runs of ``tools/gpu_session.py --plan time``, which find out whether they may be."""

import pytest

from pytest_gputrain.gate import regression, suite_noise


@pytest.fixture(autouse=True, scope="session")
def _gpu_seconds_are_judged():
    with pytest.MonkeyPatch.context() as patch:
        for module in (regression, suite_noise):
            patch.setattr(module, "WHY_GPU_SECONDS_ARE_HELD_COARSELY", "")
        yield
