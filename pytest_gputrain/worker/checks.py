"""Checks that what was measured is what the case names: a figure for another model, or one that does not train, misleads.

Not covered: whether the model would learn anything from real data.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from pytest_gputrain.records import TrainedTensors
from pytest_gputrain.records.own_training import module_of
from pytest_gputrain.utils.units import format_bytes
from pytest_gputrain.worker.allocations import strided_parts
from pytest_gputrain.worker.device import Peaks

_CHUNK: Final = 2**24
_MOST_NAMES: Final = 256
"""Names of tensors, or of their modules, that a record has."""
_NAMED: Final = 6
"""Names in a sentence."""


class CheckFailed(Exception):
    """The run is not what its case says; the message is one sentence."""


class LoopEnded(CheckFailed):
    """The user's loop has no more steps."""


def described(error: Exception) -> str:
    """Return the type and the message of an error of a library, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def ended(name: str, taken: int) -> LoopEnded:
    """Return the error for a loop that ended before all steps were taken."""
    return LoopEnded(
        f"the loop of {name} ended after {taken} {'step' if taken == 1 else 'steps'}, but more have to be measured; let it "
        "run for as long as it is asked to, for example with `while True:` around its epochs"
    )


def check_parameters(model: nn.Module, name: str, expected: int | None) -> int:
    """Return the number of parameters of the model before its method is applied, tied ones once.

    Args:
        expected: None if nobody published it.

    Raises:
        CheckFailed: it is not the count of the model named.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    if expected is not None and count != expected:
        raise CheckFailed(f"the model built for {name} has {count:,} parameters, but {name} has {expected:,}")
    return count


def check_trainable(model: nn.Module, method: str, expected: int | None) -> int:
    """Return the number of parameters that train.

    Args:
        expected: None if nobody published it.

    Raises:
        CheckFailed: the method should leave another number of them trainable.
    """
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if expected is not None and count != expected:
        raise CheckFailed(f"{method} left {count:,} parameters trainable, but should train {expected:,}")
    return count


def check_losses(losses: Sequence[float]) -> None:
    """Check that all losses are finite.

    Raises:
        CheckFailed: a loss is not finite.
    """
    for step, value in enumerate(losses, start=1):
        if not math.isfinite(value):
            raise CheckFailed(f"the loss of timed step {step} is {value}")


