"""Loops that own their steps: generators and trainers of frameworks, measured like a function that takes one step."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_examples import measured, refused, run

from pytest_gputrain import Case
from pytest_gputrain.records import Crashed
from pytest_gputrain.records.step_memory import counted_steps, unfolded

MINE = Case(model="mine", method="custom", precision="fp32", batch_size=4, steps=3, warmup=1)


def small_training(setup):
    """What both forms train, and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    batch = torch.randn(setup.case.batch_size, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    setup.watch(model)

    def step():
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_a_generator_is_measured_like_a_function_and_closed_after_its_last_step():
    closed = []

    def careful(setup):
        step = small_training(setup)
        try:
            while True:
                yield step()
        finally:
            closed.append(True)

    def hungry(setup):
        step = small_training(setup)
        while True:
            kept = torch.ones(10**6)
            yield step()
            del kept

    function, loop = measured(MINE, small_training), measured(MINE, careful)
    assert closed == [True]
    # Its first step, which is part of its build, is not among the updates.
    for figure in ("peak_allocated_bytes", "flops_per_step", "parameters", "updates"):
        assert getattr(loop, figure) == getattr(function, figure), figure
    assert len(loop.step_seconds) == 3
    assert measured(MINE, hungry).peak_allocated_bytes >= loop.peak_allocated_bytes + 4 * 10**6


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (0, "the loop of mine never yields; write `yield` after each step"),
        (1, "the loop of mine ended after 1 step, but more have to be measured"),
        (5, "the loop of mine ended after 5 steps, but more have to be measured"),
    ],
)
def test_a_loop_that_ends_too_early_says_how_many_steps_it_gave(steps, sentence):
    def short(setup):
        step = small_training(setup)
        for _ in range(steps):
            yield step()

    assert refused(MINE, short).startswith(sentence)


def test_a_mode_held_open_across_a_yield_is_refused_by_name():
    def watched(setup):
        step = small_training(setup)
        with FlopCounterMode(display=False):
            while True:
                yield step()

    sentence = refused(MINE, watched)
    assert "the loop of mine yields inside of" in sentence
    assert "Flop" in sentence
    assert not torch.nn.modules.module._global_forward_pre_hooks, "the mode is left"


def broken(setup):
    step = small_training(setup)
    yield step()
    raise ZeroDivisionError("in my loop\nsecond line")


def lacking(setup):
    import no_such_framework  # noqa: F401


def ending(setup):
    raise SystemExit(2)


NO_STEP = "mine returned {}; it must build everything and return a function that runs one step"


@pytest.mark.parametrize(
    ("builder", "lines", "sentence"),
    [
        (broken, 3, "ZeroDivisionError: in my loop (at {})"),
        (lacking, 1, f"ModuleNotFoundError: No module named 'no_such_framework' (at {{}}); install it for {sys.executable}"),
        (ending, 1, "sys.exit() was called (at {}), which"),
        *((lambda setup, made=made: made, 0, NO_STEP.format(type(made).__name__)) for made in (3, None, "step")),
    ],
)
def test_what_cannot_train_is_told_with_its_line(builder, lines, sentence):
    place = f"tests/worker/{__name__}.py:{builder.__code__.co_firstlineno + lines}"
    reply = run(MINE, builder)
    assert isinstance(reply, Crashed)
    assert reply.sentence.startswith(sentence.format(place))
    assert builder is not broken or "second line" in reply.detail


@pytest.fixture
def llama(tmp_path):
    """Makes a Trainer of a small Llama, as a user's script does."""
    transformers = pytest.importorskip("transformers")

    def make(callback=None, **arguments):
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=128, **heads)
        ids = torch.randint(128, (64, 32))
        samples = [{"input_ids": row, "labels": row} for row in ids]
        given = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, use_cpu=True, learning_rate=1e-3, **arguments
        )
        model = transformers.LlamaForCausalLM(config)
        return transformers.Trainer(model, given, train_dataset=samples, callbacks=callback and [callback])

    return make


def assert_allocates_alike(framework, by_hand, *, ahead=0, phases=("forward", "backward", "optimizer", "between")):
    """The counted steps of both have the same peaks, but for a batch ``ahead`` of so many bytes, and a few numbers.

    From Python 3.14 on, the numbers of some steps lie in cycles that are not collected yet.
    """
    more = {phase: framework.phase_peak_bytes[phase] - by_hand.phase_peak_bytes[phase] for phase in phases}
    assert all(ahead <= size <= ahead + 256 for size in more.values()), more
    assert framework.parameters == by_hand.parameters
    assert framework.flops_per_step == by_hand.flops_per_step > 0
    assert (len(framework.step_seconds), len(framework.losses)) == (3, 3)


def test_a_trainer_is_measured_by_returning_it_and_allocates_as_a_loop_by_hand_does(llama, tmp_path):
    def by_hand(setup):
        trainer = llama()
        model = trainer.model.train()
        optimizer = trainer.create_optimizer()
        setup.watch(model)
        for _ in range(10):
            for batch in trainer.get_train_dataloader():
                loss = model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    # Its running loss, the loss and the norm of the gradients of the last step, and the number of its tokens.
    assert_allocates_alike(measured(MINE, lambda setup: llama()), measured(MINE, by_hand))
    assert not list((tmp_path / "out").glob("*")), "no checkpoints and logs are written"


