"""The processes of one case, by torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

_TIMEOUT: Final = datetime.timedelta(minutes=10)
"""Of one collective; the parent's time-out ends a case that hangs."""


@dataclass(frozen=True)
class Group:
    """This process among those of its case.

    Attributes:
        rank: number of this process, from 0.
        size: processes of the case.
        local_rank: number of this process among those of its node: that of its GPU.
        meeting: through which they find each other, as torch.distributed's init_method.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    meeting: str = ""

    @contextlib.contextmanager
    def joined(self, device: torch.device, *, even_alone: bool = False) -> Iterator[None]:
        """A context in which torch.distributed is ready: nccl (rccl) on GPUs, gloo on a CPU.

        Args:
            even_alone: for engines that want a group of one.
        """
        if self.size == 1 and not even_alone:
            yield
            return
        import torch.distributed as dist

        assert self.meeting, "several processes need a place to meet"
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank), "WORLD_SIZE": str(self.size)}
        on_gpu = device.type != "cpu"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=self.meeting,
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
            device_id=device if on_gpu else None,
        )
        yield
        # Only after success: with a rank lost, leaving would wait for it.
        dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for the other processes."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()


ALONE: Final = Group()
"""The only process of its case."""
