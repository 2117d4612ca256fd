"""Joins the processes of one case, which exchange tensors by torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

_TIMEOUT: Final = datetime.timedelta(minutes=10)
"""The time limit of one collective; the parent's time-out ends a case that hangs."""


@dataclass
class Group:
    """This process, and its place among the processes of its case.

    Attributes:
        rank: number of this process, from 0.
        size: processes of the case that train: the first ones.
        local_rank: number of this process among those of its node: that of its GPU.
        meeting: through which they find each other, as torch.distributed's init_method.
        servers: further processes, which serve them.
        simulated: only this process exists, on an emulated GPU: what it sends goes nowhere, and what it receives was never
            sent.
        trainers: torch's group of those that train; None if that is everybody.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    meeting: str = ""
    servers: int = 0
    simulated: bool = False
    trainers: Any = field(default=None, init=False)

    @property
    def serves(self) -> bool:
        """Whether this process is a server."""
        return self.rank >= self.size

    @contextlib.contextmanager
    def joined(self, device: torch.device, *, even_alone: bool = False) -> Iterator[None]:
        """Provide a context in which torch.distributed is ready: nccl (rccl) on GPUs, gloo on a CPU and with servers.

        Args:
            even_alone: join also if there is only one process, for engines that need a group.
        """
        if self.size == 1 and not even_alone:
            yield
            return
        import torch.distributed as dist

        if self.simulated:
            with self._joined_alone():
                yield
            return
        assert self.meeting, "several processes need a place to meet"
        world = self.size + self.servers
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank), "WORLD_SIZE": str(world)}
        on_gpu = device.type != "cpu"
        dist.init_process_group(
            "nccl" if on_gpu and not self.servers else "gloo",
            init_method=self.meeting,
            rank=self.rank,
            world_size=world,
            timeout=_TIMEOUT,
            device_id=device if on_gpu and not self.servers else None,
        )
        if self.servers:
            self.trainers = dist.new_group(list(range(self.size)), backend="nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
        yield
        if self.servers:
            # A server waits for a message from any process, and one that leaves early would break this wait.
            dist.barrier()
        # The group is left only after success, because leaving would wait for a rank that is lost.
        dist.destroy_process_group()

    @contextlib.contextmanager
    def _joined_alone(self) -> Iterator[None]:
        """Provide a context with torch's own process group for simulations, in which no other process takes part."""
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world = self.size + self.servers
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank), "WORLD_SIZE": str(world)}
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=world)
        try:
            if self.servers:
                self.trainers = dist.new_group(list(range(self.size)))
            yield
        finally:
            dist.destroy_process_group()

    def union(self, names: tuple[set[str], ...]) -> tuple[set[str], ...]:
        """Return the union of each set of names over all processes that train, all of which must call this."""
        if self.size == 1 or self.simulated:
            return names
        from pytest_gputrain.worker import messages

        gathered = messages.gather(names, tuple[set[str], ...], self.trainers)
        return tuple(set().union(*sets) for sets in zip(*gathered, strict=True))

    def barrier(self) -> None:
        """Wait for the other processes that train."""
        if self.size > 1 and not self.simulated:
            import torch.distributed as dist

            dist.barrier(group=self.trainers)


ALONE: Final = Group()
"""The only process of its case."""
