"""Replaces the two parts of engines that fakes cannot run, DDP's reducer and gradients of sparse rows; all else is their own
code.

They allocate what the originals do, and compute nothing else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_gputrain.worker.checks import CheckFailed

_MIB: Final = 2**20


class DistributedDataParallel(nn.Module):
    """Stands in for torch's, whose reducer is C++ and refuses fakes: gradients are averaged in buckets beside them.

    Rules are those of torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp. One bucket for
    everything (``_ddp_init_helper``) is replaced, before the forward pass that follows the first exchange, by buckets of 1
    and then 25 MiB in the order in which gradients came (``Reducer::rebuild_buckets``).

    Not covered: eight bytes a parameter to note which were used, arguments that change how gradients are exchanged, and
    sparse gradients.
    """

    def __init__(
        self, module: nn.Module, *, process_group: Any = None, broadcast_buffers: bool = True, **options: Any
    ) -> None:
        super().__init__()
        unknown = sorted(options.keys() - {"device_ids", "output_device"})
        if unknown:
            raise CheckFailed(f"a prediction does not know what DistributedDataParallel does with {', '.join(unknown)}")
        self.module = module
        self._size = dist.get_world_size(process_group)
        self._exchanging = True
        self._trained: list[Tensor] = [value for value in module.parameters() if value.requires_grad]
        self._arrival_order: list[Tensor] | None = []
        """Parameters in the order in which their gradients arrived; None once the buckets follow it."""
        self._views: dict[Tensor, Tensor] = {}
        """The part of a bucket that is a parameter's."""
        self._waiting: set[Tensor] = set()
        self._make_buckets(self._trained, [sys.maxsize])
        for value in self._trained:
            value.register_post_accumulate_grad_hook(self._arrived)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._arrival_order:
            arrival_order, self._arrival_order = self._arrival_order, None
            self._make_buckets(arrival_order, [_MIB, 25 * _MIB])
        self._waiting = set(self._trained) if torch.is_grad_enabled() and self._exchanging else set()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Provide a context in which backward passes exchange no gradients, as in the original."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def _make_buckets(self, values: list[Tensor], limits: list[int]) -> None:
        self._views.clear()
        for bucket in assigned(values, limits):
            gradients = torch.empty(sum(value.numel() for value in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            parts = gradients.split([value.numel() for value in bucket])
            self._views |= {value: part.view(value.shape) for value, part in zip(bucket, parts, strict=True)}

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        if parameter not in self._waiting:
            return
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise CheckFailed("a prediction does not know what DistributedDataParallel does with sparse gradients")
        if self._arrival_order is not None:
            self._arrival_order.append(parameter)
        torch.mul(parameter.grad, 1 / self._size, out=self._views[parameter])
        self._waiting.remove(parameter)
        if not self._waiting:
            for value in self._trained:
                assert value.grad is not None
                value.grad.copy_(self._views[value])


def assigned(values: list[Tensor], limits: list[int]) -> list[list[Tensor]]:
    """Fill the buckets of ``compute_bucket_assignment_by_size``: one of a dtype is closed by the tensor that fills it."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    closed: dict[torch.dtype, int] = {}
    buckets = []
    for value in values:
        kind = value.dtype
        filling.setdefault(kind, []).append(value)
        sizes[kind] = sizes.get(kind, 0) + value.numel() * value.itemsize
        number = closed.get(kind, 0)
        if sizes[kind] >= limits[min(number, len(limits) - 1)]:
            buckets.append(filling.pop(kind))
            sizes[kind], closed[kind] = 0, number + 1
    return buckets + list(filling.values())


class RowGradient:
    """A sparse gradient of a table whose rows are known: a fake sparse tensor knows neither them nor how many are equal.

    Sums are a CPU's; a GPU's take more for a moment.

    Args:
        ids: (rows,), each once, in order.
        values: (rows, width).
    """

    def __init__(self, ids: Tensor, values: Tensor) -> None:
        self._ids = ids
        self._values = values

    def indices(self) -> Tensor:
        """Return the indices (1, rows)."""
        return self._ids.unsqueeze(0)

    def values(self) -> Tensor:
        """Return the values (rows, width)."""
        return self._values

    def __add__(self, other: RowGradient) -> RowGradient:
        """Put both one after the other, and merge equal rows in place (add_out_sparse_cpu of SparseTensorMath.cpp)."""
        ids = torch.cat((self._ids, other._ids))
        values = torch.cat((self._values, other._values))
        once = ids.unique()
        return RowGradient(ids[: len(once)].copy_(once), values[: len(once)])

    def coalesce(self) -> RowGradient:
        """Return the gradient itself, since each row is there once."""
        return self

    def cpu(self) -> RowGradient:
        """Return a copy on the host."""
        return RowGradient(self._ids.cpu(), self._values.cpu())


def row_gradient(ids: Tensor, values: Tensor, rows: int) -> RowGradient:
    """Stand in for `table_server.sparse`: return a sorted copy."""
    return RowGradient(ids.clone(), values.clone())
