"""Counts the floating-point operations of a step; those that activation checkpointing repeats are counted apart."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from pytest_gputrain.worker.allocations import is_jagged
from pytest_gputrain.worker.threads import SharedMode, on_this_thread


@dataclass(slots=True)
class _Share:
    """The FLOPs of one thread. Only this thread adds to them, and only its own recomputation counts in them."""

    total: int = 0
    recomputed: int = 0
    by_type: Counter[torch.dtype] = field(default_factory=Counter)
    in_tf32: int = 0
    optimizers: int = 0
    """The number of optimizers that take a step at this moment."""


class FlopCount(SharedMode):
    """Counts the FLOPs of the operators that run while it is entered, by the formulas of torch.utils.flop_counter.

    torch's own FlopCounterMode takes memory for it: it follows modules by hooks that keep the graph of every recomputation
    until the step ends, and takes operators apart that have a kernel, such as the backward pass of SiLU. A step that just
    fits would not fit while it is counted.

    """

    def __init__(self) -> None:
        super().__init__()
        self.formulas = formulas()
        self._shares: dict[int, _Share] = {}
        self.launches_graphs = False
        """Whether a CUDA graph was launched, whose operators are not counted."""

    @property
    def total(self) -> int:
        """Floating-point operations, recomputation included."""
        return sum(share.total for share in self._shares.values())

    @property
    def recomputed(self) -> int:
        """Floating-point operations that activation checkpointing repeats."""
        return sum(share.recomputed for share in self._shares.values())

    @property
    def by_type(self) -> Counter[torch.dtype]:
        """The FLOPs outside of optimizers, by the type of their operands. Complex numbers count as the type of their
        parts."""
        return sum((share.by_type for share in self._shares.values()), Counter())

    @property
    def tf32_share(self) -> float:
        """The share of the operations in fp32 that an NVIDIA GPU may compute in TF32, by torch's switches at their time."""
        return sum(share.in_tf32 for share in self._shares.values()) / (self.total or 1)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Provide a context in which the operations of this thread count as recomputation."""
        share = self.share()
        total, recomputed = share.total, share.recomputed
        try:
            yield
        finally:
            share.recomputed = recomputed + share.total - total

    def share(self) -> _Share:
        """Return the count of this thread."""
        return self._shares.setdefault(threading.get_native_id(), _Share())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_jagged(types):
            return NotImplemented
        kwargs = kwargs or {}
        formula = self.formulas.get(func.overloadpacket)
        if formula is None and is_composite(func, device_of(args)):
            with on_this_thread(self):
                return func.decompose(*args, **kwargs)
        self.note_thread()
        result = self.run(func, args, kwargs)
        try:
            self._add(func, formula, args, kwargs, result)
        except Exception as error:  # Counting must not fail a program.
            self.note_trouble(error)
        return result

    def _add(self, func: Any, formula: Callable[..., int] | None, args: Any, kwargs: Any, result: Any) -> None:
        flops = 0
        if formula is not None:
            share, flops = self.share(), _by(formula, args, kwargs, result)
            share.total += flops
            if not share.optimizers and (dtype := type_of(args)):
                share.by_type[dtype] += flops
                share.in_tf32 += flops * (dtype == torch.float32 and may_use_tf32(str(func.overloadpacket), args))
        self.count(func, args, kwargs, result, flops)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator; subclasses follow what it does."""
        return func(*args, **kwargs)

    def count(self, func: Any, args: Any, kwargs: Any, result: Any, flops: int) -> None:
        """Count something else of a call than its FLOPs, in subclasses."""

    def __enter__(self) -> FlopCount:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._optimizes(1)),
            register_optimizer_step_post_hook(lambda *_: self._optimizes(-1)),
        ]
        graph: Any = torch.cuda.CUDAGraph
        replay = graph.replay

        def launch(this: Any) -> None:
            self.launches_graphs = True
            replay(this)

        self._patch = mock.patch.object(graph, "replay", launch)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._patch.stop()
        for hook in self._hooks:
            hook.remove()

    def _optimizes(self, more: int) -> None:
        self.share().optimizers += more


def _by(formula: Callable[..., int], args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a call by its formula. torch's general search for shapes is left out, because it takes longer than
    the rest."""
    of_shapes: Callable[..., int] | None = getattr(formula, "__wrapped__", None)
    if of_shapes is None:
        return formula(*args, **kwargs, out_val=result)
    named = {name: _shapes(value) for name, value in kwargs.items()}
    return of_shapes(*map(_shapes, args), **named, out_shape=_shapes(result))


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return type(value)(map(_shapes, value)) if type(value) in (list, tuple) else value


def is_convolution(operator: str) -> bool:
    return "convolution" in operator or "conv2d" in operator


def may_use_tf32(operator: str, args: Any) -> bool:
    """Tell whether an operator on fp32 may compute in TF32 by torch's present switches."""
    if torch.version.hip is not None or device_of(args) != "cuda":
        return False
    # The older switches raise an error once own code has set these ones.
    backends: Any = torch.backends
    switch = backends.cudnn.conv if is_convolution(operator) else backends.cuda.matmul
    return bool(switch.fp32_precision == "tf32")


def device_of(args: Any) -> str:
    return next((value.device.type for value in args if isinstance(value, torch.Tensor)), "cpu")


def type_of(args: Any) -> torch.dtype | None:
    """Return the type of an operator's first tensor, which is that of all its operands."""
    dtype = next((value.dtype for value in args if isinstance(value, torch.Tensor)), None)
    return dtype.to_real() if dtype and dtype.is_complex else dtype


@functools.cache
def is_composite(func: Any, device: str) -> bool:
    """Tell whether an operator is composed of others. Under `torch.inference_mode` autograd does not decompose it."""
    if func.namespace == "prim" or not func._can_decompose():  # torch's dispatcher does not know `prim.layout`.
        return False
    key = torch._C._dispatch_key_for_device(device)
    return not func.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key))


