"""Own code on fakes: what a training may do that no model of the zoo does."""

import copy
import io
import pkgutil
from concurrent.futures import ThreadPoolExecutor

import bitsandbytes
import msgspec
import numpy
import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from zoo_examples import CPU, H100, compare, predicted, replied, task_of

from pytest_gputrain import Case
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Prediction
from pytest_gputrain.utils.units import MiB

OWN = Case(model="own", method="custom", precision="fp32", code="here")
HERE = ", at test_prediction_own.py:"

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # as torch.compile is imported


def doing(what):
    """A builder of steps without a loss."""
    return lambda setup: lambda: (what(setup.device), None)[1]


def refused(build, target=H100):
    reply = replied(OWN, target, build)
    assert isinstance(reply, Crashed), reply
    return reply.sentence


def trained(model, device, *, inputs=(4, 64)):
    """A step of the model, on inputs of that device."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.ones(inputs, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def layers(*devices):
    return nn.Sequential(*(nn.Linear(64, 64, device=device) for device in devices))


# What is predicted


@pytest.mark.parametrize("accumulation", [1, 4])
def test_work_is_that_of_a_step(accumulation):
    def build(setup):
        matrix = torch.ones(64, 64, device=setup.device)
        return lambda: (matrix @ matrix @ matrix, None)[1]

    case = OWN.replace(gradient_accumulation=accumulation)
    compare(case, build)
    assert predicted(case, H100, build).flops_per_step == 2 * 2 * 64**3


@pytest.mark.parametrize(("rule", "reserved"), [("lower_address", 1500), ("current", 2500)])
def test_reserved_memory_is_that_of_a_version_of_torch(rule, reserved):
    def memory(mebibytes, device):
        return torch.empty(mebibytes * MiB, dtype=torch.uint8, device=device)

    def steps(device):
        memory(1000, device)
        in_front, behind = memory(500, device), memory(500, device)
        of_its_own = memory(500, device)
        del in_front, of_its_own
        kept = memory(400, device)  # in one of two free blocks of 500 MiB
        del behind
        memory(1000, device)
        del kept

    target = msgspec.structs.replace(H100, equal_blocks=rule)
    assert predicted(OWN, target, doing(steps)).peak_reserved_bytes == reserved * MiB


def _in_a_context(device):
    with torch.device(device):
        return torch.tensor([2.0] * 8)


SMALL = {
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "in a context": _in_a_context,
    "tensor().to": lambda device: torch.tensor(3.0).to(device),
    "as_tensor": lambda device: torch.as_tensor(2.0, device=device),
    "from_numpy": lambda device: torch.from_numpy(numpy.ones(1, dtype=numpy.float32)).to(device),
    "new_tensor": lambda device: torch.ones(4, device=device).new_tensor([1.0, 2.0, 3.0]),
    "buffer": lambda device: nn.BatchNorm1d(4).to(device).num_batches_tracked,
    "beside an empty one": lambda device: torch.cat([torch.tensor([], device=device), torch.ones(8, device=device)]),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_small_tensors_are_on_the_device_too(make):
    def build(setup):
        kept = make(setup.device)
        assert kept.device == setup.device
        return lambda: (kept + torch.ones((), device=setup.device), None)[1]

    # What is kept, the one and their sum, in blocks of 512 bytes.
    assert predicted(OWN, H100, build).peak_allocated_bytes == 3 * 512


class Sound:
    """Loops that train, and are predicted to the byte."""

    @staticmethod
    def watches_its_model_in_every_step(setup):
        step = trained(model := layers(setup.device), setup.device)
        while True:
            setup.watch(model)
            yield step()

    @staticmethod
    def packs_in_four_bits_and_copies(setup):
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32).to(setup.device)
        twin = copy.deepcopy(layer)
        assert twin.weight.quant_state is not layer.weight.quant_state
        inputs = torch.randn(4, 64, device=setup.device, requires_grad=True)
        while True:
            twin(layer(inputs)).sum().backward()
            yield

    @staticmethod
    def knows_what_a_mask_holds(setup):
        values = torch.ones(1024, 8, device=setup.device)
        while True:
            keep = torch.zeros(1024, dtype=torch.bool, device=setup.device)
            keep[:512] = True
            assert values[keep].shape == (512, 8)
            yield

    @staticmethod
    def checks_for_finiteness(setup):
        model = layers(setup.device)
        checked = torch.jit.script(_without_nan)
        while True:
            loss = checked(model(torch.ones(4, 64, device=setup.device))).sum()
            assert torch.isfinite(loss)
            assert not loss.isnan()
            assert not torch.isinf(loss).any()
            loss.backward()
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            model.zero_grad()
            yield

    @staticmethod
    def clears_what_is_not_finite(setup):
        values = torch.randn(8, 4, device=setup.device)
        while True:
            bad = torch.isnan(values)
            bad |= torch.isinf(values)
            values.masked_fill_(bad, 0)
            rows = torch.isnan(values[:, 0])
            rows[0] = True
            assert values[rows].shape == (1, 4)
            yield

    @staticmethod
    def averages_its_weights(setup):
        step = trained(model := layers(setup.device), setup.device)
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))
        while True:
            yield step()
            average.update_parameters(model)

    @staticmethod
    def builds_on_meta(setup):
        with torch.device("meta"):
            model = layers(None)
        model.to_empty(device=setup.device)
        model[0].reset_parameters()
        assert model[0].weight.device == setup.device
        setup.watch(model)
        return trained(model, setup.device)

    @staticmethod
    def draws_truncated_normals(setup):
        weights = torch.empty(64, 64, device=setup.device), torch.empty(4, 4, device=setup.device)
        while True:
            for weight in weights:
                for bound in (2.0, 0.04, 0.06):
                    nn.init.trunc_normal_(weight, std=0.02, a=-bound, b=bound)
            yield

    @staticmethod
    def reads_arrays_and_numbers(setup):
        values = torch.zeros(8, device=setup.device)
        while True:
            assert numpy.asarray(values.detach().cpu()).tolist() == [0.0] * 8
            assert torch.arange(3).numpy().tolist() == [0, 1, 2]
            total = values.sum()
            assert torch.tensor([total * 2]).device.type == "cpu"
            made = torch.tensor([total, total * 2, 1.0], device=setup.device)
            assert (made.device, made.dtype) == (setup.device, torch.float32)
            assert torch.tensor([[torch.ones((), dtype=torch.float64, device=setup.device), 1]]).dtype == torch.float64
            assert torch.as_tensor([torch.tensor(3, device=setup.device)]).tolist() == [3]
            assert torch.tensor(2.0, device=str(setup.device)).device == setup.device
            yield

    @staticmethod
    def changes_the_default_type(setup):
        counts = torch.ones(2**20, device=setup.device, dtype=torch.int64)
        while True:
            for dtype in (torch.bfloat16, torch.float32):
                torch.set_default_dtype(dtype)
                assert (counts / 3).dtype == dtype
            yield

    @staticmethod
    def knows_what_is_a_copy_of_what(setup):
        weight = nn.Parameter(torch.ones(8, 8, device=setup.device))
        flat = torch.arange(8, device=setup.device)
        flat.note = ["kept"]
        while True:
            views = copy.deepcopy([flat[:4], flat[4:]])
            copied, again = copy.deepcopy([weight, weight])
            assert copied is again
            assert isinstance(copied, nn.Parameter)
            assert copied.requires_grad
            assert copied.device == setup.device
            assert copy.deepcopy(flat).note == ["kept"]
            assert views[0].untyped_storage()._cdata == views[1].untyped_storage()._cdata
            assert int(views[1][0]) == 4
            yield


def _without_nan(value: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(value), torch.zeros_like(value), value)


SOUND = [function for function in vars(Sound).values() if isinstance(function, staticmethod)]


@pytest.mark.parametrize("build", SOUND, ids=lambda build: build.__name__)
def test_what_a_loop_may_do_is_predicted_to_the_byte(build):
    compare(OWN, build)
    predicted(OWN, H100, build)


def _tied(device):
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)).to(device)
    model[1].weight = model[0].weight
    return model


COPIED = {
    "tensor": lambda device: torch.ones(1024, device=device),
    "frozen": lambda device: nn.Parameter(torch.ones(1024, device=device), requires_grad=False),
    "transposed": lambda device: torch.ones(32, 32, device=device).t(),
    "views": lambda device: list(torch.ones(1024, device=device).split(512)),
    "module": lambda device: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to(device),
    "tied": _tied,
}


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_a_copy_takes_what_a_real_one_takes(make):
    def build(setup):
        kept = make(setup.device)
        copies = {}  # the last one lives while the next one is made
        return lambda: copies.update(last=copy.deepcopy(kept))

    compare(OWN, build)
    assert predicted(OWN, H100, build).peak_allocated_bytes >= 3 * 4096, "on the device"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("loader", ["torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader"])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_loader_of_data_gives_batches(options, loader):
    def build(setup):
        samples = torch.utils.data.TensorDataset(torch.arange(1_200_000.0).reshape(-1, 4))
        for (batch,) in pkgutil.resolve_name(loader)(samples, 2, **options):
            assert (batch.pin_memory().to(setup.device, non_blocking=True) * 2).shape == (2, 4)
            yield

    predicted(OWN, H100, build)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_state_of_a_loader_that_had_processes_is_refused():
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = torch.utils.data.TensorDataset(torch.arange(120.0).reshape(-1, 4))

    def state(workers):
        loader = StatefulDataLoader(samples, 2, num_workers=workers)
        next(iter(loader))
        return loader.state_dict()

    def resuming(state):
        def build(setup):
            loader = StatefulDataLoader(samples, 2, num_workers=2)
            loader.load_state_dict(state)
            for _ in loader:
                yield

        return build

    predicted(OWN, H100, resuming(state(0)))
    sentence = replied(OWN, H100, resuming(state(2))).sentence
    assert "cannot load the state of a StatefulDataLoader that had some; leave load_state_dict() out" in sentence


class To(nn.Module):
    """Moves values, or their sum."""

    def __init__(self, device, reduce=lambda values: values):
        super().__init__()
        self.device, self.reduce = device, reduce

    def forward(self, values):
        return self.reduce(values).to(self.device)


def test_a_frozen_part_may_stay_on_the_host():
    def build(setup):
        model = nn.Sequential(layers("cpu").requires_grad_(False), To(setup.device), layers(setup.device, setup.device))
        setup.watch(model)
        return trained(model, "cpu")

    assert predicted(OWN, H100, build).host_bytes >= 4 * 64 * 65


@pytest.mark.parametrize("goes", [True, False])
def test_a_library_may_take_the_model_away_and_a_model_that_moves_is_counted_once(goes):
    def build(setup):
        step = trained(model := layers(setup.device), setup.device)
        if goes:
            setup.watch(model)
        while True:
            for _ in range(1 if goes else 6):
                model.to(setup.device)
                loss = step()
                model.to("cpu")
            if not goes:
                model.to(setup.device)
            yield loss

    assert predicted(OWN, H100, build).model_bytes == (4 * 64 * 65 if goes else None)


def test_a_thread_may_load_onto_the_host():
    def build(setup):
        model, pool = layers(setup.device), ThreadPoolExecutor(1)
        while True:
            batch = pool.submit(lambda: torch.from_numpy(numpy.ones((4, 64), dtype=numpy.float32))).result()
            yield model(batch.to(setup.device)).sum().backward()

    assert predicted(OWN, H100, build).flops_per_step == 2 * 2 * 4 * 64 * 64


@pytest.mark.parametrize("target", [H100, CPU], ids=["H100", "CPU"])
def test_another_precision_than_the_case_names_is_refused(target):
    def build(setup):
        setup.watch(model := layers(setup.device))
        step = trained(model, setup.device)
        while True:
            with torch.autocast(setup.device.type, torch.bfloat16):
                loss = step()
            yield loss

    assert predicted(OWN.replace(precision="bf16-amp"), target, build).flops_per_step
    assert 'say precision="bf16-amp"' in refused(build, target)


# What is refused


def _by_hand_on_the_host(setup):
    weight = torch.zeros(64, 64, requires_grad=True)
    while True:
        (weight * 2).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        weight.grad = None
        yield


def _loss_on_the_device(setup):
    return trained(nn.Sequential(layers("cpu", "cpu"), To(setup.device, torch.sum)), "cpu")


def _watched_on_the_host(setup):
    setup.watch(model := layers("cpu", "cpu"))
    return trained(model, "cpu")


def _written_through_a_view(device):
    values = torch.randn(1024, 8, device=device)
    keep = torch.zeros(1024, dtype=torch.bool, device=device)
    keep[:512] = values[:512, 0] > 0
    return values[keep]


def _beside(work):
    """A builder whose thread works."""

    def build(setup):
        model, pool = layers(setup.device), ThreadPoolExecutor(1, thread_name_prefix="beside")
        values = torch.ones(4, 64, device=setup.device)
        while True:
            yield model(pool.submit(work, values).result()).sum().backward()

    return build


class Table(nn.Module):
    """A buffer that is indexed by integers, which ended a process whose code was compiled on fakes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(64.0))

    def forward(self, places):
        return self.table[places].sum()


