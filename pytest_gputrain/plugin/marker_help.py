"""Describes the plugin's markers, as ``pytest --markers`` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_gputrain.hardware.catalog import MARKERS

LIMIT: Final = "gpu_limit"
TOLERANCE: Final = "gpu_tolerance"
ONLY_ON: Final = "gpu_only_on"
KINDS: Final = ("cpu", "emulated", "gpu")
"""The kinds of runs."""


def lines(*, printed: bool) -> Iterator[str]:
    """Yield the line of each marker, for the ini option ``markers``.

    Args:
        printed: whether ``pytest --markers`` prints them. The platforms then share a line, and are else registered singly.
    """
    if printed:
        yield f"PLATFORM: gputrain: declared for this GPU, or for the CPU; PLATFORM is one of {', '.join(MARKERS)}"
    else:
        yield from MARKERS
    yield (
        f'{LIMIT}(memory="24 GiB", time="0.5 s", waits=0, launches=2000): gputrain: fails the test if its case allocates '
        "more, or if a step takes longer or asks the GPU for more"
    )
    yield (
        f'{TOLERANCE}(time="5 %", memory="3 % + 1 GiB", growth="1 MiB", launches="5 %", waits=2): gputrain: the tolerances '
        "of this test, instead of gpu_time_tolerance, gpu_memory_tolerance and gpu_count_tolerance of the ini file; growth "
        "is the memory that own code may keep after every step"
    )
    yield (
        f'{ONLY_ON}("cpu", "gpu", reason="it reads losses"): gputrain: leaves the test out of runs of other kinds; the '
        f"kinds are {', '.join(KINDS)}"
    )
