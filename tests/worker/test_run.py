"""A case from its task to its reply, trained for real on the CPU."""

import re
import threading
import weakref

import msgspec
import numpy
import pytest
import torch
from zoo_examples import EXAMPLES, measured, run

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.validation import PRECISIONS
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed, Measurement, OutOfMemory, Task
from pytest_gputrain.worker import checks, methods
from pytest_gputrain.worker import training as recipe
from pytest_gputrain.worker.flops import checkpoint_contexts, count_flops
from pytest_gputrain.worker.threads import countable_threads

METHODS = ("full", "lora", "qlora")

LLAMA = Case(model="llama-3.1-8b", batch_size=2, sequence_length=8192, activation_checkpointing=True, steps=2, warmup=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXAMPLES, ids=str)
def test_every_model_trains_by_every_method(case):
    reply = measured(case.replace(activation_checkpointing=bool(architectures()[case.model].blocks), steps=2, warmup=1))
    architecture = architectures()[case.model]
    assert reply.parameters == architecture.trained_part.parameters["tiny"]
    assert reply.trainable_parameters == architecture.trainable[case.method]["tiny"]
    assert len(reply.step_seconds) == len(reply.losses) == 2
    assert len(reply.warmup_seconds) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_by_every_method(precision, method):
    assert measured(LLAMA.replace(precision=precision, method=method)).updates >= 2


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_optimizers_give_the_same_losses(optimizer):
    reply = measured(LLAMA.replace(precision="fp32", optimizer=optimizer, steps=3))
    reference = measured(LLAMA.replace(precision="fp32", steps=3))
    assert reply.losses == pytest.approx(reference.losses, rel=1e-5)


def test_partial_checkpointing_lies_between_all_and_nothing():
    llama = LLAMA.replace(model="llama-3.1-70b")  # of three tiny blocks
    shares = (False, 0.4, 0.7, True)
    replies = [measured(llama.replace(activation_checkpointing=share)) for share in shares]
    repeated = [reply.recomputed_flops_per_step for reply in replies]
    assert repeated[0] == 0
    assert repeated[1] == pytest.approx(repeated[3] / 3)
    assert repeated[2] == pytest.approx(repeated[3] * 2 / 3)
    peaks = [reply.peak_allocated_bytes for reply in replies]
    assert sorted(peaks, reverse=True) == peaks
    assert len({reply.losses for reply in replies}) == 1


def test_adapters_of_another_rank_are_counted_by_it():
    base, wide = (measured(LLAMA.replace(method="lora", lora_rank=rank)) for rank in (0, 16))
    assert wide.trainable_parameters == 2 * base.trainable_parameters


@pytest.mark.slow
def test_figures_other_than_time_are_the_same_on_every_run():
    # In fresh processes, as every case has one: libraries keep tables that the first run of a process makes. Those without
    # quantisation are compared with a fork's in test_preloaded.
    task = Task(case=LLAMA.replace(method="qlora"), scale="tiny", device_type="cpu", root=".")
    first, second = (launcher.in_process(task, gpus=(), timeout_seconds=120) for _ in range(2))
    assert isinstance(first, Measurement), first
    assert first.peak_allocated_bytes == second.peak_allocated_bytes
    assert first.model_bytes == second.model_bytes
    assert first.flops_per_step == second.flops_per_step
    assert first.losses == second.losses


def test_checkpointing_saves_memory_and_repeats_arithmetic():
    with_it = measured(LLAMA)
    without = measured(LLAMA.replace(activation_checkpointing=False))
    assert with_it.peak_allocated_bytes < without.peak_allocated_bytes
    assert with_it.flops_per_step == without.flops_per_step
    assert without.recomputed_flops_per_step == 0
    assert with_it.recomputed_flops_per_step > 0


def test_checkpointing_repeats_the_forward_pass_of_the_blocks():
    reply = measured(LLAMA.replace(precision="fp32"))
    config = architectures()["llama-3.1-8b"].trained_part.facts("tiny")
    tokens = reply.batch_size * reply.sequence_length
    head = 2 * tokens * config["vocab_size"] * config["hidden_size"]
    # Forward is a third of forward and backward; all of it but the head is repeated, up to the last unused output.
    blocks = reply.flops_per_step / 3 - head
    assert 0.6 * blocks < reply.recomputed_flops_per_step <= 1.05 * blocks


