"""`gputrain emulate --expect` and tools/calibrate.py on an emulated GPU, whose own times mean nothing."""

from pathlib import Path

import pytest

from pytest_gputrain.hardware.rates import FILE

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


def test_a_gpu_whose_rates_are_not_known_is_refused(emulate):
    done, _ = emulate(TRAINING, "0", options=("--expect",), gpu="h20")
    assert done.returncode == 2
    assert "it is not known what kernels sustain on NVIDIA H20" in done.stderr


CALIBRATION = """
import runpy
import sys

sys.path.insert(0, {tools!r})
sys.argv = ["calibrate.py", "--dry-run"]
runpy.run_path({tools!r} + "/calibrate.py", run_name="__main__")
"""


def test_a_dry_run_of_the_calibration_measures_all_and_writes_nothing(emulate):
    before = FILE.read_bytes()
    tools = str(Path(__file__).parents[2] / "tools")
    done, _ = emulate(CALIBRATION.format(tools=tools))
    assert done.returncode == 0, done.stderr
    assert "measurements ran; their times mean nothing, and no rates are written" in done.stdout
    told = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"products_16bit", "attention_flash_backward", "convolutions_tf32", "pointwise", "clipped:"} <= told
    assert " is left out" not in done.stdout
    assert FILE.read_bytes() == before
