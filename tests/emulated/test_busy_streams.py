"""Programs whose streams overlap, on an emulated GPU. Needs a CUDA build of torch, and no GPU."""

import textwrap

import pytest

PREFETCH = """
    import torch

    def train():
        side, batch = torch.cuda.Stream(), torch.empty(1 << 20).pin_memory()
        for _ in range(2):
            with torch.cuda.stream(side):
                on_gpu = batch.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            {}
            (on_gpu * 2).sum()
"""


def program(line):
    return textwrap.dedent(PREFETCH.format(line))


def test_a_block_that_another_stream_uses_makes_the_peak_a_lower_bound_with_the_line(emulate):
    done, report = emulate(program("on_gpu.record_stream(torch.cuda.current_stream())") + "\ntrain()\n")
    assert report["processes"][0]["unknown"] == [
        "blocks that record_stream keeps for another stream (train.py:10 in train)"
    ], done.stderr
    assert "peak allocated  at least " in done.stderr


@pytest.mark.parametrize(
    "line", ["pass", "on_gpu.record_stream(side)", "(on_gpu + 1).record_stream(torch.cuda.current_stream())"]
)
def test_streams_that_share_no_block_make_none(emulate, line):
    done, report = emulate(program(line) + "\ntrain()\n")
    assert report["processes"][0]["unknown"] == [], done.stderr


def test_a_function_that_uses_blocks_of_its_own_stream_first_makes_one_of_another_stream_known(emulate):
    used = program("[one.record_stream(torch.cuda.current_stream()) for one in (on_gpu + 1, on_gpu)]")
    _, report = emulate(used + "\ntrain()\n")
    assert len(report["processes"][0]["unknown"]) == 1


CASE = """
    def build(setup):
        model = torch.nn.Linear(8, 8).to(setup.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        setup.watch(model)

        def step():
            train()
            loss = model(torch.randn(setup.case.batch_size, 8, device=setup.device)).square().mean()
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            return loss

        return step

    def test_overlap(gputrain):
        gputrain.check(build, precision="fp32", batch_size=2)
"""


def test_a_case_of_pytest_names_it(run_tests, tmp_path):
    used = program("on_gpu.record_stream(torch.cuda.current_stream())")
    (tmp_path / "test_overlap.py").write_text(used + textwrap.dedent(CASE))
    done, _ = run_tests("--gpu-baseline-update")
    noted = (
        "at least this memory is needed; blocks that record_stream keeps for another stream (test_overlap.py:10 in train)"
    )
    assert noted in done.stdout, done.stdout