def _compiled(compiled):
    def build(setup):
        layer, places = compiled(Table().to(setup.device)), torch.tensor([1, 2, 3, 4], device=setup.device)
        return lambda: (layer(places), None)[1]

    return build


CUDA = "asks for the device cuda, which a prediction does not have; take setup.device"
HOST = "32.5 KiB of them are on cpu, the host"
THREAD = "the case computes in the thread 'beside_0'"
COMPILED = "a prediction does not know the code that torch.compile makes; measure it instead"
TWO = "an operator gets tensors of two devices, which fails on a GPU as well"

REFUSED = {
    "cuda made": (CUDA, doing(lambda device: torch.ones(4, device="cuda"))),
    "cuda moved": (CUDA, doing(lambda device: torch.ones(4).to("cuda:0"))),
    "cuda by its method": (CUDA, doing(lambda device: torch.ones(4).cuda())),
    "cuda of a module": (CUDA, doing(lambda device: nn.Linear(4, 4).to(torch.device("cuda")))),
    "cuda by its number": (CUDA, doing(lambda device: torch.ones(4).to(0))),
    "mask": ("a mask decides the shape of a result", doing(_written_through_a_view)),
    "array": ("take Tensor.cpu()", doing(lambda device: torch.ones(8, device=device).numpy())),
    "lazy": ("LazyLinear", doing(lambda device: nn.LazyLinear(64, device=device))),
    "FSDP1": (
        "(FSDP1)",
        doing(lambda device: torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(4, 4, device=device))),
    ),
    "saving": ("leave checkpoints out", doing(lambda device: torch.save(torch.ones(4, device=device), io.BytesIO()))),
    "linear": (TWO, doing(lambda device: nn.Linear(64, 64, device=device)(torch.ones(4, 64)))),
    "embedding": (TWO, doing(lambda device: nn.Embedding(64, 64, device=device)(torch.ones(4, 64, dtype=torch.int64)))),
    "convolution": (TWO, doing(lambda device: nn.Conv1d(4, 4, 3, device=device)(torch.ones(4, 64)))),
    "model on the host": (
        f"{HOST}, whose memory is not that of the GPU; move the model by .to(setup.device)",
        lambda setup: trained(layers("cpu", "cpu"), "cpu"),
    ),
    "watched on the host": (f"no trained parameter is on setup.device: {HOST}", _watched_on_the_host),
    "loss on the device": ("the GPU's peak of", _loss_on_the_device),
    "by hand on the host": ("all of the backward pass is on cpu, the host", _by_hand_on_the_host),
    "thread computes": (THREAD, _beside(torch.clone)),
    "thread makes": (THREAD, _beside(lambda values: torch.ones(4, 64, device=values.device))),
    "thread moves": (THREAD, _beside(lambda values: torch.from_numpy(numpy.ones((4, 64), "f")).to(values.device))),
    "thread makes in a context": (THREAD, _beside(lambda values: _in_a_context(values.device).expand(4, 8).repeat(1, 8))),
    "compiled function": (COMPILED, _compiled(lambda layer: torch.compile(layer.forward))),
    "compiled module": (COMPILED, _compiled(lambda layer: torch.compile(layer, fullgraph=True, mode="max-autotune"))),
    "compiled in place": (COMPILED, _compiled(lambda layer: layer.compile() or layer)),
}