def test_a_trainer_that_accumulates_takes_micro_batches(llama):
    accumulating = MINE.replace(gradient_accumulation=4, steps=6, warmup=3)
    reply = measured(accumulating, lambda setup: llama(gradient_accumulation_steps=4))
    assert (len(reply.warmup_seconds), len(reply.step_seconds)) == (4, 8), "whole updates"
    # Trainer divides what it trains on; what is told is the loss.
    assert reply.losses[0] == pytest.approx(measured(MINE, lambda setup: llama()).losses[0], rel=0.2)


def test_a_trainer_takes_the_steps_that_timing_and_memory_need(llama):
    many = MINE.replace(gradient_accumulation=2, steps=30)
    reply = measured(many, lambda setup: llama(gradient_accumulation_steps=2, max_steps=1))
    assert len([*unfolded(reply.memory_of_steps)]) == 30


@pytest.mark.parametrize("knob", ["gradient_accumulation", "batch_size"])
def test_a_trainer_and_its_case_say_the_same(llama, knob):
    theirs = getattr(MINE, knob)
    sentence = refused(MINE.replace(**{knob: 2 * theirs}), lambda setup: llama())
    assert sentence.endswith(f"and its case has {knob}={2 * theirs}; give check() {knob}={theirs}")


def test_early_stopping_is_left_out_and_a_trainer_that_stops_by_itself_is_told(llama):
    transformers = pytest.importorskip("transformers")

    class Impatient(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_training_stop = state.global_step >= 4

    measured(MINE, lambda setup: llama(transformers.EarlyStoppingCallback()))
    assert "the loop of mine ended after 4 steps" in refused(MINE, lambda setup: llama(Impatient()))


@pytest.fixture
def autoencoder(tmp_path):
    """Makes what Lightning trains, as a user's script does."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Autoencoder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def training_step(self, batch, index):
            (samples,) = batch
            loss = (self.layers(samples) - samples).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def make(*, callbacks=(), **arguments):
        torch.manual_seed(0)
        arguments["callbacks"] = [getattr(lightning.callbacks, name)(*given) for name, *given in callbacks]
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 32)), batch_size=4)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path / "out", **arguments)
        return trainer, Autoencoder(), loader

    return make


@pytest.mark.filterwarnings("ignore")  # Lightning warns of its own defaults
def test_lightning_is_measured_past_its_own_end_and_allocates_as_a_loop_by_hand_does(autoencoder, tmp_path):
    def by_hand(setup):
        _, module, loader = autoencoder()
        optimizer = module.configure_optimizers()
        setup.watch(module)
        for _ in range(50):
            for (samples,) in loader:
                loss = (module.layers(samples) - samples).square().mean()
                optimizer.zero_grad()  # as late as Lightning does
                loss.backward()
                optimizer.step()
                yield loss

    lightning, by_hand = measured(MINE, lambda setup: autoencoder()), measured(MINE, by_hand)
    # It runs the forward pass inside of the optimizer's step, which is the optimizer's phase then.
    assert_allocates_alike(lightning, by_hand, phases=("backward", "optimizer", "between"))
    assert not (tmp_path / "out").exists(), "no checkpoints and logs are written"


@pytest.mark.filterwarnings("ignore")
def test_lightning_that_accumulates_takes_micro_batches(autoencoder):
    builder = lambda setup: autoencoder(accumulate_grad_batches=2)  # noqa: E731
    assert len(measured(MINE.replace(gradient_accumulation=2, steps=4), builder).step_seconds) == 4
    assert refused(MINE, builder).endswith("give check() gradient_accumulation=2")
    assert refused(MINE.replace(batch_size=2), lambda setup: autoencoder()).endswith("batch_size=4")
    assert refused(MINE, lambda setup: autoencoder()[0]).endswith("or return (trainer, module, loader) of Lightning")


@pytest.mark.filterwarnings("ignore")
def test_lightning_ends_where_it_is_measured_whatever_its_own_end(autoencoder):
    callbacks = [("EarlyStopping", "val_loss"), ("LearningRateMonitor",), ("Timer", "00:00:01:00")]
    assert measured(MINE, lambda setup: autoencoder(min_steps=10**6, callbacks=callbacks)).updates < 50


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_an_epoch_of_a_trainer_is_the_whole_of_one(framework, request):
    if framework == "transformers":
        llama = request.getfixturevalue("llama")
        builder, steps = lambda setup: llama(num_train_epochs=3), 16
    else:
        trainer, module, _ = request.getfixturevalue("autoencoder")(max_steps=3)
        samples = torch.utils.data.TensorDataset(torch.randn(72, 32))
        builder, steps = lambda setup: (trainer, module, torch.utils.data.DataLoader(samples, batch_size=4)), 18
    reply = measured(MINE.replace(epoch=True), builder)
    memory = [*unfolded(reply.memory_of_steps)]
    assert len(memory) == steps
    assert memory[-1].peak
    assert counted_steps(reply.memory_of_steps) >= steps - 3


def test_accelerate_allocates_as_a_loop_by_hand_does():
    accelerate = pytest.importorskip("accelerate")

    def training(setup, prepare, backward):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        loader = torch.utils.data.DataLoader(torch.randn(400, 32), batch_size=4)
        model, optimizer, loader = prepare(model, torch.optim.AdamW(model.parameters()), loader)
        setup.watch(model)
        for batch in loader:
            loss = (model(batch) - batch).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    def by_accelerate(setup):
        accelerator = accelerate.Accelerator(cpu=True)
        return training(setup, accelerator.prepare, accelerator.backward)

    def by_hand(setup):
        return training(setup, lambda *parts: parts, torch.Tensor.backward)

    assert_allocates_alike(measured(MINE, by_accelerate), measured(MINE, by_hand), ahead=4 * 32 * 4)
