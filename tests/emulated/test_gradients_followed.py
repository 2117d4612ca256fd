"""What own code trains on an emulated GPU, and on what shapes: gradients are followed, though nothing computes them."""

import textwrap

import pytest

PROGRAM = """
    import os

    import torch
    from torch import nn

    PLANTED = os.environ.get("PLANTED", "")

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.pooler = nn.Linear(64, 64)

        def forward(self, batch):
            for number, layer in enumerate(self.layers):
                batch = layer(batch).relu()
                if PLANTED == "worse" and number == 0:
                    batch = batch.detach()
            return batch

    def build(setup):
        model = Pooled().to(setup.device)
        setup.watch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if PLANTED == "drawn":
            torch.rand(1)

        def step():
            with torch.set_grad_enabled(PLANTED != "none"):
                rows = int(torch.randint(2000, 9000, ())) + 500 * (PLANTED == "worse")
                loss = model(torch.ones(rows, 64, device=setup.device)).square().mean()
            if PLANTED != "none":
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def test_build(gputrain):
        gputrain.check(build, precision="fp32", batch_size=4, steps=2, warmup=1)
"""


@pytest.fixture
def planted(run_tests, tmp_path):
    """Record the program, and run it again with something planted: its result."""
    (tmp_path / "test_own.py").write_text(textwrap.dedent(PROGRAM))

    def run(what, *arguments):
        done, results = run_tests(*arguments, PLANTED=what)
        return done, results["test_build"]

    done, _ = run("", "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    return run


def test_gradients_and_shapes_are_held_to_those_of_the_baseline(planted):
    done, result = planted("drawn", "--gpu-strict")
    assert done.returncode == 0, done.stdout
    reply = result["reply"]
    assert reply["trained"] == {"learning": {"layers.*": 6}, "idle": {"pooler.weight": 1, "pooler.bias": 1}}
    assert [note for note in reply["notes"] if "2 of 8 trained tensors got no gradient: pooler.weight, pooler.bias" in note]
    assert len(reply["batch_shapes"]["first"]) == 4, "one of the warm-up, two timed ones, and that of FLOPs"

    worse, untrained = (planted(what)[1]["verdict"]["sentence"] for what in ("worse", "none"))
    assert "no longer trains layers.*.weight and layers.*.bias, which got a gradient" in worse
    assert "its batches have other shapes than in the baseline: [" in worse
    assert "each trained tensor got no gradient: is the loss computed under torch.no_grad()" in untrained
