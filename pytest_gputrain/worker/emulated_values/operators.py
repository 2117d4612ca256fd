"""torch's CUDA operators, each followed by the computation of its values on the host where its inputs are small and known.

The operator itself runs as it is: it allocates what it allocates on a GPU. Operators are replaced in torch's dispatcher, and
no `TorchDispatchMode` is entered: with one, autograd takes other ways, as accumulating gradients out of place, and so
allocates otherwise. A replaced operator acts in all threads, below autograd, autocast and compiled code.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from . import random_numbers, rules
from .collectives import Exchanges
from .contents import Contents, Known, is_small, on_host
from .evaluation import Values, flat
from .hooks import follow_libraries, follow_triton
from .program_lines import CountsByLine

_Kernel = Callable[..., Any]

_VIEWS: Final = frozenset((
    "view", "as_strided", "_reshape_alias", "unfold", "set_", "record_stream", "is_pinned", "_pin_memory",
    "is_set_to", "view_as_real", "view_as_complex", "_local_scalar_dense",
))  # fmt: skip
"""They compute nothing and allocate nothing on the GPU; the last one is replaced apart."""

_ALLOCATING: Final = frozenset(("empty", "empty_strided", "resize_"))
"""They compute nothing, and allocate."""

_LARGE: Final = (
    "mm", "addmm", "bmm", "baddbmm", "addmv", "addbmm", "_scaled", "_grouped_mm", "_flash", "_efficient", "_cudnn", "cudnn",
    "_scaled_dot_product", "_transform", "convolution", "_convolution", "conv_", "_conv", "slow_conv", "miopen", "native_",
    "_native", "_fused", "_thnn", "_batch_norm", "batch_norm", "_cslt", "_weight_int", "_mixed", "_addmm", "_int_mm",
    "_embedding_bag", "embedding_dense_backward", "avg_pool", "max_pool", "adaptive", "upsample", "_upsample", "grid_sample",
    "_foreach_norm",
)  # fmt: skip
"""Beginnings of names of operators whose results are never small and known. Those that write to their arguments are replaced
all the same."""

_OVERWRITING: Final = frozenset(("fill_", "zero_", "copy_"))
"""They write each element of their first argument, and do not read it."""

_SIZED_BY_VALUES: Final = frozenset((
    "nonzero", "nonzero.out", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
))  # fmt: skip
"""They read from the device how many results there are."""

_SAME_FOR_ALL: Final = frozenset((
    "all", "all.dim", "all.dims", "any", "any.dim", "any.dims", "amax", "amin", "max", "min",
))  # fmt: skip
"""Reductions of equal elements to an element that equals them."""


A_TRUTH_VALUE: Final = "a truth value for the host"
A_SIZE: Final = "the size"
"""What a program reads to go by it: what it does then depends on values that nobody has computed."""

_FOR_ALL_DEVICES: Final = frozenset({"aten::copy_", "aten::_is_all_true"})
"""Replaced, and have no kernel of CUDA's own."""

_WITHOUT_PYTHON: Final = frozenset({"aten::pow.Tensor_Tensor_out"})
"""Operators that torch itself calls with a number that lies on the GPU, for which Python has no type."""


class Observer(Protocol):
    """Follows the operators of CUDA from just above the first kernel of each: those that kernels call are a part of it."""

    def begin(self, operator: str) -> None:
        """Take notice that an operator begins on this thread."""

    def end(self, output: Any) -> None:
        """Take notice that it has returned ``output``; None if it has raised an exception."""


