"""The stand-ins that tests of this folder run on; `test_emulate_command` tells their two conditions apart."""

import pytest

from pytest_gputrain.hardware.emulation import build, libraries
from pytest_gputrain.utils.errors import CannotEmulate


@pytest.fixture(scope="module")
def stand_ins():
    try:
        return build.stand_ins(libraries.find_torch())
    except CannotEmulate as error:
        pytest.skip(f"needs a CUDA build of torch: {error}")
