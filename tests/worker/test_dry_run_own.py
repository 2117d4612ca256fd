"""Own code on fakes: what a training may do that no model of the zoo does."""

import contextlib
import sys
from unittest import mock

import bitsandbytes
import numpy
import pytest
import torch
from test_dry_run import H100, OWN, compare, predicted

from pytest_gputrain import Case, launch
from pytest_gputrain.records import Crashed, Prediction, Task
from pytest_gputrain.worker.dry_run.patches import _WhenImported
from pytest_gputrain.worker.dry_run.predict import predict
from pytest_gputrain.worker.progress import Progress


def doing(what):
    """A step without a loss."""

    def step():
        what()

    return step


def refused(build, target=H100):
    reply = predict(Task(case=OWN, scale="tiny", device_type="cpu", root=".", target=target), Progress(None), build)
    assert isinstance(reply, Crashed), reply
    return reply.sentence


@pytest.mark.parametrize("accumulation", [1, 4])
def test_work_is_that_of_a_step(accumulation):
    def build(setup):
        one = torch.ones(64, 64, device=setup.device)
        return doing(lambda: one @ one @ one)

    case = OWN.replace(gradient_accumulation=accumulation)
    compare(case, build)
    assert predicted(case, H100, build).flops_per_step == 2 * 2 * 64**3


SINGLE = {
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "tensor().to": lambda device: torch.tensor(3.0).to(device),
    "as_tensor": lambda device: torch.as_tensor(2.0, device=device),
    "from_numpy": lambda device: torch.from_numpy(numpy.ones(1, dtype=numpy.float32)).to(device),
    "new_tensor": lambda device: torch.ones(4, device=device).new_tensor([1.0, 2.0, 3.0]),
    "buffer": lambda device: torch.nn.BatchNorm1d(4).to(device).num_batches_tracked,
}


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE)
def test_small_tensors_are_on_the_device_too(make):
    def build(setup):
        kept = make(setup.device)
        assert kept.device == setup.device
        return doing(lambda: kept + torch.ones((), device=setup.device))

    # What is kept, the one and their sum, in blocks of 512 bytes.
    assert predicted(OWN, H100, build).peak_allocated_bytes == 3 * 512


def test_an_empty_tensor_meets_others_of_the_device():
    def build(setup):
        return doing(lambda: torch.cat([torch.tensor([], device=setup.device), torch.ones(8, device=setup.device)]))

    assert predicted(OWN, H100, build).peak_allocated_bytes == 2 * 512


CUDA = {
    "made": lambda: torch.ones(4, device="cuda"),
    "moved": lambda: torch.ones(4).to("cuda:0"),
    "method": lambda: torch.ones(4).cuda(),
    "module": lambda: torch.nn.Linear(4, 4).to(torch.device("cuda")),
    "number": lambda: torch.ones(4).to(0),
}


@pytest.mark.parametrize("make", CUDA.values(), ids=CUDA)
def test_cuda_by_name_is_refused_with_the_remedy(make):
    assert "asks for the device cuda, which a dry run does not have; take setup.device" in refused(lambda setup: make)


