"""Implements the server's side of the engine ps: rows of embedding tables, looked up and updated by messages of
torch.distributed.

Of every table, server s of S holds the rows whose id is s modulo S. A message is a header from whomever, then tensors from
the same worker: int64 row numbers within the shards, table after table, then their values in the tables' dtype.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_gputrain.worker import messages
from pytest_gputrain.worker.checks import CheckFailed, fingerprint
from pytest_gputrain.worker.group import Group

HEADER, ROWS, VALUES, TABLE, DONE = range(1, 6)
"""Tags: what kind of tensor is meant, so that a server that waits for anybody's header takes nothing else for one."""

Layout = list[tuple[str, int, int, str]]
"""Name, rows, width and dtype of every shard, in order."""

RowsOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Request(enum.IntEnum):
    """The kind of a message: the first number of its header. The number of rows of each table follows."""

    PULL = 0
    PUSH = 1
    LEAVE = 2


FIRST: Final = 0
"""The worker whose tables are the ones to start from."""


class TableServer:
    """The shards of the tables on one server. A synchronous update is the mean of one push from each worker, and every
    worker then gets a message.

    Attributes:
        updates: updates applied.
        rows: rows they changed, each counted once an update.
    """

    def __init__(self, group: Group, asynchronous: bool, make_optimizer: RowsOptimizer) -> None:
        """Wait for the first worker's tables."""
        self.updates = 0
        self.rows = 0
        self._workers = set(range(group.size))
        self._asynchronous = asynchronous
        self._pushes: dict[int, list[Tensor]] = {}
        self._number = group.rank - group.size
        self._shards = []
        for name, rows, width, dtype in messages.receive(Layout, FIRST):
            weight = torch.empty(rows, width, dtype=getattr(torch, dtype.removeprefix("torch.")))
            receive(weight, FIRST, TABLE)
            self._shards.append(Shard(name, weight, make_optimizer))

    @property
    def bytes(self) -> int:
        """The bytes of all rows."""
        return sum(shard.weight.nbytes for shard in self._shards)

    def serve(self, updates: int | None = None) -> None:
        """Answer the workers until all of them have left, or until this many updates are made."""
        header = torch.empty(1 + len(self._shards), dtype=torch.int64)
        while self._workers and (updates is None or self.updates < updates):
            worker = dist.recv(header, tag=HEADER)
            request, *counts = header.tolist()
            match Request(request):
                case Request.PULL:
                    self._answer(worker, counts)
                case Request.PUSH:
                    self._pushes[worker] = self._gradients(worker, counts)
                    self._update()
                case Request.LEAVE:
                    self._workers.remove(worker)

    def check(self) -> None:
        """Check that every shard that got gradients has changed since the start.

        Raises:
            CheckFailed: a shard did not change. The message names the first one.
        """
        unchanged = [shard.name for shard in self._shards if shard.pushed and not shard.moved()]
        if unchanged:
            raise CheckFailed(
                f"{len(unchanged)} of {len(self._shards)} tables did not change on server {self._number} in {self.updates} "
                f"updates (first: {unchanged[0]})"
            )

    def _answer(self, worker: int, counts: Sequence[int]) -> None:
        rows = self._rows(worker, counts)
        looked_up = [shard.weight[ids].flatten() for shard, ids in zip(self._shards, rows, strict=True)]
        dispatch(torch.cat(looked_up), worker, VALUES)

    def _update(self) -> None:
        if not self._asynchronous and len(self._pushes) < len(self._workers):
            return
        # The gradients are added in the order of the workers and not of their messages, so that every run rounds the sums in
        # the same way.
        pushes = [self._pushes[worker] for worker in sorted(self._pushes)]
        for shard, *gradients in zip(self._shards, *pushes, strict=True):
            self.rows += shard.update(sparse_sum(gradients) / len(gradients))
        self.updates += 1
        if not self._asynchronous:
            for worker in self._pushes:
                dispatch(torch.ones(1), worker, DONE)
        self._pushes.clear()

    def _rows(self, worker: int, counts: Sequence[int]) -> tuple[Tensor, ...]:
        ids = torch.empty(sum(counts), dtype=torch.int64)
        receive(ids, worker, ROWS)
        parts: tuple[Tensor, ...] = ids.split(list(counts))
        return parts

    def _gradients(self, worker: int, counts: Sequence[int]) -> list[Tensor]:
        """Return the sparse gradient of every shard, (rows, width), from a worker."""
        rows = self._rows(worker, counts)
        sizes = [count * shard.weight.shape[1] for count, shard in zip(counts, self._shards, strict=True)]
        values = torch.empty(sum(sizes), dtype=self._shards[0].weight.dtype)
        receive(values, worker, VALUES)
        return [
            sparse(ids, flat.view(len(ids), -1) if len(ids) else flat.view(0, shard.weight.shape[1]), shard.weight.shape[0])
            for ids, flat, shard in zip(rows, values.split(sizes), self._shards, strict=True)
        ]


