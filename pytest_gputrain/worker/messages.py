"""What processes of a case tell each other beside tensors: JSON as bytes. torch's own way for objects is pickle, which would
let one process run code in another."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

_Words = TypeVar("_Words")


def send(words: Any, rank: int) -> None:
    """Send what JSON can say to a process that calls `receive`; both on the host."""
    data = _data(words)
    dist.send(torch.tensor([len(data)]), dst=rank)
    dist.send(data, dst=rank)


def receive(type_: type[_Words], rank: int) -> _Words:
    """What process ``rank`` sends."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, src=rank)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, src=rank)
    return _read(data, type_)


def of_all(words: _Words, type_: type[_Words], group: Any) -> list[_Words]:
    """What each process of ``group`` says, in the order of their ranks; all of them must call this.

    Args:
        group: torch's; None for all processes.
    """
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    size, data = dist.get_world_size(group), _data(words)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(map(int, lengths))
    own = torch.zeros(longest, dtype=torch.uint8, device=device)
    own[: len(data)] = data
    found = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(found, own, group=group)
    return [_read(one[: int(length)], type_) for one, length in zip(found, lengths, strict=True)]


def _data(words: Any) -> Tensor:
    return torch.tensor(list(msgspec.json.encode(words)), dtype=torch.uint8)


def _read(data: Tensor, type_: type[_Words]) -> _Words:
    return msgspec.json.decode(bytes(data.tolist()), type=type_)
