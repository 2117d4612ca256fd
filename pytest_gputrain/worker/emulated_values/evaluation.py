"""Computes on the host what small and known inputs make of an operator, and writes it into an emulated GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from . import rules
from .contents import Contents, Dealt, Known, is_small, number_as, on_host

_OTHERWISE: Final[dict[str, Callable[..., Any]]] = {
    "aten::histc": lambda values, *others: torch.histc(values.double(), *others)
}
"""The operators that the CPU has for fewer types."""


class Values:
    """Computes operators with known inputs on the host, and writes their results into the memory of the emulated GPU."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def find_all(
        self, arguments: Sequence[Any], keywords: dict[str, Any], without: Sequence[Tensor] = ()
    ) -> list[Known] | None:
        """Return the known contents of all GPU tensors among the arguments; None if one of them is unknown."""
        found = []
        skipped = [id(tensor) for tensor in without]
        for tensor in flat([*arguments, *keywords.values()] if keywords else arguments):
            if id(tensor) in skipped:
                continue
            if tensor.is_cuda:
                known = self._contents.find(tensor)
                if known is None:
                    return None
                found.append(known)
        return found

    def read(self, tensor: Tensor) -> Tensor | None:
        """Give the values of a tensor on the host; None if they are not known."""
        return None if tensor.is_cuda and self._contents.find(tensor) is None else self._on_host(tensor, ())

    def compute(
        self,
        operator: Any,
        known: list[Known],
        arguments: Any,
        keywords: Any,
        output: Any,
        *,
        elementwise: bool,
    ) -> Any:
        """Compute an operator's output on the host, and write it into the device's memory."""
        outputs = list(flat([output]))
        dealt = rules.followed(_name_of(operator), arguments, known)
        tensors = [tensor for tensor in flat([*arguments, *keywords.values()]) if tensor.is_cuda]
        if all(is_small(tensor, dealt=dealt) for tensor in (*tensors, *outputs)):
            result = self.run(operator, arguments, keywords)
            if result is not None and output is not None and not outputs:
                return result  # the result is a number or a boolean
            self.write(outputs, result, dealt=dealt)
        elif elementwise and isinstance(output, Tensor) and any(one.value is not None for one in known):
            value = self.one(operator, arguments, keywords)
            if value is not None:
                self.fill(output, value)
        return output

    def are_all(self, truth: bool, operands: Sequence[Any], output: Tensor) -> bool:
        """Tell whether an operand has the size of the output and holds this truth value in all its elements."""
        for operand in operands:
            if not isinstance(operand, Tensor) or operand.dtype != torch.bool or operand.size() != output.size():
                continue
            known = self._contents.find(operand) if operand.is_cuda else None
            if known is not None and bool((self._on_host(operand, ()) == truth).all()):
                return True
        return False

    def write(self, outputs: Iterable[Tensor], result: Any, *, dealt: Dealt | None) -> None:
        """Write what the host computed, if it did, into the device's memory."""
        for to, value in zip(outputs, flat([result])):  # noqa: B905 - there may be no result
            if to.size() == value.size() and to.numel() and is_small(to, dealt=dealt):
                on_host(to).copy_(value)
                self._contents.written(to, dealt=dealt)

    def compute_in_place(
        self,
        operator: Any,
        known: list[Known],
        arguments: Any,
        keywords: Any,
        targets: list[Tensor],
        *,
        elementwise: bool,
    ) -> bool:
        dealt = rules.followed(_name_of(operator), arguments, known)
        tensors = [tensor for tensor in flat([*arguments, *keywords.values()]) if tensor.is_cuda]
        if all(is_small(tensor, dealt=dealt) for tensor in tensors):
            if self.run(operator, arguments, keywords, targets) is None:
                return False
            for tensor in targets:
                self._contents.written(tensor, dealt=dealt)
            return True
        value = self.one(operator, arguments, keywords) if elementwise and len(targets) == 1 else None
        if value is not None:
            self.fill(targets[0], value)
        return value is not None

    def place_all(self, operator: Any, arguments: Any, keywords: Any, target: Tensor) -> bool:
        """Run an operator, such as a scatter, that overwrites all of an unknown target with known values. Tell whether it
        does.

        Then what was there before does not matter, as two trials show.
        """
        known = self.find_all(arguments, keywords, without=[target])
        dealt = rules.followed(_name_of(operator), arguments, known or ())
        if known is None or not all(is_small(one, dealt=dealt) for one in (target, *flat(arguments)) if one.is_cuda):
            return False
        host, trials = on_host(target), []
        for before in (0, 1):
            host.fill_(before)
            if self.run(operator, arguments, keywords, [target]) is None:
                return False
            trials.append(host.clone())
        if not torch.equal(*trials):
            return False
        self._contents.written(target, dealt=dealt)
        return True

    def run(self, operator: Any, arguments: Any, keywords: Any, targets: Sequence[Tensor] = ()) -> Any:
        """Run an operator on the host's view of the device's memory; None if the CPU has no such operator."""

        others = {name: self._on_host(value, targets) for name, value in keywords.items() if name != "pin_memory"}
        computing = _OTHERWISE.get(operator._schema.name, operator)
        try:
            result = computing(*self._on_host(arguments, targets), **others)
        except Exception:  # The CPU lacks the operator or the type, or the program would fail on a GPU as well, only later.
            return None
        return True if result is None else result

    def coalesced(self, tensor: Tensor) -> Tensor:
        """Return the coalesced form of a sparse tensor whose indices are known and few. Its elements are right only if they
        are known and few, too."""
        indices, elements = on_host(tensor._indices()), tensor._values()
        known = self._contents.find(elements)
        if known is not None and is_small(elements):
            elements = self._on_host(elements, ())
        else:
            elements = torch.zeros(elements.size(0), dtype=torch.bool)
        size = [*tensor.size()[: tensor.sparse_dim()], *elements.size()[1:]]
        return torch.sparse_coo_tensor(indices, elements, size, check_invariants=False).coalesce()

    # These are methods and not nested functions. A nested function that calls itself is a reference cycle, which would keep
    # tensors and their memory until Python's garbage collector runs.

    def _on_host(self, value: Any, targets: Sequence[Tensor]) -> Any:
        """Return arguments with tensors of the CPU in place of GPU tensors, whose memory they share."""
        if isinstance(value, Tensor):
            if not value.is_cuda:
                return value
            known = self._contents.find(value)
            if known is None or known.value is None:
                return on_host(value)
            if any(value is target for target in targets):
                return on_host(value).fill_(known.value.item())
            return known.value.expand(value.size())
        if isinstance(value, (list, tuple)):
            return [self._on_host(one, targets) for one in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _as_one(self, value: Any) -> Any:
        """Return arguments with a tensor of one element in place of each tensor that is filled with one number."""
        if isinstance(value, Tensor):
            if not value.is_cuda:
                return value
            known = self._contents.find(value)
            if known is None:  # The tensor is only written to.
                return torch.zeros([1] * value.dim(), dtype=value.dtype)
            if known.value is not None:
                return known.value.clone().reshape([1] * value.dim())
            if value.numel() == 1:
                return on_host(value).clone().reshape([1] * value.dim())
            raise ValueError("the elements differ")
        if isinstance(value, (list, tuple)):
            return [self._as_one(one) for one in value]
        return value

    def one(self, operator: Any, arguments: Any, keywords: Any) -> Tensor | None:
        """Compute one element of an operator whose inputs are each filled with one number; None if they are not."""

        try:
            result = operator(*self._as_one(arguments), **{name: self._as_one(value) for name, value in keywords.items()})
        except Exception:
            return None
        return result.reshape(()) if isinstance(result, Tensor) and result.numel() == 1 else None

    def fill_by_number(self, tensor: Tensor, number: Any = 0) -> bool:
        """Fill a tensor with a number of Python; tell whether it is one that the CPU has in this type."""
        if isinstance(number, Tensor):
            return False
        try:
            value = number_as(number, repr(number), tensor.dtype)
        except (OverflowError, RuntimeError, TypeError, ValueError):
            return False
        self.fill(tensor, value)
        return True

    def fill(self, tensor: Tensor, value: Tensor) -> None:
        """Note that all elements of this tensor are this number, which is on the host."""
        if not tensor.numel():
            return
        known = self._contents.find(tensor)
        if is_small(tensor, dealt=known.dealt if known else None):
            on_host(tensor).fill_(value.item())
            self._contents.written(tensor)
        else:
            self._contents.filled(tensor, value.detach().reshape(()).to(tensor.dtype))


def _name_of(operator: Any) -> str:
    name: str = operator._schema.name
    return name.partition("::")[2]


def flat(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from flat(value)
