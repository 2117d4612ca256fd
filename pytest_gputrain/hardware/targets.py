from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.records import Target
from pytest_gputrain.units import GiB


def target_of(marker: str) -> Target:
    if marker == "cpu":
        return Target(marker="cpu", kind="cpu")
    platform = PLATFORMS[marker]
    return Target(
        marker=marker,
        kind="cuda",
        memory_bytes=platform.memory_bytes - int(0.9 * GiB),
        context_bytes=int(0.55 * GiB),
        capability=(7, 0) if marker == "v100" else (8, 0),
        peak_flops=platform.peak_flops,
        bandwidth=platform.bandwidth,
    )
