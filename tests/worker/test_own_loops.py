"""Loops that own their steps: generators and trainers of frameworks, measured like a function that takes one step."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_examples import run

from pytest_gputrain import Case, adapters
from pytest_gputrain.records import Crashed, Measurement

MINE = Case(model="mine", method="custom", precision="fp32", batch_size=4, steps=3, warmup=1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Other tests of this process were ranks of a group, by which accelerate would take it for one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


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

    function, loop = run(MINE, builder=small_training), run(MINE, builder=careful)
    assert isinstance(loop, Measurement)
    assert closed == [True]
    assert loop.peak_allocated_bytes == function.peak_allocated_bytes
    assert loop.flops_per_step == function.flops_per_step
    assert loop.parameters == function.parameters
    assert len(loop.step_seconds) == 3
    assert loop.updates == function.updates  # its first step, which is part of its build, is not among them
    assert run(MINE, builder=hungry).peak_allocated_bytes >= loop.peak_allocated_bytes + 4 * 10**6


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

    reply = run(MINE, builder=short)
    assert isinstance(reply, Crashed)
    assert reply.sentence.startswith(sentence)


def test_a_mode_held_open_across_a_yield_is_refused_by_name():
    def watched(setup):
        step = small_training(setup)
        with FlopCounterMode(display=False):
            while True:
                yield step()

    reply = run(MINE, builder=watched)
    assert isinstance(reply, Crashed)
    assert "the loop of mine yields inside of" in reply.sentence
    assert "Flop" in reply.sentence


def broken(setup):
    step = small_training(setup)
    yield step()
    raise ZeroDivisionError("in my loop")


def lacking(setup):
    import no_such_framework  # noqa: F401


def ending(setup):
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("builder", "lines", "sentence"),
    [
        (broken, 3, "ZeroDivisionError: in my loop (at {})"),
        (lacking, 1, f"ModuleNotFoundError: No module named 'no_such_framework' (at {{}}); install it for {sys.executable}"),
        (ending, 1, "sys.exit() was called (at {}), which"),
        (lambda setup: 3, 0, "mine returned int; it must build everything and return a function that runs one step"),
    ],
)
def test_what_cannot_train_is_told_with_its_line(builder, lines, sentence):
    place = f"tests/worker/{__name__}.py:{builder.__code__.co_firstlineno + lines}"
    assert run(MINE, builder=builder).sentence.startswith(sentence.format(place))


@pytest.fixture
def llama():
    """Makes a Trainer of a small Llama, as a user's script does."""
    transformers = pytest.importorskip("transformers")

    def make(folder, *, extra_layers=0, kind=transformers.Trainer, **arguments):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2 + extra_layers,
            vocab_size=128,
        )
        ids = torch.randint(128, (64, 32))
        samples = [{"input_ids": row, "labels": row} for row in ids]
        given = transformers.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=4, use_cpu=True, learning_rate=1e-3, **arguments
        )
        return kind(model=transformers.LlamaForCausalLM(config), args=given, train_dataset=samples)

    return make


def assert_allocates_alike(framework, by_hand, *, ahead=0, phases=("forward", "backward", "optimizer", "between")):
    """The counted steps of both have the same peaks, but for a batch ``ahead`` of so many bytes, and a few numbers."""
    more = {phase: framework.phase_peak_bytes[phase] - by_hand.phase_peak_bytes[phase] for phase in phases}
    assert all(ahead <= size <= ahead + 64 for size in more.values()), more


def test_a_trainer_is_measured_by_returning_it(llama, tmp_path):
    reply = run(MINE, builder=lambda setup: llama(tmp_path / "out"))
    assert isinstance(reply, Measurement), reply.sentence
    assert len(reply.step_seconds) == 3
    assert len(reply.losses) == 3
    assert reply.parameters == sum(value.numel() for value in llama(tmp_path).model.parameters())
    assert reply.flops_per_step > 0
    assert not list((tmp_path / "out").glob("*")), "no checkpoints and logs are written"


