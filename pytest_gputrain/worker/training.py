"""Makes what a case steps: the zoo's model with its method, batch, engine and optimizer, or the user's own code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pytest_gputrain.records import BatchShapes, Case, Scale
from pytest_gputrain.worker import zoo
from pytest_gputrain.worker.batch_shapes import ShapesNoted
from pytest_gputrain.worker.checks import CheckFailed, check_parameters, check_trainable
from pytest_gputrain.worker.compiling import compile_in_place
from pytest_gputrain.worker.device import is_gpu
from pytest_gputrain.worker.group import ALONE, Group
from pytest_gputrain.worker.loader import Loader
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.loops import Beside, FunctionLoop, GeneratorLoop, loop_of
from pytest_gputrain.worker.methods import adapt, left_as_they_are, stored, trainable_parameters
from pytest_gputrain.worker.optimizers import OPTIMIZERS
from pytest_gputrain.worker.parallel import ENGINES, EngineOptions
from pytest_gputrain.worker.precision import PRECISIONS, Precision
from pytest_gputrain.worker.updates import Updates
from pytest_gputrain.worker.zoo.completed import architecture_of


class Trainable(Protocol):
    """A training whose steps the worker runs and checks."""

    samples: int
    sequence_length: int
    tokens: int | None
    idle: tuple[str, ...]
    """Regular expressions for whole names of trained parameters that get no gradient by construction."""
    remote_tensors: int
    """Trained tensors that other processes hold, and check."""
    losses: list[Tensor | float]
    notes: tuple[str, ...]
    """Sentences on what of the case was done in another way."""

    @property
    def model(self) -> nn.Module | None:
        """The model that trains; None if own code does not let the worker watch it. It is known from the first step on."""

    @property
    def trainable_parameters(self) -> int | None:
        """Parameters that train; None like the model."""

    @property
    def parameters(self) -> int | None:
        """How many parameters the model has before its method is applied; None if the user's code names no model."""

    @property
    def updates(self) -> int:
        """Optimizer updates so far; for own code, calls of its step."""

    def run(self, steps: Steps) -> None:
        """Train on one micro-batch after the other. ``steps`` is resumed before each of them and after the last one."""

    def drain(self) -> None:
        """Drop batches that were loaded ahead of their steps."""

    @property
    def input_waits(self) -> Sequence[float]:
        """The seconds that each step waited for its batch; none if no batches are loaded."""

    def leave(self) -> None:
        """End the training: no more steps will come."""


