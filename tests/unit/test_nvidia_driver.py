"""NVIDIA's GPUs through the real Python bindings, over a C library that answers for GPUs that are not there.

What bindings do with error codes, missing functions and the sizes of structures only shows at this level. Asked are the
oldest binding that pyproject.toml admits, from the package index, and the one that is installed.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "standins" / "nvml.c"
WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")

ONE, OTHER = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-000000000000"
V100 = f"name=Tesla V100-SXM2-32GB,mib=32510,uuid={ONE},bus=1b,minor=0"
H100 = f"name=NVIDIA H100 80GB HBM3,mib=81559,uuid={ONE},bus=1b,minor=0"
H100_TOO = f"name=NVIDIA H100 80GB HBM3,mib=81559,uuid={OTHER},bus=43,minor=1"
T4 = f"name=Tesla T4,mib=15360,uuid={OTHER},bus=43,minor=1"

IN_CHILD = """
import json, os, pathlib, sys
from pytest_gputrain.cli import doctor_gpus
from pytest_gputrain.execution.launch import environment
from pytest_gputrain.hardware import amd, drivers, topology
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.machine import detect
from pytest_gputrain.utils.units import format_topology
amd.load = lambda: None

def each(ask):
    with drivers.driver("nvidia") as driver:
        return [ask(driver, gpu) for gpu in gpus]

for line in sys.stdin:
    expression, variables = json.loads(line)
    os.environ.update(variables)
    try:
        gpus = drivers.gpus()
        answer = eval(expression)
    except HardwareError as error:
        answer = {"refused": str(error)}
    for name in variables:
        del os.environ[name]
    print(json.dumps(answer, default=sorted), flush=True)
