"""What a case is predicted for, from the catalog."""

import pytest

from pytest_gputrain.hardware.catalog import MARKERS, PLATFORMS
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.utils.units import GiB


@pytest.mark.parametrize("marker", MARKERS)
def test_every_platform_is_a_target(marker):
    target = target_of(marker)
    assert target.marker == marker
    assert (target.memory_bytes is None) == (marker == "cpu")


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda platform: platform.marker)
def test_less_is_usable_than_sold(platform):
    # Inline error correction takes a sixteenth, the driver less than a gigabyte or three hundredths more.
    assert 0.9 * platform.memory_bytes < platform.usable_bytes < platform.memory_bytes


def test_an_h100_is_what_its_messages_say():
    target = target_of("h100")
    assert (target.memory_bytes, target.capability) == (int(79.11 * GiB), (9, 0))
    assert target.workspace_bytes == 32 * 1024**2
    assert target_of("v100").workspace_bytes == 8_519_680