class Operators:
    """The replaced operators of this process.

    Args:
        observer: follows the operators that may allocate memory.

    Attributes:
        reads: what read values that nobody knows.
        dealt: which choices were dealt in turn.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self._observed = threading.local()
        self.contents = Contents()
        self.reads = CountsByLine()
        self.dealt = CountsByLine()
        self._stand_ins: Any = ctypes.CDLL(None)
        self._stand_ins.gputrain_answer.argtypes = [ctypes.c_int64]
        self.values = Values(self.contents)
        self._exchanges = Exchanges(self.contents)
        self._answering = threading.local()
        self._libraries: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._replacing = False

    def replace_all(self) -> None:
        self._stand_ins.gputrain_track_values()
        self._replace_new()
        follow_libraries(self._replace_new, lambda: self._replacing)
        follow_triton(self.contents)
        self._exchanges.replace_functions()

    def _replace_new(self) -> None:
        """Replace the operators that were not there before."""
        names = {*_FOR_ALL_DEVICES, *torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that operators are replaced
            self._replacing = True
            for name in sorted(names - self._seen):
                self._replace(name)
            self._replacing = False
        self._seen |= names

    def _replace(self, qualified: str) -> None:
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        written = [index for index, argument in enumerate(operator._schema.arguments) if _is_written(argument)]
        run = self._replacement(operator, qualified, base, name, written)
        if self._observer is not None and base not in _VIEWS and qualified not in _WITHOUT_PYTHON:
            run = self._observing(self._observer, run or _original(qualified), f"{namespace}.{base}")
        if run is not None:
            _leave_to_python(run)
            if namespace not in self._libraries:
                self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
            self._libraries[namespace].impl(name, run, "CUDA", with_keyset=True, allow_override=True)

    def _replacement(self, operator: Any, qualified: str, base: str, name: str, written: list[int]) -> _Kernel | None:
        if qualified.startswith("c10d::"):
            return self._exchanges.operator(operator, _original(qualified))
        if not qualified.startswith("aten::"):
            return self._custom(operator, _original(qualified), written) if written else None
        if qualified in _WITHOUT_PYTHON:
            return None
        if base == "_local_scalar_dense":
            return self._read_scalar(_original(qualified))
        if base == "copy_":
            return self._copy(_original(qualified))
        if base == "_is_all_true":
            return self._holds(_original(qualified))
        if base == "_amp_foreach_non_finite_check_and_unscale_":
            return self._unscale(_original(qualified))
        if name in random_numbers.DRAWN:
            return self._draw(_original(qualified), name)
        if base in _VIEWS or base in _ALLOCATING or (not written and base.startswith(_LARGE)):
            return None
        if written:
            return self._in_place(operator, _original(qualified), base, written)
        return self._functional(operator, _original(qualified), name)

    def _observing(self, observer: Observer, run: _Kernel, name: str) -> _Kernel:
        """Return the kernel, told to the observer unless another operator of this thread runs it."""
        thread = self._observed

        def observe(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if getattr(thread, "inside", False):
                return run(keys, *arguments, **keywords)
            thread.inside = True
            output = None
            try:
                observer.begin(name)
                output = run(keys, *arguments, **keywords)
            finally:
                thread.inside = False
                observer.end(output)
            return output

        return observe

    # --- Kinds of operators

    def _functional(self, operator: Any, original: _Kernel, name: str) -> _Kernel:
        find, find_all, compute = self.contents.find, self.values.find_all, self.values.compute
        elementwise = torch.Tag.pointwise in operator.tags or name in _SAME_FOR_ALL
        base = name.partition(".")[0]
        deals, compares, sized = name in rules.DEALT, base in ("eq", "ne"), name in _SIZED_BY_VALUES
        numbers, computes = _places_of_tensors(operator), not _is_random(operator)

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if numbers:
                arguments = _with_tensors(arguments, numbers)
            if sized:
                return self._run_sized(operator, original, keys, arguments, keywords)
            if name == "equal":
                return self._run_equal(operator, original, keys, arguments)
            output = original(keys, *arguments, **keywords)
            known: list[Known] | None = []
            for first in arguments:
                if isinstance(first, Tensor) and first.is_cuda:
                    known = None if find(first) is None else known
                    break  # most are large and unknown
            if known is not None and computes and (known := find_all(arguments, keywords)) is not None:
                return compute(operator, known, arguments, keywords, output, elementwise=elementwise)
            if deals:
                self._deal(name, arguments, keywords, output)
            elif compares and (value := rules.compared(base, arguments)) is not None:
                self.values.fill(output, torch.tensor(value))
            return output

        return run

    def _in_place(self, operator: Any, original: _Kernel, base: str, written: list[int]) -> _Kernel:
        contents = self.contents
        random = _is_random(operator)
        names = [operator._schema.arguments[index].name for index in written]
        is_out = any(operator._schema.arguments[index].kwarg_only for index in written)
        fresh = is_out or base in _OVERWRITING
        elementwise = torch.Tag.pointwise in operator.tags or base in ("fill_", "zero_")
        numbers = _places_of_tensors(operator)

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if numbers:
                arguments = _with_tensors(arguments, numbers)
            if is_out and base in _SIZED_BY_VALUES:
                return self._run_sized(operator, original, keys, arguments, keywords)
            targets = [
                arguments[index] if index < len(arguments) else keywords.get(name)
                for index, name in zip(written, names, strict=True)
            ]
            output = original(keys, *arguments, **keywords)
            tensors = list(flat(targets))
            known = None
            if not random:
                known = self.values.find_all(arguments, keywords, without=tensors if fresh else ())
            if known is None or not self.values.compute_in_place(
                operator, known, arguments, keywords, tensors, elementwise=elementwise
            ):
                for tensor in tensors:
                    contents.forget(tensor)
            return output

        return run

    def _draw(self, original: _Kernel, name: str) -> _Kernel:
        """Return an operator that draws random numbers, which follow from the state that its generator had before."""
        contents, draw = self.contents, random_numbers.DRAWN[name]
        in_place = name.partition(".")[0].endswith("_")

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            given = [*arguments, *keywords.values()]
            first = next(tensor for tensor in flat(given) if tensor.is_cuda)
            state = None
            if first.numel() <= random_numbers.MOST_DRAWN_BYTES:
                generator = next((one for one in given if isinstance(one, torch.Generator)), None)
                state = random_numbers.state_of(generator, first.device)
            if "out" in keywords:
                contents.forget(keywords["out"])
            self._stand_ins.gputrain_forget_launches()
            output = original(keys, *arguments, **keywords)
            targets = list(flat([output]))
            drawn: list[Tensor | None] = [None] * len(targets)
            if state is not None and random_numbers.are_drawn(targets):
                inputs = [one for one in arguments[in_place:] if not isinstance(one, torch.Generator)]
                with contextlib.suppress(random_numbers.OtherLaunch):
                    drawn = draw(random_numbers.Stream.of(state, first.device), self.values.read, targets, *inputs)
            for to, value in zip(targets, drawn, strict=True):
                if value is not None:
                    self.values.write([to], value, dealt=False)
                elif in_place:
                    contents.forget(to)
            if name in rules.DEALT and contents.find(targets[0]) is None:
                self._deal(name, arguments, keywords, output)
            return output

        return run

    def _copy(self, original: _Kernel) -> _Kernel:
        contents = self.contents

        def run(keys: Any, to: Tensor, source: Tensor, *others: Any) -> Tensor:
            original(keys, to, source, *others)
            known = contents.find(source) if source.is_cuda else _ON_HOST
            if not to.is_cuda:
                if known is None:
                    if source.numel():
                        self.reads.note("a copy to the host")
                elif known.value is not None:
                    to.fill_(known.value.item())
                elif source.numel():
                    to.copy_(on_host(source))
            elif known is None or not to.numel():
                contents.forget(to)
            elif known.value is not None:
                self.values.fill(to, known.value)
            elif is_small(to, dealt=known.dealt):
                on_host(to).copy_(on_host(source) if source.is_cuda else source)
                contents.written(to, dealt=known.dealt)
            else:
                contents.forget(to)
            return to

        return run

    def _read_scalar(self, original: _Kernel) -> _Kernel:
        contents = self.contents

        def run(keys: Any, tensor: Tensor) -> Any:
            number = original(keys, tensor)
            known = contents.find(tensor)
            if known is None:
                if not getattr(self._answering, "now", False):
                    self.reads.note(A_TRUTH_VALUE if tensor.dtype == torch.bool else "a number for the host")
                return number
            return on_host(tensor).item() if known.value is None else known.value.item()

        return run

    def _holds(self, original: _Kernel) -> _Kernel:
        """Take as true what torch.distributions demands of values that nobody knows."""

        def run(keys: Any, condition: Tensor) -> Tensor:
            output: Tensor = original(keys, condition)
            if self.contents.find(output) is None:
                self.values.fill(output, torch.tensor(True))
            return output

        return run

    def _unscale(self, original: _Kernel) -> _Kernel:
        """Take gradients as finite: what says whether they are stays as it is, which is 0."""
        contents = self.contents

        def run(keys: Any, gradients: list[Tensor], *others: Any) -> Any:
            output = original(keys, gradients, *others)
            for gradient in gradients:
                contents.forget(gradient)
            return output

        return run

    def _custom(self, operator: Any, original: _Kernel, written: list[int]) -> _Kernel:
        names = [operator._schema.arguments[index].name for index in written]

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            output = original(keys, *arguments, **keywords)
            for index, name in zip(written, names, strict=True):
                for tensor in flat([arguments[index] if index < len(arguments) else keywords.get(name)]):
                    if tensor.is_cuda:
                        self.contents.forget(tensor)
            return output

        return run

    def _run_equal(self, operator: Any, original: _Kernel, keys: Any, tensors: Any) -> Any:
        """Run an operator that reads its own result from the device."""
        known = self.values.find_all(tensors, {})
        self._answering.now = known is not None
        try:
            output = original(keys, *tensors)
        finally:
            self._answering.now = False
        if known is None:
            return output
        return self.values.compute(operator, known, tensors, {}, output, elementwise=False)

    def _run_sized(self, operator: Any, original: _Kernel, keys: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operator that reads from the device how many results there are, which it is answered."""
        known = self.values.find_all(arguments, keywords, without=[keywords["out"]] if "out" in keywords else ())
        source, result = arguments[0], None
        if known is None:
            if source.numel():
                self.reads.note(f"{A_SIZE} of what {operator._schema.name.partition('::')[2]} finds")
            output = original(keys, *arguments, **keywords)
            for tensor in flat([output]):
                self.contents.forget(tensor)
            return output
        value = known[0].value if known else None
        dealt = any(one.dealt for one in known)
        if is_small(source, dealt=dealt):
            result = self.values.run(operator, arguments, {name: one for name, one in keywords.items() if name != "out"})
        if value is not None and result is None:
            count = source.numel() if value.item() else 0
        else:
            count = next(flat([result])).size(0) if result is not None else 0
        self._stand_ins.gputrain_answer(count)
        self._answering.now = True
        try:
            output = original(keys, *arguments, **keywords)
        finally:
            self._answering.now = False
            self._stand_ins.gputrain_drop_answers()
        self.values.write(flat([output]), result, dealt=dealt)
        return output

    def _deal(self, name: str, arguments: Any, keywords: Any, output: Any) -> None:
        indices = rules.deal(name, arguments, keywords, output)
        if indices is not None:
            to = output[-1] if isinstance(output, tuple) else output
            on_host(to).copy_(indices)
            self.contents.written(to, dealt=True)
            self.dealt.note(name.partition(".")[0])


_ON_HOST: Final = Known(0, 0)


def _original(qualified: str) -> _Kernel:
    kernel: _Kernel = torch.library.get_kernel(qualified, "CUDA").call_boxed
    return kernel


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def _places_of_tensors(operator: Any) -> list[int]:
    """Tell which arguments are tensors, and can be a number that torch took for one."""
    tensors = [index for index, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]
    return tensors if len(tensors) > 1 else []


def _with_tensors(arguments: Any, places: list[int]) -> Any:
    """Make tensors of the numbers that torch gives in place of them, of the type that the result has with the number."""
    for place in places:
        if place < len(arguments) and type(arguments[place]) in (int, float, bool, complex):
            number = arguments[place]
            other = next((one for one in arguments if isinstance(one, Tensor)), None)
            dtype = torch.result_type(other, number) if other is not None else None
            arguments = [*arguments[:place], torch.tensor(number, dtype=dtype), *arguments[place + 1 :]]
    return arguments


def _leave_to_python(function: _Kernel) -> None:
    """Keep torch.compile from compiling what runs when an operator is called from Python that it runs."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
