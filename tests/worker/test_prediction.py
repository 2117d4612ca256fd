"""A prediction by the rules of a CPU, against what the worker counts there in real steps."""

import contextlib
from unittest import mock

import bitsandbytes
import msgspec
import pytest
import torch
from zoo_examples import example, run

from pytest_gputrain import Case
from pytest_gputrain.cases.validation import OPTIMIZERS, PRECISIONS
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Measurement, Prediction, Target, Task
from pytest_gputrain.utils.units import GiB, MiB
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.prediction.predict import predict
from pytest_gputrain.worker.progress import Progress

CPU = Target(marker="cpu", kind="cpu")
H100 = Target(
    marker="h100",
    kind="cuda",
    memory_bytes=80 * GiB,
    peak_flops={"fp32": 67e12, "bf16": 989.4e12, "fp16": 989.4e12},
    bandwidth=3.35e12,
)

LLAMA = example("llama-3.1-8b", activation_checkpointing=True)
OWN = Case(model="own", method="custom", precision="fp32", code="here")
# The quickest; `test_prediction_suite` has every model of the suite.
ONE_OF_EACH_FAMILY = [
    "phi-3-mini-128k",
    "bert-large",
    "transformer-big",
    "resnet-50",
    "sd3",
    "hunyuan-video",
    "qwen2-vl-2b",
    "word2vec",
    "ctr-dnn",
]


def predicted(case, target=CPU, builder=None, scale="tiny"):
    task = Task(case=case, scale=scale, device_type="cpu", root=".", target=target)
    reply = predict(task, Progress(None), builder)
    assert isinstance(reply, Prediction), reply
    return reply


def compare(case, builder=None):
    load(case)  # which makes tensors that are none of the training's
    # A table that bitsandbytes makes when it first quantises is of the training.
    with mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True):
        real = run(case.replace(steps=1, warmup=0), builder)
    assert isinstance(real, Measurement), real
    prediction = predicted(case, builder=builder)
    assert prediction.peak_allocated_bytes == real.peak_allocated_bytes
    assert prediction.phase_peak_bytes == real.phase_peak_bytes
    assert prediction.model_bytes == real.model_bytes
    assert prediction.parameters == real.parameters
    assert prediction.trainable_parameters == real.trainable_parameters
    assert prediction.flops_per_step == (real.flops_per_step or 0)
    assert prediction.recomputed_flops_per_step == (real.recomputed_flops_per_step or 0)


@pytest.mark.parametrize("model", ONE_OF_EACH_FAMILY)
def test_every_family(model):
    compare(example(model))


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_and_method(precision, method):
    compare(LLAMA.replace(precision=precision, method=method))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer(optimizer):
    compare(LLAMA.replace(optimizer=optimizer, precision="fp32"))


@pytest.mark.parametrize("share", [False, 0.5])
def test_partial_checkpointing(share):
    compare(LLAMA.replace(activation_checkpointing=share))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_accumulation(method):
    compare(LLAMA.replace(method=method, gradient_accumulation=4))


@pytest.mark.parametrize("as_context", [False, True])
def test_numbers_become_tensors_of_the_device(as_context):
    def build(setup):
        kept = torch.ones(8, device=setup.device)

        def step():
            with setup.device if as_context else contextlib.nullcontext():
                kept * torch.tensor([2.0] * 8, device=None if as_context else setup.device)

        return step

    assert predicted(OWN, H100, build).peak_allocated_bytes == 3 * 512


def test_integers_become_the_default_type_of_the_moment():
    def build(setup):
        counts = torch.ones(2**20, device=setup.device, dtype=torch.int64)

        def step():
            for dtype in (torch.bfloat16, torch.float32):
                torch.set_default_dtype(dtype)
                assert (counts / 3).dtype == dtype

        return step

    compare(OWN, build)


def test_a_gpu_s_optimizer_works_on_lists_of_tensors():
    lists, fused = (predicted(LLAMA.replace(optimizer=name), H100) for name in ("adamw", "adamw-fused"))
    temporary = lists.phase_peak_bytes["optimizer"] - fused.phase_peak_bytes["optimizer"]
    # One copy of all weights, in blocks of 512 bytes.
    assert temporary == pytest.approx(2 * lists.parameters, rel=0.05)


def of_gpu(case, phase, **fields):
    return predicted(case, msgspec.structs.replace(H100, **fields)).phase_peak_bytes[phase]


def test_scores_of_attention_are_held_where_no_kernel_does_without_them():
    plain = LLAMA.replace(activation_checkpointing=False)
    in_fp32 = plain.replace(precision="fp32")
    scores = 4 * 2 * 4 * 128 * 128
    # Of grouped queries, which transformers 4.49 repeats.
    assert of_gpu(in_fp32, "forward") > of_gpu(in_fp32.replace(attention="sdpa-4.49"), "forward") + scores
    assert of_gpu(plain, "forward", capability=(9, 0)) < of_gpu(plain, "forward", capability=(7, 0))
    pangu = example("pangu-350m", precision="fp32")
    unfused, current = (of_gpu(pangu, "forward", attention=attention) for attention in ("unfused", "current"))
    # Of each of three blocks the softmax, what dropout left of it and its mask: 4 + 4 + 1 bytes for each of 4 x 64 x 64.
    assert unfused > current + 3 * 9 * 4 * 64 * 64


def test_optimizers_may_loop():
    assert of_gpu(LLAMA, "optimizer", lists=False) < of_gpu(LLAMA, "optimizer", lists=True)


def test_matrix_products_take_a_workspace_for_each_of_two_threads():
    without, with_one = (predicted(LLAMA, msgspec.structs.replace(H100, workspace_bytes=size)) for size in (0, MiB))
    for phase in ("forward", "backward", "optimizer"):
        # The second step has both.
        assert with_one.phase_peak_bytes[phase] - without.phase_peak_bytes[phase] == 2 * MiB


def test_what_a_compiler_makes_of_a_case_and_a_wrong_model_are_not_predicted(monkeypatch):
    def refusal(case):
        reply = predict(Task(case=case, scale="tiny", device_type="cpu", root=".", target=H100), Progress(None))
        assert isinstance(reply, Crashed)
        return reply

    compiled = refusal(LLAMA.replace(compile="default")).sentence
    assert "a prediction does not know the compiled code; set compile to off" in compiled
    wrong = mock.Mock(side_effect=ValueError("not this one"))
    monkeypatch.setattr("pytest_gputrain.worker.training.check_parameters", wrong)
    assert (refusal(LLAMA).sentence, refusal(LLAMA).phase) == ("ValueError: not this one", "build")


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

    prediction = predicted(OWN, H100, build)
    # Those of the step before are there until the new ones are.
    assert prediction.phase_peak_bytes["forward"] == 8 * 11 * MiB
    assert prediction.peak_allocated_bytes == 8 * 12 * MiB


@pytest.mark.slow
def test_the_same_in_every_process():
    task = Task(case=LLAMA.replace(method="lora"), scale="tiny", device_type="cpu", root=".", target=H100)
    first, second = (launcher.predict(task, timeout_seconds=120) for _ in range(2))
    assert isinstance(first, Prediction), first
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