NO_LINE = ("thread computes", "model on the host", "watched on the host", "loss on the device", "by hand on the host")
"""What is found at the end, and not where it happens."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_predicted_is_one_sentence_with_the_line(name):
    sentence, build = REFUSED[name]
    said = refused(build)
    assert sentence in said
    assert "test_prediction_own.py:" in said or name in NO_LINE


def test_a_thread_that_computes_is_refused_by_the_rules_of_a_cpu_too():
    assert THREAD in refused(_beside(torch.clone), CPU)


@pytest.mark.parametrize(
    "uncompiled",
    [lambda: torch.compiler.set_stance("force_eager"), lambda: torch._dynamo.config.patch(disable=True)],
    ids=["stance", "disabled"],
)
def test_code_that_is_told_not_to_be_compiled_is_predicted_as_it_is(uncompiled):
    def build(setup):
        step = _compiled(torch.compile)(setup)
        while True:
            with uncompiled():
                step()
            yield

    predicted(OWN, H100, build)


def test_an_error_is_told_by_the_line_of_own_code_without_torchs():
    reply = replied(OWN, H100, doing(lambda device: nn.Linear(64, 64, device=device)(torch.ones(4, 8, device=device))))
    assert isinstance(reply, Crashed), reply
    assert HERE in reply.sentence
    assert "test_prediction_own.py" in reply.detail
    assert "/torch/" not in reply.detail
    assert len(reply.detail.splitlines()) < 10


# Libraries, in processes that have imported nothing before

PROGRAM = """
import torch


