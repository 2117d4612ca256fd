"""`gputrain emulate` with real programs. Needs a CUDA build of torch, and no GPU."""

import importlib.machinery
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jsonschema
import pytest

import pytest_gputrain
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.emulation import boards, build
from pytest_gputrain.hardware.emulation.boards import CONTEXT_BYTES

GIB = 1 << 30
ROOT = Path(pytest_gputrain.__file__).parents[1]


def only_device(report):
    (process,) = report["processes"]
    (device,) = process["devices"]
    return device


LOOP = """
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        activations = batch.exp()
        loss = model(activations).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(torch.ones(4096, 4096, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
    print("allocated", torch.cuda.memory_allocated())
"""


def test_a_loop_is_told_its_peak_its_lines_and_its_output(emulate):
    done, report = emulate(LOOP, "--token=abc", fresh=True)
    assert done.returncode == 0, done.stderr
    schema = Path(pytest_gputrain.__file__).parent / "schemas" / "emulation.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(report)
    assert report["command"][-1] == "--token=***"
    assert "what looks like a secret in the command line is *** in the report" in done.stderr
    parameters = 4 * (2 * 4096 * 16384 + 16384 + 4096)
    allocated = int(done.stdout.split()[1])
    assert 3 * parameters <= allocated < 3 * parameters + 300e6  # weights, AdamW's two moments, cuBLAS' workspaces, a batch
    device = only_device(report)
    # Resets of the peak do not hide it: there are activations, gradients and more.
    assert device["peak_allocated_bytes"] > allocated + parameters / 2
    assert device["peak_reserved_bytes"] >= device["peak_allocated_bytes"]
    (use,) = report["use"]
    assert use["peak_bytes"] >= device["peak_reserved_bytes"] + CONTEXT_BYTES
    tensors = device["peak"]["tensors"]
    weights = [group for group in tensors if group["where"] == "train.py:4 in <module>"]
    assert (weights[0]["bytes"], weights[0]["count"]) == (4 * 4096 * 16384, 2)
    assert any(group["where"] == "train.py:9 in step" and group["bytes"] == 4 * 4096 * 16384 for group in tensors)
    assert any(group["where"].startswith("backward pass") for group in tensors)
    assert sum(group["bytes"] * group["count"] for group in tensors) > 0.9 * device["peak_allocated_bytes"]
    assert "losses, scores and times above mean nothing" in done.stderr
    assert "train.py:9 in step" in done.stderr
    parts = {part["name"]: part["bytes"] for part in device["peak"]["parts"]}
    assert parts["weights and buffers"] == parameters
    assert parts["optimizer"] >= 2 * parameters
    assert sum(parts.values()) == device["peak"]["bytes"]
    assert max(in_use for _, in_use, _ in device["course"]) == device["peak"]["bytes"]
    assert max(reserved for _, _, reserved in device["course"]) == device["peak_reserved_bytes"]


ENDS = ("torch.empty(90 << 30, dtype=torch.uint8, device='cuda')", "os.kill(os.getpid(), 9)")
OF_ONE_RUN = r"(?<=process )\d+|(?<=process\": )\d+|(?<=came )[0-9.]+ s|(?<=seconds\": )[0-9.e-]+|(?<=\[W)\d+ [0-9:.]+"
"""What differs between two runs of a program: ids of processes, and times."""


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_program_is_as_one_in_its_own_interpreter(emulate, end):
    code = f"""{LOOP}
    import atexit, os, sys, __main__
    atexit.register(lambda: print("at the end", torch.cuda.memory_allocated()))
    own = ("PYTHONPATH", "GPUTRAIN_EMULATED_DEVICE", "GPUTRAIN_EMULATED_STATE", "TORCHINDUCTOR_CACHE_DIR")
    print(sorted((name, value) for name, value in os.environ.items() if name not in own))
    print(sys.argv, sys.orig_argv, sys.flags, os.getcwd(), __name__, __file__, __main__.step is step)
    print(sys.stdin.read(), len(os.listdir("/proc/self/fd")), [entry for entry in sys.path if "preloaded" not in entry])
    print(torch.initial_seed(), flush=True)
    {end}
    """
    runs = [emulate(code, "--lr", fresh=fresh) for fresh in (True, False)]
    (fresh, report), (forked, same) = runs
    lines, others = (done.stdout.splitlines() for done in (fresh, forked))
    assert lines.pop(4) != others.pop(4)  # the seeds
    assert others == lines
    assert forked.returncode == fresh.returncode
    assert [re.sub(OF_ONE_RUN, "", told) for told in (forked.stderr, json.dumps(same))] == [
        re.sub(OF_ONE_RUN, "", told) for told in (fresh.stderr, json.dumps(report))
    ]


