"""Keeps the values that processes exchange by NCCL, whose stand-in really exchanges small data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from .contents import Contents, count_collective, is_small, on_host
from .evaluation import flat

_EXCHANGED_BYTES: Final = 1 << 20
"""The most bytes of all ranks together, as in nccl.c."""

_FROM_ANOTHER: Final = ("broadcast_", "recv_", "recv_any_source_", "scatter_")
"""Whether what they tell is known, another rank knows."""


def followed(contents: Contents, operator: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator of a collective, after which it is known what this process heard."""
    name = operator._schema.name.partition("::")[2]
    names = [argument.name for argument in operator._schema.arguments]
    own = [place for place, name in enumerate(names) if name.startswith(("input", "tensor"))]
    others = [place for place, name in enumerate(names) if name.startswith("output")]
    if name in _FROM_ANOTHER and not others:
        others = own

    def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        if not dist.is_initialized() or dist.get_backend() == "fake":
            # NCCL, which is not called, would have got the larger of what is sent and of what is heard.
            sides = [sum(one.nbytes for one in flat([arguments[place] for place in places])) for places in (own, others)]
            count_collective(name, max(sides))
            return original(keys, *arguments, **keywords)
        sent, heard = (list(flat([arguments[place] for place in places])) for places in (own, others))
        known = True
        for tensor in sent:
            if contents.find(tensor) is None:
                known = False
                if is_small(tensor):
                    on_host(tensor).zero_()  # as the host reads it, and not what the memory held before
        exchanged_bytes = sum(tensor.numel() * tensor.itemsize for tensor in sent or heard)
        output = original(keys, *arguments, **keywords)
        for tensor in heard:
            exchanged = is_small(tensor) and exchanged_bytes * dist.get_world_size() <= _EXCHANGED_BYTES
            if name in _FROM_ANOTHER:
                known = not tensor.dtype.is_floating_point  # sizes, flags and pickled objects
            if exchanged and known:
                contents.written(tensor)
            elif not exchanged or name not in _FROM_ANOTHER:
                contents.forget(tensor)
        return output

    return run
