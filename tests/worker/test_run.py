"""A case from its task to its reply, trained for real on the CPU."""

import itertools
import re
import weakref

import msgspec
import numpy
import pytest
import torch
from zoo_examples import EXAMPLES, MINE, example, measured, once, refused, run, stepping, task_of, trained

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Measurement, OutOfMemory
from pytest_gputrain.worker import checks, methods
from pytest_gputrain.worker.__main__ import _cannot_import
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.libraries import load_for

LLAMA = example("llama-3.1-8b", activation_checkpointing=True, steps=2, warmup=1)
PLAIN = LLAMA.replace(activation_checkpointing=False)
CONFIG = architectures()["llama-3.1-8b"].trained_part.facts("tiny")


ONE_OF_A_KIND = {case.method: case for case in EXAMPLES}.values()
"""The suites train each family each time."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in ONE_OF_A_KIND else [pytest.mark.weekly], id=str(case)) for case in EXAMPLES],
)
def test_every_model_trains_by_every_method(case):
    architecture = architectures()[case.model]
    reply = measured(case.replace(activation_checkpointing=bool(architecture.blocks), steps=2, warmup=1))
    assert reply.parameters == architecture.trained_part.parameters["tiny"]
    assert reply.trainable_parameters == architecture.trainable[case.method]["tiny"]
    assert (len(reply.warmup_seconds), len(reply.step_seconds), len(reply.losses)) == (1, 2, 2)


def test_letters_that_utf_8_does_not_have_leave_the_rest_of_an_error_readable():
    """Half a surrogate pair, which a tokenizer's output may hold."""

    def build(setup):
        raise ValueError("a token \ud800 of no text")

    reply = launcher.inline(task_of(MINE), build)
    assert reply.sentence.startswith("ValueError: a token \\ud800 of no text (at ")
    (reply.sentence + reply.detail).encode()


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute(), "Mute: its message cannot be made, because __str__ fails with ValueError"),
        (ValueError("x" * 70_000_000), f"ValueError: {'x' * 1000}... (69,998,000 characters left out) ...{'x' * 1000}"),
    ],
    ids=["mute", "long"],
)
def test_an_error_whose_message_cannot_be_sent_is_told(error, said):
    def build(setup):
        raise error

    reply = launcher.inline(task_of(MINE), build)
    assert reply.sentence.startswith(f"{said} (at ")
    assert len(reply.detail) < 200_000
    assert "in build" in reply.detail


def test_a_fused_optimizer_gives_the_same_losses():
    plain, fused = (measured(LLAMA.replace(precision="fp32", optimizer=name, steps=3)) for name in ("adamw", "adamw-fused"))
    assert fused.losses == pytest.approx(plain.losses, rel=1e-5)


def test_checkpointing_saves_memory_and_repeats_arithmetic_by_its_share():
    llama = LLAMA.replace(model="llama-3.1-70b", precision="fp32")  # of three tiny blocks
    replies = [measured(llama.replace(activation_checkpointing=share)) for share in (False, 0.4, 0.7, True)]
    none, third, two_thirds, whole = (reply.recomputed_flops_per_step for reply in replies)
    assert none == 0 < whole
    assert (third, two_thirds) == pytest.approx((whole / 3, whole * 2 / 3))
    assert all(more.peak_allocated_bytes > less.peak_allocated_bytes for more, less in itertools.pairwise(replies))
    assert len({(reply.losses, reply.flops_per_step) for reply in replies}) == 1
    # Forward is a third of forward and backward; all of it but the head is repeated, up to the last unused output.
    head = 2 * replies[0].batch_size * replies[0].sequence_length * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    blocks = replies[0].flops_per_step / 3 - head
    assert 0.6 * blocks < whole <= 1.05 * blocks


def test_flops_are_six_per_parameter_and_token_and_attention():
    reply = once(PLAIN)
    tokens, hidden, layers = reply.batch_size * reply.sequence_length, CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    embedding, norms = CONFIG["vocab_size"] * hidden, (2 * layers + 1) * hidden
    products = 6 * tokens * (reply.parameters - embedding - norms)
    # Two products forward; backward is five: the scores again, and four gradients.
    assert reply.flops_per_step == products + 7 * 2 * tokens * reply.sequence_length * hidden * layers


def test_qlora_does_the_arithmetic_of_lora_on_smaller_weights():
    lora, qlora = (once(LLAMA.replace(method=method)) for method in ("lora", "qlora"))
    assert qlora.flops_per_step == lora.flops_per_step
    assert qlora.model_bytes < lora.model_bytes


def test_model_bytes_are_two_per_parameter_in_bf16_and_the_environment_names_the_libraries():
    reply, head_dim = once(PLAIN), 64 // 4
    # The rotary frequencies are fp32 buffers: the table and the original of it that transformers keeps.
    assert reply.model_bytes == 2 * reply.parameters + 2 * 4 * head_dim // 2
    assert torch.__version__.startswith(reply.environment.packages["torch"])  # to which it may add how it was built
    assert {"transformers", "peft"} <= reply.environment.packages.keys()
    assert (reply.environment.device_type, reply.environment.threads) == ("cpu", 1)