def test_a_program_runs_as_it_would_on_a_gpu_and_opens_no_file_of_a_device(emulate, tmp_path):
    """As on a host with a GPU: an audit hook sees Python's files, and the process's own table those of C."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['OWN'] = 'ran'")
    code = """
        import importlib.util, os, sys, sitecustomize
        opened = []
        sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
        assert importlib.util.find_spec("torch")  # as libraries look whether torch is there
        import torch
        child = os.fork()
        kept = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
        if child == 0:
            raise SystemExit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.environ["OWN"], sitecustomize.__file__, sys.argv[1:])
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        loaded = open("/proc/self/maps").read()
        print([path for path in (*opened, *files) if path.startswith("/dev/nvidia")], "/dev/nvidia" in loaded)
        libraries = {line.split()[-1] for line in loaded.splitlines() if "/libcuda.so" in line or "/libnvidia-ml.so" in line}
        print(len(libraries), all("pytest-gputrain-emulation" in path for path in libraries))
        sys.exit(7)
    """
    done, report = emulate(code, "--lr", "1", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    own = f"4 ran {tmp_path / 'sitecustomize.py'} ['--lr', '1']"
    assert done.stdout.splitlines() == [own, "[] False", "2 True"], done.stderr
    assert done.returncode == 7
    devices = [device["peak_allocated_bytes"] for process in report["processes"] for device in process["devices"]]
    assert set(devices) == {1 << 20}


def test_a_program_that_is_killed_has_the_status_of_a_shell_and_one_that_never_used_the_gpu_is_told_so(emulate):
    assert emulate("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")[0].returncode == 128 + signal.SIGKILL
    done, report = emulate("import torch; print(torch.ones(3).sum(), torch.cuda.is_available(), torch.cuda.device_count())")
    assert (done.returncode, done.stdout) == (0, "tensor(3.) True 1\n")
    assert "never used the GPU" in done.stderr
    assert report["use"] == []


def test_an_emulation_within_another_has_the_figures(emulate, tmp_path):
    (tmp_path / "inner.py").write_text(
        "import os, torch; torch.ones(1 << 20, dtype=torch.uint8, device='cuda'); "
        "print([os.environ[name].count(part) for name, part in "
        f"(('LD_PRELOAD', {build.CORE!r}), ('PYTHONPATH', 'worker/startup'), ('TRITON_CACHE_DIR', '/emulated'))])"
    )
    code = """
        import subprocess, sys
        command = [sys.executable, "-m", "pytest_gputrain.cli.main", "emulate", "--gpu=a100", "--json=inner.json", "--"]
        sys.exit(subprocess.run([*command, sys.executable, "inner.py"]).returncode)
    """
    done, outer = emulate(code, fresh=True)
    assert (done.returncode, done.stdout) == (0, "[1, 1, 1]\n"), done.stderr
    assert outer["use"] == []
    assert "never used the GPU" in done.stderr
    inner = json.loads((tmp_path / "inner.json").read_bytes())
    assert inner["device_name"] == "NVIDIA A100-SXM4-80GB"
    assert only_device(inner)["peak_allocated_bytes"] == 1 << 20


needs_triton = pytest.mark.skipif(importlib.machinery.PathFinder.find_spec("triton") is None, reason="needs Triton")
ONES = "import torch\nx = torch.ones(8, device='cuda')\n"
REFUSED = {
    "another allocator": ("own allocator, but this program chose cudaMallocAsync; take backend:", ONES),
    "no caching": ("PYTORCH_NO_CUDA_MEMORY_CACHING turns off; unset it", ONES),
    "another torch": (
        "this program imports the one in {other}/torch",
        "import sys; sys.path.insert(0, {other!r}); import torch",
    ),
    "sharing": (
        "an emulated GPU shares no memory between processes; send tensors through the host",
        f"{ONES}x.untyped_storage()._share_cuda_()",
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_emulated_is_refused_with_what_to_do(emulate, way, tmp_path):
    other = tmp_path / "other"
    (other / "torch").mkdir(parents=True)
    (other / "torch" / "__init__.py").write_text("")
    sentence, code = (text.format(other=str(other)) for text in REFUSED[way])
    variables = {
        "another allocator": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
        "no caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    }
    done, _ = emulate(code, fresh=True, **variables.get(way, {}))
    assert done.returncode == 1
    assert sentence in done.stderr


def test_a_program_that_compiles_nothing_never_loads_the_compiler(emulate):
    """The report is written after the program's last line, and torch looks for compiled code when it tells its history."""
    done, report = emulate(
        """
        import atexit, sys
        atexit.register(lambda: print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]))
        import torch
        x = torch.ones(1 << 20, device="cuda")
        """,
        fresh=True,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert only_device(report)["peak"]["tensors"][0]["where"] == "train.py:5 in <module>"


def test_two_runs_allocate_and_reserve_the_same(emulate):
    code = """
        import random, torch
        held = []
        random.seed(1)
        for number in range(3000):
            held.append(torch.empty(random.randrange(1, 40 << 20), dtype=torch.uint8, device="cuda"))
            if random.random() < 0.6 or len(held) > 300:
                held.pop(random.randrange(len(held)))
            if number % 500 == 0:
                torch.cuda.empty_cache()
    """
    first, second = (only_device(emulate(code)[1]) for _ in range(2))
    assert first["peak_reserved_bytes"] > 1e9
    assert first["peak"].pop("seconds") >= 0
    assert second["peak"].pop("seconds") >= 0
    assert first == second


def test_out_of_memory_is_told_with_what_was_asked(emulate):
    code = """
        import torch
        held = [torch.empty(60 << 30, dtype=torch.uint8, device="cuda")]
        def grow():
            held.append(torch.empty(30 << 30, dtype=torch.uint8, device="cuda"))
        grow()
    """
    done, report = emulate(code)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB" in done.stderr
    (refused,) = only_device(report)["refused"]
    assert (refused["bytes"], refused["where"]) == (30 * GIB, "train.py:5 in grow")
    assert refused["free"] == boards.board("h100").memory_bytes - 60 * GIB - CONTEXT_BYTES
    assert "out of memory: 30.0 GiB were asked for" in done.stderr
    assert only_device(report)["peak_allocated_bytes"] == 60 * GIB
    assert emulate(code, gpu="h200")[0].returncode == 0


def test_memory_that_a_library_was_refused_does_not_fit_and_what_torch_asks_for_again_does(emulate):
    done, report = emulate("""
        import ctypes, torch
        del (held := [torch.empty(60 << 30, dtype=torch.uint8, device="cuda")])[:]
        torch.empty(70 << 30, dtype=torch.uint8, device="cuda")
    """)
    assert (done.returncode, report["fit"]["verdict"]) == (0, "fits")
    done, report = emulate("""
        import ctypes, torch
        x = torch.empty(1, device="cuda")
        assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(100 << 30))
    """)
    assert (done.returncode, report["fit"]["verdict"]) == (0, "does not fit")
    assert report["fit"]["sentence"].endswith("for a request beside torch's allocator; the program went on after the error")


def test_a_program_that_ends_without_pythons_end_leaves_the_drivers_figures(emulate):
    done, report = emulate("import os, torch; x = torch.empty(1 << 30, device='cuda'); os._exit(3)", fresh=True)
    assert done.returncode == 3
    assert [use["peak_bytes"] for use in report["use"]] == [4 * GIB + CONTEXT_BYTES]
    assert report["processes"] == []
    assert "the memory that torch allocated is not known" in done.stderr


def test_the_stand_ins_win_over_nvidias_packages_beside_torch(emulate, stand_ins, torch, tmp_path):
    """As ``pip install torch`` leaves them: torch's libraries name their folders before any in the environment."""
    site = tmp_path / "site"
    folder = site / "nvidia" / "cu13" / "lib" if torch.cuda[0] == 13 else site / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    (site / "torch" / "lib").mkdir(parents=True)  # the loader resolves links to folders, not those to files
    for original in (*torch.folder.iterdir(), *(torch.folder / "lib").iterdir(), *torch.site.glob("torch-*.dist-info")):
        link = site / original.relative_to(torch.site)
        if not link.exists():
            link.symlink_to(original)
    source = tmp_path / "dummy.c"
    source.write_text("int nothing;\n")
    soname = f"libcudart.so.{torch.cuda[0]}"
    command = [*build.find_compiler(), "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(source)]
    subprocess.run(command, check=True)
    path = os.pathsep.join([str(site), str(ROOT)])
    # The dummy is what torch finds, before what LD_LIBRARY_PATH names:
    searched = {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": str(stand_ins.folder)}
    plain = subprocess.run(
        [sys.executable, "-c", "import torch"], env=searched, capture_output=True, text=True, check=False, timeout=120
    )
    assert "undefined symbol: cuda" in plain.stderr
    done, _ = emulate("import torch; print(torch.__file__, torch.ones(1, device='cuda').item())", PYTHONPATH=path)
    assert done.stdout.split() == [str(site / "torch" / "__init__.py"), "1.0"], done.stderr


def test_no_figure_of_an_emulated_gpu_is_taken_for_a_measurement(emulate, tmp_path):
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent("""
            import pytest, torch

            def my_step(setup):
                weight = torch.ones(64, 64, device=setup.device, requires_grad=True)
                return lambda: (weight @ weight).sum().backward()

            @pytest.mark.h100
            def test_mine(gputrain):
                gputrain.check(my_step, precision="fp32", batch_size=1, steps=2)
        """)
    )
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "h100", "--gpu-baseline-update", "test_mine.py"]
    done, _ = emulate(f"import pytest; raise SystemExit(pytest.main({arguments}))")
    assert done.returncode == 1, done.stderr
    assert "figures of an emulated GPU are not measurements" in done.stdout
    assert list(tmp_path.glob("baselines/**/*.json")) == []


OFTEN = ("h100", "t4", "v100", "mi300x")
OF_ITS_CAPABILITY = {boards.board(name).capability: name for name in PLATFORMS}.values()


def marks_of(marker):
    if marker in OFTEN:
        return ()
    return pytest.mark.slow if marker in OF_ITS_CAPABILITY else (pytest.mark.slow, pytest.mark.weekly)


@pytest.mark.parametrize("marker", [pytest.param(name, marks=marks_of(name)) for name in PLATFORMS])
def test_torch_sees_each_gpu_of_the_catalog(emulate, stand_ins, marker, torch):
    board = boards.board(marker)
    code = """
        import torch
        properties = torch.cuda.get_device_properties(0)
        print(properties.total_memory, properties.multi_processor_count, properties.major, properties.minor, properties.uuid)
        print(properties.name)
        x = torch.ones(2048, 2048, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        x.nonzero(), x.topk(5), x.sort(), x.cumsum(0)  # by CUB, which takes its algorithms by the kernels' architecture
    """
    done, report = emulate(code, gpu=marker)
    kernels = boards.find_kernels(board, stand_ins.architectures, torch.version)
    (major, minor), driver_name = board.capability, board.name
    if report["device_name"] != board.name:  # torch has no kernels for it
        assert report["device_name"] == f"{board.title}, by CUDA's kernels for sm_{kernels}"
        assert f"the kernels for sm_{kernels} decided what was allocated" in done.stderr
        (major, minor), driver_name = divmod(kernels, 10), "NVIDIA Graphics Device"
    assert done.returncode == 0, done.stderr
    figures, name = done.stdout.splitlines()
    *numbers, uuid = figures.split()
    assert list(map(int, numbers)) == [board.memory_bytes, board.multiprocessors, major, minor]
    assert (name, uuid[:9]) == (driver_name, "656d756c-")
    assert ("computed from the" in done.stderr) == PLATFORMS[marker].usable_is_computed


VERDICTS = {
    "fits": ("fits", (0, 0), ""),
    "does not fit": ("does not fit", (1, 1), "torch.empty(90 << 30, dtype=torch.uint8, device='cuda')"),
    "went on": (
        "does not fit",
        (0, 1),
        "try: torch.empty(90 << 30, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass",
    ),
    "failed": ("incomplete", (3, 3), "sys.exit(3)"),
    "ended without Python's own end": ("incomplete", (0, 1), "os._exit(0)"),
}


@pytest.mark.parametrize(("verdict", "statuses", "end"), VERDICTS.values(), ids=VERDICTS)
def test_the_last_line_is_the_verdict_and_a_program_that_ended_well_must_fit(emulate, verdict, statuses, end):
    code = f"import os, sys, torch\nx = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n{end}"
    runs = [emulate(code, options=options) for options in ((), ("--must-fit",))]
    assert tuple(done.returncode for done, _ in runs) == statuses
    for done, report in runs:
        assert done.stderr.splitlines()[-1] == f"gputrain: {verdict}: {report['fit']['sentence']}"
        assert report["fit"]["verdict"] == verdict
    left = boards.board("h100").memory_bytes - GIB - CONTEXT_BYTES
    assert runs[0][1]["fit"]["headroom_bytes"] == (left - 90 * GIB if verdict == "does not fit" else left)


def test_the_versions_are_those_of_the_libraries_that_the_program_imports(emulate, torch):
    code = "import torch, {}; torch.ones(1, device='cuda')"
    none, one = (emulate(code.format(module)) for module in ("sys", "transformers"))
    assert f"torch {torch.version}; its kernels" in none[0].stderr
    (process,) = one[1]["processes"]
    version = importlib.metadata.version("transformers")
    assert process["packages"] == {"torch": importlib.metadata.version("torch"), "transformers": version}
    assert f"torch {torch.version}, transformers {version}; its kernels" in one[0].stderr


ENDS = {
    "normally": (0, ""),
    "by an exception": (1, "raise ValueError('over')"),
    "by sys.exit": (3, "sys.exit(3)"),
    "with workers": (0, "next(iter(loader))"),
    "by an exception with workers": (1, "iterator = iter(loader); next(iterator); 1 / 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("status", "end"), ENDS.values(), ids=ENDS)
def test_runs_end_with_the_programs_own_status(emulate, status, end):
    """Right after a backward pass, when autograd's thread still lets go of Python objects: a third of the runs aborted."""
    code = f"""
        import sys, torch

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                context.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(context, gradient):
                return gradient * 2

        loader = torch.utils.data.DataLoader(list(range(64)), num_workers=2, persistent_workers=True, pin_memory=True)
        x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        for _ in range(300):
            x = Double.apply(x)
            x.register_hook(lambda gradient: gradient + 1)
        x.sum().backward()
        {end}
    """
    runs = [emulate(code) for _ in range(3)]
    assert [done.returncode for done, _ in runs] == [status] * 3
    assert all(only_device(report)["peak_allocated_bytes"] > 300 * 4 << 20 for _, report in runs)


def test_expandable_segments_are_counted(emulate):
    code = """
        import torch
        held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(10)]
        del held[::2]
        held.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))
        print(torch.cuda.memory_reserved() >> 20)
    """
    done, report = emulate(code, PYTORCH_ALLOC_CONF="expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF="")
    assert done.returncode == 0, done.stderr
    device = only_device(report)
    assert device["peak_allocated_bytes"] == 10 * GIB
    assert report["use"][0]["peak_bytes"] == device["peak_reserved_bytes"] + CONTEXT_BYTES


@pytest.mark.slow
@needs_triton
def test_compiled_code_reserves_the_same_when_its_code_comes_from_the_disk(emulate, tmp_path):
    def run():
        done, report = emulate(
            """
            import torch
            model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1027)).cuda()
            compiled = torch.compile(model)
            for _ in range(2):
                compiled(torch.ones(4096, 1024, device="cuda")).softmax(0).square().mean().backward()
            from torch._dynamo.utils import counters
            print(counters["stats"]["unique_graphs"])
            """,
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
            TRITON_CACHE_DIR=str(tmp_path / "triton"),
        )
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
        assert "up to 64.3 MiB higher, 32.1 MiB of it by mm of 4096 x 1027 and 1027 x 4096, float32" in done.stderr
        return only_device(report)

    first, second = run(), run()
    assert first["peak_allocated_bytes"] > 2 * 4 * 4096 * 4096
    assert first["peak_reserved_bytes"] == second["peak_reserved_bytes"]
    assert not (tmp_path / "inductor").exists()  # a real GPU must not find what was chosen without times


@pytest.mark.slow
@pytest.mark.weekly
@needs_triton
def test_padded_products_take_no_more_than_is_told(emulate):
    code = """
        import torch
        from torch.nn import functional as F
        head = torch.nn.Linear(768, 50257, bias=False, device="cuda", dtype=torch.bfloat16)
        states = torch.ones(4096, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(4096, dtype=torch.long, device="cuda")
        for padded in (False, True):
            torch._dynamo.reset()
            torch._inductor.config.force_shape_pad = padded
            loss = torch.compile(lambda states: F.cross_entropy(head(states).float(), labels))
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                loss(states).backward()
                head.zero_grad()
            print(torch.cuda.max_memory_allocated())
    """
    done, report = emulate(code)
    assert done.returncode == 0, done.stderr
    plain, padded = map(int, done.stdout.split())
    products = report["processes"][0]["unpadded"]
    assert [product["count"] for product in products] == [1, 1, 1]
    copy_of_logits = 2 * 4096 * 50264
    assert 0.9 * copy_of_logits < padded - plain <= sum(product["bytes"] for product in products)


def test_ranks_have_a_gpu_each(emulate):
    code = """
        import os, sys
        import torch
        import torch.distributed as dist
        if "RANK" not in os.environ:
            command = ["-m", "torch.distributed.run", "--nproc-per-node=2", __file__]
            os.execv(sys.executable, [sys.executable, *command])
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        ranks = torch.empty(2, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(ranks, torch.tensor([rank], device="cuda"))
        assert ranks.tolist() == [0, 1], ranks
        received = torch.tensor([rank], device="cuda")
        dist.broadcast(received, src=1)
        assert received.item() == 1
        told, heard = [{"rank": rank}], [None, None]
        dist.all_gather_object(heard, told)
        dist.broadcast_object_list(told, src=1)
        assert (heard, told) == ([[{"rank": 0}], [{"rank": 1}]], [{"rank": 1}]), (heard, told)
        scores = torch.ones(2, device="cuda")
        dist.all_gather_into_tensor(scores, torch.randn(1 << 16, device="cuda").sum()[None])
        assert 1 not in scores.tolist(), "nobody knows them"
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda(), device_ids=[rank])
        model(torch.ones(1024 * (rank + 1), 4096, device="cuda")).sum().backward()
        print(end=f"devices {torch.cuda.device_count()}\\n")  # in one piece, where output is not buffered
        dist.destroy_process_group()
    """
    done, report = emulate(code, gpus=2)
    assert (done.returncode, done.stdout) == (0, "devices 2\n" * 2), done.stderr
    by_rank = {process["rank"]: process["devices"] for process in report["processes"]}
    assert [[device["gpu"] for device in by_rank[rank]] for rank in "01"] == [[0], [1]]
    first, second = (by_rank[rank][0]["peak_allocated_bytes"] for rank in "01")
    assert second - first >= 4 * 4096 * 1024  # its batch is larger
    assert sorted(use["gpu"] for use in report["use"]) == [0, 1]
    assert "2 x NVIDIA H100" in done.stderr
    assert "rank 1 on GPU 1" in done.stderr


@pytest.mark.parametrize(("older", "tries"), [("", False), ("1", True)], ids=["graphs", "older interface, by benchmark"])
def test_convolutions_and_recurrent_layers_run(emulate, older, tries):
    code = f"""
        import torch
        from torch import nn
        torch.backends.cudnn.benchmark = {tries}
        for kind, shape in (
            (nn.Conv1d, (2, 8, 64)),
            (nn.Conv2d, (2, 8, 32, 32)),
            (nn.Conv3d, (2, 8, 8, 8, 8)),
            (nn.ConvTranspose2d, (2, 8, 9, 9)),
        ):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                x = torch.ones(shape, device="cuda", dtype=dtype, requires_grad=True)
                kind(8, 16, 3).to("cuda", dtype)(x).sum().backward()
                kind(8, 8, 3, groups=8).to("cuda", dtype)(x).sum().backward()
                assert x.grad is not None
        images = torch.ones(4, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        nn.BatchNorm2d(16).cuda()(images).sum().backward()
        for kind, states in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
            layer = kind(32, 64, 2, bidirectional=True, dropout=0.1).cuda()
            assert layer(torch.ones(5, 3, 32, device="cuda"))[0].shape == (5, 3, 128)
            sum(output.sum() for output in layer(torch.ones(5, 3, 32, device="cuda"))[:1]).backward()
            shapes = [tuple(weight.grad.shape) for weight in layer.parameters()]
            assert shapes[:2] == [(states * 64, 32), (states * 64, 64)], shapes
        layer = nn.LSTM(32, 64, proj_size=16).cuda()
        assert layer(torch.ones(5, 3, 32, device="cuda"))[0].shape == (5, 3, 16)
    """
    done, report = emulate(code, TORCH_CUDNN_V8_API_DISABLED=older)
    assert done.returncode == 0, done.stderr
    (process,) = report["processes"]
    assert process["unknown"][0] == "cuDNN's workspaces"
    assert "what cuDNN's recurrent layers keep for the backward pass" in process["unknown"]
    assert "peak allocated  at least" in done.stderr