def attention(setup):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).to(setup.device, torch.bfloat16)
    tokens = torch.zeros(1, 512, dtype=torch.int64, device=setup.device)
    return lambda: model(tokens, labels=tokens).loss.backward()


def samples():
    return [{"x": torch.ones(64)} for _ in range(64)]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 4096)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def by_accelerate(setup):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = torch.utils.data.DataLoader(samples(), 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    setup.watch(model)
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def by_trainer(setup, **options):
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments("out", max_steps=1, remove_unused_columns=False, max_grad_norm=0, **quiet, **options)
    setup.watch(model := Model())
    trainer = Trainer(model, arguments, train_dataset=samples())
    while True:
        trainer.train()
        yield


def by_trainer_without_cuda(setup):
    return by_trainer(setup, use_cpu=not torch.cuda.is_available())


def by_trainer_in_bf16(setup):
    return by_trainer(setup, bf16=True)
"""


def predicted_apart(folder, function, precision):
    (folder / "own.py").write_text(PROGRAM)
    case = Case(model=function, method="custom", precision=precision, code=f"own.py::{function}")
    reply = launcher.predict(task_of(case, scale="full", root=str(folder), target=H100), timeout_seconds=120)
    assert isinstance(reply, Prediction), reply
    return reply


@pytest.mark.slow
def test_own_code_that_imports_transformers_gets_the_attention_of_a_gpu(tmp_path):
    reply = predicted_apart(tmp_path, "attention", "bf16")
    assert any("cudnn_attention" in name for name in reply.operators), sorted(reply.operators)
    # What other libraries are installed is no condition of it.
    assert set(reply.packages) >= {"torch", "transformers"}
    assert not set(reply.packages) & {"deepspeed", "diffusers", "peft", "bitsandbytes", "triton"}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["by_accelerate", "by_trainer", "by_trainer_without_cuda", "by_trainer_in_bf16"])
def test_a_loop_of_accelerate_trains_on_the_predicted_gpu(tmp_path, loop):
    reply = predicted_apart(tmp_path, loop, "bf16-amp" if loop == "by_trainer_in_bf16" else "fp32")
    weights = 4 * 65 * 4096
    # Weights, gradients and two states; what the libraries keep beside them is less than another copy.
    assert 4 * weights <= reply.peak_allocated_bytes < 5 * weights
    assert reply.host_bytes < 2 * weights
