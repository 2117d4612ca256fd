"""`pytest --gpu-emulate` with real workers. Needs a CUDA build of torch, and no GPU."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pytest_gputrain
from pytest_gputrain.hardware.emulation import boards, build
from pytest_gputrain.hardware.emulation.environment import emulated_environment

ROOT = Path(pytest_gputrain.__file__).parents[1]

SUITE = """
    import torch

    WIDTH = 4096

    def build(setup):
        assert str(setup.device) == f"cuda:{setup.rank}" and torch.cuda.get_device_name(0) == "NVIDIA H100 80GB HBM3"
        first, second = (torch.nn.Linear(WIDTH, WIDTH, device=setup.device) for _ in range(2))
        model = torch.nn.Sequential(first, torch.nn.GELU(), second)
        if setup.processes > 1:
            assert torch.distributed.get_backend() == "nccl"
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

    def build_uneven(setup):
        kept = torch.empty((setup.rank == 1) << 26, dtype=torch.uint8, device=setup.device)
        step = build(setup)
        return lambda: (step(), kept)[0]

    def build_alone(setup):
        assert torch.distributed.get_backend() == "fake"
        weight = torch.ones(1024, 1024, device=setup.device, requires_grad=True)
        return lambda: weight.square().sum().backward()

    def build_too_large_on_one(setup):
        torch.empty((81 if setup.rank == 1 else 1) << 30, dtype=torch.uint8, device=setup.device)
        return torch.distributed.barrier  # in which the others would wait

    def build_leaking(setup):
        kept = []

        def step():
            batch = torch.ones(1 << 20).pin_memory()
            kept.append((torch.ones(1 << 22), batch, batch.to(setup.device, non_blocking=True)))
            return kept[-1][-1].sum()

        return step

    def build_by_made_up_values(setup):
        loss = (torch.ones(512, 512, device=setup.device) @ torch.ones(512, 512, device=setup.device)).sum()
        raise ValueError(loss.item())

    def test_leaking(gputrain):
        gputrain.check(build_leaking, precision="fp32")

    def test_made_up(gputrain):
        gputrain.check(build_by_made_up_values, precision="fp32")

    def test_own(gputrain):
        gputrain.check(build, precision="fp32")

    def test_two(gputrain):
        gputrain.check(build, model="two", precision="fp32", parallel="ddp", gpus=2)

    def test_uneven(gputrain):
        gputrain.check(build_uneven, model="uneven", precision="fp32", parallel="ddp", gpus=2)

    def test_nine(gputrain):
        gputrain.check(build_alone, model="nine", precision="fp32", parallel="ddp", gpus=9)

    def test_too_large_on_one(gputrain):
        gputrain.check(build_too_large_on_one, precision="fp32", parallel="ddp", gpus=2)
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


def exact(result):
    """The figures of a case, without what Python leaves on the heap: some KiB more or less in each process."""
    return {**result["reply"], "heap_growth": None}


def test_every_figure_is_the_same_to_the_byte_in_another_run(run):
    first, recorded = run("--gpu-baseline-update", "-k", "not large and not leaking and not nine and not made_up")
    assert first.returncode == 0, first.stdout
    second, judged = run("--gpu-strict", "-k", "not large and not leaking and not nine and not made_up")
    assert second.returncode == 0, second.stdout
    for name, result in judged.items():
        assert exact(result) == exact(recorded[name])
        assert result["kind"] == "emulated"
    weights = 4 * 2 * (4096 * 4096 + 4096)
    own, two = judged["test_own"]["reply"], judged["test_two"]["reply"]
    assert own["model_bytes"] == weights
    # Weights, gradients, two moments, and what the update takes for a moment.
    assert 4 * weights < own["peak_allocated_bytes"] < 6 * weights
    assert two["processes"] == 2
    assert two["allocated_by_rank"] == [two["peak_allocated_bytes"]] * 2
    # The reducer's buckets; but no second ones, which a thread of torch would keep from the first step for a while.
    assert weights <= two["peak_allocated_bytes"] - own["peak_allocated_bytes"] < 2 * weights
    uneven = judged["test_uneven"]["reply"]
    assert uneven["allocated_by_rank"] == [two["peak_allocated_bytes"], two["peak_allocated_bytes"] + (64 << 20)]
    assert uneven["peak_allocated_bytes"] == max(uneven["allocated_by_rank"])
    assert "rank 1 needs most memory: 64.0 MiB more allocated than rank 0, which needs least" in second.stdout
    assert "2 cases of several GPUs: all processes ran" in second.stdout


def test_of_more_processes_than_a_host_has_memory_for_the_first_runs_and_the_run_says_so(run):
    done, results = run("-k", "nine")
    assert done.returncode == 0, done.stdout
    assert not results["test_nine"]["reply"]["allocated_by_rank"]
    assert "only the first of 9 processes ran, because at most 8 are emulated" in done.stdout


