"""Has GPU seconds judged in the runs of ``tools/gpu_session.py --plan time``, which find out whether they may be."""

import pytest

from pytest_gputrain.gate import regression


@pytest.fixture(autouse=True, scope="session")
def _gpu_seconds_are_judged():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "WHY_GPU_SECONDS_ARE_NOT_JUDGED", "")
        yield
