"""NVIDIA GPUs through NVML."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_gputrain.hardware.devices import Gpu, HardwareError

DEVICE_FILES: Final = Path("/dev")
"""Where the kernel shows its GPUs, whatever the library says of them."""


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the driver, in its order; none where there is no driver.

    Raises:
        HardwareError: the driver is there but does not answer.
    """
    with library() as nvml:
        if nvml is None:
            return ()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                Gpu(
                    index=index,
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                    driver=driver,
                )
            )
        return tuple(found)


class Occupancy(NamedTuple):
    """What else is on GPUs."""

    free_bytes: int | None
    """Of the one that has least; None where nobody tells."""
    processes: int | None
    """Other processes that compute on any of them; None likewise."""


def occupancy(gpus: Sequence[Gpu]) -> Occupancy:
    """What is on ``gpus`` beside this process now.

    Raises:
        HardwareError: the driver does not answer.
    """
    with library() as nvml:
        if nvml is None or not gpus:
            return Occupancy(None, None)
        handles = [nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus]
        free = min(int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles)
        try:
            found = {process.pid for handle in handles for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except nvml.NVMLError:  # not supported, or not permitted
            return Occupancy(free, None)
        return Occupancy(free, len(found - {os.getpid()}))


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """The initialised library, None on a machine without it. Imported here: most runs of pytest never ask."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # Anything else is a GPU host with a fault, which must not pass for a host without GPUs.
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if not absent or any(DEVICE_FILES.glob("nvidia[0-9]*")):
            raise _fault(error) from error
        yield None
        return
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _fault(error) from error
    finally:
        pynvml.nvmlShutdown()


def _fault(error: Exception) -> HardwareError:
    return HardwareError(
        f"the NVIDIA driver failed to describe its GPUs ({error}); see what nvidia-smi says, or leave them alone with "
        "--gpu-platform=cpu"
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
