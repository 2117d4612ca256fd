"""`gputrain emulate --expect` and tools/calibrate.py on an emulated GPU, whose own times mean nothing."""

from pathlib import Path

import pytest

from pytest_gputrain.hardware.rates import FILE
from pytest_gputrain.utils.units import format_seconds

TRAINING = """
import sys
import torch
from torch import nn

model = nn.Linear(4096, 4096).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters())
small, large = (torch.randn(size, 4096, device="cuda", dtype=torch.bfloat16) for size in (8192, 32768))
for step in range(9):
    model(small if step < int(sys.argv[1]) else large).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def expected_of(emulate, *arguments, **fields):
    _, report = emulate(TRAINING, *arguments, options=("--expect",), **fields)
    (process,) = report["processes"]
    assert process["asked"] is process["steps"] is None
    return process["expected"]


def test_the_last_steps_of_a_program_are_expected_to_take_what_their_operators_take(emulate):
    large = expected_of(emulate, "0")
    assert large["seconds"] == pytest.approx(sum(large["parts"].values()) + 600e-6)
    # Forward pass and gradient of the weight, at 0.9 of the peak and by whole waves of tiles.
    least = 2 * 2 * 32768 * 4096**2 / (0.9 * 165.2e12)
    rtx_4090 = expected_of(emulate, "0", gpu="rtx_4090")
    assert least <= rtx_4090["parts"]["matrix products"] <= 1.1 * least
    assert (large["rough"], rtx_4090["rough"]) == (True, True)
    assert expected_of(emulate, "4") == large
    small = expected_of(emulate, "9")
    assert small["parts"]["matrix products"] == pytest.approx(large["parts"]["matrix products"] / 4, rel=0.1)


def test_a_gpu_whose_rates_are_not_known_has_no_seconds(emulate):
    assert expected_of(emulate, "0", gpu="h20")["unknown"] == "it is not known what kernels sustain on this GPU"


UNUSUAL = """
import sys
import torch
from torch import nn

layers = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
model = torch.compile(layers) if sys.argv[1] == "compiled" else layers
model.cuda()
optimizer = torch.optim.SGD(model.parameters())
x = torch.randn(2048, 1024, device="cuda")
if sys.argv[1] == "graphs":
    model = torch.cuda.make_graphed_callables(model, (x,))
for _ in range(int(sys.argv[2])):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kind", "steps", "why"),
    [
        ("compiled", 3, "how long kernels of torch.compile take is not known; run it without"),  # before CUDA is used
        ("graphs", 3, "the program launches CUDA graphs, whose operators are not seen; run it without them"),
        ("plain", 1, "a step goes from one update of an optimizer to the next, and there were fewer than two"),
    ],
)
def test_a_program_whose_operators_are_not_seen_has_no_seconds_and_takes_its_own_memory(emulate, kind, steps, why):
    (expects, told), (_, plain) = (emulate(UNUSUAL, kind, str(steps), options=one) for one in (("--expect",), ()))
    assert told["processes"][0]["expected"]["unknown"] == why
    assert expects.stderr.count(why) == 1
    devices = [report["processes"][0]["devices"][0] for report in (told, plain)]
    figures = (
        "peak_allocated_bytes",
        *([] if kind == "graphs" else ["peak_reserved_bytes"]),
    )  # whose pools have other blocks
    assert [devices[0][name] for name in figures] == [devices[1][name] for name in figures]
    assert len({str(device["peak"]["tensors"]) for device in devices}) == 1


PARALLEL = """
import os
import sys
import torch

if "RANK" not in os.environ:
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", __file__]
    os.execv(sys.executable, [sys.executable, *command])
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096, bias=False).cuda())
optimizer = torch.optim.SGD(model.parameters())
x = torch.randn(4096 * (rank + 1), 4096, device="cuda")
for step in range(3):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


def test_a_step_of_several_processes_exchanges_gradients_and_takes_as_long_as_the_slowest(emulate):
    done, report = emulate(PARALLEL, gpus=2, options=("--expect",))
    first, second = (process["expected"] for process in sorted(report["processes"], key=lambda one: one["rank"]))
    exchanged = 4 * 4096**2 / 360e9  # in a ring of two each sends half of the gradients twice
    assert first["parts"]["communication"] == pytest.approx(0.1 * exchanged, rel=0.01)
    assert second["parts"]["matrix products"] == pytest.approx(2 * first["parts"]["matrix products"], rel=0.05)
    told = f"expected time of a step, from one update to the next: {format_seconds(second['seconds'])}"
    assert done.stderr.count(told) == done.stderr.count("expected time of a step") == 1


CALIBRATION = """
import runpy
import sys

sys.path.insert(0, {tools!r})
sys.argv = ["calibrate.py", "--dry-run"]
runpy.run_path({tools!r} + "/calibrate.py", run_name="__main__")
"""


@pytest.mark.weekly
def test_a_dry_run_of_the_calibration_measures_all_and_writes_nothing(emulate):
    before = FILE.read_bytes()
    tools = str(Path(__file__).parents[2] / "tools")
    done, _ = emulate(CALIBRATION.format(tools=tools))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dry run: the times and rates below mean nothing, and none are written")
    assert "measurements ran, and no rates are written" in done.stdout
    told = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"products_16bit", "attention_flash_backward", "convolutions_tf32", "pointwise", "clipped:"} <= told
    assert " is left out" not in done.stdout
    assert FILE.read_bytes() == before
