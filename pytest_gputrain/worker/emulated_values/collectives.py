"""Keeps the values that GPUs exchange by NCCL, whose stand-in really exchanges small data, and tells which are known."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from .contents import Contents, count_collective, on_host
from .evaluation import flat
from .graphs import Graphs

_EXCHANGED_BYTES: Final = 1 << 20
"""The most bytes of all ranks together, as in nccl.c."""

FROM_ANOTHER: Final = ("broadcast_", "recv_", "recv_any_source_", "scatter_")
"""Operators that receive from another rank, which alone knows whether the values are known."""

_UNKNOWN, _KNOWN, _STILL_WAITS = 0, 1, 2
"""What was heard, if anything was, as in values.c."""

_OF_ONE_PROCESS: Final = (
    "_nccl_all_gather",
    "_nccl_all_reduce",
    "_nccl_broadcast",
    "_nccl_reduce",
    "_nccl_reduce_scatter",
    "_broadcast",
    "_broadcast_coalesced",
    "_broadcast_out",
)
"""The functions of torch for several GPUs of one process, which are no operators."""


class Exchanges:
    """Follows the exchanges of this process by NCCL, and notes which of the received values are known."""

    def __init__(self, contents: Contents, graphs: Graphs) -> None:
        self._contents, self._graphs = contents, graphs
        self._stand_ins: Any = ctypes.CDLL(None)

    def operator(self, operator: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of a collective's operator, which notes whether the values that this process receives are
        known."""
        name = operator._schema.name.partition("::")[2]
        names = [argument.name for argument in operator._schema.arguments]
        own = [place for place, name in enumerate(names) if name.startswith(("input", "tensor"))]
        others = [place for place, name in enumerate(names) if name.startswith("output")]

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if not dist.is_initialized() or dist.get_backend() == "fake":
                # NCCL is not called here. NCCL would move the larger of what is sent and what is received.
                sides = [sum(one.nbytes for one in flat([arguments[place] for place in places])) for places in (own, others)]
                count_collective(name, max(sides))
                return original(keys, *arguments, **keywords)
            sent, heard = (list(flat([arguments[place] for place in places])) for places in (own, others or own))
            from_another = name in FROM_ANOTHER
            return self._run(original, (keys, *arguments), keywords, sent, lambda _: heard, from_another=from_another)

        return run

    def replace_functions(self) -> None:
        """Replace torch's functions for several GPUs of one process."""
        for name in _OF_ONE_PROCESS:
            if (original := getattr(torch._C, name, None)) is not None:
                setattr(torch._C, name, self._function(name, original))

    def _function(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        of_nccl = name.startswith("_nccl")

        def run(first: Any, second: Any, *others: Any, **keywords: Any) -> Any:
            # torch broadcasts the first tensor, whichever root the call names.
            sent = [first[0]] if name == "_nccl_broadcast" else list(flat([first]))
            addresses = {tensor.data_ptr() for tensor in sent}

            def heard(output: Any) -> list[Tensor]:
                if of_nccl:
                    return list(flat([second])) or list(flat([first]))
                return [tensor for tensor in flat([second, output]) if tensor.data_ptr() not in addresses]

            return self._run(original, (first, second, *others), keywords, sent, heard)

        return run

    def _run(
        self,
        original: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
        sent: Sequence[Tensor],
        heard: Callable[[Any], Sequence[Tensor]],
        *,
        from_another: bool = False,
    ) -> Any:
        if self._graphs.captures.value and self._graphs.defer(self._begin, sent, {}, None, []):
            output = original(*arguments, **keywords)
            tensors = heard(output)
            self._graphs.defer(self._end_of_replay, (), {}, tensors, tensors)
            return output
        known = self._begin(sent)
        try:
            output = original(*arguments, **keywords)
        finally:
            what = self._stand_ins.gputrain_end_exchange()
        tensors = heard(output)
        if what == _STILL_WAITS:
            # The group of calls ends later, so what another process sends is not seen yet. Integers, such as sizes, flags
            # and pickled objects, are known to their sender.
            numbers = any(tensor.dtype.is_floating_point for tensor in tensors)
            what = _KNOWN if (not numbers if from_another else known) else _UNKNOWN
        self._end(what, tensors)
        return output

    def _begin(self, sent: Sequence[Tensor], *_: Any, replays: bool = False) -> bool:
        """Begin an exchange; tell whether what this process sends is known."""
        known = True
        for tensor in sent:
            found = self._contents.find(tensor)
            known = known and found is not None
            if tensor.nbytes > _EXCHANGED_BYTES:
                continue
            if found is None:
                on_host(tensor).zero_()  # the host then reads zeros, and not what the memory held before
            elif found.value is not None:
                on_host(tensor).fill_(found.value)
        self._stand_ins.gputrain_begin_exchange(known)
        return known

    def _end(self, what: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if what == _KNOWN:
                self._contents.written(tensor)
            elif what == _UNKNOWN:
                self._contents.forget(tensor)

    def _end_of_replay(self, _: Any, __: Any, tensors: Sequence[Tensor], replays: bool) -> None:
        what = self._stand_ins.gputrain_end_exchange()
        # Between ncclGroupStart and ncclGroupEnd nothing is exchanged yet, so the values are unknown here.
        self._end(what if what == _KNOWN else _UNKNOWN, tensors)
