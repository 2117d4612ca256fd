"""Runs the command ``gputrain doctor``, which checks whether this host has everything that a run on its GPUs needs.

It also lists the GPUs, and records what their drivers answer. Each check is a function that yields what it found; none of
them starts a case. This process never imports torch: which build is installed, torch's own file of versions tells.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pytest_gputrain.cli import doctor_gpus
from pytest_gputrain.execution.launch.environment import CHOOSING
from pytest_gputrain.hardware import amd, drivers, lease, machine, nvidia, recording, topology
from pytest_gputrain.hardware.devices import Gpu, HardwareError, Vendor
from pytest_gputrain.hardware.emulation.build import COMPILERS, find_compiler
from pytest_gputrain.hardware.emulation.libraries import version_file
from pytest_gputrain.records.doctor import Check, CheckStatus, Diagnosis
from pytest_gputrain.report.json_report import generator
from pytest_gputrain.utils import console
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.json_text import encoded

_GET_TORCH: Final = "install the build for it from https://pytorch.org/get-started/locally"
_ORDER: Final = "CUDA_DEVICE_ORDER"
_RECORDED_READINGS: Final = 5
"""Readings of a GPU in a recording: several, so that it shows whether counters advance."""
_NO_ROCM: Final = (20,)
"""No release of ROCm: the binding that ROCm brings counts those of the C library, from 23 on."""


class Torch(NamedTuple):
    """The installed build of torch."""

    version: str
    cuda: str
    """The release of CUDA that it is built for; empty for none."""
    rocm: str


def add_to(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find out what this host lacks to run cases on its GPUs, and list them",
        description="Check drivers, bindings, torch, permissions and the lock folder of this host, and print a line for "
        "each check, with its remedy. Then list the GPUs as their drivers describe them, whatever CUDA_VISIBLE_DEVICES "
        "says. The exit status is 1 if there is a problem. Warnings leave it 0.",
    )
    form = doctor.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the checks as JSON, without the list of GPUs")
    form.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="also write every reply of the drivers' libraries to this file, to report a problem",
    )
    form.add_argument("--replay", type=Path, metavar="FILE", help="only list the GPUs of such a file")


def main(options: argparse.Namespace) -> int:
    """Print the checks and the GPUs. Return 0, 1 if there is a problem, or 2 if a file cannot be read or written."""
    try:
        return _replay(options.replay) if options.replay is not None else _examine_this_host(options)
    except ValueError as error:
        console.say(error)
    except OSError as error:
        done = "read" if options.replay else "written"
        console.say(f"{options.replay or options.record} cannot be {done}: {error.strerror}")
    return 2


def _replay(path: Path) -> int:
    """List the GPUs of a recording. It lacks the network cards and the cores of its machine."""
    with recording.replayed(path):
        try:
            console.put(doctor_gpus.describe(topology.Sysfs(Path(os.devnull))) or f"no GPU is recorded in {path}")
        except HardwareError as error:
            console.say(error)
            return 1
    return 0


def _examine_this_host(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        recordings = stack.enter_context(recording.recorded()) if options.record else []
        checks, table = examine(), ""
        if not options.json:
            try:
                table = doctor_gpus.describe(topology.Sysfs(), readings=_RECORDED_READINGS if options.record else 1)
            except HardwareError as error:
                console.say(f"the GPUs are not listed: {error}")
    if options.record:
        write_atomically(options.record, json.dumps(recordings, indent=1).encode() + b"\n")
    sound = all(check.status != "problem" for check in checks)
    if options.json:
        diagnosis = Diagnosis(generator=generator(), sound=sound, checks=tuple(checks))
        console.put(msgspec.json.format(encoded(diagnosis), indent=1).decode())
    else:
        console.put("\n".join([*map(str, checks), *(["", table] if table else [])]))
    return 0 if sound else 1


def examine() -> list[Check]:
    """Return the results of all checks of this host."""
    checks: list[Check] = []
    gpus: list[Gpu] = []
    for vendor_checks in (_nvidia(gpus), _amd(gpus)):
        checks += vendor_checks
    # With a problem every run stops before it chooses GPUs.
    if all(check.status != "problem" for check in checks):
        checks += _visible(gpus)
    for more in (_torch(gpus), _compiler(), _lock_folder()):
        checks += more
    return checks


def _nvidia(gpus: list[Gpu]) -> Iterator[Check]:
    """Yield checks of NVIDIA's driver and its binding, and add the GPUs to ``gpus``."""
    if fault := drivers.nvidia_binding_fault():
        yield Check("nvidia", "problem", fault)
        return
    try:
        with drivers.driver("nvidia") as driver:
            found = list(driver.gpus()) if driver is not None else None
    except HardwareError as error:
        yield Check("nvidia", "problem", str(error))
        return
    if found is None:
        yield Check("nvidia", "ok", "no NVIDIA driver on this host")
        return
    silent = [gpu for gpu in found if gpu.fault]
    found = [gpu for gpu in found if not gpu.fault]
    gpus += found
    for gpu in silent:
        yield Check(
            "gpus",
            "warning" if found else "problem",  # Runs use the other GPUs, if there are any.
            f"GPU {gpu.index} is not described by its driver ({gpu.fault})",
            "see what nvidia-smi says",
        )
    if silent and not found:
        return
    yield from _listed("nvidia", found, f"binding nvidia-ml-py {_installed('nvidia-ml-py')}", "see what nvidia-smi says")
    control, memory = (nvidia.DEVICE_FILES / name for name in ("nvidiactl", "nvidia-uvm"))
    if control.exists() and not memory.exists():
        yield Check(
            "permissions", "problem", f"{memory} is missing, without which CUDA does not start", "run nvidia-modprobe -u"
        )
    if found:
        yield from _permissions(
            [control, memory, *(nvidia.DEVICE_FILES / f"nvidia{gpu.minor}" for gpu in found if gpu.minor is not None)]
        )


