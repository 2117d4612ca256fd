"""What the stand-in of cuDNN takes, against what convolutions and attention took on an H200."""

from pathlib import Path

import pytest

from pytest_gputrain.utils.units import format_bytes

TESTS = Path(__file__).parents[1]

PROGRAM = f"""
    import sys
    sys.path.insert(0, {str(TESTS)!r})
    import torch
    from cudnn_measured import ATTENTION, CONVOLUTIONS, LARGE, attention, convolution, errors, within

    matrix = torch.zeros(16, 16, device="cuda", requires_grad=True)
    (matrix @ matrix).sum().backward()  # Workspaces of both threads stay.

    def peak_of(function):
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.memory._record_memory_history(context=None, stacks="python")
        result = function()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        signs = {{"alloc": 1, "free_completed": -1}}
        live = peak = 0
        for event in events:
            live += signs.get(event["action"], 0) * -(-event["size"] // 512) * 512
            peak = max(peak, live)
        return result, peak

    differences = errors(peak_of, "cuda", convolution, CONVOLUTIONS)
    print(len(differences), within(differences, 1), within(differences, 16))
    print(max(map(abs, errors(peak_of, "cuda", attention, ATTENTION))))
    print(max(abs(convolution(peak_of, "cuda", *measured)[0] - measured[-2]) for measured in LARGE) >> 20)
"""


def test_workspaces_are_those_of_an_h200(emulate):
    done, report = emulate(PROGRAM, gpu="h200")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["438 295 424", "512", "6"]
    assert not report["processes"][0]["unknown"]


MEASURED = """
    import torch
    for batch, channels, side, type in (2, 64, 128, torch.float), (4, 128, 64, torch.float), (2, 64, 128, torch.bfloat16):
        source = torch.zeros(batch, channels, side, side, device="cuda", dtype=type)
        weight = torch.zeros(channels, channels, 3, 3, device="cuda", dtype=type)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = torch.nn.functional.conv2d(source, weight, padding=1)
        print(torch.cuda.max_memory_allocated() - held - result.nbytes)
    """


@pytest.mark.parametrize(
    ("gpu", "measured"),
    [("rtx_pro_6000", (16_925_184, 17_367_552, 8_462_848)), ("rtx_3090", (8_536_576, 8_978_944, 8_462_848))],
)
def test_workspaces_are_those_published_of_12_0_and_of_8_6(emulate, gpu, measured):
    done, report = emulate(MEASURED, gpu=gpu)
    assert [int(line) for line in done.stdout.split()] == list(measured), done.stderr
    (process,) = report["processes"]
    assert not process["unknown"]
    assert max(measured) - 512 <= process["estimated_bytes"] <= max(measured)
    assert f"so reserved memory can be off by about the largest ({format_bytes(max(measured))})\n" in done.stderr


def test_workspaces_of_capabilities_up_to_8_0_are_not_known(emulate):
    done, report = emulate(MEASURED, gpu="a100")
    assert done.returncode == 0, done.stderr
    (process,) = report["processes"]
    assert process["unknown"] == ["cuDNN's workspaces"]
    assert not process["estimated_bytes"]


def test_those_that_benchmark_chooses_are_not_known(emulate):
    done, report = emulate(
        """
        import torch
        torch.backends.cudnn.benchmark = True
        torch.nn.functional.conv2d(torch.ones(1, 8, 9, 9, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda"))
        """,
        gpu="h200",
    )
    assert done.returncode == 0, done.stderr
    assert report["processes"][0]["unknown"] == ["cuDNN's workspaces that cudnn.benchmark chooses by time"]