def test_libraries_that_are_missing_are_named_at_once(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("peft", "bitsandbytes") else name)
    task = task_of(LLAMA.replace(method="qlora"))
    with pytest.raises(ModuleNotFoundError) as failure:
        load_for(task)
    assert _cannot_import(task, failure.value).endswith(
        " cannot import peft and bitsandbytes; install them with: pip install peft bitsandbytes (or pytest-gputrain[suite])"
    )


@pytest.mark.slow
def test_figures_other_than_time_are_the_same_on_every_run():
    # In fresh processes, as every case has one: libraries keep tables that the first run of a process makes. Those without
    # quantisation are compared with a fork's in test_preloaded.
    task = task_of(LLAMA.replace(method="qlora"))
    first, second = (launcher.in_process(task, gpus=(), timeout_seconds=120) for _ in range(2))
    assert isinstance(first, Measurement), first
    for figure in ("peak_allocated_bytes", "model_bytes", "flops_per_step", "losses"):
        assert getattr(first, figure) == getattr(second, figure), figure


# Accumulation


def test_an_update_is_inside_the_window_however_long_the_accumulation():
    reply = measured(LLAMA.replace(gradient_accumulation=32, steps=4, warmup=2))
    counted, warm, timed = 2, 1, 1  # the counted steps are update, accumulate, update
    assert reply.updates == counted + warm + timed


def test_accumulated_gradients_are_the_mean_over_micro_batches():
    def gradients(accumulation):
        training = trained(LLAMA.replace(precision="fp32", gradient_accumulation=accumulation))
        for _ in range(accumulation):
            training.step(False)
        return [parameter.grad for parameter in training.model.parameters()]

    # Every micro-batch is the same batch, so their mean is that of one.
    torch.testing.assert_close(gradients(3), gradients(1))


def test_gradients_held_over_the_forward_pass_are_counted():
    plain, accumulated = once(PLAIN), measured(PLAIN.replace(gradient_accumulation=4))
    held = accumulated.peak_allocated_bytes - plain.peak_allocated_bytes
    # All gradients are two bytes a parameter; at the peak, backward has just begun and made few of its own.
    assert 0.5 * 2 * plain.parameters < held <= 2 * plain.parameters + 64


def test_own_accumulation_that_is_declared_is_counted_in_whole_rounds():
    def peak(accumulation):
        def build(setup):
            model = torch.nn.Linear(512, 512)
            optimizer = torch.optim.AdamW(model.parameters())
            for call in itertools.count(1):
                model(torch.ones(1, 512)).sum().backward()
                if call % accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                yield

        return measured(MINE.replace(gradient_accumulation=accumulation), build).peak_allocated_bytes

    assert peak(4) >= peak(1)


# What is no measurement


@pytest.mark.parametrize(
    ("method", "parts", "lora", "said"),
    [
        ("full", {"num_hidden_layers": 3}, {}, "llama-3-8b has 139,584"),
        ("lora", {}, {"targets": ("q_proj",)}, "should train 16,384"),
    ],
    ids=["size", "adapters"],
)
def test_another_model_than_its_facts_tell_is_none(monkeypatch, method, parts, lora, said):
    right = architectures()["llama-3-8b"]
    part = msgspec.structs.replace(right.trained_part, tiny={**right.trained_part.tiny, **parts})
    wrong = msgspec.structs.replace(right, parts={"model": part}, lora=msgspec.structs.replace(right.lora, **lora))
    monkeypatch.setitem(architectures(), "llama-3-8b", wrong)
    assert said in refused(LLAMA.replace(model="llama-3-8b", method=method))


def test_an_optimizer_that_does_nothing_or_a_rate_that_bf16_rounds_away_is_none(monkeypatch):
    assert "did not change" in refused(LLAMA.replace(learning_rate=1e-12))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    assert "did not change" in refused(LLAMA)


NO_NUMBER = "must return its loss as one number, or nothing"


@pytest.mark.parametrize(
    ("loss", "said", "phase"),
    [
        (float("nan"), "loss of timed step 1 is nan", "check"),
        (numpy.float32("nan"), "is nan", "check"),
        *((loss, NO_NUMBER, "count") for loss in ([1.0, 2.0], {"loss": 1.0}, torch.ones(2), torch.ones(1) * 1j, 10**400)),
    ],
)
def test_a_loss_that_is_no_finite_number_is_told(loss, said, phase):
    reply = run(MINE, lambda setup: lambda: loss)
    assert isinstance(reply, Crashed)
    assert said in reply.sentence
    assert reply.phase == phase


def test_host_memory_that_runs_out_is_an_outcome_with_its_line():
    reply = run(MINE, lambda setup: lambda: torch.empty(1 << 60, dtype=torch.uint8))
    assert isinstance(reply, OutOfMemory)
    assert (reply.where, reply.phase) == ("host", "count")
    assert re.search(r"\(at \S*test_run\.py:\d+\)$", reply.message)


# How it is counted