def _amd(gpus: list[Gpu]) -> Iterator[Check]:
    """Yield checks of AMD's driver and its binding, and add the GPUs to ``gpus``.

    Beside NVIDIA's GPUs one of AMD's may only be the graphics of the processor, so nothing about it is a problem.
    """
    worst: CheckStatus = "warning" if gpus else "problem"
    if fault := amd.binding_fault():
        yield Check("amd", worst, fault)
        return
    try:
        with amd.opened() as driver:
            found = None if driver is None else driver.gpus()
            left_out = () if driver is None else driver.left_out()
    except HardwareError as error:
        yield Check("amd", "problem", str(error))  # This error stops every run.
        return
    if found is None:
        yield Check("amd", "ok", "no AMD driver on this host")
        return
    gpus += found
    binding, rocm = _installed("amdsmi"), amd.rocm_version()
    versions = f"binding amdsmi {binding}, {f'ROCm {rocm}' if rocm else 'ROCm in no usual place'}"
    yield from _listed("amd", found, versions, "see what amd-smi says" if not left_out else "")
    if rocm and () < _release(binding) < _NO_ROCM and _release(binding) != _release(rocm):
        wanted = ".".join(map(str, _release(rocm)))
        yield Check(
            "amd",
            "warning",
            f"amdsmi {binding} beside ROCm {rocm} is the binding of another release, so that figures may be wrong",
            f'pip install "amdsmi=={wanted}.*"',
        )
    for sentence in left_out:
        yield Check("left out", "warning" if found else worst, sentence)
    if found:
        yield from _permissions([amd.DEVICE_FILE])


def _listed(vendor: Vendor, gpus: Sequence[Gpu], versions: str, remedy: str) -> Iterator[Check]:
    """Yield a check of the kinds of GPUs, and whether the catalog has them."""
    if not gpus:
        yield Check(vendor, "warning", f"the driver lists no GPU that can be used, {versions}", remedy)
        return
    yield Check(vendor, "ok", f"driver {gpus[0].driver}, {versions}")
    for (name, marker), count in Counter((gpu.name, machine.marker_of(gpu)) for gpu in gpus).items():
        if marker is not None:
            yield Check("gpus", "ok", f"{count} x {name}, marker {marker}")
        else:
            yield Check(
                "gpus",
                "warning",
                f"{count} x {name}, which the catalog does not know",
                "name its platform with --gpu-platform",
            )


def _permissions(files: Sequence[Path]) -> Iterator[Check]:
    """Yield a check that opens the files by which the kernel gives GPUs to processes."""
    opened = []
    for file in files:
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            continue
        except OSError as error:
            is_group = error.errno == errno.EACCES
            remedy = (
                f"add this user to the group {amd.group_of(file)}" if is_group else f"pass --device {file} to the container"
            )
            yield Check("permissions", "problem", f"{file} cannot be opened ({error.strerror})", remedy)
        else:
            opened.append(str(file))
    if opened:
        yield Check("permissions", "ok", f"{', '.join(opened)} can be opened")


