"""Describes where a case is measured, as the worker sees it; the parent adds what only drivers know."""

from __future__ import annotations

import contextlib
import os
import platform
import socket

import torch
from msgspec import UNSET, UnsetType

from pytest_gputrain.cases.libraries import versions
from pytest_gputrain.records import Environment
from pytest_gputrain.utils.host import network_cards, usable_cores, usable_memory_bytes
from pytest_gputrain.worker.device import Device
from pytest_gputrain.worker.group import Group


def environment_of(device: Device, group: Group) -> Environment:
    """Describe the device, the host and the libraries of this process."""
    on_gpu = device.type != "cpu"
    properties = torch.cuda.get_device_properties(device.torch_device) if on_gpu else None
    return Environment(
        device_name=torch.cuda.get_device_name(device.torch_device) if on_gpu else "cpu",
        device_type=device.type,
        device_count=group.size + group.servers,
        device_memory_bytes=properties.total_memory if properties else None,
        host=socket.gethostname(),
        cpu_model=_cpu_model(),
        os=platform.platform(terse=True),
        python=platform.python_version(),
        packages=versions(),
        runtime=torch.version.hip or torch.version.cuda if on_gpu else None,
        threads=device.threads,
        cudnn=_cudnn() if on_gpu else UNSET,
        nccl=_nccl() if on_gpu else UNSET,
        cores=len(usable_cores()),
        host_memory_bytes=usable_memory_bytes(),
        nics=network_cards(),
    )


def _cudnn() -> str | UnsetType:
    """Return the version of cuDNN or MIOpen, from its number."""
    number = None
    # The cuDNN that was found may differ from that of torch's build. This matters only to a case that uses cuDNN.
    with contextlib.suppress(RuntimeError):
        number = torch.backends.cudnn.version()
    if number is None:
        return UNSET
    # cuDNN 9.10.2 has the number 91002, cuDNN 8.9.2 had 8902, and MIOpen 3.5.0 has 3005000.
    size, major_size = (1000, 1_000_000) if torch.version.hip else (100, 10_000 if number >= 90_000 else 1000)
    return f"{number // major_size}.{number % major_size // size}.{number % size}"


def _nccl() -> str | UnsetType:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return UNSET
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"
