"""Exchanges messages between the processes of a case beside tensors, as JSON in bytes.

torch's own way to send objects is pickle, which would let one process run code in another.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

_Message = TypeVar("_Message")


def send(message: Any, rank: int) -> None:
    """Send a message, as JSON, to a process that calls `receive`. Both processes use memory of the host."""
    data = _data(message)
    dist.send(torch.tensor([len(data)]), dst=rank)
    dist.send(data, dst=rank)


def receive(type_: type[_Message], rank: int) -> _Message:
    """Return the message that process ``rank`` sends."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, src=rank)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, src=rank)
    return _read(data, type_)


def gather(message: _Message, type_: type[_Message], group: Any) -> list[_Message]:
    """Return the message of each process of ``group``, in the order of their ranks; all of them must call this.

    Args:
        group: torch's; None for all processes.
    """
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    size, data = dist.get_world_size(group), _data(message)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(map(int, lengths))
    own = torch.zeros(longest, dtype=torch.uint8, device=device)
    own[: len(data)] = data
    buffers = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(buffers, own, group=group)
    return [_read(buffer[: int(length)], type_) for buffer, length in zip(buffers, lengths, strict=True)]


def _data(message: Any) -> Tensor:
    return torch.tensor(list(msgspec.json.encode(message)), dtype=torch.uint8)


def _read(data: Tensor, type_: type[_Message]) -> _Message:
    return msgspec.json.decode(bytes(data.tolist()), type=type_)