def test_an_own_model_is_counted_when_watched_and_watching_takes_no_memory():
    def build(watches):
        def builder(setup):
            model = torch.nn.Linear(8, 8, dtype=setup.dtype)
            if watches:
                setup.watch(model)
            return stepping(model, torch.ones(4, 8, dtype=setup.dtype))

        return builder

    watched, plain = measured(MINE, build(True)), measured(MINE, build(False))
    assert (watched.parameters, watched.trainable_parameters, watched.model_bytes) == (72, 72, 288)
    assert (plain.parameters, plain.trainable_parameters, plain.model_bytes) == (None, None, None)
    assert watched.peak_allocated_bytes == plain.peak_allocated_bytes


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_operators_that_are_made_of_others_are_counted(context):
    """Under inference_mode a product arrives as `linear`, which has no formula."""
    layer, values = torch.nn.Linear(8, 16), torch.ones(4, 8)
    with context(), count_flops() as flops:
        layer(values)
    assert flops.total == 2 * 4 * 8 * 16


def test_quantising_frees_each_layer_before_the_next(monkeypatch):
    class Blocks(torch.nn.ModuleList):
        def get_output_embeddings(self):
            return None

    def blocks(count):
        return Blocks(torch.nn.ModuleDict({"q_proj": torch.nn.Linear(64, 64)}) for _ in range(count))

    # On its first use bitsandbytes looks for a kernel in vain, and keeps the exception with the frames that it came through.
    methods._quantise(blocks(1), torch.bfloat16, torch.uint8)
    model, seen, plain = blocks(4), [], methods._quantised
    alive = [weakref.ref(block["q_proj"]) for block in model]

    def watched(linear, *types):
        seen.append(sum(reference() is not None for reference in alive))
        return plain(linear, *types)

    monkeypatch.setattr(methods, "_quantised", watched)
    methods._quantise(model, torch.bfloat16, torch.uint8)
    assert seen == [4, 3, 2, 1]


# Whether all that trains has moved


def moved(model, change, *, steps=1, gradients=True, **options):
    """Checks the model after a change; its gradients come from the change, or are taken as seen."""
    movement = checks.Movement(model, **options)
    if gradients:
        movement._reached.update(name for name, _ in model.named_parameters())
    with movement.watching(), torch.set_grad_enabled(not gradients):
        change(model)
    movement.check(*movement.changes(), steps=steps)


def test_one_element_of_many_and_changes_whose_sum_is_nothing_are_seen():
    def change(model):
        model.weight[0, ::2] += 2**-7
        model.weight[0, 1::2] -= 2**-7

    moved(torch.nn.Linear(500, 500, bias=False), lambda model: model.weight[250, 250].add_(1e-3))
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 4)))  # which cannot move
    moved(model, change)


def test_gradients_of_zero_are_some_where_losses_may_cancel():
    def change(critic):
        (critic(torch.ones(2, 4)).mean() - critic(torch.zeros(2, 4)).mean()).backward()
        with torch.no_grad():
            critic.weight.add_(1)

    moved(torch.nn.Linear(4, 1), change, gradients=False, accepts_zeros=True)


@pytest.mark.parametrize("precision", ["fp16-amp", "bf16-amp"])
def test_gradients_that_fp16_rounds_to_zero_are_no_fault(monkeypatch, precision):
    case = example("vgg-16", precision=precision, optimizer="adamw", learning_rate=1e-2, steps=2, warmup=1)
    monkeypatch.setattr(torch.Tensor, "backward", _without_gradients)
    reply = run(case)
    assert isinstance(reply, Measurement if precision == "fp16-amp" else Crashed), reply


def _without_gradients(loss, *args, **kwargs):
    """The gradients of a backward pass that underflows; decay changes the weights all the same."""
    torch.autograd.backward(loss * 0)


def _by(optimizer):
    return lambda model: stepping(model, torch.randn(2, 4), optimizer, lr=0.1)()


def _with_an_unused_vector():
    model = torch.nn.LayerNorm(4)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return model


@pytest.mark.parametrize(
    ("model", "change", "options", "said"),
    [
        (
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
            lambda model: model[0].weight.add_(1),
            {"steps": 5},
            r"1 of 4 trained tensors .*in 5 steps \(first: 1\.weight",
        ),
        (
            torch.nn.LayerNorm(4),
            lambda model: (model(torch.randn(2, 4)).sum() * 0).backward(),
            {"gradients": False},
            "each trained tensor got no gradient, or one of zeros only, and none changed",
        ),
        (torch.nn.Linear(2, 2).requires_grad_(False), lambda model: None, {}, "nothing trains"),
        *(
            (_with_an_unused_vector(), _by(optimizer), {"gradients": False}, r"1 of 3 .* got no gradient \(first: unused")
            for optimizer in (torch.optim.AdamW, torch.optim.SGD)
        ),
    ],
    ids=["stays", "gradients of zero", "nothing trained", "unused of AdamW", "unused of SGD"],
)
def test_what_has_not_moved_is_named(model, change, options, said):
    with pytest.raises(checks.CheckFailed, match=said):
        moved(model, change, **options)