def test_a_trainer_allocates_as_a_loop_by_hand_does(llama, tmp_path):
    def by_hand(setup):
        trainer = llama(tmp_path)
        model = trainer.model.train()
        optimizer = trainer.create_optimizer()
        batches = (batch for _ in range(10) for batch in trainer.get_train_dataloader())
        setup.watch(model)

        def step():
            loss = model(**next(batches)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    # Its running loss, the loss and the norm of the gradients of the last step, and the number of its tokens.
    assert_allocates_alike(run(MINE, builder=lambda setup: llama(tmp_path)), run(MINE, builder=by_hand))


def test_a_deeper_model_in_a_trainer_needs_more(llama, tmp_path):
    small, deep = (
        run(MINE, builder=lambda setup, extra=extra: llama(tmp_path, extra_layers=extra)).peak_allocated_bytes
        for extra in (0, 1)
    )
    assert deep > 1.2 * small


def test_a_trainer_that_accumulates_takes_micro_batches(llama, tmp_path):
    accumulating = MINE.replace(gradient_accumulation=4, steps=6, warmup=3)
    reply = run(accumulating, builder=lambda setup: llama(tmp_path, gradient_accumulation_steps=4))
    assert isinstance(reply, Measurement), reply.sentence
    assert (len(reply.warmup_seconds), len(reply.step_seconds)) == (4, 8), "whole updates"
    # Trainer divides what it trains on; what is told is the loss.
    assert reply.losses[0] == pytest.approx(run(MINE, builder=lambda setup: llama(tmp_path)).losses[0], rel=0.2)


@pytest.mark.parametrize("knob", ["gradient_accumulation", "batch_size"])
def test_a_trainer_and_its_case_say_the_same(llama, tmp_path, knob):
    theirs = getattr(MINE, knob)
    reply = run(MINE.replace(**{knob: 2 * theirs}), builder=lambda setup: llama(tmp_path))
    assert reply.sentence.endswith(f"and its case has {knob}={2 * theirs}; give check() {knob}={theirs}")


def test_early_stopping_is_left_out_and_a_trainer_that_stops_by_itself_is_told(llama, tmp_path):
    import transformers

    class Impatient(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_training_stop = state.global_step >= 4

    def stopping_by(callback):
        trainer = llama(tmp_path)
        trainer.add_callback(callback)
        return trainer

    early = run(MINE, builder=lambda setup: stopping_by(transformers.EarlyStoppingCallback()))
    assert isinstance(early, Measurement)
    impatient = run(MINE, builder=lambda setup: stopping_by(Impatient))
    assert "the loop of mine ended after 4 steps" in impatient.sentence


@pytest.fixture
def autoencoder():
    """Makes what Lightning trains, as a user's script does."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Autoencoder(lightning.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))

        def training_step(self, batch, index):
            (samples,) = batch
            loss = (self.layers(samples) - samples).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def make(folder, *, width=64, callbacks=(), **arguments):
        torch.manual_seed(0)
        arguments["callbacks"] = [getattr(lightning.callbacks, name)(*given) for name, *given in callbacks]
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 32)), batch_size=4)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **arguments)
        return adapters.lightning(trainer, Autoencoder(width), loader)

    return make


@pytest.mark.filterwarnings("ignore")  # Lightning warns of its own defaults
def test_lightning_is_measured_past_its_own_end(autoencoder, tmp_path):
    reply = run(MINE, builder=lambda setup: autoencoder(tmp_path / "out"))
    assert isinstance(reply, Measurement), reply.sentence
    assert (len(reply.step_seconds), len(reply.losses)) == (3, 3)
    assert reply.parameters == 32 * 64 + 64 + 64 * 32 + 32
    assert reply.flops_per_step == function_flops()
    assert not (tmp_path / "out").exists(), "no checkpoints and logs are written"


def function_flops():
    return run(MINE, builder=small_training).flops_per_step


@pytest.mark.filterwarnings("ignore")
def test_lightning_allocates_as_a_loop_by_hand_does(autoencoder, tmp_path):
    def by_hand(setup):
        fit = autoencoder(tmp_path)
        module, loader = fit.arguments
        optimizer = module.configure_optimizers()
        batches = (batch for _ in range(50) for batch in loader)
        setup.watch(module)

        def step():
            (samples,) = next(batches)
            loss = (module.layers(samples) - samples).square().mean()
            optimizer.zero_grad()  # as late as Lightning does
            loss.backward()
            optimizer.step()
            return loss

        return step

    lightning, by_hand = run(MINE, builder=lambda setup: autoencoder(tmp_path)), run(MINE, builder=by_hand)
    # It runs the forward pass inside of the optimizer's step, which is the optimizer's phase then.
    assert_allocates_alike(lightning, by_hand, phases=("backward", "optimizer", "between"))


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

    assert_allocates_alike(run(MINE, builder=by_accelerate), run(MINE, builder=by_hand), ahead=4 * 32 * 4)


@pytest.mark.filterwarnings("ignore")
def test_a_wider_model_in_lightning_needs_more(autoencoder, tmp_path):
    narrow, wide = (
        run(MINE, builder=lambda setup, width=width: autoencoder(tmp_path, width=width)).peak_allocated_bytes
        for width in (64, 128)
    )
    assert wide > 1.5 * narrow


@pytest.mark.filterwarnings("ignore")
def test_lightning_that_accumulates_takes_micro_batches(autoencoder, tmp_path):
    builder = lambda setup: autoencoder(tmp_path, accumulate_grad_batches=2)  # noqa: E731
    assert len(run(MINE.replace(gradient_accumulation=2, steps=4), builder=builder).step_seconds) == 4
    assert run(MINE, builder=builder).sentence.endswith("give check() gradient_accumulation=2")
    assert run(MINE.replace(batch_size=2), builder=lambda setup: autoencoder(tmp_path)).sentence.endswith("batch_size=4")


@pytest.mark.filterwarnings("ignore")
def test_lightning_ends_where_it_is_measured_whatever_its_own_end(autoencoder, tmp_path):
    callbacks = [("EarlyStopping", "val_loss"), ("LearningRateMonitor",), ("Timer", "00:00:01:00")]
    reply = run(MINE, builder=lambda setup: autoencoder(tmp_path, min_steps=10**6, callbacks=callbacks))
    assert isinstance(reply, Measurement), reply.sentence
    assert reply.updates < 50
