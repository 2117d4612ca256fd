"""The random numbers that torch's CUDA kernels draw, computed on the host from a generator's seed and offset.

torch draws by Philox4x32-10, a function of a key and a counter. The key is the generator's seed. Half of the counter is the
number of the GPU's thread, and the other half is the generator's offset, by which each call moves the generator forward.
Which thread draws for which element follows from the tensor's size and, beyond some ten thousand elements, from how many
threads the GPU runs at once. All this is as in torch 2.9 to 2.13 (DistributionTemplates.h, Dropout.cu, Randperm.cu), and as
in NVIDIA's curand. If another torch launches another number of blocks, the numbers are unknown.

Integers, booleans and uniform numbers have the same bits as on a GPU. A GPU computes sines, logarithms and exponentials by
fast functions of its own, so that normal and exponential numbers differ in their last digits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

MOST_DRAWN_BYTES: Final = 64 << 10
"""The most bytes of a tensor whose random numbers are computed."""

_Read = Callable[[Tensor], Tensor | None]
"""Gives the values of a tensor on the GPU, on the host; None if they are unknown."""

_Values = list[Tensor | None]
"""The values of each target, or None if they are unknown."""

_CPU: Final = torch.device("cpu")
_THREADS_OF_A_BLOCK: Final = 256
_ELEMENTS_OF_A_BLOCK: Final = 4 * 512
"""The elements of a block of `bernoulli` with a tensor of chances: 512 threads, each for four neighbouring elements."""

_THREADS_OF_A_MULTINOMIAL_BLOCK: Final = 128
_WIDE_SPAN: Final = 1 << 28
"""The number of different integers from which on torch draws each one from 64 bits and not from 32."""

_TWO_PI: Final = ctypes.c_float(2 * math.pi).value
_DIGITS: Final[Mapping[torch.dtype, int]] = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""The bits of a floating point number, all integers of which are exact."""


@functools.cache
def _stand_ins() -> Any:
    stand_ins: Any = ctypes.CDLL(None)
    stand_ins.gputrain_philox.argtypes = [*[ctypes.c_uint64] * 5, ctypes.c_int, ctypes.c_void_p]
    stand_ins.gputrain_has_launched.argtypes = [ctypes.c_uint64]
    return stand_ins


def _has_launched(blocks: int) -> bool:
    return bool(_stand_ins().gputrain_has_launched(blocks))


class OtherLaunch(LookupError):
    """torch launched a kernel of another size than expected, so it is not known which random numbers its elements get."""


