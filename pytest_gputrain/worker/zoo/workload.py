"""Defines the base of all families of models: building, activation checkpointing, and the interface of batch and loss."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from pytest_gputrain.cases.architectures.facts import Architecture, Part
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.checks import CheckFailed, described
from pytest_gputrain.worker.flops import selective_contexts


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch on the device; every step trains on it."""

    inputs: dict[str, Tensor]
    """The inputs by the names that the family's loss knows."""
    samples: int
    sequence_length: int = 0
    """Tokens per sample, padding included; 0 if samples are not token sequences."""
    tokens: int | None = None
    """Tokens of all samples without padding; None if none is padding."""


class Workload(abc.ABC):
    """A model of one family, built, with its batch and its loss.

    Args of the constructor: the model's facts; the case; the scale. It builds on the default device and in the default dtype
    that the caller has set, in training mode, with activation checkpointing as the case says.
    """

    own: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Modules that are the family's own; its facts name them by class."""
    model: nn.Module
    """The model that trains. The caller puts its adapted form here."""
    encoders: dict[str, nn.Module]
    """Frozen networks that run in the forward pass, by name of their part."""

    def __init__(self, architecture: Architecture, case: Case, scale: Scale) -> None:
        self.architecture = architecture
        self.case = case
        self.scale = scale
        self.model, *encoders = [self.build_part(name) for name in architecture.parts]
        self.encoders = dict(zip(list(architecture.parts)[1:], encoders, strict=True))
        for encoder in encoders:
            encoder.requires_grad_(False).eval()
        self.model.train()
        if case.activation_checkpointing:
            self.checkpoint_activations(float(case.activation_checkpointing))

    def build_part(self, name: str) -> nn.Module:
        """Build one network by its library's class, from its hyper-parameters."""
        part = self.architecture.parts[name]
        try:
            return self._built(part)
        except (MemoryError, RuntimeError):  # If the device is out of memory, other code reports it.
            raise
        except Exception as error:
            raise CheckFailed(
                f"{self.case.model} cannot be built at {self.scale} scale by {part.model_class}: {described(error)}"
            ) from error

    def _built(self, part: Part) -> nn.Module:
        facts = part.facts(self.scale)
        if part.library == "transformers":
            import transformers

            config = getattr(transformers, part.config_class)(**facts)
            module: nn.Module = getattr(transformers, part.model_class)(config)
            return module
        if part.library == "diffusers":
            import diffusers

            module = getattr(diffusers, part.model_class)(**facts)
            return module
        return next(module_class for module_class in self.own if module_class.__name__ == part.model_class)(**facts)

    def checkpoint_activations(self, share: float) -> None:
        """Recompute the blocks in backward, or the first ``share`` of them."""
        for block in self.blocks[: share_of(len(self.blocks), share, str(self.case))]:
            block.forward = _recomputed(block.forward, self.checkpointed)

    @property
    def blocks(self) -> list[nn.Module]:
        """The model's repeated blocks, in the order in which they run."""
        return [block for path in self.architecture.blocks for block in self.model.get_submodule(path).children()]

    def checkpointed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``forward(*args, **kwargs)``, recomputed in backward by the case's variant."""
        if self.case.reentrant_checkpointing:
            return reentrant(forward, *args, **kwargs)
        if self.case.activation_checkpointing_policy:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self.checkpoint_contexts, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def checkpoint_contexts(self) -> tuple[Any, Any]:
        """Return the contexts of a block's forward pass and of its recomputation, as the case's policy sets them."""
        return self._contexts()

    @functools.cached_property
    def _contexts(self) -> Callable[[], tuple[Any, Any]]:
        # By the time that the first block runs, all libraries with operators are loaded. So the result is computed then, and
        # kept.
        return selective_contexts(self.case.activation_checkpointing_policy)

    def table_limited_length(self) -> int:
        """Return the case's sequence length, for a model with a table of positions. At tiny scale it is at most the size of
        the table.

        Raises:
            CheckFailed: the full-size model has fewer positions.
        """
        part, length = self.architecture.trained_part, self.case.sequence_length
        positions: int = part.config["max_position_embeddings"]
        if length > positions:
            raise CheckFailed(
                f"{self.case.model} has a table of {positions:,} positions, too few for sequence_length={length}; "
                f"set it to at most {positions}"
            )
        return min(length, int(part.facts(self.scale)["max_position_embeddings"]))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the package itself has chosen for the case."""
        return ()

    @abc.abstractmethod
    def batch(self, device: torch.device) -> Batch:
        """Draw one batch of random data."""

    @abc.abstractmethod
    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of a batch, by ``self.model``."""


def share_of(count: int, share: float, case: str) -> int:
    """Return the share of ``count`` blocks, rounded down.

    Raises:
        CheckFailed: the share is less than one block. The message names the case.
    """
    if not int(count * share):
        raise CheckFailed(
            f"{case} recomputes {share:g} of {count} blocks, which is none; set at least {1 / count:.3g}, or false"
        )
    return int(count * share)


def _recomputed(forward: Callable[..., Any], checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpointed(forward, *args, **kwargs)

    return run


def reentrant(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block by torch's older variant: autograd sees one function, whose backward repeats the whole forward pass.

    It differentiates by tensors that are arguments of their own, so those in tuples become such. Where none wants a
    gradient, as behind a frozen embedding, it differentiates nothing; the first tensor is then asked for one, as
    transformers and peft do by ``enable_input_require_grads``.
    """
    values, structure = tree_flatten((args, kwargs))
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        first = next(index for index, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point())
        values[first] = values[first].detach().requires_grad_()

    def run(*given: Any) -> Any:
        args, kwargs = tree_unflatten(given, structure)
        return forward(*args, **kwargs)

    return checkpoint(run, *values, use_reentrant=True)
