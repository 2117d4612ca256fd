"""A prediction by the rules of a CPU, against what the worker counts there in real steps, and the rules of GPUs."""

from unittest import mock

import msgspec
import pytest
import torch
from zoo_examples import H100, compare, example, predicted, replied, task_of

from pytest_gputrain import Case
from pytest_gputrain.cases.validation import OPTIMIZERS, PRECISIONS
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Prediction
from pytest_gputrain.utils.units import MiB

LLAMA = example("llama-3.1-8b", activation_checkpointing=True)
PLAIN = LLAMA.replace(activation_checkpointing=False)
SHORT = Case(model="llama-3.1-8b", precision="fp32", batch_size=2, sequence_length=32)
CLIPPED = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.5, "lr_scheduler": "cosine", "lr_warmup_steps": 3}
LLAVA = {"resolution": "336x336", "sequence_length": 2048}
QWEN = {"resolution": "504x364", "sequence_length": 512}

QUICK = [
    # The quickest of each family; `test_prediction_suite` has every model of the suite.
    *map(example, ("phi-3-mini-128k", "bert-large", "transformer-big", "resnet-50", "sd3", "hunyuan-video", "qwen2-vl-2b")),
    *map(example, ("word2vec", "ctr-dnn")),
    *(LLAMA.replace(precision=name, method=method) for name in PRECISIONS for method in ("full", "lora", "qlora")),
    *(LLAMA.replace(optimizer=name, precision="fp32") for name in OPTIMIZERS if name != "adamw"),
    *(LLAMA.replace(activation_checkpointing=share) for share in (False, 0.5)),
    *(LLAMA.replace(method=method, gradient_accumulation=4) for method in ("full", "lora")),
    SHORT.replace(**CLIPPED),
    SHORT.replace(**CLIPPED, precision="fp16-amp"),
    SHORT.replace(**{**CLIPPED, "optimizer": "adamw"}, method="lora"),
    PLAIN.replace(loss="fp32"),
    PLAIN.replace(loss="fp32", method="lora", loss_chunks=4, lengths="padded"),
    example("gemma-2-9b", loss="fp32", precision="bf16-amp"),
    example("qwen2-vl-2b", loss="fp32"),
    *(
        SHORT.replace(precision="bf16", master_weights=True, **knobs)
        for knobs in (
            {},
            {"optimizer": "adamw-fused"},
            {"optimizer": "momentum", "learning_rate": 0.1},
            {"gradient_accumulation": 3, "activation_checkpointing": True},
            {"max_grad_norm": 0.5},
            {"model": "llava-1.6-7b", "method": "pretrain", **LLAVA},
        )
    ),
    *(
        example(model, activation_checkpointing=True, activation_checkpointing_policy="save-matmuls")
        for model in ("sd3", "qwen2-vl-2b")
    ),
]
SLOW = [
    *(
        LLAMA.replace(method=method, **knobs)
        for method in ("lora", "qlora")
        for knobs in (
            {"dora": True},
            {"dora": True, "lora_dropout": 0.0},
            {"lora_targets": "all-linear"},
            {"lora_targets": "q_proj+v_proj"},
            {"lora_dropout": 0.0},
            {"lora_rank": 64},
        )
    ),
    *(
        LLAMA.replace(optimizer=name, **knobs)
        for name in ("adamw_8bit", "paged_adamw_8bit", "adafactor")
        for knobs in ({}, {"master_weights": True}, {"method": "qlora"})
    ),
    *(
        LLAMA.replace(precision="fp32", batch_size=8, activation_checkpointing_policy=policy).replace(**knobs)
        for policy in ("save-attention", "save-matmuls")
        for knobs in (
            {},
            {"method": "lora"},
            {"method": "qlora", "precision": "bf16"},
            {"precision": "bf16-amp", "loss_chunks": 3},
            {"activation_checkpointing": 0.5},
        )
    ),
    example("llama-3.1-8b", lengths="padded", batch_size=4, precision="bf16", method="lora"),
    example("gemma-2-9b", lengths="packed", batch_size=2),
    example("llava-1.6-7b", "lora", lengths="padded", batch_size=4, **LLAVA),
    example("qwen2-vl-2b", lengths="padded", batch_size=4, **QWEN),
    *(example(model, ids="zipf", batch_size=100, precision="fp32") for model in ("word2vec", "ctr-dnn")),
    *(
        case.replace(loader_workers=workers)
        for workers in (1, 2)
        for case in (
            example("word2vec", batch_size=100, precision="fp32"),
            example("resnet-50", batch_size=4, precision="fp32"),
            example("llama-3.1-8b", lengths="padded"),
            example("qwen2-vl-2b", "sft", **QWEN),
            example("sd3"),
        )
    ),
    *(
        example(
            *pair,
            precision="bf16-amp" if "lora" in pair[1] else "bf16",
            activation_checkpointing=True,
            reentrant_checkpointing=True,
        )
        for pair in (
            *((model, "full") for model in ("phi-3-mini-128k", "pangu-350m", "bert-large", "transformer-big")),
            *(("llama-3.1-8b", method) for method in ("lora", "qlora")),
            *((model, "lora") for model in ("flux.1-dev", "mochi-1", "sd-1.5")),
            *((model, "full") for model in ("hunyuan-video", "wan2.1-i2v")),
            *(("qwen2-vl-2b", "sft"), ("llava-1.6-7b", "pretrain")),
        )
    ),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")  # FLUX's, under autocast
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # of a forked loader
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_what_is_predicted_is_counted_to_the_byte(case):
    compare(case)


# Rules of GPUs


def of_gpu(case, phase, **fields):
    return predicted(case, msgspec.structs.replace(H100, **fields)).phase_peak_bytes[phase]


def test_a_gpu_s_optimizer_works_on_lists_of_tensors():
    lists, fused, loop = (
        of_gpu(LLAMA.replace(optimizer=name), "optimizer", lists=lists)
        for name, lists in (("adamw", True), ("adamw-fused", True), ("adamw", False))
    )
    # One copy of all weights, in blocks of 512 bytes.
    assert lists - fused == pytest.approx(2 * predicted(LLAMA, H100).parameters, rel=0.05)
    assert loop < lists


def test_scores_of_attention_are_held_where_no_kernel_does_without_them():
    in_fp32 = PLAIN.replace(precision="fp32")
    scores = 4 * 2 * 4 * 128 * 128
    # Of grouped queries, which transformers 4.49 repeats.
    assert of_gpu(in_fp32, "forward") > of_gpu(in_fp32.replace(attention="sdpa-4.49"), "forward") + scores
    assert of_gpu(PLAIN, "forward", capability=(9, 0)) < of_gpu(PLAIN, "forward", capability=(7, 0))
    pangu = example("pangu-350m", precision="fp32")
    unfused, current = (of_gpu(pangu, "forward", attention=attention) for attention in ("unfused", "current"))
    # Of each of three blocks the softmax, what dropout left of it and its mask: 4 + 4 + 1 bytes for each of 4 x 64 x 64.
    assert unfused > current + 3 * 9 * 4 * 64 * 64


def test_matrix_products_take_a_workspace_for_each_of_two_threads():
    for phase in ("forward", "backward", "optimizer"):
        # The second step has both.
        assert of_gpu(LLAMA, phase, workspace_bytes=MiB) - of_gpu(LLAMA, phase, workspace_bytes=0) == 2 * MiB


def test_what_a_compiler_makes_of_a_case_and_a_wrong_model_are_not_predicted(monkeypatch):
    compiled = replied(LLAMA.replace(compile="default"), H100)
    assert "a prediction does not know the compiled code; set compile to off" in compiled.sentence
    wrong = mock.Mock(side_effect=ValueError("not this one"))
    monkeypatch.setattr("pytest_gputrain.worker.training.check_parameters", wrong)
    reply = replied(LLAMA, H100)
    assert isinstance(reply, Crashed)
    assert (reply.sentence, reply.phase) == ("ValueError: not this one", "build")


def test_too_little_memory_is_told_with_what_it_was_for():
    prediction = predicted(LLAMA.replace(batch_size=16), msgspec.structs.replace(H100, memory_bytes=2 * MiB))
    assert prediction.fits is False
    assert prediction.peak_reserved_bytes > 2 * MiB
    assert prediction.refused.phase in ("forward", "backward", "optimizer")
    assert prediction.refused.bytes > 0


def test_what_is_held_covers_what_is_allocated():
    prediction = predicted(LLAMA, H100)
    assert prediction.fits is True
    assert prediction.refused is None
    assert prediction.peak_allocated_bytes <= prediction.peak_reserved_bytes
    highest = max(size for phase, size in prediction.phase_peak_bytes.items() if phase != "build")
    assert prediction.phase_peak_bytes[prediction.peak_phase] == highest <= prediction.peak_allocated_bytes
    assert sum(row.bytes for row in prediction.largest[prediction.peak_phase]) <= highest


def test_what_is_left_of_a_block_counts_as_allocated():
    """As torch.cuda.max_memory_allocated() counts it: a rest of at most 1 MiB stays with the block that it is left of."""

    def build(setup):
        kept = []

        def step():
            kept[:] = [torch.empty(11 * MiB, dtype=torch.uint8, device=setup.device) for _ in range(4)]

        return step

    prediction = predicted(Case(model="own", method="custom", precision="fp32", code="here"), H100, build)
    # Those of the step before are there until the new ones are.
    assert prediction.phase_peak_bytes["forward"] == 8 * 11 * MiB
    assert prediction.peak_allocated_bytes == 8 * 12 * MiB


@pytest.mark.slow
def test_the_same_in_every_process():
    task = task_of(LLAMA.replace(method="lora"), target=H100)
    first, second = (launcher.predict(task, timeout_seconds=120) for _ in range(2))
    assert isinstance(first, Prediction), first
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