def test_weights_of_four_bits_move_to_the_device():
    def build(setup):
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16).to(setup.device)
        inputs = torch.randn(4, 64, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
        return doing(lambda: layer(inputs).sum().backward())

    predicted(OWN, H100, build)


def test_what_is_written_through_a_view_is_forgotten_of_the_whole():
    def build(setup):
        values = torch.randn(1024, 8, device=setup.device)

        def step():
            keep = torch.zeros(1024, dtype=torch.bool, device=setup.device)
            keep[:512] = values[:512, 0] > 0
            values[keep].sum()

        return step

    assert "a mask decides on the shape of a result" in refused(build)


def test_what_is_known_stays_known_beside_it():
    def build(setup):
        values = torch.ones(1024, 8, device=setup.device)

        def step():
            keep = torch.zeros(1024, dtype=torch.bool, device=setup.device)
            keep[:512] = True
            assert values[keep].shape == (512, 8)

        return step

    predicted(OWN, H100, build)


def test_checks_of_finiteness_find_nothing():
    def build(setup):
        weights = torch.nn.Linear(64, 64, device=setup.device)

        def step():
            loss = weights(torch.ones(4, 64, device=setup.device)).sum()
            assert torch.isfinite(loss)
            assert not loss.isnan()
            assert not torch.isinf(loss).any()
            loss.backward()
            assert all(parameter.grad.isfinite().all() for parameter in weights.parameters())
            torch.nn.utils.clip_grad_norm_(weights.parameters(), 1.0, error_if_nonfinite=True)
            weights.zero_grad()

        return step

    predicted(OWN, H100, build)
    compare(OWN, build)


def test_what_was_not_finite_may_be_cleared():
    def build(setup):
        values = torch.randn(8, 4, device=setup.device)

        def step():
            bad = torch.isnan(values)
            bad |= torch.isinf(values)
            values.masked_fill_(bad, 0)
            rows = torch.isnan(values[:, 0])
            rows[0] = True
            assert values[rows].shape == (1, 4)

        return step

    predicted(OWN, H100, build)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_function_may_check_for_finiteness():
    def build(setup):
        def checked(value: torch.Tensor) -> torch.Tensor:
            return torch.where(torch.isnan(value), torch.zeros_like(value), value)

        compiled = torch.jit.script(checked)
        return doing(lambda: compiled(torch.randn(8, device=setup.device)))

    predicted(OWN, H100, build)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_loader_of_data_gives_batches(options):
    def build(setup):
        samples = torch.utils.data.TensorDataset(torch.arange(1_200_000.0).reshape(-1, 4))
        batches = iter(torch.utils.data.DataLoader(samples, 2, **options))

        def step():
            (batch,) = next(batches)
            assert (batch.to(setup.device) * 2).shape == (2, 4)

        return step

    predicted(OWN, H100, build)


def test_what_a_library_needs_is_done_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "latecomer.py").write_text("def answer():\n    return 'real'\n")
    monkeypatch.syspath_prepend(tmp_path)

    def patches():
        yield mock.patch("latecomer.answer", return_value="fake")

    with contextlib.ExitStack() as stack:
        finder = _WhenImported({"latecomer": patches}, stack)
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        import latecomer

        assert latecomer.answer() == "fake"
    assert latecomer.answer() == "real"
    del sys.modules["latecomer"]


def predicted_apart(folder, source, function, precision):
    """By a process of its own, which has imported nothing before."""
    (folder / "own.py").write_text(source)
    case = Case(model=function, method="custom", precision=precision, code=f"own.py::{function}")
    task = Task(case=case, scale="full", device_type="cpu", root=str(folder), target=H100)
    reply = launch.predict(task, timeout_seconds=120)
    assert isinstance(reply, Prediction), reply
    return reply


LATE = """
import torch

def attention(setup):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).to(setup.device, torch.bfloat16)
    tokens = torch.zeros(1, 512, dtype=torch.int64, device=setup.device)

    def step():
        model(tokens, labels=tokens).loss.backward()

    return step
"""


@pytest.mark.slow
def test_own_code_that_imports_transformers_gets_the_attention_of_a_gpu(tmp_path):
    reply = predicted_apart(tmp_path, LATE, "attention", "bf16")
    assert any("cudnn_attention" in name for name in reply.operators), sorted(reply.operators)
    # What other libraries are installed is no condition of it.
    assert set(reply.packages) >= {"torch", "transformers"}
    assert not set(reply.packages) & {"deepspeed", "diffusers", "peft", "bitsandbytes", "triton"}


DRAWN = """
import numpy
import torch

def drawn(setup):
    kept = torch.zeros(numpy.random.randint(1, 10**6), device=setup.device)

    def step():
        kept.sum()

    return step
"""


@pytest.mark.slow
def test_numpy_draws_the_same_in_every_process(tmp_path):
    first, second = (predicted_apart(tmp_path, DRAWN, "drawn", "fp32") for _ in range(2))
    assert first == second
