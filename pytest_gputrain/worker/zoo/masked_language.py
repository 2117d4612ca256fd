"""Builds the family of masked language models: BERT's pre-training on masked tokens and next sentences."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gputrain.worker.zoo.language import IGNORED_LABEL
from pytest_gputrain.worker.zoo.workload import Batch, Workload


class MaskedLanguageModel(Workload):
    """Trains BERT of transformers with both heads (masked tokens, next sentence) and dropout."""

    def batch(self, device: torch.device) -> Batch:
        """Draw pairs of sentences of equal length, without padding, the same count of masked tokens in each pair.

        ``input_ids``, ``token_type_ids`` and ``labels`` are (batch, sequence) int64, ``next_sentence_label`` is (batch,).
        A masked token is the mask token always: the tenths that BERT leaves alone or replaces by another cost the same.
        """
        facts, step = self.architecture.trained_part.facts(self.scale), self.architecture.step
        size, length = self.case.batch_size, self.table_limited_length()
        ids = torch.randint(facts["pad_token_id"] + 1, facts["vocab_size"], (size, length), device=device)
        masked = max(1, round(step["masked_share"] * length))
        chosen = torch.rand(size, length, device=device, dtype=torch.float32).topk(masked, dim=1).indices
        labels = torch.full_like(ids, IGNORED_LABEL).scatter(1, chosen, ids.gather(1, chosen))
        second = torch.arange(length, device=device) >= length // 2
        inputs = {
            "input_ids": ids.scatter(1, chosen, step["mask_token_id"]),
            "token_type_ids": second.long().expand(size, length),
            "labels": labels,
            "next_sentence_label": torch.randint(0, 2, (size,), device=device),
        }
        return Batch(inputs=inputs, samples=size, sequence_length=length)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the model's own loss: cross entropy over the masked tokens plus that of the next sentence.

        Its head computes the logits of all tokens, masked or not.
        """
        loss: Tensor = self.model(**inputs).loss
        return loss