"""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Folders with the library as of two drivers, by their major versions."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) on this machine")
    folders = {version: tmp_path_factory.mktemp(f"driver-{version}") for version in (470, 580)}
    for version, folder in folders.items():
        library = folder / "libnvidia-ml.so.1"
        command = [compiler, *WARNINGS, f"-DDRIVER={version}", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True)
    return folders


@pytest.fixture(scope="session", params=["oldest", "installed"])
def binding(request, tmp_path_factory):
    """The folder with an older binding; None for the installed one."""
    if request.param == "installed":
        return None
    (version,) = _oldest_admitted()
    folder = tmp_path_factory.mktemp("binding")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries=0", "--timeout=10"]
    # The constraints of a test environment name another version.
    environ = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    done = subprocess.run(
        [*pip, f"--target={folder}", f"nvidia-ml-py=={version}"], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"nvidia-ml-py {version} cannot be installed here: {done.stderr.strip()[-200:]}")
    return folder


def _oldest_admitted():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [match[1] for text in dependencies if (match := re.fullmatch(r"nvidia-ml-py>=([\d.]+)", text))]


@pytest.fixture(scope="session")
def ask(libraries, binding):
    """Evaluates an expression in a process in which the driver has these GPUs, and the environment these variables.

    There is one process for each driver: the library reads its variables whenever it is initialised.
    """
    with contextlib.ExitStack() as stack:
        children = {driver: _child(stack, folder, binding) for driver, folder in libraries.items()}

        def evaluate(expression, *gpus, driver=580, init=0, **variables):
            told, answers = children[driver].stdin, children[driver].stdout
            variables = {"NVML_GPUS": ";".join(gpus), "NVML_INIT": str(init), **variables}
            told.write(json.dumps([expression, variables]) + "\n")
            told.flush()
            answer = answers.readline()
            assert answer, "the process has ended; its standard error says why"
            return json.loads(answer)

        yield evaluate


def _child(stack, library, binding):
    child = subprocess.Popen(
        [sys.executable, "-c", IN_CHILD],
        env=_environment(library, *filter(None, [binding])),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(child)
    # The end of its stdin does not reach it as long as a process that another test forked holds the pipe.
    stack.callback(child.terminate)
    return child


def _environment(library, *paths, **variables):
    """That of a process which finds the library, and nothing that chooses among its GPUs."""
    chosen = ("CUDA_", "SLURM_", "ROCR_", "HIP_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    return environ | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))} | variables


def test_the_oldest_binding_is_asked(ask, binding):
    file = ask("__import__('pynvml').__file__", H100)
    assert binding is None or Path(file).is_relative_to(binding)


@pytest.mark.parametrize("driver", [470, 580])
def test_processes_are_told_by_drivers_of_every_age(ask, driver):
    """Driver 470 lacks the list that bindings ask for; bindings since 12.560 say so by no NVMLError."""
    gpu = f"{V100},pids=4000:3072+4001:4096+4002"
    listed = [[4000, 3 << 30], [4001, 4 << 30], [4002, None]]
    none_listed = []
    if driver == 470 and not ask("hasattr(__import__('pynvml'), 'nvmlDeviceGetComputeRunningProcesses_v2')"):
        listed = none_listed = None  # the oldest binding has no name for the list that there is
    holders = "each(lambda d, g: (h := d.occupancy(g).holders) and [(holder.pid, holder.bytes) for holder in h])"
    assert ask(holders, gpu, driver=driver) == [listed]
    assert ask(holders, V100, driver=driver) == [none_listed]


@pytest.mark.parametrize("code", [3, 4])
def test_processes_that_a_driver_refuses_to_tell_are_unknown(ask, code):
    gpu = f"{H100},nvmlDeviceGetComputeRunningProcesses={code}"
    assert ask("each(lambda d, g: d.occupancy(g).holders)", gpu) == [None]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nvmlDeviceGetHandleByIndex=15", "GPU is lost"),
        ("nvmlDeviceGetHandleByIndex=4", "Insufficient Permissions"),
        ("nvmlDeviceGetUUID=3", "Not Supported"),
        ("nvmlDeviceGetMemoryInfo=16", "GPU requires restart"),
    ],
)
def test_a_gpu_that_fails_hides_no_other(ask, fault, says):
    gpus = (f"{H100},{fault}", H100_TOO)
    assert ask("[(gpu.index, gpu.uuid, gpu.fault) for gpu in gpus]", *gpus) == [[0, "", says], [1, OTHER, ""]]
    assert ask("[gpu.index for gpu in detect().gpus]", *gpus) == [1]
    assert ask("[gpu.index for gpu in detect(gpu_ids=['1']).gpus]", *gpus) == [1]
    assert ask("[gpu.index for gpu in detect().gpus]", *gpus, CUDA_VISIBLE_DEVICES=OTHER) == [1]
    refused = ask("detect(gpu_ids=['0'])", *gpus)["refused"]
    assert refused.startswith(f"--gpu-ids names GPU 0, which its driver does not describe ({says})")
    refused = ask("detect()", *gpus, CUDA_VISIBLE_DEVICES="0")["refused"]
    assert f"by their UUIDs, as nvidia-smi -L prints them: the driver does not describe GPU 0 ({says})" in refused


def test_a_host_whose_driver_or_gpus_fail_is_no_cpu_and_one_without_gpus_is(ask):
    gpu = f"{H100},nvmlDeviceGetHandleByIndex=15"
    assert "the NVIDIA driver failed to describe its GPUs (GPU is lost)" in ask("detect()", gpu)["refused"]
    assert ask("detect().platform", gpu, CUDA_VISIBLE_DEVICES="") == "cpu"
    assert "the NVIDIA driver failed to describe its GPUs" in ask("detect()", H100, init=18)["refused"]
    assert ask("detect().platform", init=28) == "cpu"


def test_paths_of_healthy_gpus_are_told_beside_a_lost_one(ask):
    gpus = (f"{H100},links=18*switch", f"{H100_TOO},links=18*switch", f"{T4},nvmlDeviceGetHandleByIndex=15")
    assert ask("drivers.paths([gpu for gpu in gpus if not gpu.fault])", *gpus) == [["X", "NV18"], ["NV18", "X"]]


def test_numbers_that_cuda_counts_otherwise_are_refused(ask):
    """CUDA's 0 is the fastest of several kinds, NVML's the first on the bus."""
    gpus = (T4.replace("minor=1", "minor=0"), H100)
    refused = ask("detect()", *gpus, CUDA_VISIBLE_DEVICES="0")["refused"]
    assert "by their UUIDs" in refused
    assert "(NVIDIA H100 80GB HBM3, Tesla T4) CUDA counts the fastest first" in refused
    by_bus = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert ask("detect().device_name", *gpus, **by_bus) == "Tesla T4"
    assert ask("detect().device_name", *gpus, CUDA_VISIBLE_DEVICES=ONE) == "NVIDIA H100 80GB HBM3"
    assert ask("detect(gpu_ids=['0']).device_name", *gpus) == "Tesla T4"  # nvidia-smi's number
    assert ask("detect().platform", *gpus, CUDA_VISIBLE_DEVICES="-1") == "cpu"
    assert ask("detect().gpus[0].uuid", H100, H100_TOO, CUDA_VISIBLE_DEVICES="1") == OTHER  # of one kind


@pytest.mark.parametrize("variable", ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS"])
def test_a_shell_in_a_slurm_job_has_the_jobs_gpus(ask, variable):
    indices = "[gpu.index for gpu in detect().gpus]"
    assert ask(indices, H100, H100_TOO, **{variable: "1"}) == [1]
    assert ask(indices, H100, H100_TOO, **{variable: "0,1"}) == [0, 1]
    assert ask(indices, H100, H100_TOO, **{variable: "1", "CUDA_VISIBLE_DEVICES": "0"}) == [0]
    # In a container the driver counts from 0 again.
    assert ask(indices, H100.replace("minor=0", "minor=5"), **{variable: "5"}) == [0]
    assert f"{variable}=7 names none of the 2 GPUs here" in ask("detect()", H100, H100_TOO, **{variable: "7"})["refused"]
    of_both = {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1"}
    assert ask(indices, H100, H100_TOO, **of_both) == [1], "a step has fewer than its job"


def test_a_gpu_is_named_by_the_beginning_of_its_uuid_or_a_whole_one_without_a_prefix(ask):
    assert "no visible GPU 'GPU-', or several" in ask("detect(gpu_ids=['GPU-'])", H100, H100_TOO)["refused"]
    assert "shows none of the 2 GPUs" in ask("detect()", H100, H100_TOO, CUDA_VISIBLE_DEVICES="GPU-")["refused"]
    assert ask("detect(gpu_ids=['GPU-6']).gpus[0].uuid", H100, H100_TOO) == OTHER
    # A Jetson's; its process sees it by number, as CUDA takes no UUID that does not begin with GPU-.
    uuid = "ddd1d5ac-9f3c-5bb6-9d4b-0a3a7b7b6a0c"
    jetson = f"name=Orin (nvgpu),uuid={uuid},bus=0"
    assert ask("[gpu.uuid for gpu in detect(gpu_ids=[gpus[0].uuid]).gpus]", jetson) == [uuid]
    shown = "environment._visible(gpus, {})['CUDA_VISIBLE_DEVICES']"
    assert (ask(shown, jetson), ask(shown, H100)) == ("0", ONE)


def test_memory_that_is_not_told_is_not_zero(libraries):
    gpu = f"name=NVIDIA GB10,uuid={ONE},bus=1"
    environ = _environment(libraries[580], NVML_GPUS=gpu, COLUMNS="300")
    command = [sys.executable, "-c", "from pytest_gputrain.cli.main import main; main(['doctor'])"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "not told" in done.stdout
    assert "0 B" not in done.stdout


@pytest.mark.parametrize("driver", [470, 580])
def test_a_reading_has_every_figure_that_the_driver_tells(ask, driver):
    """Most boards' first power is a mean of the last second; these two are recorded of one H100."""
    figures = "power=150000,energy=123456789,clock=1290,busy=97,reasons=4"
    readings = "each(lambda d, g: d.read(g)._asdict())"
    (reading,) = ask(readings, f"{H100},{figures}", driver=driver)
    assert reading == {
        "energy_joules": 123456.789,
        "power_watts": 150.0,
        "clock_mhz": 1290,
        "utilization": 0.97,
        "throttling": ["SW Power Cap"],
    }
    (untold,) = ask(readings, H100, driver=driver)
    assert set(untold.values()) == {None}
    assert ask("gpus[0].power_limit_watts", H100, driver=driver) is None
    assert ask("gpus[0].power_limit_watts", f"{H100},limit=300000", driver=driver) == 300.0
    power = "each(lambda d, g: d.read(g).power_watts)"
    assert ask(power, f"{H100},power=629450,instant=588390") == [588.39]
    assert ask(power, f"{H100},power=629450,nvmlDeviceGetFieldValues=3") == [629.45]


