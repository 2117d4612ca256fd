"""Builds the family of decoder-only language models: those of transformers, and PanGu by a module of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_gputrain.cases.architectures.facts import Architecture, Part
from pytest_gputrain.records import Case, Scale
from pytest_gputrain.worker.zoo.attention import named_attention
from pytest_gputrain.worker.zoo.headed import language_model
from pytest_gputrain.worker.zoo.pangu import PanGu
from pytest_gputrain.worker.zoo.samples import packed_positions, real_tokens, spread_lengths
from pytest_gputrain.worker.zoo.workload import Batch, Workload

TINY_SEQUENCE_LENGTH: Final = 128
"""Long enough to leave the tiny sliding window (Gemma 2) and the tiny short-rope range (Phi-3), both 32."""

IGNORED_LABEL: Final = -100


class LanguageModel(Workload):
    """A language model with random weights, and the case's attention or the one that transformers chooses: eager for Gemma
    2, sdpa for all others."""

    own = (PanGu,)

    def __init__(self, architecture: Architecture, case: Case, scale: Scale) -> None:
        super().__init__(architecture, case, scale)
        self._labels: Tensor | None = None
        self._loss = case.loss or architecture.loss
        if case.attention:
            model: Any = self.model
            model.set_attn_implementation(named_attention(case.attention))
        if case.loss_chunks > 1:
            whole: Any = self.model
            head = whole.get_output_embeddings()
            head.forward = self._loss_in_place_of_logits(head.forward)

    def _built(self, part: Part) -> nn.Module:
        if part.library == "transformers":
            return language_model(part, part.facts(self.scale))
        return super()._built(part)

    def checkpoint_activations(self, share: float) -> None:
        if (
            share < 1 or self._is_own or self.case.compile != "off" or self.case.reentrant_checkpointing
        ):  # The base class checkpoints blocks that are compiled or wrapped one by one.
            super().checkpoint_activations(share)
            return
        model: Any = self.model
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        contexts = {"context_fn": self.checkpoint_contexts} if self.case.activation_checkpointing_policy else {}
        enable({"use_reentrant": False, **contexts})

    def batch(self, device: torch.device) -> Batch:
        """Draw random token ids and, shifted by one, their labels: both (batch, sequence) int64.

        With samples of several lengths ``attention_mask`` tells padding, or ``position_ids`` where packed samples begin.
        """
        if self._is_own:
            length = self.table_limited_length()
        else:
            length = self.case.sequence_length
            if self.scale == "tiny":
                length = min(length, TINY_SEQUENCE_LENGTH)
        vocabulary: int = self.architecture.trained_part.facts(self.scale)["vocab_size"]
        # Some models pad their vocabulary with tokens for which they return no logits. Such tokens cannot be labels.
        vocabulary = min(vocabulary, getattr(self._config, "unpadded_vocab_size", None) or vocabulary)
        samples = self.case.batch_size
        ids = torch.randint(0, vocabulary, (samples, length), device=device)
        inputs = {"input_ids": ids, "labels": next_token_labels(ids)}
        tokens = None
        if self.case.lengths == "padded":
            lengths = spread_lengths(length, samples)
            inputs |= padded(inputs["labels"], lengths)
            tokens = sum(lengths)
        elif self.case.lengths == "packed":
            positions = packed_positions(samples, length, device)
            inputs["position_ids"] = positions
            # After the last token of a sample the next sample begins, so it has no label.
            inputs["labels"].masked_fill_(positions.roll(-1, dims=1) == 0, IGNORED_LABEL)
        inputs |= self._further_inputs(device)
        return Batch(inputs=inputs, samples=samples, sequence_length=length, tokens=tokens)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of the next tokens."""
        self._labels = inputs["labels"]
        if self._is_own:
            return next_token_loss(self.model(inputs["input_ids"]), inputs["labels"])
        model_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        logits: Tensor = self.model(**model_inputs, use_cache=False).logits
        return logits if self.case.loss_chunks > 1 else LOSSES[self._loss](logits, inputs["labels"])

    def _loss_in_place_of_logits(self, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function in place of the head that computes the loss over one chunk of tokens after another. Backward
        computes the logits again.

        In the head's own place, because parallelisms hook the model's forward pass: a loss beside it would miss them.
        """

        def total_loss(hidden: Tensor) -> Tensor:
            assert self._labels is not None, "a loss is of labels"
            tokens, labels = hidden.flatten(0, 1), self._labels.flatten()
            chunks = min(self.case.loss_chunks, len(labels))
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for part, part_labels in zip(tokens.tensor_split(chunks), labels.tensor_split(chunks), strict=True):
                total = total + checkpoint(sum_of_losses, part, part_labels, use_reentrant=False).float()
            return total / (labels != IGNORED_LABEL).sum()

        def sum_of_losses(part: Tensor, labels: Tensor) -> Tensor:
            # The losses of chunks are added, because a chunk that is all padding has no mean.
            logits = head(part)
            logits = logits.float() if self._loss == "fp32" else logits
            return functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")

        return total_loss

    def _further_inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Draw the inputs that the model would get from the multimodal model it is a part of."""
        if getattr(self._config, "model_type", "") == "voxtral_realtime_text":
            # This model also gets an embedding of how far the text lags behind the sound.
            model: Any = self.model
            words = model.get_input_embeddings()
            return {"t_cond": torch.randn(1, words.embedding_dim, dtype=words.weight.dtype, device=device)}
        return {}

    @property
    def _config(self) -> Any:
        """The config of transformers; None for a model that is not of transformers."""
        return getattr(self.model, "config", None)

    @property
    def _is_own(self) -> bool:
        return self.architecture.trained_part.library == "own"


def next_token_labels(ids: Tensor) -> Tensor:
    """Return the id that follows each: same shape, the last one ignored."""
    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = IGNORED_LABEL
    return labels


def padded(labels: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Return the mask and the labels of a batch whose samples are padded from these lengths."""
    mask = real_tokens(lengths, labels.shape[1], labels.device)
    # Padding follows the last real token, so that token has no label either.
    has_label = mask.roll(-1, dims=1) & mask
    return {"attention_mask": mask.long(), "labels": labels.masked_fill(~has_label, IGNORED_LABEL)}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of (batch, sequence, vocabulary) logits in their own dtype, ignored labels left out.

    transformers' own loss copies the logits to fp32, which alone is 8 GiB at 2 x 8192 tokens of a 128k vocabulary; the
    published memory figures exclude it. Shifting the labels instead of the logits saves another copy of them.
    """
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)


def transformers_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy as transformers computes it, from a copy of the logits in fp32."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    # With `shift_labels` the loss ignores its labels argument.
    loss: Tensor = ForCausalLMLoss(logits, None, logits.shape[-1], ignore_index=IGNORED_LABEL, shift_labels=labels)
    return loss


LOSSES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {"logits": next_token_loss, "fp32": transformers_loss}
"""The losses by the case's ``loss``, or that of its architecture."""