class Stream(NamedTuple):
    """The state of a generator of the GPU when an operator draws from it.

    Attributes:
        seed: of the generator, 64 bits.
        offset: of the generator, a multiple of 4.
        most_threads: the most threads that a kernel of torch's distributions starts on this GPU.
        has_launched: tells whether the operator has launched a kernel of this many blocks.
    """

    seed: int
    offset: int
    most_threads: int
    has_launched: Callable[[int], bool] = _has_launched

    @classmethod
    def of(cls, state: Tensor, device: torch.device) -> Stream:
        """Read the state that a CUDA generator gives: 8 bytes of the seed and 8 of the offset."""
        seed, offset = state.view(torch.int64).tolist()
        properties = torch.cuda.get_device_properties(device)
        blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // _THREADS_OF_A_BLOCK)
        return cls(seed & 0xFFFFFFFFFFFFFFFF, offset, blocks * _THREADS_OF_A_BLOCK)

    def started(self, count: int) -> int:
        """Return how many threads a kernel of torch's distributions starts for this many elements."""
        return min(-(-count // _THREADS_OF_A_BLOCK) * _THREADS_OF_A_BLOCK, self.most_threads)

    def calls(self, count: int, at_once: int) -> int:
        """Return how often each of these threads draws, if one draw gives this many elements."""
        return -(-count // (self.started(count) * at_once))

    def words(self, blocks: int, calls: int, threads: int, kept: int = 4, first_thread: int = 0) -> Tensor:
        """Return the random words that each thread draws in each call, four at most, as a tensor (calls, words, threads).

        Raises:
            OtherLaunch: no kernel of this many blocks was launched.
        """
        if not self.has_launched(blocks):
            raise OtherLaunch
        words = torch.empty((calls, kept, threads), dtype=torch.int64, device=_CPU)
        _stand_ins().gputrain_philox(self.seed, self.offset // 4, calls, first_thread, threads, kept, words.data_ptr())
        return words

    def strided(self, count: int, at_once: int, together: int = 1) -> Tensor:
        """Draw for the kernels in which a thread's elements lie as far from each other as threads were started.

        Args:
            count: of elements.
            at_once: how many elements of a thread come from its four words, 2 or 4.
            together: how many words make numbers together.

        Returns:
            By calls, words and threads. The numbers that are made of the words come in the order of the elements, and more.
        """
        started = self.started(count)
        kept = min(4, -(-count // started) * 4 // at_once)
        kept = -(-kept // together) * together
        return self.words(started // _THREADS_OF_A_BLOCK, self.calls(count, at_once), min(count, started), kept)

    def integers(self, count: int) -> Tensor:
        """Draw integers of 32 bits."""
        return self.strided(count, 4).reshape(-1)[:count]

    def wide_integers(self, count: int) -> list[int]:
        """Draw integers of 64 bits."""
        words = self.strided(count, 2)
        high, low = (words[:, part::2].reshape(-1)[:count].tolist() for part in (0, 1))
        return [upper << 32 | lower for upper, lower in zip(high, low, strict=True)]

    def uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        """Draw numbers above 0 and up to 1, of 32 or 64 bits."""
        if dtype == torch.float64:
            return _of_two_words(self.strided(count, 2), 2.0**-53).reshape(-1)[:count]
        return _of_a_word(self.strided(count, 4)).reshape(-1)[:count]

    def normal(self, count: int, dtype: torch.dtype) -> Tensor:
        """Draw normal numbers by Box and Muller's method, of 32 or 64 bits."""
        if dtype == torch.float64:
            words = self.strided(count, 2, together=4)
            radius = _of_two_words(words[:, :2], 2.0**-53).log().mul(-2.0).sqrt()
            angle = _of_two_words(words[:, 2:], 2.0**-52) * math.pi
        else:
            words = self.strided(count, 4, together=2)
            radius = _of_a_word(words[:, ::2]).double().log().float().mul(-2.0).sqrt().double()
            turn = _TWO_PI * 2.0**-32
            angle = (words[:, 1::2].float().double() * turn + turn / 2).float().double()
        return torch.stack((angle.sin() * radius, angle.cos() * radius), 2).to(dtype).reshape(-1)[:count]


def _of_a_word(words: Tensor) -> Tensor:
    # curand takes the middle of the interval of a word, so 0 is never drawn.
    return words.float() * 2.0**-32 + 2.0**-33


def _of_two_words(words: Tensor, step: float) -> Tensor:
    return (words[:, ::2] ^ words[:, 1::2] << 21).double() * step + step / 2


# --- Operators: each gives the values of its targets


def _uniform(stream: Stream, read: _Read, targets: Sequence[Tensor], low: float = 0.0, high: float = 1.0) -> _Values:
    to = targets[0]
    dtype = _computed_in(to.dtype)
    ends = torch.tensor([low, high], dtype=to.dtype, device=_CPU)
    span = (ends[1] - ends[0]).double()
    values = (stream.uniform(to.numel(), dtype).double() * span + ends[0].double()).to(dtype).to(to.dtype)
    # The kernel replaces the upper end, which it may draw, by the lower one.
    return [_in_memory_order(to, torch.where(values == ends[1], ends[0], values))]


def _normal_values(stream: Stream, to: Tensor, mean: float, std: float) -> Tensor:
    if to.is_complex():
        parts = torch.view_as_real(to)
        return torch.view_as_complex(_normal_values(stream, parts, mean, std / math.sqrt(2)).contiguous())
    dtype = _computed_in(to.dtype)
    ends = torch.tensor([mean, std], dtype=dtype, device=_CPU).double()
    values = stream.normal(to.numel(), dtype).double() * ends[1] + ends[0]
    return _in_memory_order(to, values.to(dtype).to(to.dtype))


def _normal(stream: Stream, read: _Read, targets: Sequence[Tensor], mean: float = 0.0, std: float = 1.0) -> _Values:
    return [_normal_values(stream, targets[0], mean, std)]


def _normal_about(
    stream: Stream, read: _Read, targets: Sequence[Tensor], mean: Tensor | float, std: Tensor | float = 1.0
) -> _Values:
    means, stds = (read(one) if isinstance(one, Tensor) else one for one in (mean, std))
    if means is None or stds is None:
        return [None]
    if isinstance(stds, Tensor):
        return [_normal_values(stream, targets[0], 0.0, 1.0).mul_(stds).add_(means)]
    return [_normal_values(stream, targets[0], 0.0, stds).add_(means)]


def _log_normal(stream: Stream, read: _Read, targets: Sequence[Tensor], mean: float = 1.0, std: float = 2.0) -> _Values:
    to = targets[0]
    dtype = _computed_in(to.dtype)
    values = (stream.normal(to.numel(), dtype).double() * std + mean).to(dtype).double().exp()
    return [_in_memory_order(to, values.to(dtype).to(to.dtype))]


def _exponential(stream: Stream, read: _Read, targets: Sequence[Tensor], rate: float = 1.0) -> _Values:
    to = targets[0]
    dtype = _computed_in(to.dtype)
    least = torch.finfo(dtype).eps / 2
    drawn = stream.uniform(to.numel(), dtype)
    # The kernel keeps the logarithm below 0, so that no result becomes 0.
    logarithm = torch.where(drawn >= 1 - least, -least, drawn.double().log()).to(dtype)
    return [_in_memory_order(to, (logarithm * (-1.0 / torch.tensor(rate, dtype=dtype, device=_CPU))).to(to.dtype))]


def _geometric(stream: Stream, read: _Read, targets: Sequence[Tensor], chance: float) -> _Values:
    to = targets[0]
    dtype = torch.float64 if to.dtype == torch.float64 else torch.float32
    drawn = stream.uniform(to.numel(), dtype).double().log().to(dtype)
    return [_in_memory_order(to, (drawn / torch.tensor(-chance, dtype=dtype, device=_CPU).log1p()).ceil().to(to.dtype))]


def _cauchy(stream: Stream, read: _Read, targets: Sequence[Tensor], median: float = 0.0, sigma: float = 1.0) -> _Values:
    to = targets[0]
    dtype = _computed_in(to.dtype)
    drawn = stream.uniform(to.numel(), dtype)
    if dtype == torch.float32:
        drawn = drawn.clamp(torch.finfo(dtype).eps, 1 - torch.finfo(dtype).eps)
    values = ((drawn.double() - 0.5) * math.pi).tan() * sigma + median
    return [_in_memory_order(to, values.to(dtype).to(to.dtype))]


def _bernoulli(stream: Stream, read: _Read, targets: Sequence[Tensor], chance: float = 0.5) -> _Values:
    to = targets[0]
    dtype = torch.float64 if to.dtype == torch.float64 else torch.float32
    limit = torch.tensor(chance, dtype=dtype, device=_CPU)
    return [_in_memory_order(to, (stream.uniform(to.numel(), dtype) < limit).to(to.dtype))]


def _bernoulli_by(stream: Stream, read: _Read, targets: Sequence[Tensor], chances: Tensor) -> _Values:
    to, limits = targets[0], read(chances)
    if limits is None:
        return [None]
    count = to.numel()
    # A thread of this kernel draws once, for four neighbouring elements.
    words = stream.words(-(-count // _ELEMENTS_OF_A_BLOCK), 1, -(-count // 4))[0].t().reshape(-1)[:count]
    limits = limits.to(torch.float64 if to.dtype == torch.float64 else torch.float32)
    return [(_in_memory_order(to, _of_a_word(words)) <= limits).to(to.dtype)]


def _integers(stream: Stream, to: Tensor, span: int, base: int = 0) -> _Values:
    """Draw integers from ``base`` on, out of ``span`` ones."""
    if span < _WIDE_SPAN:
        values = stream.integers(to.numel()) % span + base
    else:
        values = torch.tensor([drawn % span + base for drawn in stream.wide_integers(to.numel())], device=_CPU)
    return [_in_memory_order(to, values.to(to.dtype))]


def _random(stream: Stream, read: _Read, targets: Sequence[Tensor]) -> _Values:
    to = targets[0]
    if to.dtype == torch.bool:
        return _integers(stream, to, 2)
    if to.dtype in (torch.int64, torch.float64):
        span = 1 << 63 if to.dtype == torch.int64 else (1 << _DIGITS[to.dtype]) + 1
        values = torch.tensor([drawn % span for drawn in stream.wide_integers(to.numel())], device=_CPU)
    else:
        span = (1 << _DIGITS[to.dtype]) + 1 if to.dtype in _DIGITS else torch.iinfo(to.dtype).max + 1
        values = stream.integers(to.numel()) % span
    return [_in_memory_order(to, values.to(to.dtype))]


def _random_from(stream: Stream, read: _Read, targets: Sequence[Tensor], low: int, high: int | None = None) -> _Values:
    to = targets[0]
    if high is None and low == torch.iinfo(torch.int64).min:
        values = [drawn - (drawn >> 63 << 64) for drawn in stream.wide_integers(to.numel())]
        return [_in_memory_order(to, torch.tensor(values, device=_CPU).to(to.dtype))]
    if high is None:
        most = 1 << _DIGITS[to.dtype] if to.dtype in _DIGITS else 1 if to.dtype == torch.bool else torch.iinfo(to.dtype).max
        high = most + 1
    if to.dtype in _DIGITS and max(abs(low), abs(high) - 1) > 1 << _DIGITS[to.dtype]:
        return [None]  # torch moves ends that the type cannot hold, which is not computed here
    return _integers(stream, to, high - low, low)


def _random_to(stream: Stream, read: _Read, targets: Sequence[Tensor], high: int) -> _Values:
    return _random_from(stream, read, targets, 0, high)


def _permutation(stream: Stream, read: _Read, targets: Sequence[Tensor], count: int) -> _Values:
    """Sort the numbers by random keys of as few bits as keep most of them distinct, and shuffle those of equal keys."""
    # By torch's formula all keys differ with a probability of 0.9.
    bits = min(64, math.ceil(math.log2(count - (6.0 * count * count + 1) / (math.log(0.9) * 12))))
    if bits <= 32:
        span, base = 0xFFFFFFFF, -(1 << 31)
    else:
        span, base = 0xFFFFFFFFFFFFFFFF, -(1 << 63)
    mask = (1 << bits) - 1
    keys = [(drawn % span + base) & mask for drawn in stream.wide_integers(count)]
    if bits in (32, 64):  # Keys of these sizes are sorted as signed numbers.
        keys = [key ^ 1 << (bits - 1) for key in keys]
    order = sorted(range(count), key=keys.__getitem__)
    # The numbers of the shuffle are drawn after those of the keys.
    shuffling = stream._replace(offset=stream.offset + 4 * stream.calls(count, 2))
    begin = 0
    while begin < count:
        end = begin + 1
        while end < count and keys[order[end]] == keys[order[begin]]:
            end += 1
        if end - begin > 1:
            words = shuffling.words(-(-count // 512), -(-(end - begin) // 4), 1, first_thread=begin).reshape(-1).tolist()
            for last, word in zip(range(end - begin - 1, 0, -1), words, strict=False):
                one, other = begin + last, begin + word % (last + 1)
                order[one], order[other] = order[other], order[one]
        begin = end
    return [torch.tensor(order, device=_CPU).to(targets[0].dtype)]


def _native_dropout(
    stream: Stream, read: _Read, targets: Sequence[Tensor], source: Tensor, chance: float, train: bool | None = None
) -> _Values:
    if train is False or chance == 1:
        return [None, None]  # other operators have filled the targets
    return _fused_dropout(stream, read, targets, source, 1.0 - chance)


def _fused_dropout(stream: Stream, read: _Read, targets: Sequence[Tensor], source: Tensor, kept: float) -> _Values:
    count, at_once = source.numel(), _loaded_at_once(source)
    if at_once > 1:
        started, parts = stream.started(count), -(-at_once // 4)
        rounds = -(-count // (started * at_once))
        words = stream.words(started // _THREADS_OF_A_BLOCK, rounds * parts, min(started, count // at_once))
        words = words.reshape(rounds, parts * 4, -1)[:, :at_once].transpose(1, 2)
        drawn = _in_memory_order(source, _of_a_word(words.reshape(-1)[:count]))
    else:
        drawn = _of_a_word(stream.integers(count)).reshape(source.size())
    dtype = _computed_in(source.dtype)
    limit = torch.tensor(kept, dtype=dtype, device=_CPU)
    mask = drawn < limit
    values = read(source)
    if values is not None:
        scale = (1.0 / limit.double()).to(dtype)
        values = (values.to(dtype) * mask * scale).to(source.dtype)
    return [values, mask.to(targets[1].dtype)]


def _loaded_at_once(tensor: Tensor) -> int:
    """Return how many elements a thread of dropout takes at once, which lie next to each other."""
    if not _is_dense(tensor):
        return 1
    size, at_once = tensor.itemsize, 8
    while at_once > 1 and (at_once * size > 16 or tensor.data_ptr() % (at_once * size) or tensor.numel() % at_once):
        at_once //= 2
    return at_once


def _multinomial(
    stream: Stream, read: _Read, targets: Sequence[Tensor], scores: Tensor, samples: int, replacement: bool = False
) -> _Values:
    """Draw by the cumulative sums of the scores. torch makes its other multinomial draws of operators that are followed
    anyway."""
    if not replacement or samples == 1 or scores.dtype not in (torch.float32, torch.float64):
        return [None]
    values = read(scores)
    if values is None:
        return [None]
    values = values.reshape(-1, values.size(-1))
    shares = values / values.sum(1, keepdim=True)
    rows, options = shares.size()
    block = _THREADS_OF_A_MULTINOMIAL_BLOCK
    blocks = -(-samples // block)
    words = stream.words(rows * blocks, 1, rows * blocks * block, kept=1)
    drawn = _of_a_word(words).reshape(rows, blocks * block)[:, :samples].to(shares.dtype)
    found = torch.searchsorted(shares.cumsum(1), drawn.contiguous()).clamp_(max=options - 1)
    possible = torch.where(shares > 0, torch.arange(options, device=_CPU), 0).cummax(1)[0]
    return [possible.gather(1, found).reshape(targets[0].size())]


DRAWN: Final[Mapping[str, Callable[..., _Values]]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "normal.Tensor_float": _normal_about,
    "normal.Tensor_float_out": _normal_about,
    "normal.float_Tensor": _normal_about,
    "normal.float_Tensor_out": _normal_about,
    "normal.Tensor_Tensor": _normal_about,
    "normal.Tensor_Tensor_out": _normal_about,
    "log_normal_": _log_normal,
    "exponential_": _exponential,
    "geometric_": _geometric,
    "cauchy_": _cauchy,
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli_by,
    "bernoulli.out": _bernoulli_by,
    "random_": _random,
    "random_.from": _random_from,
    "random_.to": _random_to,
    "randperm.generator_out": _permutation,
    "native_dropout": _native_dropout,
    "_fused_dropout": _fused_dropout,
    "multinomial": _multinomial,
    "multinomial.out": _multinomial,
}
"""The operators that draw, but for those that may draw more than once for an element: of the Poisson, binomial and gamma
distributions."""


# --- Types and layouts


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dimensions_in_memory(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def _in_memory_order(like: Tensor, values: Tensor) -> Tensor:
    """Give values that are in the order of a tensor's memory the sizes of the tensor."""
    if like.is_contiguous():
        return values.reshape(like.size())
    order = _dimensions_in_memory(like)
    inverse = sorted(range(like.dim()), key=order.__getitem__)
    return values.reshape([like.size(dim) for dim in order]).permute(inverse)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory, in some order of its dimensions."""
    expected = 1
    for dim in reversed(_dimensions_in_memory(tensor)):
        if tensor.size(dim) > 1:
            if tensor.stride(dim) != expected:
                return False
            expected *= tensor.size(dim)
    return True


def are_drawn(targets: Sequence[Tensor]) -> bool:
    """Tell whether the random numbers of these tensors, or of the smallest of them, are computed."""
    return 0 < min(one.numel() * one.itemsize for one in targets) <= MOST_DRAWN_BYTES


def state_of(generator: Any, device: torch.device) -> Tensor | None:
    """Take the state of the generator that an operator on this GPU draws from: its own one, or the GPU's."""
    if generator is None:
        generator = torch.cuda.default_generators[device.index]
    return generator.get_state() if generator.device.type == "cuda" else None