@pytest.mark.parametrize(
    ("links", "path"),
    [
        (("2*1", "2*0"), "NV2"),
        (("18*switch", "18*switch"), "NV18"),
        (("18*switch", "9*switch"), "NV9"),
        # A virtual machine sees that a link is up, and not what it leads to.
        (("18*vm", "18*vm"), "NV18"),
        # Of four that are linked pairwise, this container has two.
        (("1*1+2*9", "1*0+2*9"), "NV1"),
        (("", ""), "SYS"),
    ],
)
def test_links_are_counted_whatever_the_driver_tells_of_their_ends(ask, links, path):
    first, other = (f"{gpu},links={ends}" if ends else gpu for gpu, ends in zip((H100, H100_TOO), links, strict=True))
    assert ask("drivers.paths(gpus)", first, other) == [["X", path], [path, "X"]]


@pytest.mark.parametrize("fault", ["", ",nvmlDeviceGetNvLinkRemoteDeviceType=3"], ids=["", "a driver that tells no types"])
def test_the_machine_of_a_published_document_is_as_its_matrix(ask, fault):
    """Eight V100, each linked to some of the others; in the order of the case's GPUs."""
    lines = json.loads((ROOT / "baselines" / "published" / "paddle-distributed.json").read_text())
    matrix = [line.split()[1:9] for line in lines["platforms"]["v100_32gb"]["topology"][1:9]]
    gpus = []
    for index, row in enumerate(matrix):
        links = "+".join(f"{path[2:]}*{other}" for other, path in enumerate(row) if path.startswith("NV"))
        gpus.append(
            f"name=Tesla V100-SXM2-32GB,mib=32510,uuid=GPU-{index},bus={0x10 + index:x},level=40,links={links}{fault}"
        )
    assert ask("drivers.paths(gpus)", *gpus) == matrix
    assert ask("format_topology(drivers.paths(gpus))", *gpus) == "8 x NV1, 8 x NV2, 12 x NODE"
    lent = (6, 0, 3)
    assert ask(f"drivers.paths([gpus[at] for at in {lent}])", *gpus) == [
        [matrix[at][other] for other in lent] for at in lent
    ]
    assert ask("drivers.paths(gpus[:1]) or drivers.paths([])", *gpus) == []


@pytest.mark.parametrize(
    ("told", "path"),
    [
        *((f"level={level}", path) for level, path in ((10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"))),
        ("nvmlDeviceGetTopologyCommonAncestor=3", "N/A"),
    ],
)
def test_without_links_it_is_where_they_meet_on_pcie(ask, told, path):
    assert ask("drivers.paths(gpus)", f"{H100},{told}", f"{H100_TOO},{told}") == [["X", path], [path, "X"]]


def test_a_gpu_is_found_on_pcie_by_the_address_that_its_driver_tells(ask, tmp_path):
    device = tmp_path / "devices" / "pci0000:00" / "0000:00:1e.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("0-3\n")
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices" / device.name).symlink_to(device)
    table = f"doctor_gpus.links(gpus, topology.Sysfs(pathlib.Path({str(tmp_path)!r})))"
    gpu = f"name=Tesla T4,mib=15360,uuid={ONE},bus=00,slot=1e"
    assert ask(f"{table}.headers + {table}.rows[0]", gpu) == ["", "GPU 0", "Cores", "GPU 0", "X", "0-3"]
