"""Answers programs that look at values that nobody computed: whether weights changed, whether two tensors are equal.

A tensor equals its clone, and results of the same values are the same, until something is written to it. After that it
differs, in all its elements. A number that the host reads is made up from where the values come from: positive, finite,
the same for the same values, and another one for others. At each line these numbers fall slowly, so that a loop that
waits until a number is small ends.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import operator
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .branches import Condition, while_condition
from .contents import Contents, extent, host_bytes, on_host
from .evaluation import Values, flat
from .pieces import Origin
from .program_lines import line_of

_COMPARING: Final = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))

_LOOKING: Final = frozenset((
    *_COMPARING, "sub", "abs", "linalg_vector_norm", "_foreach_norm", "norm", "dot", "vdot", "sum",
    "mean", "std", "var", "var_mean", "prod", "amax", "amin", "aminmax", "max", "min", "any", "all", "count_nonzero", "cat",
    "stack", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "is_nonzero",
))  # fmt: skip
"""Operators by which programs compare tensors. What others compute of values that were looked at is followed as well."""

_PASSING: Final = frozenset(("any", "all", "max", "min", "amax", "amin", "sum", "mean", "count_nonzero", "cat", "stack"))
"""Operators that make one truth value of equal ones."""

_MEASURING: Final = _PASSING | {"abs", "linalg_vector_norm", "norm", "pow", "sqrt"}
"""They tell how large values are."""

_ORDERS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip

_MOST_REPEATED: Final = 16
_FALL: Final = 0.99
_LEAST: Final = 1e-12
_MOST: Final = 1 << 16
"""The most numbers, and places of values with facts, that are kept."""

_MARKS: Final = 16
"""The first bytes of a copy on the host that tell it from others, so that types with few digits differ, too."""

_ALL_BYTES: Final = 256 << 10
_MOST_SUMMED: Final = 64 << 20
"""To read more would take longer than all else that a step does, where a model is offloaded to the host."""
_SUMMED_BYTES: Final = 32 << 10
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 512

_SAVE: Final = frozenset((torch.serialization._save.__code__, torch.serialization._legacy_save.__code__))
"""Functions of torch.save, which copy the bytes of a storage and know the types of its tensors."""

_CALL: Final = torch.nn.Module._call_impl.__code__
_CLIP: Final = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__
"""Python code below which each step computes new values, of which programs compare few: modules, and the function that
scales gradients and so writes to what it has looked at."""

_Identity = tuple[Any, ...]


class _Fact(NamedTuple):
    """What is known of unknown values that come from one place."""

    truth: bool | None = None
    """The truth value of all elements; None if no rule decides it."""
    is_guess: bool = False
    """Whether the truth value rests on the order of made-up numbers."""
    is_difference: bool = False
    """Whether the values say how far two tensors are apart, which is not zero once one was written to."""


_NOTHING: Final = _Fact()


class Looks:
    """Decides what a program sees of values that nobody computed: which of them are equal, and which numbers the host reads.

    Args:
        contents: the values that are known.
        values: writes known values.
    """

    def __init__(self, contents: Contents, values: Values) -> None:
        self._contents, self._values, self._pieces = contents, values, contents.pieces
        self._facts: dict[int, _Fact] = {}
        """What is known of values, by where they come from."""
        self._numbers: dict[_Identity, float] = {}
        self._copies: dict[int, tuple[Origin, ...]] = {}
        self._read: Counter[str] = Counter()
        self._repeated: dict[tuple[int, Condition], tuple[bool, int]] = {}
        """The last answer of each loop's condition in a thread, and how often in a row."""

    # --- Operators on unknown values

    def follow(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> None:
        """Note from which inputs an operator has made its output, if some of the inputs are unknown.

        Args:
            name: of the operator, without its overload.
        """
        if _in_backward():
            return  # gradients differ in each step, and following a backward pass takes time
        first = arguments[0] if arguments else None
        if name not in _LOOKING:
            if not (isinstance(first, Tensor) and first.is_cuda and self._pieces.any_in(first)) or _in_pass():
                return
        elif name not in _COMPARING and self._pass_by(arguments):
            return
        # A foreach operator has a result for each tensor of its first list.
        if name.startswith("_foreach_") and isinstance(output, list):
            for number, one in enumerate(output):
                self._derive(name, [first[number] if first else None, *arguments[1:]], keywords, one)
        elif not (isinstance(output, Tensor) and self._compare(name, arguments, keywords, output)):
            self._derive(name, arguments, keywords, output)

    def follow_in_place(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], target: Tensor) -> None:
        """Note that an operator has written values to its first argument that follow from other, unknown arguments.

        Sums of norms and comparisons are built so. Larger targets just hold other values than before.
        """
        if target.dtype != torch.bool and target.numel() != 1:
            self._contents.forget(target)
            return
        truth = self._truth_of_result(name.removesuffix("_"), arguments)
        if truth is not None and self.truth(target) == truth and self._contents.find(target) is not None:
            return  # the value stays known
        origin = self._hash(name, arguments, keywords)
        is_guess = truth is not None and self._rests_on_order(name.removesuffix("_"), arguments)
        self._contents.forget(target)
        self._put(target, origin, _Fact(truth, is_guess))

    def drawn(self, name: str, to: Tensor, state: Tensor, inputs: Sequence[Any]) -> None:
        """Note that an operator drew random numbers into ``to``. Equal states of the generator give equal numbers."""
        self._contents.forget(to)
        self._put(to, self._hash(name, [state, *inputs, to.dtype, to.size(), to.stride()], {}))

    def copied(self, to: Tensor, source: Tensor) -> None:
        """Note that unknown values were copied on the GPU."""
        if _in_backward() and not self._pieces.any_in(source):
            return  # as in `follow`, backward passes are not followed
        if to.dtype == source.dtype and _linear(to, source):
            self._pieces.put(to, to.nbytes, self._pieces.of(source, source.nbytes))
        elif not _in_pass():
            self._put(to, self._hash(f"copy to {to.dtype}", [source, to.stride()], {}), _Fact(self.truth(source)))

    def copied_to_host(self, to: Tensor, source: Tensor) -> None:
        """Write made-up numbers to a tensor of the host to which a program has copied unknown values."""
        saved = _saved_type(source) if source.dtype == torch.uint8 else None
        if saved is not None and saved.is_floating_point and source.nbytes % saved.itemsize == 0:
            # A program may load these bytes as this type, and they must then equal another copy on the host.
            source, to = source.view(saved), to.view(saved)
        truth = self.truth(source)
        floats = source.dtype.is_floating_point and to.dtype.is_floating_point
        identity = self.identity(source)
        if truth is not None:
            to.fill_(truth)
        elif floats:
            to.fill_(self._number(identity))
        # A converted or rearranged copy cannot be recognised by its bytes.
        if to.dtype != source.dtype or not _linear(to, source) or not to.is_contiguous():
            return
        long = to.nbytes >= _MARKS
        if truth is None and (floats or (long and saved is None and to.dtype == torch.uint8)):
            if long:  # These bytes are numbers between 0 and 2 in each type.
                mixed = _mixed(identity)
                marks = b"".join(bytes((mixed >> 7 * place & 0x7F, 0x3F)) for place in range(_MARKS // 2))
                ctypes.memmove(to.data_ptr(), marks, _MARKS)
            _limit(self._copies)
            # If the program copies these bytes to a GPU again, their checksum tells where they come from.
            self._copies[_sum_of(to)] = self._pieces.of(source, source.nbytes)

    def copied_to_gpu(self, to: Tensor, source: Tensor) -> None:
        """Note which values of the host were copied, if they are too many to be kept. Two copies of the same values are
        equal."""
        if not source.is_contiguous() or not to.is_contiguous():
            return
        sum_ = _sum_of(source)
        before = self._copies.get(sum_) if to.dtype == source.dtype else None
        if before is not None and sum(length for _, _, length in before) == to.nbytes:
            self._pieces.put(to, to.nbytes, before)
        else:
            self._put(to, hash((sum_, _sum(str(to.dtype)))))

    def exchanged(self, operator: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a collective. What a rank receives counts as changed if what it sends has changed,
        because all ranks do the same."""
        names = [argument.name for argument in operator._schema.arguments]
        own = [place for place, name in enumerate(names) if name.startswith(("input", "tensor"))]
        others = [place for place, name in enumerate(names) if name.startswith("output")] or own
        name = operator._schema.name

        def run_and_note(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            origin = self._hash(name, [arguments[place] for place in own], {})
            output = run(keys, *arguments, **keywords)
            for place, tensor in enumerate(flat([arguments[place] for place in others])):
                if tensor.is_cuda and self._contents.find(tensor) is None:
                    self._put(tensor, hash((origin, place)))
            return output

        return run_and_note

    # --- What the host reads

    def read(self, tensor: Tensor, zero: Any) -> Any:
        """Return a made-up number where the host reads an unknown value. For an integer, which may be a size, return
        ``zero``."""
        truth = self.truth(tensor)
        if truth is not None:
            return type(zero)(truth)
        if not isinstance(zero, (float, complex)):
            return zero
        # A copy of this tensor on the host has the same number.
        return torch.tensor(self._number(self.identity(tensor)), dtype=tensor.dtype).item()

    def are_equal(self, one: Tensor, other: Tensor) -> bool:
        """Tell whether two tensors hold the same values; at least one of them is unknown."""
        return one.dtype == other.dtype and one.size() == other.size() and self.identity(one) == self.identity(other)

    def equal(self, one: Tensor, other: Tensor) -> bool | None:
        """Tell whether all elements of two tensors are equal; None if no rule decides it."""
        if self.are_equal(one, other):
            return True
        truths = [self.truth(one), self.truth(other)] if one.dtype == other.dtype == torch.bool else [None]
        return None if None in truths else truths[0] == truths[1]

    def identity(self, tensor: Tensor) -> _Identity:
        """Return a key that tensors with the same values share, and tensors with other values do not."""
        if tensor.layout is not torch.strided:
            return (self._pieces.fresh(),)
        if not tensor.numel():
            return ()
        known = self._contents.find(tensor) if tensor.is_cuda else None
        if known is not None and known.value is not None:
            return -1, _sum(repr(known.value.item()))
        if known is not None or not tensor.is_cuda:
            held = on_host(tensor) if tensor.is_cuda else tensor
            sum_ = _sum_of(held.contiguous())
            return (*self._copies[sum_], False, False) if sum_ in self._copies else (-2, sum_)
        if tensor.is_contiguous():
            return *self._pieces.of(tensor, tensor.nbytes), tensor.is_conj(), tensor.is_neg()
        return (
            *self._pieces.of(tensor, extent(tensor)),
            tensor.is_conj(),
            tensor.is_neg(),
            tuple(tensor.size()),
            tensor.stride(),
        )

    # --- The rules

    def _compare(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], output: Tensor) -> bool:
        """Write the result of comparing or subtracting equal tensors, which needs no values. Tell whether the call is of
        this kind."""
        one, other = arguments[0], arguments[1] if len(arguments) > 1 else None
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_cuda and other.is_cuda):
            return False
        if name not in ("eq", "ne", "sub", *_ORDERS) or keywords or len(arguments) > 2 or not self.are_equal(one, other):
            return False
        self._values.fill(output, torch.tensor(name in ("eq", "le", "ge"), dtype=output.dtype))
        return True

    def _truth_of_result(self, name: str, arguments: Sequence[Any]) -> bool | None:
        first = arguments[0]
        if name in ("eq", "ne", *_ORDERS):
            return self._truth_of_comparison(name, first, arguments[1])
        if name in ("logical_not", "bitwise_not"):
            truth = self.truth(first)
            return None if truth is None else not truth
        if name in ("logical_and", "bitwise_and", "logical_or", "bitwise_or"):
            truths = [self.truth(first), self.truth(arguments[1])]
            decisive = name.endswith("or")
            return decisive if decisive in truths else None if None in truths else not decisive
        if name in _PASSING:
            truths = [self.truth(one) for one in flat([first])]
            return truths[0] if truths and len(set(truths)) == 1 else None
        return None

    def _truth_of_comparison(self, name: str, one: Any, other: Any) -> bool | None:
        if not isinstance(one, Tensor) or not one.is_cuda:
            return None
        if isinstance(other, Tensor):
            if self.are_equal(one, other):
                return name in ("eq", "le", "ge")
            if name in ("eq", "ne"):
                return name == "ne"
            if name == "le":  # `isclose` asks this way whether the difference of two tensors is small enough.
                return False
            if one.numel() != 1 or other.numel() != 1:
                return None
        floats = one.dtype.is_floating_point and (not isinstance(other, Tensor) or other.dtype.is_floating_point)
        if not floats or isinstance(other, complex):
            return None
        if name in ("eq", "ne"):
            return name == "ne"
        # The order of two values follows from the numbers that the host would read for them.
        follows = _ORDERS[name](self._number_of(one), self._number_of(other))
        return follows != self._is_repeated(follows)

    def _is_repeated(self, answer: bool) -> bool:
        """Tell whether the condition of a ``while`` loop has got this answer so often that only the other one may end it."""
        condition = while_condition(sys._getframe(1))
        if condition is None:
            return False
        place = threading.get_ident(), condition
        before, times = self._repeated.pop(place, (answer, 0))
        times = times + 1 if answer == before else 1
        if times <= _MOST_REPEATED:
            self._repeated[place] = answer, times
        return times > _MOST_REPEATED

    def _rests_on_order(self, name: str, arguments: Sequence[Any]) -> bool:
        """Tell whether a truth value follows from the order of made-up numbers."""
        if name in _ORDERS:
            same = isinstance(arguments[1], Tensor) and self.are_equal(*arguments[:2])
            return not same and not any(self._is_difference(tensor) for tensor in flat(arguments))
        return name not in ("eq", "ne") and any(self.is_guess(tensor) for tensor in flat(arguments))

    def _measures_a_difference(self, name: str, arguments: Sequence[Any]) -> bool:
        if name == "sub":
            return all(isinstance(one, Tensor) and one.is_cuda for one in arguments[:2])
        return name in _MEASURING and any(self._is_difference(tensor) for tensor in flat(arguments))

    def _is_difference(self, tensor: Tensor) -> bool:
        if not tensor.is_cuda or self._contents.find(tensor) is not None:
            return False
        return any(fact.is_difference for fact in self._facts_of(tensor))

    def is_guess(self, tensor: Tensor) -> bool:
        """Tell whether no rule decides the truth value of a tensor, or whether it follows from the order of made-up
        numbers."""
        if not tensor.is_cuda or self._contents.find(tensor) is not None:
            return False
        return self.truth(tensor) is None or any(fact.is_guess for fact in self._facts_of(tensor))

    def _facts_of(self, tensor: Tensor) -> Iterator[_Fact]:
        return (self._facts.get(origin, _NOTHING) for origin, _, _ in self._pieces.of(tensor, extent(tensor)))

    def _number_of(self, value: Any) -> float:
        if not isinstance(value, Tensor):
            return float(value)
        held = self._values.read(value)
        return self._number(self.identity(value)) if held is None else float(held[(0,) * held.dim()])

    def truth(self, tensor: Any) -> bool | None:
        """Return the truth value that all elements of a tensor have; None if they differ, or if no rule decides them."""
        if not isinstance(tensor, Tensor) or not tensor.is_cuda or not tensor.numel():
            return None
        known = self._contents.find(tensor)
        if known is None:
            if not self._pieces.any_in(tensor):
                return None
            truths = {fact.truth for fact in self._facts_of(tensor)}
            return truths.pop() if len(truths) == 1 else None
        if tensor.dtype != torch.bool:
            return None
        if known.value is not None:
            return bool(known.value.item())
        held = on_host(tensor)
        return True if bool(held.all()) else None if bool(held.any()) else False

    def _derive(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> None:
        origin = self._hash(name, arguments, keywords)
        truth = self._truth_of_result(name, arguments)
        is_guess = truth is not None and self._rests_on_order(name, arguments)
        fact = _Fact(truth, is_guess, self._measures_a_difference(name, arguments))
        for place, tensor in enumerate(flat([output])):
            if tensor.is_cuda:
                self._put(tensor, hash((origin, place)), fact)

    def _pass_by(self, arguments: Sequence[Any]) -> bool:
        """Tell whether a module's pass, or clipping, gets an unknown argument that is no weight and that nothing looked at
        yet.

        Each pass makes other ones, and programs look at few of them, so it would take time for nothing to follow them all.
        """
        for tensor in flat(arguments):
            if not tensor.is_cuda or (tensor.requires_grad and tensor.is_leaf) or self._pieces.any_in(tensor):
                continue
            if self._contents.find(tensor) is None:
                return _in_pass()
        return False

    def _put(self, tensor: Tensor, origin: int, fact: _Fact = _NOTHING) -> None:
        if tensor.layout is not torch.strided:
            return
        bytes_ = extent(tensor)
        if not bytes_ or bytes_ != tensor.nbytes:
            return
        self._pieces.put(tensor, bytes_, ((origin, 0, bytes_),))
        if fact != _NOTHING:
            _limit(self._facts)
            self._facts[origin] = fact

    def _hash(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
        """Return a hash of an operator and its inputs, by which equal results are recognised. It is the same in each
        process."""
        parts: list[Any] = [_sum(name)]
        for value in (*arguments, *keywords.values()):
            tensors = [value] if isinstance(value, Tensor) else list(flat(value)) if type(value) in (list, tuple) else ()
            if not tensors:
                parts.append(_sum(repr(value)))
            for tensor in tensors:
                parts += self.identity(tensor), tensor.size()
        return hash(tuple(parts))

    def _number(self, identity: _Identity) -> float:
        number = self._numbers.get(identity)
        if number is None:
            _limit(self._numbers)
            line = line_of(sys._getframe(1))
            # Each read at a line gives a smaller number, so that a loop ends which waits for a falling loss.
            fallen: float = _FALL ** self._read[line]
            self._read[line] += 1
            number = self._numbers[identity] = max(fallen, _LEAST) * (0.75 - _mixed(identity) / (1 << 72))
        return number


def _mixed(identity: _Identity) -> int:
    """Return a 64-bit hash of an identity, of which every bit depends on all of the identity."""
    return int.from_bytes(
        zlib.crc32(repr(identity).encode()).to_bytes(4) + zlib.adler32(repr(identity).encode()).to_bytes(4)
    )


def _limit(kept: dict[Any, Any]) -> None:
    if len(kept) >= _MOST:
        kept.clear()


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _in_pass() -> bool:
    """Tell whether a module runs, or gradients are clipped."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _CALL or code is _CLIP:
            return True
        frame = frame.f_back
    return False


def _saved_type(source: Tensor) -> torch.dtype | None:
    """Return the type of the tensor whose bytes torch.save is copying; None outside of torch.save."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _SAVE:
            dtype: torch.dtype | None = frame.f_locals.get("storage_dtypes", {}).get(source.data_ptr())
            return dtype
        frame = frame.f_back
    return None


@functools.lru_cache(1 << 10)
def _sum(text: str) -> int:
    return zlib.crc32(text.encode())


def _sum_of(tensor: Tensor) -> int:
    """Return a checksum of the values of a contiguous tensor on the host.

    That of a large one consists of sums, which any other element changes, and of samples, which another order changes. That
    of a very large one consists of samples alone.
    """
    start, bytes_ = tensor.data_ptr(), tensor.nbytes
    if bytes_ <= _ALL_BYTES:
        return hash((bytes_, zlib.crc32((ctypes.c_char * bytes_).from_address(start))))
    step = (bytes_ - _SAMPLE_BYTES) / (_SAMPLES - 1)
    samples = [ctypes.string_at(start + int(number * step), _SAMPLE_BYTES) for number in range(_SAMPLES)]
    if bytes_ > _MOST_SUMMED:
        return hash((bytes_, zlib.crc32(b"".join(samples))))
    data = host_bytes(start, bytes_)
    rows = bytes_ // _SUMMED_BYTES
    sums = data[: rows * _SUMMED_BYTES].view(torch.int64).view(rows, -1).sum(1)
    rest = ctypes.string_at(start + rows * _SUMMED_BYTES, bytes_ % _SUMMED_BYTES)
    return hash((bytes_, zlib.crc32(b"".join((*samples, rest, ctypes.string_at(sums.data_ptr(), sums.nbytes))))))


def _linear(one: Tensor, other: Tensor) -> bool:
    """Tell whether the elements of two tensors lie in the same order, without gaps."""
    if one.is_contiguous() and other.is_contiguous():
        return one.numel() == other.numel()
    return one.size() == other.size() and one.stride() == other.stride() and extent(one) == one.nbytes
