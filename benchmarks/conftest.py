"""Provides fixtures for tests that compare cases with each other."""

import pytest


@pytest.fixture
def compared(gputrain, pytestconfig):
    """The fixture ``gputrain``, unless what it measures is no more the cases that were declared."""
    if pytestconfig.getoption("--gpu-find-batch"):
        pytest.skip("--gpu-find-batch gives each case a batch of its own, so they do not compare")
    return gputrain
