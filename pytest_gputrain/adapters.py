"""Says how frameworks train, to be returned by the function that builds a case. Imports no framework.

A Trainer of transformers or TRL needs none of these: return the trainer itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["lightning"]


@dataclass(frozen=True)
class LightningFit:
    """The arguments of Lightning's ``Trainer.fit``."""

    trainer: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def lightning(trainer: Any, *arguments: Any, **keywords: Any) -> LightningFit:
    """Train with Lightning: return ``lightning(trainer, module, loader)`` in place of ``trainer.fit(module, loader)``.

    Args:
        trainer: a Trainer of lightning or pytorch_lightning.
        arguments: the arguments of its ``fit``: the LightningModule, then loaders or a data module.
        keywords: the keyword arguments of its ``fit``.
    """
    return LightningFit(trainer, arguments, keywords)
