"""Notes the shapes of the tensors that a watched model is given, step by step: data that vary take other memory."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from torch import Tensor, nn
from torch.jit._script import RecursiveScriptModule
from torch.nested._internal.nested_tensor import NestedTensor

from pytest_gputrain.records import BatchShapes
from pytest_gputrain.records.own_training import TensorShapes
from pytest_gputrain.worker.allocations import strided_parts
from pytest_gputrain.worker.loop import Steps

_MOST_ROWS: Final = 4
"""Runs of steps of the same shapes that a record has."""
_MOST_SHAPES: Final = 16
"""Shapes of one step that a record has."""
_MOST_VALUES: Final = 256
_DEEPEST: Final = 6
"""Values that are looked at in what a model is given, and how deep: a batch may be an object that refers to anything."""


class ShapesNoted:
    """Records the shapes of the model's inputs in each step. It reads only sizes, so nothing waits for a GPU."""

    def __init__(self) -> None:
        self._is_following = False
        self._step: dict[TensorShapes, None] = {}
        self._steps: list[TensorShapes] = []

    @contextlib.contextmanager
    def following(self, model: nn.Module | None) -> Iterator[None]:
        """Provide a context in which shapes are noted.

        Args:
            model: whose calls are followed; None if `note` is called instead, or where they cannot be seen.
        """
        hooks = [part.register_forward_pre_hook(self._see, with_kwargs=True) for part in _called(model)]
        self._is_following = True
        try:
            yield
        finally:
            self._is_following = False
            for hook in hooks:
                hook.remove()

    def during(self, steps: Steps) -> Steps:
        """Yield what ``steps`` yields, and record the shapes of each of its steps."""
        for update in steps:
            was_following = self._is_following
            yield update
            if was_following and self._step:
                shapes = dict.fromkeys(itertools.chain.from_iterable(self._step))
                self._steps.append(tuple(shapes))
            self._step.clear()

    def note(self, given: object) -> None:
        """Note the shapes of the model's inputs. Inputs that recomputation repeats count once in a step."""
        if self._is_following:
            self._step[tuple(itertools.islice(_shapes(given), _MOST_VALUES))] = None

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of a call of the model. This is a method and no closure, because a model with hooks must be
        copied and stored."""
        self.note((args, kwargs))

    def record(self) -> BatchShapes | None:
        """Return the record; None if nothing was noted."""
        if not any(self._steps):
            return None
        rows = ((sum(1 for _ in run), shapes[:_MOST_SHAPES]) for shapes, run in itertools.groupby(self._steps))
        return BatchShapes(
            steps=len(self._steps),
            digest=hashlib.sha256(msgspec.json.encode(self._steps)).hexdigest()[:8],
            first=tuple(itertools.islice(rows, _MOST_ROWS)),
            last=self._steps[-1][:_MOST_SHAPES],
        )


def _called(model: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the modules whose calls are recorded: the model, or the parts of a container that is never called itself. A
    scripted module takes no hooks."""
    if model is None or isinstance(model, RecursiveScriptModule):
        return
    if type(model) in (nn.ModuleList, nn.ModuleDict):
        for part in model.children():
            yield from _called(part)
    else:
        yield model


def _shapes(given: object) -> Iterator[tuple[int, ...]]:
    """Yield the shape of each tensor in a value. A sparse or nested tensor gives the shapes of its parts."""
    values: list[tuple[object, int]] = [(given, 0)]
    for _ in range(_MOST_VALUES):
        if not values:
            return
        value, depth = values.pop()
        if isinstance(value, Tensor):
            # The sizes of a jagged tensor are not numbers, but the sizes of its values and of its offsets are.
            parts = (value.values(), value._offsets) if isinstance(value, NestedTensor) else strided_parts(value)
            yield from (tuple(part.shape) for part in parts if part.shape)
        elif depth < _DEEPEST:
            values += [(inner, depth + 1) for inner in reversed(_parts(value))]


def _parts(value: object) -> list[Any]:
    """Return the first items of a collection in a batch, or the attributes of an object in it."""
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        parts = vars(value).values()
    return [*itertools.islice(parts, _MOST_VALUES)]
