"""What programs ask the emulated GPU's driver: NVML's figures, streams, errors, memory in children, memory of the host."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pytest_gputrain

ROOT = Path(pytest_gputrain.__file__).parents[1]


def test_loggers_read_an_idle_gpu_and_this_process_memory(emulate):
    pytest.importorskip("pynvml")
    code = """
        import os, pynvml, torch
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        print(torch.cuda.utilization(), torch.cuda.memory_usage(), torch.cuda.temperature() > 0, torch.cuda.power_draw() > 0)
        print(torch.cuda.clock_rate() > 0, torch.cuda.device_memory_used() >> 20, torch.cuda.list_gpu_processes())
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        (own,) = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        print(own.pid == os.getpid(), own.usedGpuMemory == pynvml.nvmlDeviceGetMemoryInfo(gpu).used)
        print(pynvml.nvmlDeviceGetPciInfo(gpu).busId, pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu))
        for name in ("FanSpeed", "EnforcedPowerLimit", "TotalEnergyConsumption", "EccMode", "Serial"):
            try:
                print(getattr(pynvml, f"nvmlDeviceGet{name}")(gpu))
            except pynvml.NVMLError_NotSupported:
                pass
    """
    done, _ = emulate(code)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "0 0 True True"
    assert rest[0] == f"True {1024 + 768} GPU:0"
    assert rest[1].startswith("process ")
    assert rest[2:] == ["True True", "00000000:01:00.0 []"]


def test_streams_keep_their_priority_and_refused_products_say_why(emulate):
    code = """
        import torch
        print(torch.cuda.Stream(priority=-1).priority, torch.cuda.Stream().priority)
        matrix = torch.eye(8).to_sparse_csr().cuda()
        try:
            matrix @ matrix
        except RuntimeError as error:
            print(error)
    """
    done, _ = emulate(code)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "-1 0"
    assert "an emulated GPU does not support this operation" in " ".join(rest)


def test_a_child_cannot_change_the_memory_of_its_parent(emulate):
    code = """
        import os, torch
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        del held
        before = torch.cuda.mem_get_info()
        child = os.fork()
        if child == 0:
            try:
                torch._C._cuda_emptyCache()
            except RuntimeError as error:
                print(str(error).splitlines()[0], flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(torch.cuda.mem_get_info() == before)
        torch.cuda.empty_cache()
        print(torch.cuda.mem_get_info()[0] - before[0])
    """
    done, _ = emulate(code)
    assert done.stdout.splitlines() == ["CUDA error: initialization error", "True", str(1 << 30)], done.stderr


@pytest.mark.slow
def test_calls_take_no_memory_of_the_host(emulate):
    """A hundred thousand calls that make descriptors."""
    code = """
        import torch

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        torch.cuda.init()
        torch.cuda.memory._record_memory_history(enabled=None)  # keeps what each call allocates
        layer, images = torch.nn.Linear(64, 64).cuda(), torch.nn.Conv2d(4, 4, 3).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        with torch.no_grad():
            numbers, pixels = torch.ones(4, 64, device="cuda"), torch.ones(1, 4, 8, 8, device="cuda")
            calls = {60_000: lambda: layer(numbers), 30_000: lambda: images(pixels), 10_000: optimizer.step}
            for times, call in calls.items():
                for _ in range(500):
                    call()
                before = resident()
                for _ in range(times):
                    call()
                print(resident() - before)
    """
    done, _ = emulate(code)
    assert done.returncode == 0, done.stderr
    growth = list(map(int, done.stdout.split()))
    assert len(growth) == 3
    assert sum(growth) < 1 << 20, growth


def test_what_a_program_leaves_beside_the_figures_is_ignored(emulate):
    code = """
        import os, torch
        torch.ones(1, device="cuda")
        state = os.environ["GPUTRAIN_EMULATED_STATE"]
        os.mkdir(f"{state}/99999"), os.mkdir(f"{state}/88888.json"), os.mkfifo(f"{state}/77777")
    """
    done, report = emulate(code)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(report["use"]) == len(report["processes"]) == 1


def _wait(condition):
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_killed_command_takes_its_program_along_and_the_next_one_removes_its_folder(stand_ins, tmp_path):
    script, temporary = tmp_path / "train.py", tmp_path / "temporary"
    temporary.mkdir()
    script.write_text(
        "import os, time; print(os.getpid(), os.environ['GPUTRAIN_EMULATED_STATE'], flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-m", "pytest_gputrain.cli.main", "emulate", "--gpu=h100", "--", sys.executable]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    with subprocess.Popen([*command, str(script)], env=environ, stdout=subprocess.PIPE, text=True) as running:
        process, folder = running.stdout.readline().split()
        # While the first runs, another leaves its folder alone.
        subprocess.run([*command, "-c", ""], env=environ, check=True, timeout=600)
        assert Path(folder).is_dir()
        os.kill(running.pid, signal.SIGKILL)
        assert _wait(lambda: not Path(f"/proc/{process}").exists())
    assert Path(folder).is_dir()
    subprocess.run([*command, "-c", ""], env=environ, check=True, timeout=600)
    assert not Path(folder).exists()
