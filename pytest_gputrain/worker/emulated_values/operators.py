"""Replaces torch's CUDA operators by ones that also compute on the host if their inputs are small and known.

The operator itself runs as it is: it allocates what it allocates on a GPU. Operators are replaced in torch's dispatcher, and
no `TorchDispatchMode` is entered: with one, autograd takes other ways, as accumulating gradients out of place, and so
allocates otherwise. A replaced operator acts in all threads, below autograd, autocast and compiled code.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from . import busy_streams, device_asserts, random_numbers, rules, sizes, sparse
from .branches import truth_that_raises_nothing
from .collectives import FROM_ANOTHER, Exchanges
from .contents import CHOICES, COUNTS, MATCHES, Contents, Dealt, Known, is_small, joined, number_as, on_host
from .evaluation import Values, flat
from .following_time import FollowingTime
from .graphs import Graphs
from .hooks import follow_libraries, follow_triton
from .lbfgs import Lbfgs
from .looks import Looks
from .padding import Padding
from .program_lines import CountsByLine

_Kernel = Callable[..., Any]

_VIEWS: Final = frozenset((
    "view", "as_strided", "_reshape_alias", "unfold", "set_", "record_stream", "is_pinned", "_pin_memory",
    "is_set_to", "view_as_real", "view_as_complex", "_local_scalar_dense",
))  # fmt: skip
"""Operators that compute and allocate nothing on the GPU. The last one is replaced separately."""

_ALLOCATING: Final = frozenset(("empty", "empty_strided", "resize_"))
"""Operators that compute nothing, and allocate."""

_LARGE: Final = (
    "mm", "addmm", "bmm", "baddbmm", "addmv", "addbmm", "_scaled", "_grouped_mm", "_flash", "_efficient", "_cudnn", "cudnn",
    "_scaled_dot_product", "_transform", "convolution", "_convolution", "conv_", "_conv", "slow_conv", "miopen", "native_",
    "_native", "_fused", "_thnn", "_batch_norm", "batch_norm", "_cslt", "_weight_int", "_mixed", "_addmm", "_int_mm",
    "_embedding_bag", "embedding_dense_backward", "avg_pool", "max_pool", "adaptive", "upsample", "_upsample", "grid_sample",
)  # fmt: skip
"""Beginnings of names of operators whose results are never small and known. Those that write to their arguments are replaced
all the same."""

_OVERWRITING: Final = frozenset(("fill_", "zero_", "copy_"))
"""Operators that write each element of their first argument, and do not read it."""

_UPDATING: Final = frozenset((
    "native_batch_norm", "cudnn_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
    "batch_norm_update_stats",
))  # fmt: skip
"""Operators that write to the running mean and variance in training, although their schemas do not say so."""

_PLACING: Final = frozenset(("scatter_", "index_copy_", "_index_put_impl_", "put_"))
"""Operators that write to the places that indices name, which may be all places."""

_SAME_FOR_ALL: Final = frozenset((
    "all", "all.dim", "all.dims", "any", "any.dim", "any.dims", "amax", "amin", "max", "min",
))  # fmt: skip
"""Reductions of equal elements to an element that equals them."""

_ZERO_OF_ZEROS: Final = frozenset(("sum", "mean", "linalg_vector_norm"))
"""Reductions that are zero for zeros, as the difference of equal tensors has them."""


A_TRUTH_VALUE: Final = "a truth value for the host"
"""The note for a truth value that a program reads and acts on, so that it depends on values that nobody has computed."""

_CHECKS: Final[Mapping[str, bool | None]] = {
    "normal": True,
    "cov": None,
    "segment_reduce": True,
    "allclose": True,
    "istft": False,
}
"""The truth values with which the checks pass that operators make of their arguments, by the beginning of the operator's
name. ``allclose`` stands for the comparison in a derivative. None is for a check that compares with zero twice: made-up
numbers are positive and pass both."""

_LARGER: Final = frozenset(("bincount", "one_hot", "_ctc_loss", "_padded_dense_to_jagged_forward"))
"""The operators whose output is as large as the largest value that they read."""

_OPERATOR: Final = re.compile(r"_ZN2at4_ops(\d+)(\w+)")

_FOR_ALL_DEVICES: Final = frozenset({"aten::copy_", "aten::_is_all_true", "aten::masked_scatter_backward"})
"""Operators that are replaced although they have no kernel for CUDA alone."""

_WITHOUT_PYTHON: Final = frozenset({"aten::pow.Tensor_Tensor_out"})
"""Operators that torch itself calls with a number that lies on the GPU, for which Python has no type."""


class Observer(Protocol):
    """Follows each operator of CUDA that a program runs. Operators that its kernel calls are a part of it, and are not
    followed."""

    def begin(self, operator: str) -> None:
        """Note that an operator begins on this thread."""

    def end(self, output: Any) -> None:
        """Note that it has returned ``output``; None if it has raised an exception."""


class Operators:
    """The replaced operators of this process.

    Args:
        observer: follows the operators that may allocate memory.

    Attributes:
        reads: the reads of unknown values, by line.
        dealt: the choices among unknown scores that were made up, by line.
        deciding: the made-up choices on which sizes or decisions of the host depend.
        assumed: the sizes and checks that depend on unknown values, by line.
        graphs: the CUDA graphs.
        padding: the matrix products that Inductor would measure with padding.
        time: the time that following operators of torch took.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self._observed = threading.local()
        self.contents = Contents()
        self.reads = CountsByLine()
        self.dealt = CountsByLine()
        self.deciding: set[tuple[str, str]] = set()
        self.assumed = CountsByLine()
        self.padding = Padding()
        self.time = FollowingTime()
        self._lbfgs = Lbfgs(self.contents, self.assumed.note)
        self._stand_ins: Any = ctypes.CDLL(None)
        self._stand_ins.gputrain_take_unanswered.restype = ctypes.c_uint64
        self._stand_ins.gputrain_asking_operator.restype = ctypes.c_char_p
        self._unanswered = ctypes.c_uint64.in_dll(self._stand_ins, "gputrain_unanswered_reads")
        self.values = Values(self.contents)
        self.graphs = Graphs(self.contents)
        self._exchanges = Exchanges(self.contents, self.graphs)
        self._looks = Looks(self.contents, self.values)
        self._answering = threading.local()
        self._libraries: dict[str, Any] = {}
        self._too_low: dict[bytes, bytes] = {}
        """The names of figures that the stand-ins got, which keep their addresses."""
        self._seen: set[str] = set()
        self._replacing = False

    def replace_all(self) -> None:
        self._stand_ins.gputrain_track_values()
        self._replace_new()
        follow_libraries(self._replace_new, lambda: self._replacing)
        follow_triton(self.contents, self.graphs, self.padding)
        self._exchanges.replace_functions()
        self._lbfgs.follow()
        self.graphs.follow_pools()

    def _replace_new(self) -> None:
        """Replace the operators that were registered since the last call. The first call replaces all."""
        registered = {*_FOR_ALL_DEVICES, *torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")}
        # A library may register a kernel before anybody has defined its operator. Nobody can call such an operator, so it is
        # left out.
        names = {name for name in registered - self._seen if torch._C._jit_get_schemas_for_operator(name.partition(".")[0])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns for each operator that is replaced
            self._replacing = True
            for name in sorted(names):
                self._replace(name)
            if not self._seen:
                self._replace_sparse()
            self._replacing = False
        self._seen |= names

    def _replace(self, qualified: str) -> None:
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        written = [index for index, argument in enumerate(operator._schema.arguments) if _is_written(argument)]
        run = self._replacement(operator, qualified, base, name, written)
        if namespace == "aten" and device_asserts.checks(base):
            original = _original(qualified)
            run = device_asserts.asserting(self.contents, self.graphs, base, run or original, original)
        if self._observer is not None and base not in _VIEWS and qualified not in _WITHOUT_PYTHON:
            run = self._observing(self._observer, run or _original(qualified), f"{namespace}.{base}")
        if run is not None:
            self._register(namespace, name, run, "CUDA")

    def _replace_sparse(self) -> None:
        self._register("aten", "_coalesce", self._coalesce(_original("aten::_coalesce", "SparseCUDA")), "SparseCUDA")
        for name, key in sparse.operators_to_follow():
            base, _, overload = name.partition(".")
            numbers = _places_of_tensors(getattr(getattr(torch.ops.aten, base), overload or "default"))
            self._register("aten", name, self._sparse(_original(f"aten::{name}", key), numbers), key)

    def _sparse(self, original: _Kernel, numbers: list[int]) -> _Kernel:
        """Follow an operator of sparse or nested tensors, after which the numbers that it has written are unknown."""

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            output = original(keys, *_with_tensors(arguments, numbers), **keywords)
            elements = [sparse.elements(tensor) for tensor in flat([output])]
            if not (self.graphs.captures.value and self.graphs.defer(None, (), {}, None, elements)):
                for tensor in elements:
                    self.contents.forget(tensor)
            return output

        return run

    def _register(self, namespace: str, name: str, run: _Kernel, key: str) -> None:
        _leave_to_python(run)
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        self._libraries[namespace].impl(name, run, key, with_keyset=True, allow_override=True)

    def _replacement(self, operator: Any, qualified: str, base: str, name: str, written: list[int]) -> _Kernel | None:
        if qualified.startswith("c10d::"):
            run = self._exchanges.operator(operator, _original(qualified))
            return run if base in FROM_ANOTHER else self._unless_captured(self._looks.exchanged(operator, run), run)
        if not qualified.startswith("aten::"):
            return self._custom(operator, _original(qualified), written) if written else None
        if qualified in _WITHOUT_PYTHON:
            return None
        apart: dict[str, Callable[[_Kernel], _Kernel]] = {
            "record_stream": lambda original: self._unless_captured(busy_streams.following(original), original),
            "_local_scalar_dense": self._read_scalar,
            "copy_": self._copy,
            "_is_all_true": self._holds,
            "_amp_foreach_non_finite_check_and_unscale_": self._unscale,
            "masked_scatter_backward": self._scatter_backward,
        }
        if base in apart:
            return apart[base](_original(qualified))
        if name in random_numbers.DRAWN:
            return self._draw(_original(qualified), name)
        if base in _VIEWS or base in _ALLOCATING:
            return None
        if not written and base.startswith(_LARGE):
            return self._unknown(operator, _original(qualified), base)
        if written:
            return self._in_place(operator, _original(qualified), base, written)
        return self._functional(operator, _original(qualified), name)

    def _observing(self, observer: Observer, run: _Kernel, name: str) -> _Kernel:
        """Return the kernel with calls of the observer around it, unless another operator of this thread runs it."""
        thread, seconds = self._observed, self.time
        # Kernels of other libraries are not timed, and a collective waits for other processes.
        library, _, base = name.partition(".")
        timed = library == "aten"

        def observe(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if getattr(thread, "inside", False):
                return run(keys, *arguments, **keywords)
            thread.inside = True
            thread.kernel = 0.0
            started, output = perf_counter(), None
            try:
                observer.begin(name)
                output = run(keys, *arguments, **keywords)
            finally:
                thread.inside = False
                observer.end(output)
                if timed:
                    seconds.add(base, perf_counter() - started - thread.kernel)
            return output

        return observe

    # --- Kinds of operators

    def _functional(self, operator: Any, original: _Kernel, name: str) -> _Kernel:
        find, find_all, compute = self.contents.find, self.values.find_all, self.values.compute
        elementwise = torch.Tag.pointwise in operator.tags or name in _SAME_FOR_ALL
        base = name.partition(".")[0]
        deals, sized, decides = name in rules.DEALT, base in sizes.SIZED, rules.DECIDING.get(base)
        by_lbfgs = base in ("gt", "le")
        compare = self._lbfgs.compared if by_lbfgs else rules.compared if base in ("eq", "ne", "isnan") else None
        fresh = all(one.alias_info is None for one in operator._schema.returns)
        numbers, random = _places_of_tensors(operator), _is_random(operator)
        captures, defer = self.graphs.captures, self.graphs.defer

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if numbers:
                arguments = _with_tensors(arguments, numbers)
            if sized:
                return self._run_sized(operator, original, keys, arguments, keywords)
            if name == "equal":
                return self._run_equal(operator, original, keys, arguments)
            output = self._run(original, base, keys, arguments, keywords)
            if captures.value and defer(after, arguments, keywords, output, [output] if fresh else []):
                return output
            return after(arguments, keywords, output)

        def after(arguments: Any, keywords: Any, output: Any, replays: bool = False) -> Any:
            known: list[Known] | None = []
            for first in arguments:
                if isinstance(first, Tensor) and first.is_cuda:
                    known = None if find(first) is None else known
                    break  # only the first tensor is looked up, because most tensors are unknown
            if fresh:
                self._forget(output, arguments)
            if known is not None and not random and (known := find_all(arguments, keywords)) is not None:
                same = elementwise or (base in _ZERO_OF_ZEROS and all(_is_zero(one) for one in known))
                return compute(operator, known, arguments, keywords, output, elementwise=same)
            if deals:
                self._deal(name, arguments, keywords, output)
            elif compare is not None and (value := compare(base, arguments)) is not None:
                self.values.fill(output, torch.tensor(value))
            elif decides is not None and self.values.are_all(decides, arguments, output):
                self.values.fill(output, torch.tensor(decides))
            elif not random and not replays:
                self._looks.follow(base, arguments, keywords, output)
            return output

        return run

    def _unknown(self, operator: Any, original: _Kernel, name: str) -> _Kernel:
        """Follow an operator whose results are never known."""
        names = [argument.name for argument in operator._schema.arguments] if name in _UPDATING else []
        updated = [place for place, one in enumerate(names) if one.startswith("running_")]
        training = names.index("training") if "training" in names else None
        captures, defer = self.graphs.captures, self.graphs.defer

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            output = self._run(original, name, keys, arguments, keywords)
            changed = [arguments[place] for place in updated if training is None or arguments[training]]
            if captures.value and defer(None, (), {}, None, [output, *changed]):
                return output
            self._forget(output, arguments)
            for tensor in flat(changed):
                self.contents.forget(tensor)
            return output

        return run

    def _in_place(self, operator: Any, original: _Kernel, base: str, written: list[int]) -> _Kernel:
        contents = self.contents
        random = _is_random(operator)
        names = [operator._schema.arguments[index].name for index in written]
        is_out = any(operator._schema.arguments[index].kwarg_only for index in written)
        fresh, places = is_out or base in _OVERWRITING, base in _PLACING
        elementwise, fills = torch.Tag.pointwise in operator.tags or base == "fill_", base in ("fill_", "zero_")
        decides = rules.DECIDING.get(base.rstrip("_"))
        numbers = _places_of_tensors(operator)
        captures, defer = self.graphs.captures, self.graphs.defer

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if numbers:
                arguments = _with_tensors(arguments, numbers)
            if is_out and base in sizes.SIZED:
                return self._run_sized(operator, original, keys, arguments, keywords)
            output = self._run(original, base, keys, arguments, keywords)
            if captures.value and defer(after, arguments, keywords, output, targets_of(arguments, keywords)):
                return output
            return after(arguments, keywords, output)

        def targets_of(arguments: Any, keywords: Any) -> list[Any]:
            return [
                arguments[index] if index < len(arguments) else keywords.get(name)
                for index, name in zip(written, names, strict=True)
            ]

        def after(arguments: Any, keywords: Any, output: Any, replays: bool = False) -> Any:
            if fills and self.values.fill_by_number(*arguments):
                return output
            targets = targets_of(arguments, keywords)
            tensors = list(flat(targets))
            known = None
            if not random:
                known = self.values.find_all(arguments, keywords, without=tensors if fresh else ())
            if places and known is None and self.values.place_all(operator, arguments, keywords, tensors[0]):
                return output
            if known is None or not self.values.compute_in_place(
                operator, known, arguments, keywords, tensors, elementwise=elementwise
            ):
                if decides is not None and self.values.are_all(decides, arguments, tensors[0]):
                    contents.forget(tensors[0])
                    self.values.fill(tensors[0], torch.tensor(decides))
                elif len(tensors) == 1 and not (random or is_out or replays):
                    self._looks.follow_in_place(base, arguments, keywords, tensors[0])
                else:
                    for tensor in tensors:
                        contents.forget(tensor)
                    if is_out and not random and not replays:
                        others = {name: value for name, value in keywords.items() if name not in names}
                        self._looks.follow(base, arguments, others, targets)
            return output

        return run

    def _draw(self, original: _Kernel, name: str) -> _Kernel:
        """Return a replacement of an operator that draws random numbers. They follow from the state that its generator had
        before."""
        contents, draw = self.contents, random_numbers.DRAWN[name]
        in_place, captures = name.partition(".")[0].endswith("_"), self.graphs.captures

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if captures.value and self.graphs.capture():
                output = original(keys, *arguments, **keywords)
                self.graphs.defer(deal, arguments, keywords, output, [output])
                return output
            given = [*arguments, *keywords.values()]
            first = next(tensor for tensor in flat(given) if tensor.is_cuda)
            state = None
            # Reading the generator's state takes time, so it is read only if it will be used.
            if in_place or first.numel() <= random_numbers.MOST_DRAWN_BYTES:
                generator = next((one for one in given if isinstance(one, torch.Generator)), None)
                state = random_numbers.state_of(generator, first.device)
            if "out" in keywords:
                contents.forget(keywords["out"])
            # Earlier launches are forgotten, so that the draw below checks only the size of the next one.
            self._stand_ins.gputrain_forget_launches()
            started = perf_counter()
            output = original(keys, *arguments, **keywords)
            self._observed.kernel = perf_counter() - started
            targets = list(flat([output]))
            drawn: list[Tensor | None] = [None] * len(targets)
            if state is not None and random_numbers.are_drawn(targets):
                inputs = [one for one in arguments[in_place:] if not isinstance(one, torch.Generator)]
                with contextlib.suppress(random_numbers.OtherLaunch):
                    drawn = draw(random_numbers.Stream.of(state, first.device), self.values.read, targets, *inputs)
            for to, value in zip(targets, drawn, strict=True):
                if value is not None:
                    self.values.write([to], value, dealt=None)
                elif in_place and state is not None:
                    self._looks.drawn(
                        name, to, state, [one for one in arguments[1:] if not isinstance(one, torch.Generator)]
                    )
                elif in_place:
                    contents.forget(to)
            if name in rules.DEALT and contents.find(targets[0]) is None:
                self._deal(name, arguments, keywords, output)
            return output

        def deal(arguments: Any, keywords: Any, output: Any, replays: bool) -> None:
            """Forget what a graph has drawn: its generator's state is known to the replay alone."""
            for tensor in flat([output]):
                contents.forget(tensor)
            if name in rules.DEALT:
                self._deal(name, arguments, keywords, output)

        return run

    def _copy(self, original: _Kernel) -> _Kernel:
        contents, captures, defer = self.contents, self.graphs.captures, self.graphs.defer

        def run(keys: Any, to: Tensor, source: Tensor, *others: Any) -> Tensor:
            started = perf_counter()
            original(keys, to, source, *others)
            self._observed.kernel = perf_counter() - started
            if not (captures.value and defer(after, (to, source), {}, None, [to], reads_host=True)):
                after((to, source), {}, None)
            return to

        def after(tensors: Any, _: Any, __: Any, replays: bool = False) -> None:
            to, source = tensors
            self._stand_ins.gputrain_take_unanswered()  # The code below answers this read, or reports it.
            known = contents.find(source) if source.is_cuda else _ON_HOST
            if not to.is_cuda:
                if known is None:
                    if source.numel():
                        self.reads.note("a copy to the host")
                        self._looks.copied_to_host(to, source)
                elif known.value is not None:
                    to.fill_(known.value.item())
                elif source.numel():
                    self._decide(known, source.dtype, CHOICES)
                    to.copy_(on_host(source))
            elif known is None or not to.numel():
                contents.forget(to)
                if to.numel():
                    self._looks.copied(to, source)
            elif known.value is not None:
                self.values.fill(to, known.value)
            elif is_small(to, dealt=known.dealt):
                on_host(to).copy_(on_host(source) if source.is_cuda else source)
                contents.written(to, dealt=known.dealt)
            else:
                contents.forget(to)
                if not source.is_cuda:
                    self._looks.copied_to_gpu(to, source)

        return run

    def _read_scalar(self, original: _Kernel) -> _Kernel:
        contents = self.contents

        def run(keys: Any, tensor: Tensor) -> Any:
            number = original(keys, tensor)
            answered = not self._stand_ins.gputrain_take_unanswered()
            known = contents.find(tensor)
            if known is None:
                if answered or getattr(self._answering, "now", False):
                    return number
                if tensor.dtype == torch.bool:
                    return self._read_truth(self._looks.truth(tensor), is_guess=self._looks.is_guess(tensor))
                return self._read_number(tensor, number)
            self._decide(known, tensor.dtype, MATCHES)
            return on_host(tensor).item() if known.value is None else known.value.item()

        return run

    def _decide(self, known: Known | None, dtype: torch.dtype, truth: int) -> None:
        """Note that the host reads values that follow from made-up choices, such as how often an expert was chosen.

        Numbers that only compare choices with labels, such as an accuracy, do not decide what the host does. Neither do the
        choices themselves, which metrics of other libraries get.
        """
        least = truth if dtype == torch.bool else COUNTS
        if known is not None and known.dealt is not None and known.dealt.kind >= least and not dtype.is_floating_point:
            self.deciding |= known.dealt.by

    def _read_number(self, tensor: Tensor, zero: Any) -> Any:
        """Return a made-up number where the host reads an unknown value. Record this read, and the figures that become too
        low by it."""
        if (operator := self._asking_operator()) in _LARGER:
            what = f"the sizes that {_shown(operator)} reads from values".encode()
            self._too_low.setdefault(what, what)
            self._stand_ins.gputrain_unknown(self._too_low[what])
        self.reads.note(f"a number for {_shown(operator) or 'the host'}")
        # made-up ends of a range would be in no order, so an operator gets zero
        return zero if operator else self._looks.read(tensor, zero)

    def _read_truth(self, truth: bool | None, *, is_guess: bool = False) -> bool:
        """Return a truth value where the host reads unknown values: the one that passes a check, one that follows from other
        values, or false.

        Args:
            is_guess: whether what follows from others rests on made-up numbers, so that a check of the program passes.
        """
        operator = self._asking_operator()
        for name, passing in _CHECKS.items():
            if operator.startswith(name):
                self.assumed.note(f"a check of {name}")
                return truth is not False if passing is None else passing
        passing = truth_that_raises_nothing(sys._getframe(1)) if is_guess else None
        if passing is not None:
            self.assumed.note("a check that raises an error")
            return passing
        self.reads.note(A_TRUTH_VALUE)
        return bool(truth)

    def _asking_operator(self) -> str:
        """Return the name of torch's operator that reads a value for itself; empty if the program reads it."""
        symbol = _OPERATOR.match((self._stand_ins.gputrain_asking_operator() or b"").decode())
        return symbol[2][: int(symbol[1])] if symbol else ""

    def _holds(self, original: _Kernel) -> _Kernel:
        """Let the checks of torch.distributions pass for unknown values."""

        def run(keys: Any, condition: Tensor) -> Tensor:
            output: Tensor = original(keys, condition)
            if not (self.graphs.captures.value and self.graphs.defer(after, (condition,), {}, output, [output])):
                after((condition,), {}, output)
            return output

        def after(_: Any, __: Any, output: Tensor, replays: bool = False) -> None:
            if self.contents.find(output) is None:
                self.values.fill(output, torch.tensor(True))
                self.assumed.note("a check that all are true")

        return run

    def _unscale(self, original: _Kernel) -> _Kernel:
        """Follow the unscaling of gradients, which are taken to be finite: the flag for infinities stays 0."""
        contents = self.contents

        def run(keys: Any, gradients: list[Tensor], *others: Any) -> Any:
            output = original(keys, gradients, *others)
            if not (self.graphs.captures.value and self.graphs.defer(None, (), {}, None, gradients)):
                for gradient in gradients:
                    contents.forget(gradient)
            return output

        return run

    def _custom(self, operator: Any, original: _Kernel, written: list[int]) -> _Kernel:
        names = [operator._schema.arguments[index].name for index in written]

        def run(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            output = original(keys, *arguments, **keywords)
            places = zip(written, names, strict=True)
            targets = [arguments[index] if index < len(arguments) else keywords.get(name) for index, name in places]
            if not (self.graphs.captures.value and self.graphs.defer(None, (), {}, None, targets)):
                for tensor in flat(targets):
                    if tensor.is_cuda:
                        self.contents.forget(tensor)
            return output

        return run

    def _run_equal(self, operator: Any, original: _Kernel, keys: Any, tensors: Any) -> Any:
        """Run an operator that reads its own result from the device."""
        if self.graphs.captures.value and self.graphs.capture():
            return original(keys, *tensors)  # torch itself refuses this operator in a capture.
        known = self.values.find_all(tensors, {})
        same = self._looks.equal(*tensors) if known is None else None
        self._answering.now = True
        try:
            output = original(keys, *tensors)
        finally:
            self._answering.now = False
            self._stand_ins.gputrain_take_unanswered()
        if known is None:
            return same or self._read_truth(same)
        for one in known:
            self._decide(one, torch.bool, MATCHES)
        return self.values.compute(operator, known, tensors, {}, output, elementwise=False)

    def _unless_captured(self, run: _Kernel, original: _Kernel) -> _Kernel:
        """Return ``run``, and where the current stream is captured ``original``."""
        captures, capture = self.graphs.captures, self.graphs.capture

        def choose(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            return (original if captures.value and capture() else run)(keys, *arguments, **keywords)

        return choose

    def _run(self, original: _Kernel, name: str, keys: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operator; report a value that it reads from the device and that no replacement has answered."""
        if self._unanswered.value:
            self.tell_unanswered("a library")
        started = perf_counter()
        try:
            return original(keys, *arguments, **keywords)
        finally:
            self._observed.kernel = perf_counter() - started
            if self._unanswered.value:
                self.tell_unanswered(name)

    def _forget(self, output: Any, arguments: Sequence[Any]) -> None:
        """Forget the contents of an operator's results, of which its parts have written only some, such as zeros."""
        for tensor in flat([output]):
            if not any(tensor is argument for argument in arguments):
                self.contents.forget(tensor)

    def tell_unanswered(self, name: str) -> None:
        """Report zeros that this thread has read from the device, if no replaced operator has reported them."""
        if self._stand_ins.gputrain_take_unanswered():
            self.reads.note(f"a number for {name}")

    def _run_sized(self, operator: Any, original: _Kernel, keys: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operator that reads the number of its results from the device, and answer this read."""
        if self.graphs.captures.value and self.graphs.capture():
            # torch refuses this operator in a capture, unless the size is given.
            output = original(keys, *arguments, **keywords)
            self.graphs.defer(None, (), {}, None, [output])
            return output
        name = operator._schema.name.partition("::")[2]
        known = self.values.find_all(arguments, keywords, without=[keywords["out"]] if "out" in keywords else ())
        value = result = dealt = None
        if known is not None:
            value = known[0].value if known else None
            dealt = joined(one.dealt for one in known)
            if is_small(arguments[0], dealt=dealt):
                inputs = {name: one for name, one in keywords.items() if name != "out"}
                result = self.values.run(operator, arguments, inputs)
        answers = sizes.SIZED[name](arguments, result, value)
        if result is None and value is None:
            most: int | None = getattr(self._answering, "most", None)
            if known is not None and name == "nonzero" and (count := sizes.repeated_nonzero(arguments[0])) is not None:
                answers, value = [(count, 0)], torch.tensor(count)
            elif most is not None:
                answers = [(min(count, most), other) for count, other in answers]
        output, taken = self._answered(answers, original, name, keys, arguments, keywords)
        for tensor in flat([output]):
            self.contents.forget(tensor)
        if taken and name != "mode":  # The results of `mode` have the same size whatever values it reads.
            self._decide(self.contents.find(arguments[0]), torch.bool, MATCHES)
        if result is not None:
            self.values.write(flat([output]), result, dealt=dealt)
        elif taken and value is None:
            self.assumed.note(_shown(name))
        return output

    def _answered(
        self, answers: sizes.Answers, original: _Kernel, name: str, keys: Any, arguments: Any, keywords: Any
    ) -> tuple[Any, int]:
        """Run an operator that reads these answers from the device; return its output, and how many it has read."""
        held = (ctypes.c_int64 * (2 * len(answers)))(*itertools.chain.from_iterable(answers))
        self._stand_ins.gputrain_answer(held, len(answers))
        try:
            output = self._run(original, name, keys, arguments, keywords)
        finally:
            taken: int = self._stand_ins.gputrain_drop_answers()
        return output, taken

    def _scatter_backward(self, original: _Kernel) -> _Kernel:
        """Let the derivative of `masked_scatter` find as many elements as were scattered, if the mask is not known."""

        def run(keys: Any, grad: Tensor, mask: Tensor, size: Sequence[int]) -> Any:
            self._answering.most = math.prod(size)
            try:
                return original(keys, grad, mask, size)
            finally:
                self._answering.most = None

        return run

    def _coalesce(self, original: _Kernel) -> _Kernel:
        """Answer how many elements of a sparse tensor have different places."""
        contents, values = self.contents, self.values

        def run(keys: Any, tensor: Tensor) -> Any:
            indices = tensor._indices()
            known, result = contents.find(indices), None
            if known is not None and known.value is not None:
                count = 1
            elif known is not None and is_small(indices, dealt=known.dealt):
                result = values.coalesced(tensor)
                count = result._nnz()
            else:
                count = sparse.most_places(tensor)
            output, taken = self._answered([(count, 0)], original, "coalesce", keys, [tensor], {})
            if result is not None:
                values.write([output._indices(), output._values()], [result._indices(), result._values()], dealt=None)
            elif taken and (known is None or known.value is None):
                self.assumed.note("coalesce")
            return output

        return run

    def _deal(self, name: str, arguments: Any, keywords: Any, output: Any) -> None:
        indices = rules.deal(name, arguments, keywords, output)
        if indices is not None:
            to = output[-1] if isinstance(output, tuple) else output
            on_host(to).copy_(indices)
            place = self.dealt.note(name.partition(".")[0])
            self.contents.written(to, dealt=Dealt(CHOICES, frozenset((place,))))


_ON_HOST: Final = Known(0, 0)


def _shown(name: str) -> str:
    """Return the name that a program calls an operator by."""
    return name.strip("_").rstrip("2")


def _original(qualified: str, key: str = "CUDA") -> _Kernel:
    kernel: _Kernel = torch.library.get_kernel(qualified, key).call_boxed
    return kernel


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def _is_zero(known: Known) -> bool:
    return known.value is not None and not known.value.item()


def _places_of_tensors(operator: Any) -> list[int]:
    """Return the positions of the arguments that are tensors, in whose place torch may pass a number."""
    tensors = [index for index, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]
    return tensors if len(tensors) > 1 else []


def _with_tensors(arguments: Any, places: list[int]) -> Any:
    """Make tensors of the numbers that torch passes in place of tensors, with the type that the result gets."""
    for place in places:
        if place < len(arguments) and type(arguments[place]) in (int, float, bool, complex):
            number = arguments[place]
            other = next((one for one in arguments if isinstance(one, Tensor)), None)
            dtype = torch.result_type(other, number) if other is not None else None
            arguments = [*arguments[:place], number_as(number, repr(number), dtype), *arguments[place + 1 :]]
    return arguments


def _leave_to_python(function: _Kernel) -> None:
    """Keep torch.compile from compiling this replacement of an operator, which compiled code may call from Python."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