def model_bytes(model: nn.Module | None, device: torch.device | None = None) -> int:
    """Return the bytes of the storages of parameters, buffers and bitsandbytes' quantisation states, each storage once.

    Args:
        model: 0 bytes where it is None.
        device: only of those on it.
    """

    def tensors(model: nn.Module) -> Iterable[Tensor]:
        yield from model.parameters()
        yield from model.buffers()
        for parameter in model.parameters():
            state: Any = getattr(parameter, "quant_state", None)
            while state is not None:
                yield from (value for value in vars(state).values() if isinstance(value, Tensor))
                state = getattr(state, "state2", None)

    of_model = () if model is None else map(local, tensors(model))
    on_device = (tensor for tensor in of_model if device is None or tensor.device == device)
    storages = (part.untyped_storage() for tensor in on_device for part in strided_parts(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def check_peak(peaks: Peaks, held: int) -> None:
    """Check that torch's peak of memory can be right.

    Args:
        held: bytes of the model's tensors on the device; 0 if there is no model to look at.

    Raises:
        CheckFailed: memory was allocated, or its peak reset, if nobody could see it.
    """
    if peaks.allocated is not None and peaks.allocated < held:
        raise CheckFailed(
            f"torch's caching allocator counted {format_bytes(peaks.allocated)} at the peak, less than the "
            f"{format_bytes(held)} that the model itself holds on the GPU: the memory comes from another allocator; unset "
            "PYTORCH_NO_CUDA_MEMORY_CACHING, or leave the other allocator out"
        )
    if peaks.reset_unseen:
        raise CheckFailed(
            "something resets the peak of torch's caching allocator from compiled code, so the peak may be too low; leave "
            "that out of the step"
        )


def finite_losses(losses: Sequence[float], name: str, *, steps: int) -> tuple[float, ...]:
    """Return the losses before the first one that is not finite, which a curve may have.

    Args:
        steps: how many steps were run.

    Raises:
        CheckFailed: not every step gave a loss.
    """
    if len(losses) < steps:
        some = f"a loss from {len(losses)} of {steps} steps" if losses else "no loss from its step"
        raise CheckFailed(f"{name} returns {some}, so it has no curve; return the loss of every step")
    return tuple(itertools.takewhile(math.isfinite, losses))


class Movement:
    """Checks that the trained parameters change, without keeping copies of them.

    Args:
        idle: regular expressions for whole names of parameters that get no gradient by construction.
        accepts_zeros: whether a gradient of zeros is one. The losses of two players can cancel: that of a critic has no
            gradient for the bias of its last layer.
        knows_values: whether the device computes values, so that it can be seen whether they change.
    """

    def __init__(
        self, model: nn.Module, idle: Sequence[str] = (), *, accepts_zeros: bool = False, knows_values: bool = True
    ) -> None:
        self._accepts_zeros = accepts_zeros
        self._trained = {
            name: value
            for name, value in model.named_parameters()
            if value.requires_grad and not any(re.fullmatch(pattern, name) for pattern in idle)
        }
        self._before = {name: fingerprint(value) for name, value in self._trained.items()} if knows_values else {}
        self._reached: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Provide a context that records the names of the parameters that get a gradient."""

        def note_gradient_of(name: str) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                gradient = None if parameter.grad is None else local(parameter.grad)
                # On an emulated GPU this check's operators would count as operators of the step. So gradients of the user's
                # own code may be zero there.
                if gradient is not None and gradient.is_sparse and not self._accepts_zeros:
                    gradient = gradient.coalesce().values()
                if gradient is None or not gradient.numel():
                    return
                if self._accepts_zeros or torch.linalg.vector_norm(gradient, ord=math.inf) != 0:
                    self._reached.add(name)

            return hook

        hooks = [value.register_post_accumulate_grad_hook(note_gradient_of(name)) for name, value in self._trained.items()]
        for value in self._trained.values():
            # This hook comes first, because other hooks may take the gradient away. torch calls hooks in the order of this
            # dict.
            others: dict[int, Any] = value._post_accumulate_grad_hooks
            for number in [*others][:-1]:
                others[number] = others.pop(number)
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def changes(self) -> tuple[set[str], set[str]]:
        """Return the names of the tensors that have changed since the start, and of those that got a gradient in the watched
        step."""
        moved = {name for name, before in self._before.items() if before != fingerprint(self._trained[name])}
        return moved, self._reached

    def check(self, moved: set[str], reached: set[str] | None, *, steps: int, remote_tensors: int = 0) -> None:
        """Check that every trained tensor got a gradient in the watched step, and that every trained matrix has changed
        since the start.

        Vectors may stay: a norm's weights near 1.0 round an update of 1e-4 away when stored in bf16.

        Args:
            moved: what `changes` returns, united over all processes of the case: one may hold rows of a sharded table
                that no sample names, and nothing of a small tensor.
            reached: the names of the tensors that got a gradient, united over all processes; None if no step was watched.
            remote_tensors: trained tensors that other processes hold, and check.

        Raises:
            CheckFailed: a tensor got no gradient or did not change. The message names the first one.
        """
        still, starved = self._left_out(moved, reached, remote_tensors=remote_tensors)
        if still:
            raise self._unchanged(still, steps)
        if starved:
            raise CheckFailed(
                f"{len(starved)} of {len(self._trained)} trained tensors got no gradient (first: {starved[0]}){self._zeros}"
                "; if that is intended, give them requires_grad_(False)"
            )

    def tell(
        self, moved: set[str], reached: set[str] | None, *, steps: int, declared: Iterable[str] = ()
    ) -> tuple[TrainedTensors, str]:
        """Return which tensors train, and a sentence on those that do not; empty if there are none.

        Args:
            moved, reached, steps: as of `check`.
            declared: the names of the tensors that are to be idle, or patterns of them.

        Raises:
            CheckFailed: no tensor trains, or one does that is to be idle.
        """
        still, starved = self._left_out(moved, reached)
        idle = {*still, *starved}
        to_be_idle = {name: pattern for pattern in declared for name in fnmatch.filter(self._trained, pattern)}
        if trained := next((name for name in to_be_idle if name not in idle), None):
            raise CheckFailed(
                f"setup.watch() has {to_be_idle[trained]!r} in idle, but {trained} "
                f"{'changes' if trained in moved else 'gets a gradient'} in training; take it out"
            )
        names = [name for name in self._trained if name not in to_be_idle]
        learning, left = [name for name in names if name not in idle], [name for name in names if name in idle]
        if still and moved.isdisjoint(names):
            raise self._unchanged(still, steps)
        counts = Counter(map(_without_numbers, left))
        record = TrainedTensors(
            learning=dict(Counter(module_of(_without_numbers(name)) for name in learning).most_common(_MOST_NAMES)),
            idle=dict(counts.most_common(_MOST_NAMES)),
        )
        if not left:
            return record, ""
        what = "got no gradient" if set(left) <= {*starved} else "did not change"
        both = " and did not change" if self._before and what == "got no gradient" else ""
        told = [f"{name} ({number})" if number > 1 else name for name, number in counts.items()]
        more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        return record, (
            f"{len(left)} of {len(names)} trained tensors {what}{both}: {', '.join(told[:_NAMED])}{more}; if that is "
            "intended, say it by setup.watch(model, idle=[...]) with these names, or give them requires_grad_(False)"
        )

    def check_declared(self, declared: Iterable[str]) -> None:
        """Check that each of these names, or patterns, matches a trained tensor.

        Raises:
            CheckFailed: one is not.
        """
        for pattern in declared:
            if not fnmatch.filter(self._trained, pattern):
                raise CheckFailed(
                    f"setup.watch() has {pattern!r} in idle, but no trained tensor of the model has such a name; its names "
                    f"are like {next(iter(self._trained), 'none')}, and * stands for any part of one"
                )

    @property
    def _zeros(self) -> str:
        return "" if self._accepts_zeros else ", or one of zeros only"

    def _unchanged(self, still: Sequence[str], steps: int) -> CheckFailed:
        number = len(self._trained)
        return CheckFailed(f"{len(still)} of {number} trained tensors did not change in {steps} steps (first: {still[0]})")

    def _left_out(
        self, moved: set[str], reached: set[str] | None, *, remote_tensors: int = 0
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Return the names of matrices that did not change, and of tensors that got no gradient.

        Raises:
            CheckFailed: there is no other tensor.
        """
        if not self._trained and not remote_tensors:
            raise CheckFailed("no parameter requires a gradient: nothing trains")
        shapes = {name: shape for name, value in self._trained.items() if 0 not in (shape := _shape(value))}
        reaches = reached is None or not reached.isdisjoint(shapes)
        if not reaches and not remote_tensors and not moved:
            changed = ", and none changed" if self._before else ""
            raise CheckFailed(
                f"each trained tensor got no gradient{self._zeros}{changed}: is the loss computed under torch.no_grad(), or "
                "is backward() not called?"
            )
        matrices = [name for name, shape in shapes.items() if len(shape) > 1] if self._before else []
        still = [name for name in matrices if name not in moved]
        return still, [name for name in shapes if reached is not None and name not in reached]


def _without_numbers(name: str) -> str:
    """Return the name of a tensor with ``*`` in place of the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; a tensor that is not sharded is returned itself."""
    # torch's DTensor has the first attribute, and DeepSpeed's stage 3 has the second one.
    shard: Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))
    return shard


def _shape(parameter: Tensor) -> tuple[int, ...]:
    # DeepSpeed's stage 3 leaves an empty vector in place of the parameter.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def fingerprint(parameter: Tensor) -> list[float]:
    """Return norms of pieces of the tensor in double precision. They differ if any element differs by more than rounding.

    In pieces, because a double copy of a 128k-token embedding would take 4 GiB; as numbers, which no counter takes for
    tensors of the training.
    """
    pieces = local(parameter).detach().flatten().split(_CHUNK)
    norms: list[float] = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]).tolist()
    return norms
