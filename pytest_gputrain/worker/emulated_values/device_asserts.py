"""Raises what torch raises where a kernel would assert: for an index out of range, a label of no class and the like.

On a GPU the error comes at the next call that waits for it. Here it comes at the operator, as with CUDA_LAUNCH_BLOCKING=1,
and stays: each later call that asks the GPU for something fails as well. Only values that are known are checked, and no
choices that were dealt.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from .contents import Contents, on_host
from .graphs import Graphs
from .program_lines import BACKWARD, line_of

_Kernel = Callable[..., Any]

_ASSERTED: Final = 710
"""The error that CUDA returns after a kernel has asserted."""

_Look = Callable[[Any], "Tensor | None"]
"""Gives a tensor's values on the host, or one value for all of them; None if they are not known or it is no tensor."""

_Check = Callable[[_Look, Sequence[Any]], "str | None"]
"""Says what is wrong with the values among an operator's arguments, in words that follow a colon; None if nothing is."""


def checks(name: str) -> bool:
    """Tell whether an operator's kernel checks values on a GPU.

    Args:
        name: of the operator, without its overload.
    """
    return name in _CHECKS


def asserting(contents: Contents, graphs: Graphs, name: str, run: _Kernel, original: _Kernel) -> _Kernel:
    """Return the kernel with a check before it, of the values that the kernel itself checks on a GPU.

    Args:
        contents: the values that are known.
        graphs: the CUDA graphs, at whose replays values are checked as well.
        name: of the operator, without its overload.
        run: the kernel, and what computes its values.
        original: the kernel alone.
    """
    check = _CHECKS[name]

    def look(tensor: Any) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return None
        if not tensor.is_cuda:
            return tensor
        known = contents.find(tensor)
        if known is None or known.dealt:
            return None
        return on_host(tensor) if known.value is None else known.value

    def check_replay(arguments: Any, _: Any, line: str, replays: bool) -> int:
        if not (wrong := check(look, arguments)):
            return 0
        stand_ins: Any = ctypes.CDLL(None)
        stand_ins.gputrain_assert()
        print(f"gputrain: a CUDA graph asserts in {name} at {line}: {wrong}", file=sys.stderr)
        return _ASSERTED

    def run_checked(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        if graphs.captures.value and graphs.capture():
            line = line_of(sys._getframe(1)) or BACKWARD
            graphs.defer(check_replay, arguments, keywords, line, [])
        elif wrong := check(look, arguments):
            original(keys, *arguments, **keywords)  # the operator's own checks on the host come first
            _fail(f"{name} at {line_of(sys._getframe(1)) or BACKWARD}: {wrong}")
        return run(keys, *arguments, **keywords)

    return run_checked


def _fail(reason: str) -> NoReturn:
    stand_ins: Any = ctypes.CDLL(None)
    stand_ins.gputrain_assert()
    try:
        torch._C._cuda_synchronize()
    except RuntimeError as error:
        error.args = (f"{str(error).rstrip()}\nThe emulated GPU found the reason in {reason}.",)
        raise
    raise AssertionError("an emulated GPU that has asserted raises an error")


def _outside(indices: Tensor | None, least: int, size: int) -> str | None:
    # A mask holds no indices, and torch itself compares its size.
    if indices is None or indices.dtype in (torch.bool, torch.uint8):
        return None
    for dimension, stride in enumerate(indices.stride()):
        if not stride:  # A dimension that was expanded repeats the same indices, so one of them is enough.
            indices = indices.narrow(dimension, 0, 1)
    low, high = (int(end) for end in indices.aminmax())
    if least <= low and high < size:
        return None
    return f"index {low if low < least else high} is out of range for {size} elements"


def _along(least: Callable[[int], int], place: int = 2) -> _Check:
    """Check indices along the dimension that the second argument names.

    Args:
        least: the lowest index for this many elements.
        place: of the indices.
    """

    def check(look: _Look, arguments: Sequence[Any]) -> str | None:
        size = arguments[0].size(arguments[1]) if arguments[0].dim() else 1
        return _outside(look(arguments[place]), least(size), size)

    return check


def _from_zero(size: int) -> int:
    return 0


def _from_the_end(size: int) -> int:
    return -size


def _index(look: _Look, arguments: Sequence[Any]) -> str | None:
    dimension, indices = 0, arguments[1]
    for one in indices:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            dimension += one.dim()
            continue
        size = arguments[0].size(dimension)
        if one is not None and (wrong := _outside(look(one), -size, size)):
            return wrong
        dimension += 1
    return None


def _index_put(look: _Look, arguments: Sequence[Any]) -> str | None:
    accumulates = len(arguments) > 3 and arguments[3]
    return None if accumulates else _index(look, arguments)  # torch itself checks indices that accumulate


def _take(look: _Look, arguments: Sequence[Any]) -> str | None:
    size = arguments[0].numel()
    return _outside(look(arguments[1]), -size, size)


def _bag(look: _Look, arguments: Sequence[Any]) -> str | None:
    offsets = look(arguments[2])
    if offsets is not None and offsets.dim() and bool((offsets.diff() < 0).any()):
        return "offsets decrease"
    indices = look(arguments[1])
    return _outside(indices.clamp(min=0), 0, arguments[0].size(0)) if indices is not None else None


def _labels(look: _Look, arguments: Sequence[Any]) -> str | None:
    scores, ignored = arguments[0], arguments[4]
    labels = look(arguments[1])
    return _of_no_class(labels, scores.size(1 if scores.dim() > 1 else 0), ignored)


def _of_no_class(labels: Tensor | None, classes: int, ignored: int | None = None) -> str | None:
    if labels is None:
        return None
    wrong = (labels < 0) | (labels >= classes)
    if ignored is not None:
        wrong &= labels != ignored
    return f"label {int(labels[wrong][0])} is none of {classes} classes" if bool(wrong.any()) else None


def _margin(look: _Look, arguments: Sequence[Any]) -> str | None:
    return _of_no_class(look(arguments[1]), arguments[0].size(-1) if arguments[0].dim() else 1)


def _margin_of_several(look: _Look, arguments: Sequence[Any]) -> str | None:
    labels = look(arguments[1])
    if labels is None:
        return None
    ended = (labels == -1).cumsum(-1) > 0 if labels.dim() else labels == -1
    return _of_no_class(labels[~ended], arguments[0].size(-1) if arguments[0].dim() else 1)


def _within(place: int, least: float, most: float, what: str) -> _Check:
    def check(look: _Look, arguments: Sequence[Any]) -> str | None:
        values = look(arguments[place])
        if values is None or bool(((values >= least) & (values <= most)).all()):
            return None
        return what

    return check


_probability: Final = _within(0, 0, 1, "a value is not between 0 and 1")


def _bernoulli_in_place(look: _Look, arguments: Sequence[Any]) -> str | None:
    return _probability(look, arguments[1:]) if len(arguments) > 1 else None


def _drawn(look: _Look, arguments: Sequence[Any]) -> str | None:
    if len(arguments) < 3 or not arguments[2] or arguments[1] == 1:
        return None  # In these cases torch itself checks the weights.
    return _within(0, 0, sys.float_info.max, "a weight is negative, infinite or NaN")(look, arguments)


def _holds(look: _Look, arguments: Sequence[Any]) -> str | None:
    value = look(arguments[0])
    if value is None or bool(value.any()):
        return None
    return str(arguments[1]) if len(arguments) > 1 and arguments[1] else "the value is zero"


def _scattered_by_mask(look: _Look, arguments: Sequence[Any]) -> str | None:
    mask = look(arguments[1])
    if mask is None:
        return None
    wanted = int(mask.count_nonzero()) * (arguments[0].numel() // mask.numel())
    given = arguments[2].numel()
    return f"the mask chooses {wanted} elements, and the source has {given}" if wanted > given else None


def _compressed(look: _Look, arguments: Sequence[Any]) -> str | None:
    on_cpu = [look(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
    if any(value is None for value in on_cpu):
        return None
    try:
        torch.ops.aten._validate_compressed_sparse_indices.default(*on_cpu)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


_CHECKS: Final[Mapping[str, _Check]] = {
    "index": _index,
    "_index_put_impl_": _index_put,
    **dict.fromkeys(
        (
            "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
            "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_",
        ),
        _along(_from_zero),
    ),
    "index_fill_": _along(_from_the_end),
    "take": _take,
    "put_": _take,
    "_embedding_bag": _bag,
    "_embedding_bag_forward_only": _bag,
    "nll_loss_forward": _labels,
    "nll_loss2d_forward": _labels,
    "multi_margin_loss": _margin,
    "multilabel_margin_loss_forward": _margin_of_several,
    "binary_cross_entropy": _probability,
    "bernoulli": _probability,
    "bernoulli_": _bernoulli_in_place,
    "poisson": _within(0, 0, math.inf, "a rate is negative"),
    "multinomial": _drawn,
    "repeat_interleave": _within(0, 0, math.inf, "a number of repetitions is negative"),
    "_assert_async": _holds,
    "masked_scatter_": _scattered_by_mask,
    "_validate_compressed_sparse_indices": _compressed,
}  # fmt: skip
"""The checks by name of the operator. No other operator is known whose kernel checks values."""
