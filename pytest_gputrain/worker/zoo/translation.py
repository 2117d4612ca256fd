"""Builds the family of translation models: the Transformer of arXiv:1706.03762, by transformers' Marian class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gputrain.worker.zoo.workload import Batch, Workload


class TranslationModel(Workload):
    """A Transformer as in the paper: post-norm, sinusoidal positions, one table for source, target and output, and dropout.

    The two position tables are parameters that do not train: they are in the count of parameters, not of the trainable.
    """

    def batch(self, device: torch.device) -> Batch:
        """Draw sources and targets of the case's sequence length each, without padding; the decoder sees the targets one
        late.

        All (batch, sequence) int64. Samples are sentence pairs, and a pair counts the tokens of its target.
        """
        facts = self.architecture.trained_part.facts(self.scale)
        size, length = self.case.batch_size, self.table_limited_length()
        source, target = torch.randint(facts["pad_token_id"] + 1, facts["vocab_size"], (2, size, length), device=device)
        late = torch.roll(target, 1, dims=1)
        late[:, 0] = facts["decoder_start_token_id"]
        inputs = {"input_ids": source, "decoder_input_ids": late, "labels": target}
        return Batch(inputs=inputs, samples=size, sequence_length=length)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy with smoothed labels, which transformers' own loss does not have."""
        logits = self.model(
            input_ids=inputs["input_ids"], decoder_input_ids=inputs["decoder_input_ids"], use_cache=False
        ).logits
        smoothing: float = self.architecture.step["label_smoothing"]
        return functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), label_smoothing=smoothing)