def test_flops_are_six_per_parameter_and_token_and_attention():
    reply = measured(LLAMA.replace(activation_checkpointing=False))
    config = architectures()["llama-3.1-8b"].trained_part.facts("tiny")
    tokens = reply.batch_size * reply.sequence_length
    embedding = config["vocab_size"] * config["hidden_size"]
    norms = (2 * config["num_hidden_layers"] + 1) * config["hidden_size"]
    products = 6 * tokens * (reply.parameters - embedding - norms)
    # Two products forward; backward is five: the scores again, and four gradients.
    attention = 7 * 2 * tokens * reply.sequence_length * config["hidden_size"] * config["num_hidden_layers"]
    assert reply.flops_per_step == products + attention


def test_qlora_does_the_arithmetic_of_lora():
    assert measured(LLAMA.replace(method="qlora")).flops_per_step == measured(LLAMA.replace(method="lora")).flops_per_step


def test_qlora_stores_linear_layers_in_less_than_lora():
    assert measured(LLAMA.replace(method="qlora")).model_bytes < measured(LLAMA.replace(method="lora")).model_bytes


def test_model_bytes_are_two_per_parameter_in_bf16():
    reply = measured(LLAMA)
    # The rotary frequencies are fp32 buffers: the table and the original of it that transformers keeps.
    head_dim = 64 // 4
    assert reply.model_bytes == 2 * reply.parameters + 2 * 4 * head_dim // 2


def test_an_update_is_inside_the_window_however_long_the_accumulation():
    reply = measured(LLAMA.replace(gradient_accumulation=32, steps=4, warmup=2))
    counted, warm, timed = 2, 1, 1  # the counted steps are update, accumulate, update
    assert reply.updates == counted + warm + timed


def test_accumulated_gradients_are_the_mean_over_micro_batches():
    def gradients(accumulation):
        torch.manual_seed(0)
        case = LLAMA.replace(precision="fp32", gradient_accumulation=accumulation)
        training = recipe.Training(case, "tiny", torch.device("cpu"))
        for _ in range(accumulation):
            training.step(False)
        return [parameter.grad for parameter in training.model.parameters()]

    # Every micro-batch is the same batch, so their mean is that of one.
    torch.testing.assert_close(gradients(3), gradients(1))


def test_a_model_of_another_size_is_no_measurement(monkeypatch):
    right = architectures()["llama-3-8b"]
    part = msgspec.structs.replace(right.trained_part, tiny={**right.trained_part.tiny, "num_hidden_layers": 3})
    monkeypatch.setitem(architectures(), "llama-3-8b", msgspec.structs.replace(right, parts={"model": part}))
    reply = run(LLAMA.replace(model="llama-3-8b"))
    assert isinstance(reply, Crashed)
    assert "llama-3-8b has 139,584" in reply.sentence


def test_adapters_on_too_few_layers_are_no_measurement(monkeypatch):
    right = architectures()["llama-3-8b"]
    recipe_of_one = msgspec.structs.replace(right.lora, targets=("q_proj",))
    monkeypatch.setitem(architectures(), "llama-3-8b", msgspec.structs.replace(right, lora=recipe_of_one))
    reply = run(LLAMA.replace(model="llama-3-8b", method="lora"))
    assert isinstance(reply, Crashed)
    assert "should train 16,384" in reply.sentence


