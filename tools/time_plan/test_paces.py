"""Steps from one whose GPU waits for the host to one that keeps it busy, which `tools/gpu_session.py --plan time` measures.

Environment variables change a step: ``PLAN_ITEMS=1`` reads a value in each layer, ``PLAN_SLEEP=0.001`` has the GPU work for
so many seconds more, and ``PLAN_TIMES=FILE`` writes when the last steps began and when the process ended.
"""

import atexit
import json
import os
import time

import pytest

LAYERS = 48
WIDTHS = (64, 128, 256, 384, 768, 1536)
TOKENS = 4096
LAST_STEPS = 7
"""Steps whose begin is kept: more than run under the profiler."""


def pace(setup, width):
    """Return a step of a deep network of narrow or of wide layers."""
    import torch
    from torch import nn

    device = setup.device
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS)).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4)
    batch = torch.randn(TOKENS if device.type == "cuda" else 8, width, device=device)
    cycles = _cycles(torch, float(os.environ.get("PLAN_SLEEP", "0"))) if device.type == "cuda" else 0
    begins = []
    if path := os.environ.get("PLAN_TIMES"):
        atexit.register(_write_times, path, begins)

    def step():
        begins[:] = [*begins[-LAST_STEPS + 1 :], time.monotonic()]
        hidden = batch
        for layer in layers:
            hidden = hidden + nn.functional.gelu(layer(hidden))
            if os.environ.get("PLAN_ITEMS"):
                hidden.mean().item()
        if cycles:
            torch.cuda._sleep(cycles)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _cycles(torch, seconds):
    """Return the cycles of the GPU's clock in so many seconds, as it is now; 1 on a GPU that tells no time."""
    if not seconds:
        return 0
    many = 50_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(many)  # until the clock has risen
    begin.record()
    torch.cuda._sleep(many)
    end.record()
    end.synchronize()
    taken = begin.elapsed_time(end) / 1000
    return max(1, round(many * seconds / taken)) if taken else 1


def _write_times(path, begins):
    with open(path, "w") as file:
        json.dump({"begins": begins, "end": time.monotonic()}, file)


@pytest.mark.parametrize("width", WIDTHS)
def test_pace(gputrain, width):
    gputrain.check(pace, precision="fp32", batch_size=1, steps=20, warmup=5, args={"width": width})