def test_a_process_that_does_not_fit_ends_those_that_wait_for_it_and_is_named(run):
    done, results = run("-k", "large_on_one")
    assert done.returncode == 1
    reply = results["test_too_large_on_one"]["reply"]
    assert not reply["fits"]
    assert "rank 1 does not fit, and the others were ended" in reply["notes"]
    assert "does not fit H100 (79.1 GiB): CUDA out of memory. Tried to allocate 81.00 GiB" in done.stdout


IN_PYTEST = """
    def test_here():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            torch.ones(1, device="cuda")
        assert not torch.ones(1).is_pinned()
"""


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["pytest", "xdist"])
def test_files_of_tests_import_torch_as_on_a_machine_without_a_gpu(run, tmp_path, processes):
    (tmp_path / "conftest.py").write_text("import torch\n")
    (tmp_path / "test_pytest.py").write_text("import pytest\nimport torch\n" + textwrap.dedent(IN_PYTEST))
    done, results = run("-k", "here or two", *processes, GPUTRAIN_EMULATED_DEVICE="devices=1,memory=1000000")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert results["test_two"]["reply"]["fits"]


FOUND = {
    "nothing": "",
    "the loader": "",
    "beside torch": "sys.path.append({site!r})",
    "a driver that is loaded": "ctypes.CDLL({folder!r} + '/libcuda.so.1')",
}


@pytest.mark.parametrize("found", FOUND)
def test_stand_ins_are_loaded_only_where_torch_cannot_be_imported_otherwise(torch, stand_ins, tmp_path, found):
    lib = tmp_path / "nvidia" / "all" / "lib"
    lib.mkdir(parents=True)
    for path in stand_ins.libraries:
        (lib / path.name).touch()
    code = f"""
        import ctypes, sys
        from pytest_gputrain.hardware.emulation.importable import make_importable
        from pytest_gputrain.hardware.emulation.libraries import find_torch

        {FOUND[found].format(site=str(tmp_path), folder=str(stand_ins.folder))}
        make_importable(find_torch())
        print(*(line.split("/")[-1].strip() for line in open("/proc/self/maps") if {str(stand_ins.folder)!r} in line))
    """
    environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    environ |= {name: os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ}
    if not subprocess.run([sys.executable, "-c", "import torch"], env=environ, capture_output=True, check=False).returncode:
        pytest.skip("NVIDIA's libraries are there")
    environ |= {"LD_LIBRARY_PATH": str(stand_ins.folder)} if found == "the loader" else {}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
    loaded = set(done.stdout.split())
    if found == "nothing":
        assert loaded == {path.name for path in stand_ins.libraries} - {"libnvidia-ml.so.1"}
    else:
        assert loaded <= {build.CORE, "libcuda.so.1"}


@pytest.mark.slow
@pytest.mark.weekly
def test_a_compiled_case_takes_the_same_memory_whatever_was_compiled_before(run_tests, tmp_path):
    (tmp_path / "test_compiled.py").write_text(textwrap.dedent(COMPILED))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    first, recorded = run_tests("--gpu-baseline-update", **caches)
    assert first.returncode == 0, first.stdout
    assert any((tmp_path / "compiled").rglob("*.cubin"))  # which later runs find
    again, judged = run_tests("--gpu-strict", **caches)
    assert again.returncode == 0, again.stdout
    assert exact(judged["test_compiled"]) == exact(recorded["test_compiled"])