def test_an_optimizer_that_does_nothing_is_no_measurement(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    reply = run(LLAMA)
    assert isinstance(reply, Crashed)
    assert "did not change" in reply.sentence


def test_a_learning_rate_that_bf16_rounds_away_is_no_measurement():
    reply = run(LLAMA.replace(learning_rate=1e-12))
    assert isinstance(reply, Crashed)
    assert "did not change" in reply.sentence


def test_a_loss_that_is_not_finite_is_no_measurement():
    def build(setup):
        return lambda: float("nan")

    reply = run(Case(model="mine", method="custom", code="inline"), build)
    assert isinstance(reply, Crashed)
    assert "loss of timed step 1 is nan" in reply.sentence


def test_host_memory_that_runs_out_is_an_outcome():
    def build(setup):
        return lambda: torch.empty(1 << 60, dtype=torch.uint8)

    reply = run(Case(model="mine", method="custom", code="inline"), build)
    assert isinstance(reply, OutOfMemory)
    assert reply.where == "host"
    assert reply.phase == "count"


def test_any_other_exception_is_a_crash_with_its_traceback():
    def build(setup):
        raise LookupError("no such data\nsecond line")

    reply = run(Case(model="mine", method="custom", code="inline"), build)
    assert isinstance(reply, Crashed)
    assert re.fullmatch(r"LookupError: no such data \(at .*test_run\.py:\d+\)", reply.sentence)
    assert "second line" in reply.detail
    assert reply.phase == "build"


def test_own_model_is_counted_and_checked_when_watched():
    def build(setup):
        model = torch.nn.Linear(8, 8, dtype=setup.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        setup.watch(model)

        def step():
            loss = model(torch.ones(4, 8, dtype=setup.dtype)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    reply = measured(Case(model="mine", method="custom", code="inline", precision="fp32"), build)
    assert (reply.parameters, reply.trainable_parameters, reply.model_bytes) == (72, 72, 288)
    assert reply.losses[-1] < reply.losses[0]


@pytest.mark.parametrize("result", [None, 3, "step"])
def test_own_code_that_returns_no_step_is_told(result):
    reply = run(Case(model="mine", method="custom", code="inline"), lambda setup: result)
    assert isinstance(reply, Crashed)
    assert "must build everything and return a function" in reply.sentence


def test_the_environment_names_the_libraries_that_are_there():
    environment = measured(LLAMA).environment
    assert environment.packages["torch"] == torch.__version__
    assert {"transformers", "peft"} <= environment.packages.keys()
    assert environment.device_type == "cpu"
    assert environment.threads == 1


def test_gradients_held_over_the_forward_pass_are_counted():
    plain = measured(LLAMA.replace(activation_checkpointing=False))
    accumulated = measured(LLAMA.replace(activation_checkpointing=False, gradient_accumulation=4))
    held = accumulated.peak_allocated_bytes - plain.peak_allocated_bytes
    # All gradients are two bytes a parameter; at the peak, backward has just begun and made few of its own.
    assert 0.5 * 2 * plain.parameters < held <= 2 * plain.parameters + 64


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_operators_that_are_made_of_others_are_counted(context):
    """Under inference_mode a product arrives as `linear`, which has no formula."""
    layer, values = torch.nn.Linear(8, 16), torch.ones(4, 8)
    with context(), count_flops() as flops:
        layer(values)
    assert flops.total == 2 * 4 * 8 * 16


def test_recomputation_is_told_apart_on_any_thread():
    """A GPU's backward runs on threads of torch's own."""
    _, recomputing = checkpoint_contexts()
    left = torch.ones(4, 5, requires_grad=True)

    def backward():
        with recomputing:
            left @ left.T

    with countable_threads(), count_flops() as flops:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert flops.recomputed > 0


@pytest.mark.parametrize("loss", [[1.0, 2.0], {"loss": 1.0}, torch.ones(2), torch.ones(1) * 1j, 10**400])
def test_a_loss_that_is_no_number_is_told_in_the_first_step(loss):
    reply = run(Case(model="mine", method="custom", code="inline"), lambda setup: lambda: loss)
    assert isinstance(reply, Crashed)
    assert "must return its loss as one number, or nothing" in reply.sentence
    assert reply.phase == "count"


def test_a_loss_of_numpy_is_checked_too():
    reply = run(Case(model="mine", method="custom", code="inline"), lambda setup: lambda: numpy.float32("nan"))
    assert isinstance(reply, Crashed)
    assert "is nan" in reply.sentence


def test_watching_a_model_does_not_change_its_memory():
    def peak(watched):
        def build(setup):
            model = torch.nn.Linear(64, 64)
            if watched:
                setup.watch(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step():
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return measured(Case(model="mine", method="custom", code="inline", precision="fp32"), build).peak_allocated_bytes

    assert peak(watched=True) == peak(watched=False)


def test_quantising_frees_each_layer_before_the_next():
    class Blocks(torch.nn.ModuleList):
        def get_output_embeddings(self):
            return None

    def blocks(count):
        return Blocks(torch.nn.ModuleDict({"q_proj": torch.nn.Linear(64, 64)}) for _ in range(count))

    # On its first use bitsandbytes looks for a kernel in vain, and keeps the exception with the frames that it came through.
    methods._quantise(blocks(1), torch.bfloat16)
    model = blocks(4)
    alive = [weakref.ref(block["q_proj"]) for block in model]
    seen = []
    plain = methods._quantised

    def watched(linear, compute):
        seen.append(sum(reference() is not None for reference in alive))
        return plain(linear, compute)

    methods._quantised, restore = watched, plain
    try:
        methods._quantise(model, torch.bfloat16)
    finally:
        methods._quantised = restore
    assert seen == [4, 3, 2, 1]


class TestMovement:
    @staticmethod
    def movement(model):
        """With every gradient seen, so that a test can be about the movement alone."""
        movement = checks.Movement(model)
        movement._reached.update(name for name, _ in model.named_parameters())
        return movement

    def test_sees_one_element_of_many(self):
        layer = torch.nn.Linear(500, 500)
        movement = self.movement(layer)
        with torch.no_grad():
            layer.weight[250, 250] += 1e-3
        movement.check(*movement.changes(), steps=1)

    def test_sees_symmetric_changes(self):
        layer = torch.nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
        torch.nn.init.ones_(layer.weight)
        movement = self.movement(layer)
        with torch.no_grad():
            layer.weight[0, ::2] += 2**-7
            layer.weight[0, 1::2] -= 2**-7
        movement.check(*movement.changes(), steps=1)

    def test_names_a_tensor_that_stays(self):
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        movement = self.movement(layers)
        with torch.no_grad():
            layers[0].weight.add_(1)
        with pytest.raises(checks.CheckFailed, match=r"1 of 4 trained tensors .*in 5 steps \(first: 1\.weight"):
            movement.check(*movement.changes(), steps=5)

    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
    def test_names_a_vector_without_gradient_whatever_the_optimizer(self, optimizer):
        model = torch.nn.LayerNorm(4)
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        updates = optimizer(model.parameters(), lr=0.1)
        movement = checks.Movement(model)
        with movement.watching():
            model(torch.randn(2, 4)).square().sum().backward()
        updates.step()
        with pytest.raises(checks.CheckFailed, match=r"1 of 3 .* got no gradient \(first: unused"):
            movement.check(*movement.changes(), steps=1)

    def test_gradients_of_zero_are_none(self):
        model = torch.nn.LayerNorm(4)
        movement = checks.Movement(model)
        with movement.watching():
            (model(torch.randn(2, 4)).sum() * 0).backward()
        with pytest.raises(
            checks.CheckFailed, match=r"got no gradient .*, or one of zeros only; .* requires_grad_\(False\)"
        ):
            movement.check(*movement.changes(), steps=1)

    def test_gradients_of_zero_are_some_where_losses_may_cancel(self):
        critic = torch.nn.Linear(4, 1)
        movement = checks.Movement(critic, accepts_zeros=True)
        with movement.watching():
            (critic(torch.ones(2, 4)).mean() - critic(torch.zeros(2, 4)).mean()).backward()
        with torch.no_grad():
            critic.weight.add_(1)
        movement.check(*movement.changes(), steps=1)

    def test_an_empty_parameter_cannot_move(self):
        model = torch.nn.Linear(4, 4)
        movement = self.movement(model)
        model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 4)))
        with torch.no_grad():
            model.weight.add_(1)
        checks.Movement(model)
        movement.check(*movement.changes(), steps=1)

    def test_nothing_trained_is_told(self):
        with pytest.raises(checks.CheckFailed, match="nothing trains"):
            checks.Movement(torch.nn.Linear(2, 2).requires_grad_(False)).check(set(), set(), steps=1)


def test_own_accumulation_that_is_declared_is_counted_in_whole_rounds():
    def peak(accumulation):
        def build(setup):
            model = torch.nn.Linear(512, 512)
            optimizer = torch.optim.AdamW(model.parameters())
            calls = 0

            def step():
                nonlocal calls
                calls += 1
                model(torch.ones(1, 512)).sum().backward()
                if calls % accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()

            return step

        case = Case(model="mine", method="custom", code="inline", gradient_accumulation=accumulation, precision="fp32")
        return measured(case, build).peak_allocated_bytes

    assert peak(4) >= peak(1)
