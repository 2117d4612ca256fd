"""Makes torch find the shardings of an optimizer's many tensors in a time that is linear in their number.

For each of the tensors that one call updates, torch 2.13 looks at all of them. That takes 5 seconds for the 448 adapters of
a model of 8B parameters, and half a minute for the 1,120 of 70B. It happens once in a process. This does not matter to a
real training, but is most of the time on an emulated GPU. The result is the same, and no memory of a GPU is used.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def found_in_linear_time() -> Iterator[None]:
    """Provide a context in which shardings are found in linear time, if this torch has the slow functions."""
    propagation: Any = importlib.import_module("torch.distributed.tensor._sharding_prop")
    with contextlib.ExitStack() as stack:
        if hasattr(propagation, "_propagate_use_strided_shard_flag"):
            name, strided = "_propagate_use_strided_shard_flag", propagation._StridedShard
            stack.enter_context(mock.patch.object(propagation, name, _only_if_strided(getattr(propagation, name), strided)))
            rules: Any = importlib.import_module("torch.distributed.tensor._ops.single_dim_strategy")
            stack.enter_context(mock.patch.object(rules, "tree_map_only", _without_numbers(rules.tree_map_only)))
        yield


def _only_if_strided(propagate: Callable[[Any, Any], None], strided: type) -> Callable[[Any, Any], None]:
    """Return a function that makes the outputs of a call agree with its inputs that are strided shards. It looks for such
    inputs once for a call, and not once for each tensor of the call as torch does."""
    last: tuple[Any, bool] = (None, False)

    def propagate_once(strategy: Any, schema: Any) -> None:
        nonlocal last
        of, is_any = last
        if of is not schema:
            is_any = any(isinstance(place, strided) for spec in schema.args_spec for place in spec.placements)
            last = schema, is_any
        if is_any:
            propagate(strategy, schema)

    return propagate_once


def _without_numbers(tree_map_only: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function that makes the arguments for one tensor from those of a call for many. A list of numbers keeps
    only its first one, since the sharding depends on none."""

    def map_arguments(kind: Any, function: Callable[[Any], Any], arguments: Any, is_leaf: Any = None) -> Any:
        if isinstance(arguments, tuple):
            return tuple(map_arguments(kind, function, argument, is_leaf) for argument in arguments)
        if isinstance(arguments, list) and all(type(number) in (int, float) for number in arguments):
            return arguments[:1]
        return tree_map_only(kind, function, arguments, is_leaf=is_leaf)

    return map_arguments
