"""What models of several families have in common."""

import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo_examples import METHODS_OF_MODELS, STATED, built, example, inputs_of, measured, refused, trained

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.worker.flops import count_flops

WITH_POSITIONS = {"pangu-350m": 1024, "bert-large": 512, "transformer-big": 256}
"""Models by the length of their table of positions at full size."""
GENERATING = [name for name, architecture in STATED.items() if "diffusion" in architecture.family]


@pytest.mark.parametrize(("name", "positions"), WITH_POSITIONS.items())
def test_a_sample_longer_than_the_table_of_positions_is_told_at_any_scale(name, positions):
    assert refused(example(name, sequence_length=positions + 1)) == (
        f"{name} has a table of {positions:,} positions, too few for sequence_length={positions + 1}; "
        f"set it to at most {positions}"
    )


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_a_sample_has_the_case_s_length_up_to_the_tiny_table(name):
    most = architectures()[name].trained_part.facts("tiny")["max_position_embeddings"]
    for asked, expected in [(7, 7), (most, most), (most + 1, most)]:
        batch = built(name, sequence_length=asked).batch(torch.device("cpu"))
        assert batch.sequence_length == batch.inputs["input_ids"].shape[1] == expected


@pytest.fixture
def doubles():
    """Arithmetic in which rounding is far below any gradient: a bias of all keys gets nothing but rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# No method trains LLaVA's tower, and word2vec's contexts begin at zero.
@pytest.mark.parametrize("name", [name for name in STATED if not name.startswith(("llava", "word2vec"))])
@pytest.mark.usefixtures("doubles")
def test_idle_parameters_are_exactly_those_without_a_gradient(name):
    workload = built(name)
    workload.loss(inputs_of(workload)).backward()
    gradients = {key: value.grad for key, value in workload.model.named_parameters() if value.requires_grad}
    norms = {key: 0.0 if gradient is None else float(gradient.norm()) for key, gradient in gradients.items()}
    without = {key for key, norm in norms.items() if norm < 1e-14 * max(norms.values())}
    assert without == {key for key, norm in norms.items() if norm < 1e-8 * max(norms.values())}, "a gradient in doubt"
    patterns = architectures()[name].idle.get("tiny", ())
    assert without == {key for key in norms if any(re.fullmatch(pattern, key) for pattern in patterns)}


@pytest.mark.parametrize("name", GENERATING)
def test_every_step_trains_on_the_same_noise_and_time(name):
    workload = built(name)
    inputs = inputs_of(workload)
    assert torch.equal(workload.loss(inputs), workload.loss(inputs))


PRODUCTS = {"bert-large": 6}
"""Of attention, forward and backward. Two are forward; backward has four gradients and the scores again, unless dropout has
the weights kept, as on a CPU."""
BY_OTHER_MEANS = ("gemma-2-9b", "pangu-350m", "pangu-2.6b", "mochi-1", "word2vec")
"""Models with products outside of layers and torch's attention."""
COUNTED = {(STATED[name].trained_part.model_class, method): name for name, method in METHODS_OF_MODELS if method != "qlora"}


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for (_, method), name in COUNTED.items() if name not in BY_OTHER_MEANS]
)
def test_flops_are_those_of_layers_and_attention(name, method):
    """A layer's product is there once more for each gradient that is wanted: of its input, and of its weights."""
    training = trained(example(name, method, precision="fp32"))
    flops, attend = [], functional.scaled_dot_product_attention

    def layer(module, arguments, output):
        wanted = [arguments[0].requires_grad, module.weight.requires_grad] if torch.is_grad_enabled() else []
        flops.append((1 + sum(wanted)) * 2 * output.numel() * module.weight[0].numel())

    def attention(query, key, *others, **options):
        products = PRODUCTS.get(name, 7) if query.requires_grad and torch.is_grad_enabled() else 2
        flops.append(products * 2 * query.numel() * key.shape[-2])
        return attend(query, key, *others, **options)

    for module in training.model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            module.register_forward_hook(layer)
    with mock.patch.object(functional, "scaled_dot_product_attention", attention), count_flops() as counted:
        training.step(True)
    assert counted.total == sum(flops) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "fp16-amp"])
@pytest.mark.parametrize(
    "name", [*WITH_POSITIONS, "resnet-50", "vgg-16", "word2vec", "ctr-dnn", "wide-deep", "llava-1.6-13b", "qwen2-vl-2b"]
)
def test_every_precision_trains_every_family(name, precision):
    assert measured(example(name, precision=precision, steps=1, warmup=1)).updates >= 2
