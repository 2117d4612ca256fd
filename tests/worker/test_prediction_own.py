"""Own code on fakes: what a training may do that no model of the zoo does."""

import contextlib
import copy
import importlib.util
import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import bitsandbytes
import numpy
import pytest
import torch
from test_prediction import CPU, H100, OWN, compare, predicted

from pytest_gputrain import Case
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Prediction, Task
from pytest_gputrain.worker.prediction.patches import patch_when_imported
from pytest_gputrain.worker.prediction.predict import predict
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
        matrix = torch.ones(64, 64, device=setup.device)
        return doing(lambda: matrix @ matrix @ matrix)

    case = OWN.replace(gradient_accumulation=accumulation)
    compare(case, build)
    assert predicted(case, H100, build).flops_per_step == 2 * 2 * 64**3


def test_a_loop_may_watch_its_model_in_every_step():
    def build(setup):
        model = torch.nn.Linear(64, 64, device=setup.device)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            setup.watch(model)
            model(torch.ones(8, 64, device=setup.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    assert predicted(OWN, H100, build).model_bytes == 4 * (64 * 64 + 64)


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
    assert "asks for the device cuda, which a prediction does not have; take setup.device" in refused(lambda setup: make)


def test_weights_of_four_bits_move_to_the_device_and_are_copied_as_they_are():
    def build(setup):
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16).to(setup.device)
        twin = copy.deepcopy(layer)
        assert twin.weight.quant_state is not layer.weight.quant_state
        inputs = torch.randn(4, 64, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
        return doing(lambda: twin(layer(inputs)).sum().backward())

    predicted(OWN.replace(precision="bf16"), H100, build)


def test_what_is_written_through_a_view_is_forgotten_of_the_whole():
    def build(setup):
        values = torch.randn(1024, 8, device=setup.device)

        def step():
            keep = torch.zeros(1024, dtype=torch.bool, device=setup.device)
            keep[:512] = values[:512, 0] > 0
            values[keep].sum()

        return step

    assert "a mask decides the shape of a result" in refused(build)


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
        patch_when_imported("latecomer", patches, stack)
        assert importlib.util.find_spec("latecomer")  # as libraries ask before they import another
        import latecomer

        assert latecomer.answer() == "fake"
    assert latecomer.answer() == "real"
    del sys.modules["latecomer"]


def predicted_apart(folder, source, function, precision):
    """By a process of its own, which has imported nothing before."""
    (folder / "own.py").write_text(source)
    case = Case(model=function, method="custom", precision=precision, code=f"own.py::{function}")
    task = Task(case=case, scale="full", device_type="cpu", root=str(folder), target=H100)
    reply = launcher.predict(task, timeout_seconds=120)
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


def trained(model, device):
    """A step of the model, on inputs of that device."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.ones(4, 64, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def layers(*devices):
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=device) for device in devices))


@pytest.mark.parametrize("watches", [True, False], ids=["watched", "unwatched"])
def test_a_model_on_the_host_is_refused(watches):
    def build(setup):
        model = layers("cpu", "cpu")
        if watches:
            setup.watch(model)
        return trained(model, "cpu")

    sentence = refused(build)
    assert "32.5 KiB of them are on cpu, the host" in sentence
    assert "move the model by .to(setup.device)" in sentence


def test_a_loss_on_the_device_does_not_hide_a_model_on_the_host():
    def build(setup):
        model = torch.nn.Sequential(layers("cpu", "cpu"), ToDevice(setup.device))
        return trained(model, "cpu")

    assert "the GPU's peak of" in refused(build)
    assert "32.5 KiB of them are on cpu, the host" in refused(build)


class ToDevice(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, values):
        return values.sum().to(self.device)


def test_training_by_hand_on_the_host_is_refused():
    def build(setup):
        weight = torch.zeros(64, 64, requires_grad=True)

        def step():
            (weight * 2).sum().backward()
            with torch.no_grad():
                weight.sub_(weight.grad)
            weight.grad = None

        return step

    assert "all of the backward pass is on cpu, the host" in refused(build)


@pytest.mark.parametrize("makes", [False, True], ids=["computes", "makes what the step does not use"])
def test_another_thread_that_computes_is_refused(makes):
    def build(setup):
        matrix = torch.ones(64, 64, device=setup.device)

        def step():
            beside = (lambda: torch.ones(4, device=setup.device)) if makes else (lambda: matrix @ matrix)
            thread = threading.Thread(target=beside, name="beside")
            thread.start()
            thread.join()
            if makes:
                matrix.clone().requires_grad_().sum().backward()

        return step

    for target in (H100, CPU)[: 1 if makes else 2]:
        assert "the case computes in the thread 'beside'" in refused(build, target)


def _made_in(device):
    with torch.device(device):
        return torch.ones(4, 64)


LOADS = {
    "made": lambda device: torch.ones(4, 64, device=device),
    "moved": lambda device: torch.from_numpy(numpy.ones((4, 64), dtype=numpy.float32)).to(device),
    "by a context": _made_in,
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_thread_that_loads_onto_the_gpu_is_refused_by_its_name(load):
    def build(setup):
        model = layers(setup.device)
        pool = ThreadPoolExecutor(1, thread_name_prefix="loads")

        def step():
            model(pool.submit(load, setup.device).result()).sum().backward()

        return step

    sentence = refused(build)
    assert "the case computes in the thread 'loads_0'" in sentence
    assert "test_prediction_own.py:" in sentence


def test_a_thread_may_load_onto_the_host():
    def build(setup):
        model = layers(setup.device)
        pool = ThreadPoolExecutor(1)

        def step():
            batch = pool.submit(lambda: torch.from_numpy(numpy.ones((4, 64), dtype=numpy.float32))).result()
            model(batch.to(setup.device)).sum().backward()

        return step

    assert predicted(OWN, H100, build).flops_per_step == 2 * 2 * 4 * 64 * 64


@pytest.mark.parametrize("target", [H100, CPU], ids=["H100", "CPU"])
def test_another_precision_than_the_case_names_is_refused(target):
    def build(setup):
        model = layers(setup.device)
        setup.watch(model)
        step = trained(model, setup.device)

        def cast():
            with torch.autocast(setup.device.type, torch.bfloat16):
                return step()

        return cast

    case = OWN.replace(precision="bf16-amp")
    assert predicted(case, target, build).flops_per_step
    assert 'does not train in precision "fp32"' in refused(build, target)
    assert 'say precision="bf16-amp"' in refused(build, target)


def test_a_frozen_part_may_stay_on_the_host():
    def build(setup):
        model = torch.nn.Sequential(
            layers("cpu").requires_grad_(False), Moved(setup.device), layers(setup.device, setup.device)
        )
        setup.watch(model)
        return trained(model, "cpu")

    assert predicted(OWN, H100, build).host_bytes >= 4 * 64 * 65


class Moved(ToDevice):
    def forward(self, values):
        return values.to(self.device)


def test_a_library_may_take_the_model_away_and_a_model_that_moves_is_counted_once():
    def build(setup, *, goes):
        model = layers(setup.device)
        setup.watch(model)
        step = trained(model, setup.device)

        def fit():
            model.to(setup.device)
            loss = step()
            model.to("cpu")
            return loss if goes else (model.to(setup.device), loss)[1]

        return fit

    predicted(OWN, H100, lambda setup: build(setup, goes=True))
    predicted(OWN.replace(gradient_accumulation=6), H100, lambda setup: build(setup, goes=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.nn.Linear(64, 64, device=device),
        lambda device: torch.nn.Embedding(64, 64, device=device),
        lambda device: torch.nn.Conv1d(4, 4, 3, device=device),
    ],
    ids=["linear", "embedding", "convolution"],
)
def test_an_input_on_the_host_fails_as_on_a_gpu(make):
    def build(setup):
        layer = make(setup.device)
        inputs = torch.ones(4, 64) if not isinstance(layer, torch.nn.Embedding) else torch.ones(4, 64, dtype=torch.int64)
        return doing(lambda: layer(inputs))

    sentence = refused(build)
    assert sentence.startswith("an operator gets tensors of two devices, which fails on a GPU as well")
    assert ", at test_prediction_own.py:" in sentence
    assert sentence.endswith("return doing(lambda: layer(inputs))")


def test_an_error_is_told_by_the_line_of_own_code_without_torchs():
    def build(setup):
        layer = torch.nn.Linear(64, 64, device=setup.device)
        return doing(lambda: layer(torch.ones(4, 8, device=setup.device)))

    reply = predict(Task(case=OWN, scale="tiny", device_type="cpu", root=".", target=H100), Progress(None), build)
    assert isinstance(reply, Crashed), reply
    assert ", at test_prediction_own.py:" in reply.sentence
    assert "test_prediction_own.py" in reply.detail
    assert "/torch/" not in reply.detail
    assert len(reply.detail.splitlines()) < 10


def tied(device):
    model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64, bias=False)).to(device)
    model[1].weight = model[0].weight
    return model


COPIED = {
    "tensor": lambda device: torch.ones(1024, device=device),
    "parameter": lambda device: torch.nn.Parameter(torch.ones(1024, device=device)),
    "frozen": lambda device: torch.nn.Parameter(torch.ones(1024, device=device), requires_grad=False),
    "transposed": lambda device: torch.ones(32, 32, device=device).t(),
    "views": lambda device: list(torch.ones(1024, device=device).split(512)),
    "module": lambda device: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(device),
    "tied": tied,
}


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_a_copy_takes_what_a_real_one_takes(make):
    def build(setup):
        kept = make(setup.device)
        copies = {}  # the last one lives while the next one is made
        return doing(lambda: copies.update(last=copy.deepcopy(kept)))

    compare(OWN, build)
    assert predicted(OWN, H100, build).peak_allocated_bytes >= 3 * 4096, "on the device"


def test_a_copy_is_what_it_is_a_copy_of():
    def build(setup):
        weight = torch.nn.Parameter(torch.ones(8, 8, device=setup.device))
        flat = torch.arange(8, device=setup.device)
        flat.note = ["kept"]
        views = copy.deepcopy([flat[:4], flat[4:]])
        copied, again = copy.deepcopy([weight, weight])
        assert copied is again
        assert isinstance(copied, torch.nn.Parameter)
        assert copied.requires_grad
        assert copied.device == setup.device
        assert copy.deepcopy(flat).note == ["kept"]
        assert views[0].untyped_storage()._cdata == views[1].untyped_storage()._cdata
        assert int(views[1][0]) == 4
        return doing(copied.sum)

    predicted(OWN, H100, build)


def test_an_average_of_weights_follows_the_model():
    def build(setup):
        model = layers(setup.device)
        setup.watch(model)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
        step = trained(model, setup.device)

        def both():
            loss = step()
            average.update_parameters(model)
            return loss

        return both

    compare(OWN, build)
    predicted(OWN, H100, build)


def test_a_model_on_meta_gets_its_weights_on_the_device():
    def build(setup):
        with torch.device("meta"):
            model = layers(None)
        model.to_empty(device=setup.device)
        model[0].reset_parameters()
        assert model[0].weight.device == setup.device
        setup.watch(model)
        return trained(model, setup.device)

    compare(OWN, build)
    predicted(OWN, H100, build)


@pytest.mark.parametrize(("bound", "size"), [(2.0, 64), (0.04, 64), (0.06, 64), (0.06, 4)])
def test_truncated_normals_draw_anew_what_lies_outside(bound, size):
    def build(setup):
        weight = torch.empty(size, size, device=setup.device)
        return doing(lambda: torch.nn.init.trunc_normal_(weight, std=0.02, a=-bound, b=bound))

    compare(OWN, build)
    predicted(OWN, H100, build)


def test_a_list_of_numbers_may_hold_tensors():
    def build(setup):
        values = torch.randn(8, device=setup.device)

        def step():
            total = values.sum()
            assert torch.tensor([total * 2]).device.type == "cpu"
            made = torch.tensor([total, total * 2, 1.0], device=setup.device)
            assert made.device == setup.device
            assert made.dtype == torch.float32
            assert torch.tensor([[torch.ones((), dtype=torch.float64, device=setup.device), 1]]).dtype == torch.float64
            assert torch.as_tensor([torch.tensor(3, device=setup.device)]).tolist() == [3]
            assert torch.tensor(2.0, device=str(setup.device)).device == setup.device
            values[made > 0]

        return step

    assert "which a prediction does not know" in refused(build) or "a prediction does not know its content" in refused(build)


def test_what_is_on_the_host_can_become_an_array():
    def build(setup):
        values = torch.randn(8, device=setup.device)

        def step():
            assert numpy.asarray(values.detach().cpu()).tolist() == [0.0] * 8
            assert torch.arange(3).numpy().tolist() == [0, 1, 2]
            assert values.cpu().pin_memory().to(setup.device, non_blocking=True).device == setup.device

        return step

    predicted(OWN, H100, build)
    assert "take Tensor.cpu()" in refused(lambda setup: doing(torch.ones(8, device=setup.device).numpy))


class Table(torch.nn.Module):
    """A buffer that is indexed by integers, which ended a process whose code was compiled on fakes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(64.0))

    def forward(self, places):
        return self.table[places].sum()


def disabled():
    """What TORCH_COMPILE_DISABLE=1 does."""
    return torch._dynamo.config.patch(disable=True)


COMPILED = {
    "function": lambda layer: torch.compile(layer.forward),
    "module": torch.compile,
    "in place": lambda layer: layer.compile() or layer,
    "whole graph": lambda layer: torch.compile(layer, fullgraph=True, mode="max-autotune"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # as torch.compile is imported
@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_compiled_code_is_refused(compiled):
    def build(setup):
        layer = compiled(Table().to(setup.device))
        places = torch.tensor([1, 2, 3, 4], device=setup.device)
        return doing(lambda: layer(places))

    assert "a prediction does not know the code that torch.compile makes; measure it instead" in refused(build)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "uncompiled", [lambda: torch.compiler.set_stance("force_eager"), disabled], ids=["stance", "disabled"]
)
def test_code_that_is_told_not_to_be_compiled_is_predicted_as_it_is(uncompiled):
    def build(setup):
        layer = torch.compile(Table().to(setup.device))
        places = torch.tensor([1, 2, 3, 4], device=setup.device)

        def step():
            with uncompiled():
                layer(places)

        return step

    predicted(OWN, H100, build)


REFUSED = {
    "LazyLinear": lambda device: torch.nn.LazyLinear(64, device=device),
    "(FSDP1)": lambda device: torch.distributed.fsdp.FullyShardedDataParallel(torch.nn.Linear(4, 4, device=device)),
    "leave checkpoints out": lambda device: torch.save(torch.ones(4, device=device), io.BytesIO()),
}


@pytest.mark.parametrize(("words", "call"), REFUSED.items(), ids=REFUSED)
def test_what_no_fake_can_do_is_refused_with_one_sentence(words, call):
    sentence = refused(lambda setup: doing(lambda: call(setup.device)))
    assert words in sentence
    assert ", at test_prediction_own.py:" in sentence


LOOPS = """
import torch


def samples():
    return [{"x": torch.ones(64)} for _ in range(64)]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 4096)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def by_hand(setup):
    model = Model().to(setup.device)
    setup.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        loss = model(torch.ones(8, 64, device=setup.device))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_accelerate(setup):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = torch.utils.data.DataLoader(samples(), 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    setup.watch(model)
    batches = iter(loader)

    def step():
        loss = model(**next(batches))["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_trainer(setup, **options):
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments("out", max_steps=1, remove_unused_columns=False, max_grad_norm=0, **quiet, **options)
    model = Model()
    setup.watch(model)
    trainer = Trainer(model, arguments, train_dataset=samples())

    def step():
        trainer.train()

    return step


def by_trainer_without_cuda(setup):
    return by_trainer(setup, use_cpu=not torch.cuda.is_available())


def by_trainer_in_bf16(setup):
    return by_trainer(setup, bf16=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["by_accelerate", "by_trainer", "by_trainer_without_cuda", "by_trainer_in_bf16"])
def test_a_loop_of_accelerate_trains_on_the_predicted_gpu(tmp_path, loop):
    reply = predicted_apart(tmp_path, LOOPS, loop, "bf16-amp" if loop == "by_trainer_in_bf16" else "fp32")
    weights = 4 * 65 * 4096
    # Weights, gradients and two states; what the libraries keep beside them is less than another copy.
    assert 4 * weights <= reply.peak_allocated_bytes < 5 * weights
    assert reply.host_bytes < 2 * weights
