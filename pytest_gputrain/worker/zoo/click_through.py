"""Builds the family that predicts click-through rates: CTR-DNN, and wide & deep (arXiv:1606.07792) on the same inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.worker.zoo.samples import zipf
from pytest_gputrain.worker.zoo.workload import Batch, Workload

SLOTS: Final[tuple[int, ...]] = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Categories in each slot of the Criteo Display Advertising Challenge, as in facebookresearch/dlrm."""


class Deep(nn.Module):
    """CTR-DNN: maps ids (batch, slots) int64 and dense features (batch, features) to logits (batch, outputs).

    All slots share one table, as in PaddlePaddle/PaddleFleetX deprecated/examples/distribute_ctr. Its gradient is dense:
    torch's Adam takes no other.
    """

    def __init__(
        self, *, hashed_ids: int, dimension: int, slots: int, dense_features: int, hidden_sizes: Sequence[int], outputs: int
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(hashed_ids, dimension)
        nn.init.uniform_(self.table.weight, -1, 1)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([slots * dimension + dense_features, *hidden_sizes, outputs]):
            linear = nn.Linear(before, after)
            nn.init.normal_(linear.weight, std=1 / math.sqrt(before))
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([self.table(ids).flatten(1), dense], dim=1))
        return logits


class WideAndDeep(nn.Module):
    """`Deep` plus a linear model of the same ids and dense features; one output."""

    def __init__(self, *, hashed_ids: int, dense_features: int, outputs: int, **deep: Any) -> None:
        super().__init__()
        self.deep = Deep(hashed_ids=hashed_ids, dense_features=dense_features, outputs=outputs, **deep)
        self.wide_ids = nn.Embedding(hashed_ids, outputs)
        self.wide_dense = nn.Linear(dense_features, outputs, bias=False)
        nn.init.zeros_(self.wide_ids.weight)
        nn.init.zeros_(self.wide_dense.weight)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        logits: Tensor = self.deep(ids, dense) + self.wide_ids(ids).sum(dim=1) + self.wide_dense(dense)
        return logits


class ClickThroughModel(Workload):
    own = (Deep, WideAndDeep)

    def batch(self, device: torch.device) -> Batch:
        """Draw ``ids`` (batch, slots), one a slot, ``dense`` (batch, features) in the default dtype, and ``clicks``
        (batch,).

        By ``zipf`` a slot has as many categories as in Criteo's data (`SLOTS`), which share the table's rows where there are
        more than rows; that the n-th is an n-th as frequent as the first is an assumption.
        """
        facts = self.architecture.trained_part.facts(self.scale)
        size = self.case.batch_size
        inputs = {
            "ids": self._ids(size, facts, device),
            "dense": torch.rand(size, facts["dense_features"], device=device),
            "clicks": torch.randint(0, 2, (size,), device=device),
        }
        return Batch(inputs=inputs, samples=size)

    def _ids(self, size: int, facts: dict[str, Any], device: torch.device) -> Tensor:
        if self.case.id_distribution == "uniform":
            return torch.randint(0, facts["hashed_ids"], (size, facts["slots"]), device=device)
        firsts = itertools.accumulate(SLOTS[:-1], initial=0)
        slots = [first + zipf(count, (size,), 1, device) for first, count in zip(firsts, SLOTS, strict=True)]
        return torch.stack(slots, dim=1) % int(facts["hashed_ids"])

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy over click and no click, the binary one for a model with one output."""
        logits, clicks = self.model(inputs["ids"], inputs["dense"]), inputs["clicks"]
        if logits.shape[1] == 1:
            return functional.binary_cross_entropy_with_logits(logits.squeeze(1), clicks.to(logits.dtype))
        return functional.cross_entropy(logits, clicks)