@contextlib.contextmanager
def count_flops(count: FlopCount | None = None) -> Iterator[FlopCount]:
    """Provide a context in which matrix multiplications, convolutions and attention are counted, by ``count`` if given."""
    count = count or FlopCount()
    with _recomputation_within(count.recomputing), count:
        yield count


@contextlib.contextmanager
def _recomputation_within(recomputing: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Provide a context in which a function that `torch.utils.checkpoint` runs again, in either variant, runs within
    ``recomputing``."""
    frames: Any = torch.utils.checkpoint._CheckpointFrame
    functions: Any = torch.utils.checkpoint.CheckpointFunction
    make, forward = frames.__init__, functions.forward

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            # The older variant of checkpointing first runs the same function without gradients. That run is the forward
            # pass, and no recomputation.
            with recomputing() if torch.is_grad_enabled() else contextlib.nullcontext():
                return function(*args)

        return run

    def made(frame: Any, function: Callable[..., Any], *others: Any, **options: Any) -> None:
        make(frame, again(function), *others, **options)

    def first(context: Any, function: Callable[..., Any], *others: Any) -> Any:
        return forward(context, again(function), *others)

    with mock.patch.object(frames, "__init__", made), mock.patch.object(functions, "forward", staticmethod(first)):
        yield


def formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas by operator: functions that return FLOPs from the arguments and, as ``out_val``, the result."""
    return dict(FlopCounterMode(display=False, custom_mapping=_own_formulas()).flop_registry)


def selective_contexts(policy: str) -> Callable[[], tuple[Any, Any]]:
    """Return the ``context_fn`` of `torch.utils.checkpoint.checkpoint` that keeps some operators' results, by the case's
    policy.

    Args:
        policy: ``save-attention`` keeps those of fused attention, ``save-matmuls`` those of all operators with FLOPs.
    """
    kept = {packet for packet in formulas() if policy == "save-matmuls" or "scaled_dot_product" in str(packet)}

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = getattr(operator, "overloadpacket", None) in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


def _own_formulas() -> dict[Any, Any]:
    """Return the operators that torch's own counter lacks, or cannot count in all supported versions.

    Those are fused attention (torch knows no CPU kernel, and before 2.12 no grouped queries), products of experts with their
    tokens, bitsandbytes' fused 4-bit product, products whose result has a type of its own (``out_dtype``), and gradients of
    convolutions (up to 2.13 torch forgets the groups in that of the weight).
    """
    aten = torch.ops.aten
    formulas: dict[Any, Any] = {}
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        formulas[getattr(aten, f"_scaled_dot_product_{name}")] = _attention
        formulas[getattr(aten, f"_scaled_dot_product_{name}_backward")] = _attention_backward
    formulas[aten._grouped_mm] = _grouped_product
    formulas[aten.convolution_backward] = _convolution_backward
    formulas[aten.bmm] = _products
    formulas[aten.addmm] = formulas[aten.baddbmm] = _sum_with_products
    if "bitsandbytes" in sys.modules:
        for name in ("gemm_4bit", "gemv_4bit"):
            if hasattr(torch.ops.bitsandbytes, name):
                formulas[getattr(torch.ops.bitsandbytes, name)] = _product_with_4bit
    return formulas


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of scores and of their product with the values. Shapes are (batch, heads, tokens, width); keys may
    have fewer heads."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * (width + value[3]))


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Return the FLOPs of a second computation of the scores, and of the gradients of values, scores, queries and keys."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3]))


def _convolution_backward(
    grad: Any,
    given: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Return the FLOPs of the forward pass for each gradient of input and weight that is ``wanted``.

    The shape of the weight has the channels of one group alone.
    """
    positions = math.prod((given if transposed else grad)[2:])
    return int(2 * (wanted[0] + wanted[1]) * grad[0] * positions * math.prod(weight))


def _products(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * math.prod(left) * right[-1])


def _sum_with_products(term: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _products(left, right)


def _grouped_product(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of products of groups. Either the groups divide one dimension, or each group has a pair of
    matrices."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


def _product_with_4bit(left: Any, packed: Any, shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of ``left`` (..., in) times the transpose of a weight whose unpacked ``shape`` is (out, in)."""
    return int(2 * math.prod(left) * shape[0])