class Shard:
    """A server's rows of one table, and their optimizer's states.

    Attributes:
        name: the table's, within its model.
        weight: the rows, (rows, width).
        pushed: whether a gradient ever came for any of them.
    """

    def __init__(self, name: str, weight: Tensor, make_optimizer: RowsOptimizer) -> None:
        self.name = name
        self.weight = weight
        self.pushed = False
        self._make_optimizer = make_optimizer
        self._states: dict[str, Any] = {}
        self._before = fingerprint(weight)

    def moved(self) -> bool:
        """Tell whether any row changed since the start."""
        return self._before != fingerprint(self.weight)

    def update(self, gradient: Tensor) -> int:
        """Take one step of the optimizer for the rows in ``gradient`` (coalesced) alone. Return how many rows these are.

        As torch.optim.SparseAdam does it, but with the very optimizer that the case would have in one process: it gets the
        rows as its parameter, with their part of its states. States and weights of other rows stay, so that momentum and
        weight decay act on a row only when it is seen; a count of steps is the table's.
        """
        ids = gradient.indices()[0]
        rows = nn.Parameter(self.weight[ids])
        rows.grad = gradient.values()
        optimizer = self._make_optimizer([rows])
        if self._states:
            optimizer.state[rows] = {
                name: state[ids] if _is_by_row(state) else state for name, state in self._states.items()
            }
        optimizer.step()
        self.weight[ids] = rows.detach()
        for name, state in optimizer.state[rows].items():
            if _is_by_row(state):
                self._states.setdefault(name, torch.zeros_like(self.weight, dtype=state.dtype))[ids] = state
            else:
                self._states[name] = state
        self.pushed = self.pushed or len(ids) > 0
        return len(ids)


def _is_by_row(state: Any) -> bool:
    return isinstance(state, Tensor) and state.ndim == 2


def sparse(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """Return ``values`` (ids, width) at the rows ``ids`` of a table of this many rows; equal ids are summed."""
    size = (rows, values.shape[1])
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, size, check_invariants=False).coalesce()


def sparse_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of sparse gradients of one table, coalesced."""
    first, *others = parts
    for other in others:
        first = first + other
    return first.coalesce()


def dispatch(values: Tensor, rank: int, tag: int) -> None:
    """Send a tensor, unless it is empty, and return once the tensor may be changed again."""
    work = post(values, rank, tag)
    if work is not None:
        work.wait()


def post(values: Tensor, rank: int, tag: int) -> dist.Work | None:
    """Begin to send a tensor, and return the work to wait for before the tensor is changed or freed; None if it is empty."""
    return dist.isend(_bytes(values), dst=rank, tag=tag) if values.numel() else None


def receive(values: Tensor, rank: int, tag: int) -> None:
    """Receive into ``values`` what `dispatch` sends."""
    if values.numel():
        dist.recv(_bytes(values), src=rank, tag=tag)


def _bytes(values: Tensor) -> Tensor:
    """Return the tensor's memory as bytes, because gloo does not know every type."""
    return values.flatten().view(torch.uint8)
