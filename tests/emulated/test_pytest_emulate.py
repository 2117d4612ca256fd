"""`pytest --gpu-emulate` with real workers. Needs a CUDA build of torch, and no GPU."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pytest_gputrain
from pytest_gputrain.hardware.emulation import boards
from pytest_gputrain.hardware.emulation.environment import emulated_environment

ROOT = Path(pytest_gputrain.__file__).parents[1]

SUITE = """
    WIDTH = 4096

    def build(setup):
        import torch  # not above: without NVIDIA's packages only the worker, which has the stand-ins, can import it

        assert str(setup.device) == "cuda:0" and torch.cuda.get_device_name(0) == "NVIDIA H100 80GB HBM3"
        first, second = (torch.nn.Linear(WIDTH, WIDTH, device=setup.device) for _ in range(2))
        model = torch.nn.Sequential(first, torch.nn.GELU(), second)
        if setup.processes > 1:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(1024, WIDTH, device=setup.device)
        setup.watch(model)

        def step():
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def build_too_large(setup):
        import torch

        kept = torch.empty(81 << 30, dtype=torch.uint8, device=setup.device)
        return lambda: kept.sum()

    def build_failing(setup):
        import torch
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        weight = torch.ones(4096, 4096, device=setup.device, requires_grad=True)

        def step():
            if _get_current_dispatch_mode().__class__.__name__ == "FlopCount":
                raise ValueError("no luck")
            weight.square().sum().backward()

        return step

    def test_failing(gputrain):
        gputrain.check(build_failing, precision="fp32")

    def test_own(gputrain):
        gputrain.check(build, precision="fp32")

    def test_two(gputrain):
        gputrain.check(build, model="two", precision="fp32", parallel="ddp", gpus=2)

    def test_too_large(gputrain):
        gputrain.check(build_too_large, precision="fp32")
"""


COMPILED = """
    def build(setup):
        import torch

        # No tensor of a step is as small as those that compiling makes, so these take a segment of their own.
        tuned = torch.nn.Sequential(torch.nn.Linear(1024, 4096, bias=False), torch.nn.GELU())
        odd = torch.nn.Linear(4096, 4099, bias=False)  # which torch would measure with and without padding
        model = torch.nn.Sequential(tuned, odd).to(setup.device, torch.bfloat16)
        tuned = torch.compile(tuned, mode="max-autotune-no-cudagraphs")
        odd = torch.compile(odd)
        optimizer = torch.optim.SGD(model.parameters())
        batches = [torch.randn(rows, 1024, device=setup.device, dtype=torch.bfloat16) for rows in (4096, 2048, 6144)]
        setup.watch(model)
        turns = iter(range(1000))

        def step():
            output = odd(tuned(batches[next(turns) % 3]))
            output.backward(torch.empty_like(output))
            optimizer.step()
            optimizer.zero_grad()

        return step

    def test_compiled(gputrain):
        gputrain.check(build, precision="bf16")
"""


@pytest.fixture
def run(run_tests, tmp_path):
    (tmp_path / "test_own.py").write_text(textwrap.dedent(SUITE))
    return run_tests


def test_every_figure_is_the_same_to_the_byte_in_another_run(run):
    first, recorded = run("--gpu-baseline-update", "-k", "not large and not failing")
    assert first.returncode == 0, first.stdout
    second, judged = run("--gpu-strict", "-k", "not large and not failing")
    assert second.returncode == 0, second.stdout
    for name, result in judged.items():
        assert result["reply"] == recorded[name]["reply"]
        assert result["kind"] == "emulated"
    weights = 4 * 2 * (4096 * 4096 + 4096)
    own, two = judged["test_own"]["reply"], judged["test_two"]["reply"]
    assert own["model_bytes"] == weights
    # Weights, gradients, two moments, and what the update takes for a moment.
    assert 4 * weights < own["peak_allocated_bytes"] < 6 * weights
    assert two["processes"] == 2
    assert two["peak_allocated_bytes"] - own["peak_allocated_bytes"] >= weights  # the reducer's buckets


@pytest.mark.slow
def test_a_compiled_case_takes_the_same_memory_whatever_was_compiled_before(run_tests, tmp_path):
    (tmp_path / "test_compiled.py").write_text(textwrap.dedent(COMPILED))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    first, recorded = run_tests("--gpu-baseline-update", **caches)
    assert first.returncode == 0, first.stdout
    assert any((tmp_path / "compiled").rglob("*.cubin"))  # which later runs find
    for _ in range(3):
        again, judged = run_tests("--gpu-strict", **caches)
        assert again.returncode == 0, again.stdout
        assert judged["test_compiled"]["reply"] == recorded["test_compiled"]["reply"]


def test_what_does_not_fit_fails_with_the_allocators_sentence(run):
    done, results = run("-k", "large")
    assert done.returncode == 1
    assert not results["test_too_large"]["reply"]["fits"]
    assert "does not fit H100 (79.1 GiB): CUDA out of memory. Tried to allocate 81.00 GiB" in done.stdout


def test_figures_are_kept_where_a_case_fails_afterwards(run):
    done, results = run("-k", "failing", "--gpu-baseline-update")
    assert done.returncode == 1
    assert "was emulated (" in done.stdout
    assert " allocated), but failed afterwards (check): ValueError: no luck" in done.stdout
    measured = results["test_failing"]["reply"]["measured"]
    assert measured["outcome"] == "emulated"
    assert measured["peak_allocated_bytes"] >= 2 * 4 * 4096**2
    assert "step_seconds" not in measured


def test_a_run_that_measures_refuses_stand_ins(run, stand_ins):
    board = boards.board("h100")
    description = boards.describe(board, kernels=boards.find_kernels(board, stand_ins.architectures, "2"))
    done, results = run("-k", "own", emulated=False, **emulated_environment({}, stand_ins, description))
    assert done.returncode == 1
    assert "this worker found stand-ins of CUDA's libraries" in done.stdout
    assert [reply["outcome"] for reply in results["test_own"]["replies"]] == ["crashed"]


def test_a_test_that_takes_the_stand_ins_away_gets_no_figures(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture(autouse=True)\ndef bare(monkeypatch):\n    monkeypatch.setenv('LD_PRELOAD', '')\n"
    )
    done, results = run("-k", "own")
    assert done.returncode == 1
    sentence = results["test_own"]["reply"]["sentence"]
    # Without NVIDIA's packages, torch cannot even be imported.
    assert "this worker did not find the stand-ins" in sentence or "libcudnn" in sentence


def test_real_bindings_of_nvml_read_the_emulated_gpu(stand_ins):
    board = boards.board("h100")
    description = boards.describe(board, kernels=boards.find_kernels(board, stand_ins.architectures, "2"), devices=2)
    code = """
        import os
        from pytest_gputrain.hardware import drivers
        from pytest_gputrain.hardware.machine import detect

        machine = detect(environ={})
        print(machine.platform, len(machine.gpus), machine.slug, len({gpu.uuid for gpu in machine.gpus}))
        print(drivers.occupancy(machine.gpus).free_bytes > 79 * 2**30, drivers.paths(machine.gpus)[0][0])
        with drivers.driver("nvidia") as driver:
            print(driver.read(machine.gpus[0]))
    """
    environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environ = emulated_environment(environ, stand_ins, description)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
    first, second, third = done.stdout.splitlines()
    assert first == "h100 2 nvidia-h100-80gb-hbm3 2"
    assert second == "True X"
    assert third.startswith("Reading(")
