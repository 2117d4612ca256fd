"""Implements the engine ps: embedding tables on parameter servers, the dense part on the workers.

Synchronous, an update is that of one process that trains on all workers' batches. Asynchronous, servers apply each worker's
gradients as they come, while the dense part stays synchronous: the hybrid algorithm of Persia, arXiv:2111.05897.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.worker import messages
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.parallel.data_parallel import averaged
from pytest_gputrain.worker.parallel.engine import Engine, EngineOptions
from pytest_gputrain.worker.parallel.table_server import (
    DONE,
    FIRST,
    HEADER,
    ROWS,
    TABLE,
    VALUES,
    Layout,
    Request,
    dispatch,
    post,
    receive,
    sparse,
    sparse_sum,
)


class ParameterServer(Engine):
    """The engine of a worker of parameter servers. All parameters outside of tables are under DistributedDataParallel."""

    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        case = options.case
        if options.precision.scaled:
            raise CheckFailed(f"parallel='ps' scales no loss, which {case.precision} needs; choose bf16-amp")
        self._tables = Tables(_tables_of(model, case.model), options.group, case.asynchronous)
        for number, name in enumerate(self._tables.names):
            model.set_submodule(name, Lookup(number, self._tables))
        self.remote_tensors = len(self._tables.names)
        trained = [value for value in model.parameters() if value.requires_grad]
        self._dense = averaged(model, options.group) if trained else None
        self._optimizer = options.make_optimizer(trained) if trained else None
        self.model = self._dense or model
        self.updates = 0
        self._precision = options.precision
        self._device = options.device
        self._accumulation = case.gradient_accumulation

    def step(self, loss: Callable[[], Tensor], update: bool) -> Tensor:
        with self._communicating(update):
            with self._precision.casting(self._device):
                value = loss()
            (value / self._accumulation).backward()
        self._tables.collect()
        if update:
            self._tables.push()
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
            self._tables.settle()
            self.updates += 1
        return value.detach()

    def leave(self) -> None:
        self._tables.leave()

    def _communicating(self, update: bool) -> contextlib.AbstractContextManager[Any]:
        if update or self._dense is None:
            return contextlib.nullcontext()
        return self._dense.no_sync()


class Lookup(nn.Module):
    """Replaces an nn.Embedding by rows that the servers send."""

    def __init__(self, table: int, tables: Tables) -> None:
        super().__init__()
        self._table = table
        self._tables = tables

    def forward(self, ids: Tensor) -> Tensor:
        unique, positions = ids.unique(return_inverse=True)
        return functional.embedding(positions, self._tables.pull(self._table, unique))


class Tables:
    """The embedding tables of a model on a worker. Their rows are on the servers.

    Attributes:
        names: of their modules within the model, in order.
    """

    def __init__(self, weights: dict[str, Tensor], group: Group, asynchronous: bool) -> None:
        self.names = list(weights)
        self._shapes = [weight.shape for weight in weights.values()]
        self._dtype = next(iter(weights.values())).dtype
        self._servers = range(group.size, group.size + group.servers)
        self._asynchronous = asynchronous
        self._used: list[tuple[int, Tensor, Tensor]] = []
        self._gradients: dict[int, Tensor] = {}
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._trained: set[int] = set()
        if group.rank == FIRST:
            for number, server in enumerate(self._servers):
                shards = {name: weight.detach()[number :: group.servers].cpu() for name, weight in weights.items()}
                layout: Layout = [(name, *shard.shape, str(shard.dtype)) for name, shard in shards.items()]
                messages.send(layout, server)
                for shard in shards.values():
                    dispatch(shard.contiguous(), server, TABLE)

    def pull(self, table: int, ids: Tensor) -> Tensor:
        """Return the rows ``ids`` (each once) of a table from the servers, (ids, width), as a leaf whose gradient the next
        `collect` takes."""
        self._finish()
        rows_by_server = self._rows_by_server(ids.cpu())
        width = self._shapes[table][1]
        for server, (positions, rows) in rows_by_server.items():
            if len(positions):
                self._request(Request.PULL, server, {table: rows})
        pulled = torch.empty(len(ids), width, dtype=self._dtype)
        for server, (positions, _) in rows_by_server.items():
            part = torch.empty(len(positions), width, dtype=self._dtype)
            receive(part, server, VALUES)
            pulled[positions] = part
        self._finish()
        leaf = pulled.to(ids.device)
        if torch.is_grad_enabled():
            self._used.append((table, ids, leaf.requires_grad_()))
        return leaf

    def collect(self) -> None:
        """Add the gradients of the rows that were pulled since the last call to those that `push` sends."""
        for table, ids, leaf in self._used:
            if leaf.grad is not None:
                parts = [sparse(ids, leaf.grad, self._shapes[table][0])]
                if table in self._gradients:
                    parts.insert(0, self._gradients[table])
                self._gradients[table] = sparse_sum(parts)
        self._used.clear()

    def push(self) -> None:
        """Send every server its part of the gradients, in one message each, without waiting for the end of the messages."""
        rows: dict[int, dict[int, Tensor]] = {server: {} for server in self._servers}
        values: dict[int, list[Tensor]] = {server: [] for server in self._servers}
        for table in sorted(self._gradients):
            gradient = self._gradients[table].cpu()
            for server, (positions, ids) in self._rows_by_server(gradient.indices()[0]).items():
                rows[server][table] = ids
                values[server].append(gradient.values()[positions].flatten())
            self._trained.add(table)
        for server in self._servers:
            self._request(Request.PUSH, server, rows[server])
            if values[server]:
                self._send(torch.cat(values[server]), server, VALUES)
        self._gradients.clear()

    def settle(self) -> None:
        """Wait until the servers have applied what all workers have pushed, unless the servers are asynchronous."""
        if not self._asynchronous:
            self._finish()
            for server in self._servers:
                receive(torch.empty(1), server, DONE)

    def leave(self) -> None:
        """Tell the servers that this worker has ended.

        Raises:
            CheckFailed: a table never got a gradient.
        """
        starved = [name for table, name in enumerate(self.names) if table not in self._trained]
        if starved:
            raise CheckFailed(f"{len(starved)} of {len(self.names)} tables got no gradient (first: {starved[0]})")
        self._finish()
        for server in self._servers:
            self._request(Request.LEAVE, server, {})
        self._finish()

    def _rows_by_server(self, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Return which of ``ids`` each server holds, as positions in ``ids`` and as the server's own row numbers."""
        count = len(self._servers)
        rows_by_server = {}
        for number, server in enumerate(self._servers):
            positions = (ids % count == number).nonzero().squeeze(1)
            rows_by_server[server] = positions, ids[positions] // count
        return rows_by_server

    def _request(self, request: Request, server: int, rows: dict[int, Tensor]) -> None:
        """Send a header, and the row numbers by table."""
        counts = [len(rows.get(table, ())) for table in range(len(self.names))]
        self._send(torch.tensor([request, *counts]), server, HEADER)
        if rows:
            self._send(torch.cat(list(rows.values())), server, ROWS)

    def _send(self, values: Tensor, server: int, tag: int) -> None:
        work = post(values, server, tag)
        if work is not None:
            # The memory of the values must stay until the message is sent.
            self._under_way.append((work, values))

    def _finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


def _tables_of(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Return the weights of the embedding tables that train, by the names of their modules.

    Raises:
        CheckFailed: there are none, or one is more than a table.
    """
    tables: dict[str, Any] = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight.requires_grad
    }
    if not tables:
        raise CheckFailed(f"{name} trains no embedding table, so there is nothing for a parameter server; choose ddp")
    owners = [id(value) for _, value in model.named_parameters(remove_duplicate=False)]
    for path, table in tables.items():
        if owners.count(id(table.weight)) > 1 or table.padding_idx is not None or table.max_norm is not None:
            raise CheckFailed(
                f"the table {path} of {name} is tied to another layer, pads or limits its norms, which a parameter server "
                "does not do; choose ddp"
            )
    return {path: table.weight for path, table in tables.items()}
