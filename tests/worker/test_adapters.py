"""The knobs of LoRA: what is adapted, and by how much."""

import bitsandbytes
import peft
import pytest
import torch
from several_processes import measured as measured_by_workers
from torch import nn
from zoo_examples import example, measured, refused, trained

from pytest_gputrain.worker.training import _apart

LLAMA = example("llama-3.1-8b", "lora", activation_checkpointing=True)
BLOCKS, WIDTH, KEYS, INNER = 2, 64, 32, 128
"""Of tiny Llama."""
LINEAR = {
    "q_proj": (WIDTH, WIDTH),
    "k_proj": (WIDTH, KEYS),
    "v_proj": (WIDTH, KEYS),
    "o_proj": (WIDTH, WIDTH),
    "gate_proj": (WIDTH, INNER),
    "up_proj": (WIDTH, INNER),
    "down_proj": (INNER, WIDTH),
}


def adapted(model):
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}


def layers(**knobs):
    """Those of the first block, by the last part of their names."""
    found = adapted(trained(LLAMA.replace(**knobs)).model)
    return {name.rpartition(".")[2]: module for name, module in found.items() if ".layers.0." in name}


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    ("knobs", "names", "rank"),
    [
        ({"lora_targets": "q_proj+v_proj"}, ["q_proj", "v_proj"], 8),
        ({"lora_targets": "mlp.down_proj", "lora_rank": 3}, ["down_proj"], 3),
        ({"lora_targets": "all-linear"}, list(LINEAR), 8),
        ({"dora": True, "lora_rank": 4}, list(LINEAR), 4),
        ({"dora": True, "lora_targets": "o_proj"}, ["o_proj"], 8),
    ],
    ids=str,
)
def test_the_named_layers_are_adapted_and_no_others(method, knobs, names, rank):
    training = trained(LLAMA.replace(method=method, **knobs))
    assert {name.rpartition(".")[2] for name in adapted(training.model)} == set(names)
    dora = knobs.get("dora", False)
    expected = BLOCKS * sum(rank * sum(LINEAR[name]) + dora * LINEAR[name][1] for name in names)
    assert training.trainable_parameters == expected
    packed = [module for module in training.model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(packed) == (BLOCKS * len(LINEAR) if method == "qlora" else 0), "the base does not depend on the adapters"


def test_all_linear_is_not_the_head():
    for targets, is_adapted in (("all-linear", False), ("lm_head", True)):
        assert any("lm_head" in name for name in adapted(trained(LLAMA.replace(lora_targets=targets)).model)) is is_adapted


@pytest.mark.parametrize(
    ("knobs", "scaling"),
    [({}, 2), ({"lora_rank": 4}, 2), ({"lora_alpha": 4}, 0.5), ({"lora_alpha": 4, "lora_rank": 16}, 0.25)],
)
def test_alpha_scales_what_adapters_add(knobs, scaling):
    assert {layer.scaling["default"] for layer in layers(**knobs).values()} == {scaling}


@pytest.mark.parametrize(("dropout", "kinds"), [(None, {nn.Dropout}), (0.5, {nn.Dropout}), (0.0, {nn.Identity})])
def test_dropout_is_the_case_s(dropout, kinds):
    found = [layer.lora_dropout["default"] for layer in layers(lora_dropout=dropout).values()]
    assert {type(module) for module in found} == kinds
    assert {getattr(module, "p", 0.0) for module in found} == {0.05 if dropout is None else dropout}


@pytest.mark.parametrize(
    "knobs", [{"dora": True}, {"lora_targets": "all-linear", "lora_dropout": 0.0}, {"lora_alpha": 64}], ids=str
)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_it_trains(method, knobs):
    losses = measured(LLAMA.replace(method=method, precision="fp32", learning_rate=1e-2, steps=3, warmup=1, **knobs)).losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("precision", "called", "quantized_from", "unquantized"),
    [
        ("bf16", None, torch.bfloat16, torch.bfloat16),
        ("bf16", True, torch.bfloat16, torch.float32),
        ("bf16-amp", None, torch.float32, torch.float32),
        ("bf16-amp", True, torch.bfloat16, torch.float32),
        ("bf16-amp", False, torch.bfloat16, torch.bfloat16),
    ],
)
def test_what_is_not_packed_is_in_fp32_where_peft_has_converted_it(precision, called, quantized_from, unquantized):
    case = LLAMA.replace(method="qlora", precision=precision, unquantized_fp32=called)
    model = trained(case).model
    packed = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert {module.weight.quant_state.dtype for module in packed} == {quantized_from}
    weights = {name: value for name, value in model.named_parameters() if value.dtype != torch.uint8}
    assert {value.dtype for name, value in weights.items() if "lora_" not in name} == {unquantized}
    assert {value.dtype for name, value in weights.items() if "lora_" in name} == {torch.float32}
    assert {name for name, value in weights.items() if value.requires_grad} == {name for name in weights if "lora_" in name}
    losses = measured(case.replace(learning_rate=1e-2, steps=3, warmup=1)).losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("targets", "said"),
    [("q_proj+qproj", "'qproj', but llama-3.1-8b has no linear layer of that name (did you mean"), ("mlp", "'mlp', but")],
)
def test_a_name_that_no_layer_has_is_told(targets, said):
    sentence = refused(LLAMA.replace(lora_targets=targets))
    assert said in sentence
    assert "it has down_proj, gate_proj, k_proj, lm_head" in sentence


def test_a_diffusion_model_adapts_what_is_named():
    names = adapted(trained(example("sd3", "lora", lora_targets="to_q+ff.net.2")).model)
    assert {name.endswith((".to_q", ".ff.net.2")) for name in names} == {True}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("zero3", marks=pytest.mark.weekly)])
@pytest.mark.parametrize("knobs", [{"dora": True}, {"lora_targets": "all-linear", "lora_alpha": 64}], ids=str)
def test_two_processes_adapt_as_one(parallel, knobs):
    case = LLAMA.replace(precision="fp32", learning_rate=1e-2, lora_dropout=0.0, steps=3, warmup=1, gpus=2, **knobs)
    losses, expected = (measured_by_workers(case.replace(parallel=name)).losses for name in (parallel, "ddp"))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_build_on_a_cpu_asks_no_gpu_for_a_pool_of_memory():
    case = LLAMA.replace(method="qlora", parallel="fsdp", gpus=2)
    with _apart(case, torch.device("cpu")):
        assert torch.ones(1).item() == 1
