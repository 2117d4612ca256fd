"""Looks up, once each, the properties of operators that a prediction needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pytest_gputrain.worker.flops import formulas
from pytest_gputrain.worker.prediction.layouts import Layout
from pytest_gputrain.worker.work import moves_memory, written_arguments

Temporaries = Callable[[tuple[Any, ...]], tuple[int, ...]]
"""Sizes in bytes of what an operator's kernel allocates beside its results and frees at its end, from its arguments."""

_ATEN: Final = torch.ops.aten
_PRODUCTS: Final = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm})
_RESHAPED: Final = frozenset({_ATEN.resize_, _ATEN.resize_as_, _ATEN.set_, _ATEN.sparse_resize_})
"""Operators that give a tensor another shape or storage; those of one storage have the tag ``inplace_view``."""
_REPEATING: Final = frozenset({"aten", "fsdp", "bitsandbytes"})
"""Namespaces whose operators give results alike for arguments alike, as far as shapes go."""
_UNKNOWN: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """The properties of one overload of an operator.

    Attributes:
        call: it, or what takes its place.
        moves: whether it reads and writes memory: a view does not.
        multiplies: whether it takes a workspace for matrix products.
        written: places and names of the arguments that it writes to.
        reshapes: whether it gives an argument another shape or storage.
        repeats: whether its results are alike whenever its arguments are.
        in_place_on_lists: whether it changes lists of tensors and returns nothing, as optimizers call it: fakes have nothing
            to change, and FakeTensorMode checks hundreds of them one by one.
        dynamic: whether the shape of its result depends on values.
        from_start: whether its arguments name places in the storage.
    """

    name: str
    call: Callable[..., Any]
    flops: Callable[..., int] | None
    temporaries: Temporaries | None
    moves: bool
    multiplies: bool
    written: tuple[tuple[int, str], ...]
    reshapes: bool
    repeats: bool
    in_place_on_lists: bool
    dynamic: bool
    from_start: bool

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the tensors that a call writes to."""
        for position, name in self.written:
            yield from tensors_in((args[position] if position < len(args) else kwargs.get(name),))


class Operators:
    """The properties of all operators, by overload.

    Args:
        layouts: what to call instead of an operator, see `layouts`.
        temporaries: of the operators that have any.
    """

    def __init__(self, layouts: dict[Any, Layout], temporaries: dict[Any, Temporaries]) -> None:
        self._layouts = layouts
        self._temporaries = temporaries
        self._formulas = formulas()
        self._known: dict[Any, Operator] = {}

    def __getitem__(self, func: Any) -> Operator:
        return self._known.get(func) or self._look_up(func)

    def _look_up(self, func: Any) -> Operator:
        packet = func.overloadpacket
        name = str(packet)
        tags = set(func.tags)
        reshapes = packet in _RESHAPED or torch.Tag.inplace_view in tags
        operator = self._known[func] = Operator(
            name=name,
            call=self._layouts.get(func, func),
            flops=self._formulas.get(packet),
            temporaries=self._temporaries.get(packet),
            moves=moves_memory(func),
            multiplies=packet in _PRODUCTS,
            written=written_arguments(func),
            reshapes=reshapes,
            repeats=func.namespace in _REPEATING and not _UNKNOWN & tags and not reshapes,
            in_place_on_lists=name.startswith("aten._foreach_") and not func._schema.returns,
            dynamic=torch.Tag.dynamic_output_shape in tags,
            from_start=func is _ATEN.as_strided.default,
        )
        return operator


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the values, in lists and tuples too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
