"""Notes that a program lets several streams of a GPU use the same memory, which is then kept for longer than here.

A GPU keeps a block that the program gives back while a stream that `record_stream` named has work for it. On an emulated
GPU no stream has work, so the block is free at once, and the peak can be lower.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .program_lines import BACKWARD, line_of

_SEGMENT_BYTES: Final = 2 << 20
"""All blocks in as many bytes are of one stream."""

_MOST_TRIES: Final = 256
"""The most blocks that are looked up for a line, which may be a function that is called for blocks of any stream."""

_texts: Final[list[ctypes.Array[ctypes.c_char]]] = []
"""Texts that the stand-ins point to, so they must stay in memory. One is enough for a program."""


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `record_stream` as an operator that notes its first use for another stream than the block's."""
    decided: set[tuple[str, int, int]] = set()
    tries: Counter[str] = Counter()

    def run(keys: Any, tensor: Tensor, stream: torch.Stream) -> None:
        original(keys, tensor, stream)
        if _texts:
            return
        line = line_of(sys._getframe(1)) or BACKWARD
        place = line, stream.stream_id, tensor.untyped_storage().data_ptr() // _SEGMENT_BYTES
        if place in decided or tries[line] == _MOST_TRIES:
            return  # finding the stream of a block takes time
        decided.add(place)
        tries[line] += 1
        if _is_of_another(tensor, stream):
            _texts.append(
                ctypes.create_string_buffer(f"blocks that record_stream keeps for another stream ({line})".encode())
            )
            stand_ins: Any = ctypes.CDLL(None)
            stand_ins.gputrain_unknown(_texts[0])

    return run


def _is_of_another(tensor: Tensor, stream: torch.Stream) -> bool:
    """Tell whether the block of a tensor was allocated for another stream than this one."""
    own = torch.cuda.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    address = tensor.untyped_storage().data_ptr()
    for segment in memory_segments():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return bool(segment["stream"] != own.cuda_stream)
    return False


def memory_segments() -> list[dict[str, Any]]:
    """Return the segments of torch's allocator."""
    take: Any = torch.cuda.memory_snapshot
    try:
        segments: list[dict[str, Any]] = take(include_traces=False)
    except TypeError:  # torch before 2.11 has no such argument, and always includes the traces.
        segments = take()
    return segments
