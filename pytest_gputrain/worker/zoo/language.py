"""Decoder-only language models by transformers: Llama, Gemma, Phi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.architectures import Architecture
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.flops import checkpoint_contexts

TINY_SEQUENCE_LENGTH: Final = 128
"""Long enough to leave the tiny sliding window (Gemma 2) and the tiny short-rope range (Phi-3), both 32."""

_IGNORED_LABEL: Final = -100


def build(architecture: Architecture, case: Case, scale: Scale) -> nn.Module:
    """The model with random weights and the attention that transformers picks for it (eager for Gemma 2, sdpa else)."""
    import transformers

    facts = architecture.config if scale == "full" else {**architecture.config, **architecture.tiny}
    config = getattr(transformers, architecture.config_class)(**facts, use_cache=False)
    model: Any = getattr(transformers, architecture.model_class)(config)
    model.train()
    if case.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": checkpoint_contexts})
    built: nn.Module = model
    return built


def batch(model: nn.Module, case: Case, scale: Scale, device: torch.device) -> dict[str, Tensor]:
    """Random token ids and, shifted by one, their labels: both (batch, sequence) int64, no padding."""
    length = case.sequence_length if scale == "full" else min(case.sequence_length, TINY_SEQUENCE_LENGTH)
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    ids = torch.randint(0, vocabulary, (case.batch_size, length), device=device)
    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = _IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Next-token cross entropy in the logits' own dtype.

    transformers' own loss copies the logits to fp32, which alone is 8 GiB at 2 x 8192 tokens of a 128k vocabulary; the
    published memory figures exclude it. Shifting the labels instead of the logits saves another copy of them.
    """
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=_IGNORED_LABEL)