def test_a_run_on_kernels_for_another_gpu_is_named_so_in_the_record_the_sentences_and_the_baseline(run_tests, tmp_path):
    (tmp_path / "test_own.py").write_text(
        textwrap.dedent("""
            import torch

            def build(setup):
                assert torch.cuda.get_device_name(0) == "NVIDIA Graphics Device"
                weight = torch.ones(1024, 1024, device=setup.device, requires_grad=True)
                return lambda: weight.square().sum().backward()

            def test_own(gputrain):
                gputrain.check(build, precision="fp32")
        """)
    )
    done, results = run_tests("--gpu-platform=mi300x", "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    reply = results["test_own"]["reply"]
    assert reply["device_name"].startswith("MI300X, by CUDA's kernels for sm_")
    assert f"emulated {reply['device_name']} with 192 GiB" in done.stdout
    assert any("decided what was allocated: torch for ROCm" in note for note in reply["notes"])
    assert reply["device_name"] in next(tmp_path.glob("baselines/emulated/mi300x/*.json")).read_text()


def test_figures_are_kept_where_a_case_fails_afterwards(run):
    done, results = run("-k", "leaking", "--gpu-baseline-update")
    assert done.returncode == 1
    assert "was emulated (" in done.stdout
    assert " allocated), but failed afterwards (check): leaking keeps 4.00 MiB more" in done.stdout.replace("build_", "")
    measured = results["test_leaking"]["reply"]["measured"]
    assert measured["outcome"] == "emulated"
    assert measured["peak_allocated_bytes"] >= 10 * 4 * 1024**2
    assert "step_seconds" not in measured


def test_an_error_after_made_up_values_were_read_names_them(run):
    done, _ = run("-k", "made_up")
    assert "; before, made-up values were read where a GPU would have computed them, by a number" in done.stdout


def test_of_growth_on_the_gpu_only_a_tensor_of_the_gpu_is_named(run):
    done, _ = run("-k", "leaking")
    # Which operator torch calls to make it differs between its versions.
    named = r"most of it float32 \[1048576\] \(4\.00 MiB\) made by aten\.\w+ in test_own\.py:"
    assert re.search(f"keeps 4.00 MiB more of tensors after every step, {named}", done.stdout)


def test_a_run_that_measures_refuses_stand_ins(run, stand_ins):
    board = boards.board("h100")
    description = boards.describe(board, kernels=boards.find_kernels(board, stand_ins.architectures, "2"))
    done, results = run("test_own.py::test_own", emulated=False, **emulated_environment({}, stand_ins, description))
    assert done.returncode == 1
    assert "this worker found stand-ins of CUDA's libraries" in done.stdout
    assert [reply["outcome"] for reply in results["test_own"]["replies"]] == ["crashed"]


def test_a_test_that_takes_the_stand_ins_away_gets_no_figures(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture(autouse=True)\ndef bare(monkeypatch):\n    monkeypatch.setenv('LD_PRELOAD', '')\n"
    )
    done, results = run("test_own.py::test_own")
    assert done.returncode == 1
    sentence = results["test_own"]["reply"]["sentence"]
    # Without NVIDIA's packages, torch cannot even be imported.
    assert "this worker did not find the stand-ins" in sentence or ("cannot import" in sentence and ".so" in sentence)


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


def test_own_cases_are_forked_and_take_what_they_take_in_fresh_processes(run_tests, tmp_path):
    (tmp_path / "test_own.py").write_text(
        textwrap.dedent("""
        import os
        import pytest
        import torch

        def build(setup):
            with open(f"/proc/{os.getppid()}/cmdline") as parent:
                assert ("worker.preload" in parent.read()) == (os.environ["ISOLATION"] == "auto")
            net = torch.nn.Linear(setup.case.batch_size, 64, device=setup.device)
            net = torch.compile(net) if setup.case.batch_size == 64 else net
            optimizer = torch.optim.AdamW(net.parameters())
            batch = torch.randn(8, setup.case.batch_size, device=setup.device)

            def step():
                loss = net(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.item()

            return step

        @pytest.mark.parametrize("width", [32, 64])
        def test_own(gputrain, width):
            gputrain.check(build, precision="fp32", batch_size=width)
        """)
    )

    def replies(isolation):
        done, results = run_tests(f"--gpu-isolation={isolation}", fresh=True, ISOLATION=isolation)
        assert done.returncode == 0, done.stdout
        return {test: exact(result) for test, result in results.items()}

    assert replies("auto") == replies("process")


SPIKE = """
    import torch

    ROWS, KEPT = {rows}, {kept}

    def train(setup):
        model = torch.nn.Linear(64, 64, device=setup.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = []
        for number in range(40):
            batch = torch.ones(ROWS if number == 9 else 64, 64, device=setup.device)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= KEPT and number % 3 == 0:
                kept.append(torch.ones(1 << 18, device=setup.device))
            yield
            del batch

    def test_train(gputrain):
        gputrain.check(train, precision="fp32", steps=12, epoch={epoch})
"""


def test_a_later_step_that_needs_more_or_keeps_it_is_named(run_tests, tmp_path):
    def judged(*arguments, rows=64, kept=99, epoch=False):
        program = SPIKE.format(rows=rows, kept=kept, epoch=epoch)
        (tmp_path / "test_own.py").write_text(textwrap.dedent(program))
        [result] = run_tests(*arguments)[1].values()
        return result

    recorded = judged("--gpu-baseline-update", epoch=True)
    assert recorded["verdict"]["status"] == "recorded"
    assert sum(steps for steps, _, _ in recorded["reply"]["memory_of_steps"]) == 39
    assert judged(epoch=True)["verdict"]["status"] == "pass"
    assert " in step 9 (" in judged(rows=1 << 14)["verdict"]["sentence"]
    kept = "keeps 1.00 MiB more of tensors after every 3 steps from step 21 on, which it did not before"
    assert kept in judged(kept=20, epoch=True)["verdict"]["sentence"]