class Training:
    """The training of a case of the zoo."""

    def __init__(
        self,
        case: Case,
        scale: Scale,
        device: torch.device,
        group: Group = ALONE,
        own_work_done: Callable[[], None] = lambda: None,
        deepspeed: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            own_work_done: called in each step before the step first needs another process.
            deepspeed: further options of that engine.
        """
        architecture = architecture_of(case.model)
        precision = PRECISIONS[case.precision]
        seed = torch.initial_seed()
        # With `cpu_offload` the model stays on the host, because it may not fit on the device.
        place = torch.device("cpu") if case.cpu_offload else device
        with place, _default_dtype(stored(case, precision)), _apart(case, device):
            self._workload = zoo.build(case, scale, architecture)
        names = list(architecture.parts)
        built = dict(zip(names, [self._workload.model, *self._workload.encoders.values()], strict=True))
        parameters = {
            name: check_parameters(
                built[name], case.model if name == names[0] else f"{case.model}'s {name}", part.parameters.get(scale)
            )
            for name, part in architecture.parts.items()
        }
        self.parameters: int = parameters[names[0]]
        self.notes: tuple[str, ...] = (
            *self._workload.notes,
            *left_as_they_are(self._workload.model, architecture, case),
        )
        adapted = adapt(self._workload.model, architecture, case, precision)
        expected = trainable_parameters(architecture, case, scale)
        self.trainable_parameters: int | None = check_trainable(adapted, case.method, expected)
        blocks = self._workload.blocks
        self._workload.model = adapted
        if case.compile != "off":
            compile_in_place(blocks or [adapted], case.compile, device)
        optimizer = OPTIMIZERS[case.optimizer]
        engine_options = EngineOptions(
            case=case,
            precision=precision,
            device=device,
            group=group,
            shrinkage=1.0 if scale == "full" else self.parameters / architecture.trained_part.parameters["full"],
            blocks=blocks,
            deepspeed=deepspeed,
            make_optimizer=lambda parameters: optimizer(list(parameters), case.learning_rate),
        )
        self._engine = ENGINES[case.parallel](adapted, engine_options)
        self._own_work_done = own_work_done
        self._workload.model = self._engine.model
        self.remote_tensors = self._engine.remote_tensors
        encoders = self._workload.encoders
        self.model: nn.Module | None = nn.ModuleDict({names[0]: adapted, **encoders}) if encoders else adapted
        if case.parallel != "single":
            # All processes have the same weights but different samples, whatever random numbers the engine has drawn.
            torch.manual_seed(seed + group.rank)
        random_state = torch.get_rng_state()
        with _default_dtype(precision.weights):
            batch = self._workload.batch(device)
        self._loader: Loader | None = None
        self._inputs = batch.inputs
        if case.loader_workers:
            self._loader = self._loading(case, device, precision, random_state)
        self.samples = batch.samples
        self.sequence_length = batch.sequence_length
        self.tokens = batch.tokens
        self.idle = architecture.idle.get(scale, ())
        self.losses: list[Tensor | float] = []

    @property
    def updates(self) -> int:
        return self._engine.updates

    def run(self, steps: Steps) -> None:
        for update in steps:
            self.step(update)

    def step(self, update: bool) -> None:
        self.losses.append(self._engine.step(self._loss, update).clone())

    def _loading(self, case: Case, device: torch.device, precision: Precision, random_state: Tensor) -> Loader:
        """Return a loader that draws this batch in other processes. A GPU draws other random numbers than they do, so its
        batches then have the same shapes and other values.

        Args:
            random_state: of the host, from which the batch is drawn.
        """

        def draw() -> dict[str, Tensor]:
            torch.set_rng_state(random_state)
            with _default_dtype(precision.weights):
                return self._workload.batch(torch.device("cpu")).inputs

        moved = {name for name, value in self._inputs.items() if value.device == device}
        self._inputs = {}
        return Loader(draw, case.loaders(beside_gpu=is_gpu(device)), device, moved)

    def drain(self) -> None:
        if self._loader:
            self._loader.drain()

    @property
    def input_waits(self) -> Sequence[float]:
        return self._loader.waits if self._loader else ()

    def _loss(self) -> Tensor:
        loss = self._workload.loss(self._loader.next() if self._loader else self._inputs)
        if self._engine.forward_is_local:
            self._own_work_done()
        return loss

    def leave(self) -> None:
        self._engine.leave()
        if self._loader:
            self._loader.close()


@dataclass(kw_only=True)
class Setup:
    """The argument of your own code's function, with everything to build its step."""

    case: Case
    """The case."""
    scale: Scale
    """``full``, or ``tiny`` on a CPU: build a smaller model then."""
    device: torch.device
    """The device to train on."""
    precision: Precision
    """How the case stores and computes, with ``weights`` and ``autocast``; the name is ``setup.case.precision``."""
    rank: int = 0
    """The number of this process among those of the case; if there are several, torch.distributed is initialised."""
    processes: int = 1
    """The number of processes that train."""
    watched: list[nn.Module] = field(default_factory=list)
    idle_names: dict[str, None] = field(default_factory=dict)
    beside: Beside = field(default_factory=Beside)
    own_work_done: Callable[[], None] = lambda: None
    """You may call it in a step before the step first needs another process; the report then shows which process is
    late."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights in the case's precision."""
        return self.precision.weights

    def casting(self) -> Any:
        """Return the autocast context of the case's precision. It does nothing if the precision needs none."""
        return self.precision.casting(self.device)

    def watch(self, model: nn.Module, *, idle: Sequence[str] = ()) -> None:
        """Have the worker count the parameters of ``model`` and check that training changes them. A loop may call it in
        every step. For several networks pass one ``nn.ModuleList``.

        Args:
            idle: the names of tensors that require a gradient, and get none on purpose, as in ``model.named_parameters()``;
                ``*`` stands for any part of a name.

        Raises:
            CheckFailed: ``idle`` is not a list of names.
        """
        if isinstance(idle, str) or not all(isinstance(name, str) for name in idle):
            raise CheckFailed(f"setup.watch() takes a list of names as idle, such as idle=['pooler.*'], and got {idle!r}")
        if all(model is not watched for watched in self.watched):
            self.watched.append(model)
        self.idle_names.update(dict.fromkeys(idle))

    def evaluation(self, evaluate: Callable[[], object]) -> None:
        """Have the worker call ``evaluate`` between two steps, as the phase ``evaluate`` with its own peak of memory and
        counts. On a CPU it is called twice, once for each. A loop may call this in every step; the last function counts.

        Raises:
            CheckFailed: ``evaluate`` is not a function.
        """
        self.beside.evaluate = _function("evaluation", evaluate)

    def checkpoint(self, save: Callable[[Path], object]) -> None:
        """Have the worker call ``save`` between two steps, as the phase ``checkpoint`` with its own peak of memory. It gets
        a temporary folder to save to, which is removed afterwards. A loop may call this in every step; the last function
        counts.

        Raises:
            CheckFailed: ``save`` is not a function.
        """
        self.beside.save = _function("checkpoint", save)


def _function(said: str, given: Any) -> Callable[..., object]:
    if not callable(given):
        raise CheckFailed(f"setup.{said}() takes a function that the worker calls, and got {type(given).__name__}")
    function: Callable[..., object] = given
    return function


StepBuilder = Callable[[Setup], Any]
"""The user's function: builds everything and returns one step, which may return its loss; or owns the loop, as a generator
that yields after each step; or returns a framework's trainer."""


class OwnCodeTraining:
    """The training of a case of own code, by the user's own step."""

    def __init__(
        self,
        case: Case,
        scale: Scale,
        device: torch.device,
        builder: StepBuilder,
        group: Group = ALONE,
        own_work_done: Callable[[], None] = lambda: None,
    ) -> None:
        setup = Setup(
            case=case,
            scale=scale,
            device=device,
            precision=PRECISIONS[case.precision],
            rank=group.rank,
            processes=group.size,
            own_work_done=own_work_done,
        )
        self._name = case.model
        self.keeps_losses = True
        """Whether losses are copied, which is a task for the GPU that the program does not ask for."""
        self._watched = setup.watched
        self.beside = setup.beside
        self.idle_names = setup.idle_names
        """The names of tensors that are to get no gradient: see `Setup.watch`."""
        self._shapes = ShapesNoted()
        self.optimizer_steps = Updates(case, counts=device.type == "cpu")
        with self.optimizer_steps.following():
            self._loop = loop_of(builder(setup), case, group.size, setup.watch, self._note, self._shapes.note, setup.beside)
        self.samples = case.batch_size
        self.sequence_length = case.sequence_length
        self.tokens: int | None = None
        self.idle: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.remote_tensors = 0
        self.updates: int = 0
        self.losses: list[Tensor | float] = []

    @functools.cached_property
    def model(self) -> nn.Module | None:
        """The model that the user's code lets the worker watch, from the first step on."""
        if len(self._watched) > 1:
            raise CheckFailed(f"{self._name} called setup.watch() with {len(self._watched)} models; wrap them in one")
        return self._watched[0] if self._watched else None

    @property
    def parameters(self) -> int | None:
        return None if self.model is None else sum(value.numel() for value in self.model.parameters())

    @property
    def trainable_parameters(self) -> int | None:
        if self.model is None:
            return None
        return sum(value.numel() for value in self.model.parameters() if value.requires_grad)

    @property
    def first_step_began(self) -> Callable[[], bool | None] | None:
        """Tell whether the step before a generator's first ``yield`` has begun; None if there is no such step."""
        return self._loop.first_step_began if isinstance(self._loop, GeneratorLoop) else None

    @property
    def _is_of_framework(self) -> bool:
        """Whether a framework's trainer runs the steps, so that its accumulation and its batches are known."""
        return not isinstance(self._loop, FunctionLoop | GeneratorLoop)

    def run(self, steps: Steps) -> None:
        steps = self._shapes.during(steps)
        if self._is_of_framework:
            self._loop.run(steps)
            return
        with self.optimizer_steps.following():
            self._loop.run(self.optimizer_steps.during(steps))

    def noting_shapes(self, *, compiled: bool) -> contextlib.AbstractContextManager[None]:
        """Provide a context for steps that records the shapes of the model's inputs.

        Args:
            compiled: whether the model may run compiled, and its calls be no calls of Python.
        """
        return self._shapes.following(None if compiled or self._is_of_framework else self.model)

    @property
    def batch_shapes(self) -> BatchShapes | None:
        """The shapes that were recorded."""
        return self._shapes.record()

    def _note(self, loss: Any) -> None:
        self.updates += 1
        if loss is None or not self.keeps_losses:
            return
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            # The loss is copied, because it may be a view that keeps a large tensor alive.
            self.losses.append(loss.detach().clone())
            return
        try:
            self.losses.append(float(loss))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise CheckFailed(
                f"a step of {self._name} returned {type(loss).__name__}; it must return its loss as one number, or nothing"
            ) from None

    def drain(self) -> None:
        """Do nothing, because own code loads its own batches."""

    input_waits: Sequence[float] = ()

    def leave(self) -> None:
        """Do nothing, because no process waits for own code."""


def _apart(case: Case, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a build whose weights will all be replaced: QLoRA packs them, and FSDP2 takes shards of them.

    In a memory pool of its own, because torch's allocator would else put shards into the holes that packed weights leave,
    and could give back none of these. Programs that load one part of the model at a time have no such holes.
    """
    if case.method == "qlora" and case.parallel == "fsdp" and device.type == "cuda" and not case.cpu_offload:
        return torch.cuda.use_mem_pool(torch.cuda.MemPool())
    return contextlib.nullcontext()


class _default_dtype:
    """A context that sets torch's default type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exc_info: object) -> None:
        torch.set_default_dtype(self._previous)
