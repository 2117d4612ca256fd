"""What the counters of a CPU cannot see is told, and a program whose tensors they cannot follow keeps its other figures."""

import numpy
import pytest
import torch
from torch.masked import masked_tensor
from zoo_examples import MINE, measured, stepping

from pytest_gputrain.worker import flops, operator_counts

FLOATS = 4_000_000
PYTHON = "a step holds up to 15.3 MiB in Python's own memory, such as NumPy arrays and bytearrays, which is not counted"


def holding(make):
    """A builder of steps that hold something from the end of one until the end of the next."""

    def build(setup):
        step = stepping(torch.nn.Linear(64, 64), torch.ones(8, 64))
        while True:
            held = make()
            yield step()
            del held

    return build


def without_dispatch():
    with torch._C._DisableTorchDispatch():
        return torch.ones(FLOATS)


def without_modes():
    from torch.utils._python_dispatch import _disable_current_modes  # as own code does, which is imported while counting

    with _disable_current_modes():
        return torch.ones(FLOATS)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: numpy.ones(FLOATS, numpy.float32), PYTHON),
        (lambda: torch.frombuffer(bytearray(4 * FLOATS), dtype=torch.float32), PYTHON),
        (lambda: torch.from_dlpack(numpy.ones(FLOATS, numpy.float32)), PYTHON),
        (without_dispatch, "makes below _DisableTorchDispatch are counted only where other operators take them"),
        (without_modes, "makes below _disable_current_modes are counted only where other operators take them"),
    ],
)
def test_memory_that_no_operator_made_is_told(make, told):
    figures = measured(MINE, holding(make))
    assert figures.uncounted_memory
    (note,) = figures.notes[:1]
    assert note.endswith(told)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.frombuffer(bytearray(4 * FLOATS), dtype=torch.float32).sum(),
        lambda: torch.from_numpy(numpy.ones(FLOATS, numpy.float32)),
        lambda: [list(range(100)) for _ in range(100)],
        lambda: numpy.ones(100_000, numpy.float32),
    ],
)
def test_what_is_counted_or_small_is_not_told(make):
    assert not measured(MINE, holding(make)).uncounted_memory


def nested(inputs, weight):
    return torch.nested.as_nested_tensor([inputs[:4] @ weight, inputs[4:] @ weight]).to_padded_tensor(0.0)


def jagged(inputs, weight):
    parts = torch.nested.as_nested_tensor([inputs[:4], inputs[4:]], layout=torch.jagged)
    return torch.nn.functional.linear(parts, weight).values()


def masked(inputs, weight):
    product = inputs @ weight
    return masked_tensor(product, product > 0).sum().get_data() + product


def padded(inputs, weight):
    with torch.no_grad():
        encoded = ENCODER(inputs[None], src_key_padding_mask=torch.arange(8)[None] > 5)
    return encoded[0] @ weight[: encoded.shape[-1]]


def of_onednn(inputs, weight):
    return torch.relu(inputs.to_mkldnn()).to_dense() @ weight


ENCODER = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", [nested, jagged, masked, padded, of_onednn], ids=lambda use: use.__name__)
def test_tensors_without_a_storage_of_their_own_are_no_fault_of_the_program(use):
    def build(setup):
        weight = torch.nn.Parameter(torch.eye(16))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        while True:
            loss = use(torch.ones(8, 16), weight).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    figures = measured(MINE, build)
    assert (figures.flops_per_step or 0) > 0
    assert figures.counts is not None
    told = ["memory of tensors of layout torch._mkldnn is not counted, because torch does not tell pytest-gputrain of it"]
    assert list(figures.notes) == (told if use is of_onednn else [])
    assert figures.uncounted_memory == (use is of_onednn)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: torch.eye(16).to_sparse(), 16 * (2 * 8 + 4)),
        (lambda: torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), 4 * 18),
        (lambda: torch.eye(16).to_mkldnn(), 0),
    ],
)
def test_a_buffer_without_a_storage_of_its_own_is_a_part_of_its_model(make, size):
    def build(setup):
        model = torch.nn.Linear(64, 64, bias=False)
        model.register_buffer("table", make())
        setup.watch(model)
        return stepping(model, torch.ones(8, 64))

    assert measured(MINE, build).model_bytes == 4 * 64 * 64 + size


def test_a_counter_that_fails_leaves_its_figure_unknown_and_the_program_alone(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no such tensor\n")

    monkeypatch.setattr(flops, "_by", fail)
    monkeypatch.setattr(operator_counts, "_kind_of", fail)
    figures = measured(MINE, lambda setup: stepping(torch.nn.Linear(64, 64), torch.ones(8, 64)))
    assert (figures.flops_per_step, figures.counts) == (None, None)
    assert figures.notes == (
        "FLOPs are not known, because pytest-gputrain failed to count them (ValueError: no such tensor)",
        "what a step asks for is not known, because pytest-gputrain failed to count it (ValueError: no such tensor)",
    )