def _visible(gpus: Sequence[Gpu]) -> Iterator[Check]:
    """Yield a check of which GPUs the variables of the runtimes show, and in which order."""
    names = (*CHOOSING, _ORDER)
    variables = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "no variable hides any"
    if not gpus:
        yield Check("visible", "ok", "no GPU: cases train on the CPU, at tiny scale")
        return
    try:
        visible = machine.detect().gpus
    except HardwareError as error:
        yield Check("visible", "problem", str(error))
        return
    order = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in visible)
    if visible:
        yield Check("visible", "ok", f"a run uses GPU {order}: {variables}")
    else:
        yield Check("visible", "warning", f"a run uses none of the {len(gpus)} GPUs: {variables}", "unset it to use them")
    kinds = {gpu.name for gpu in gpus if gpu.vendor == "nvidia"}
    if len(kinds) > 1 and os.environ.get(_ORDER) != "PCI_BUS_ID":
        yield Check(
            "visible",
            "warning",
            f"CUDA numbers the {len(kinds)} kinds of GPU by speed, and this package by the driver",
            f"set {_ORDER}=PCI_BUS_ID, or choose by UUIDs",
        )


def torch_build() -> Torch | None:
    """Return the build of torch that is installed beside this package, from its version file; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    about: dict[str, str] = {}
    with contextlib.suppress(OSError):
        about = version_file(Path(spec.origin).parent)
    return Torch(about.get("__version__") or _installed("torch"), about.get("cuda", ""), about.get("hip", ""))


def _torch(gpus: Sequence[Gpu]) -> Iterator[Check]:
    torch = torch_build()
    if torch is None:
        yield Check("torch", "problem", "torch is not installed", 'pip install "pytest-gputrain[suite]"')
        return
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm.partition('-')[0]}" if torch.rocm else "the CPU only"
    found = f"torch {torch.version} is built for {built}"
    vendors = {gpu.vendor for gpu in gpus}
    if "nvidia" in vendors:
        yield _torch_for_nvidia(torch, found)
    if "amd" in vendors:
        yield _torch_for_amd(torch, found)
    if not gpus:
        yield Check("torch", "ok", found)


def _torch_for_nvidia(torch: Torch, found: str) -> Check:
    if not torch.cuda:
        return Check("torch", "problem", f"{found}, and the GPUs are NVIDIA's", _GET_TORCH)
    most = _cuda_of_driver()
    if most is None:
        return Check("torch", "ok", found)
    beside = f"{found}, the driver supports CUDA up to {most[0]}.{most[1]}"
    if _release(torch.cuda)[:1] > most[:1]:  # An older driver works if CUDA's major release is the same.
        return Check("torch", "problem", beside, f"update the driver, or for CUDA {most[0]} {_GET_TORCH}")
    return Check("torch", "ok", beside)


def _torch_for_amd(torch: Torch, found: str) -> Check:
    if not torch.rocm:
        return Check("torch", "problem", f"{found}, and the GPUs are AMD's", _GET_TORCH)
    rocm = amd.rocm_version()
    if rocm and _release(torch.rocm)[:1] != _release(rocm)[:1]:
        return Check("torch", "warning", f"{found}, beside ROCm {rocm}", f"for ROCm {rocm} {_GET_TORCH}")
    return Check("torch", "ok", found)


def _cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest release of CUDA that the NVIDIA driver supports; None if the driver does not report it."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            number = pynvml.nvmlSystemGetCudaDriverVersion()
        finally:
            pynvml.nvmlShutdown()
        return number // 1000, number % 1000 // 10
    return None


def _compiler() -> Iterator[Check]:
    """Yield a check of the compilers with which torch.compile and DeepSpeed build kernels."""
    with contextlib.suppress(CannotEmulate):
        yield Check("compiler", "ok", shutil.which(find_compiler(packaged=False)[0]) or "")
        return
    looked = f"CC={os.environ['CC']}" if os.environ.get("CC") else ", ".join(COMPILERS)
    yield Check(
        "compiler",
        "warning",
        f"no C compiler is found ({looked}), without which cases with compile= and those of DeepSpeed fail on a GPU",
        "install gcc",
    )


def _lock_folder() -> Iterator[Check]:
    """Yield a check of the folder with the locks that keep two runs from using one GPU."""
    try:
        folder = lease.check_folder()
    except (HardwareError, OSError) as error:
        yield Check(
            "locks",
            "problem",
            f"GPUs cannot be lent: {error}",
            "set TMPDIR to a folder that every user of this host can write to",
        )
    else:
        yield Check("locks", "ok", f"{folder} can be used")


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _release(version: str) -> tuple[int, ...]:
    """Return the major and the minor release; empty if a version does not begin with them."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else ()
