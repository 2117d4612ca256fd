"""Describes where a case is measured, as the worker sees it; the parent adds what only drivers know."""

from __future__ import annotations

import os
import platform
import socket

import torch

from pytest_gputrain.cases.libraries import versions
from pytest_gputrain.records import Environment
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
    )


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"
