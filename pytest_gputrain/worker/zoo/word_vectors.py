"""Builds the family of word vectors: word2vec's skip-gram with negative sampling (arXiv:1310.4546), on sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.zoo.samples import zipf
from pytest_gputrain.worker.zoo.workload import Batch, Workload


class SkipGram(nn.Module):
    """Maps words (batch,) and candidates for their context (batch, candidates), both int64, to logits (batch, candidates).

    A table for words, a table and biases for contexts, after PaddlePaddle/PaddleFleetX
    deprecated/examples/word2vec/network.py.
    """

    def __init__(self, *, vocab_size: int, dimension: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, dimension, sparse=True)
        self.contexts = nn.Embedding(vocab_size, dimension, sparse=True)
        self.biases = nn.Embedding(vocab_size, 1, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / dimension, 0.5 / dimension)
        nn.init.zeros_(self.contexts.weight)
        nn.init.zeros_(self.biases.weight)

    def forward(self, words: Tensor, candidates: Tensor) -> Tensor:
        products = torch.bmm(self.contexts(candidates), self.words(words).unsqueeze(2))
        logits: Tensor = (products + self.biases(candidates)).squeeze(2)
        return logits


class WordVectorModel(Workload):
    own = (SkipGram,)

    def batch(self, device: torch.device) -> Batch:
        """Draw ``words`` (batch,), ``candidates`` (batch, 1 + negatives) with the true context first, and their labels.

        By ``zipf`` words and contexts are as frequent as in natural language (Zipf's law, exponent 1), and negatives are
        drawn by the power of 0.75 of the frequencies, as in the paper.

        Raises:
            CheckFailed: the case's optimizer takes no sparse gradients.
        """
        # Parameter servers implement every optimizer for sparse gradients. Otherwise only SGD takes them.
        if self.case.optimizer != "sgd" and self.case.parallel != "ps":
            raise CheckFailed(
                f"{self.case.model} trains on sparse gradients, which the optimizer {self.case.optimizer!r} does not take; "
                "choose optimizer='sgd'"
            )
        vocabulary: int = self.architecture.trained_part.facts(self.scale)["vocab_size"]
        size, candidates = self.case.batch_size, 1 + int(self.architecture.step["negatives"])
        truth = torch.zeros(size, candidates, device=device)
        truth[:, 0] = 1
        if self.case.id_distribution == "zipf":
            words = zipf(vocabulary, (size,), 1, device)
            contexts = zipf(vocabulary, (size, 1), 1, device)
            negatives = zipf(vocabulary, (size, candidates - 1), 0.75, device)
            inputs = {"words": words, "candidates": torch.cat([contexts, negatives], dim=1), "truth": truth}
        else:
            inputs = {
                "words": torch.randint(0, vocabulary, (size,), device=device),
                "candidates": torch.randint(0, vocabulary, (size, candidates), device=device),
                "truth": truth,
            }
        return Batch(inputs=inputs, samples=size)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the binary cross entropy, summed over a word's candidates, averaged over the words."""
        logits = self.model(inputs["words"], inputs["candidates"])
        total = functional.binary_cross_entropy_with_logits(logits, inputs["truth"], reduction="sum")
        mean: Tensor = total / logits.shape[0]
        return mean
