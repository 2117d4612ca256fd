"""Makes what own code may call, and no model of the zoo does, work on fakes, or refuses it with one sentence."""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.prediction.operators import tensors_in
from pytest_gputrain.worker.prediction.values import LIMIT, answer, forget, keep, value_of

COMPILED: Final = (
    "a prediction does not know the code that torch.compile makes; measure it instead, or leave torch.compile out"
)


def patches(gpu: torch.device | None) -> Iterator[Any]:
    """Return the patches that own code needs.

    Args:
        gpu: label of the GPU that is predicted for; None for a CPU.
    """
    yield PythonCalls(gpu)
    yield mock.patch.object(FakeTensor, "__deepcopy__", deepcopied, create=True)
    yield mock.patch.object(nn.init, "_no_grad_trunc_normal_", _truncated_normal(nn.init._no_grad_trunc_normal_))
    yield mock.patch.object(torch, "save", _refuse_save)
    yield mock.patch.object(LazyModuleMixin, "__init__", _refuse_lazy)
    yield mock.patch.object(FullyShardedDataParallel, "__init__", _refuse_fsdp1)
    if gpu is not None:
        # accelerate, and so transformers' Trainer, train on the device that this names, whatever torch says is there.
        yield mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": str(gpu)})


def trainer_patches(gpu: torch.device) -> Iterator[Any]:
    """Return the patches for transformers' Trainer, which moves batches to this device: the host under ``use_cpu=not
    torch.cuda.is_available()``."""
    module = sys.modules["transformers.training_args"]

    def device(self: Any) -> torch.device:
        self._setup_devices  # noqa: B018  # which sets more than the device
        return gpu

    yield mock.patch.object(module.TrainingArguments, "device", property(device))
    yield mock.patch.object(module, "is_torch_bf16_gpu_available", _yes)


def _yes() -> bool:
    return True


def dynamo_patches() -> Iterator[Any]:
    """Refuse what would be compiled; what torch.compiler.set_stance or TORCH_COMPILE_DISABLE keeps as it is runs."""
    eval_frame = sys.modules["torch._dynamo.eval_frame"]
    choose = eval_frame._callback_from_stance

    def refuse(callback: Any) -> Any:
        chosen = choose(callback)
        if chosen not in (None, False) and not eval_frame.config.disable:
            raise CheckFailed(COMPILED)
        return chosen

    yield mock.patch.object(eval_frame, "_callback_from_stance", refuse)


class PythonCalls(TorchFunctionMode):
    """The calls that are decided before an operator is called.

    Args:
        gpu: label of the GPU that is predicted for; None for a CPU.
    """

    def __init__(self, gpu: torch.device | None) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CHECKS:
            return answer(func(*args, **kwargs), _CHECKS[func])
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
            readable = self._readable(args[0])
            with _disable_current_modes():
                return func(readable, *args[1:], **kwargs)
        if func in _MAKERS:
            return self._made(func, args, kwargs)
        if self._gpu is not None:
            device = kwargs.get("device")
            if (
                func is Tensor.cuda
                or _is_cuda(device)
                or (func is Tensor.to and _is_cuda(args[1] if len(args) > 1 else None))
            ):
                raise CheckFailed(_CUDA)
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor of Python's numbers, or of those in a list of tensors."""
        if func is Tensor.new_tensor:
            like, *args = args
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or like.dtype, "device": kwargs.get("device") or like.device}
            func = torch.tensor
        # The device may come from a context, which is a mode too, and has been asked before.
        device = kwargs.get("device")
        if self._gpu is not None and _is_cuda(device):
            raise CheckFailed(_CUDA)
        numbers = functools.partial(_of_numbers, func)
        if self._gpu is None or device is None or torch.device(device) != self._gpu:
            return numbers(*args, **kwargs)
        # Made by C++, which has but one CPU and leaves out which of the two was meant.
        made = numbers(*args, **{**kwargs, "device": None})
        return made.detach().to(self._gpu).requires_grad_(made.requires_grad)

    def _readable(self, tensor: FakeTensor) -> Tensor:
        """Return the contents, for numpy. Floats that nobody knows are 0.0, as where one of them is read."""
        if tensor.fake_device == self._gpu:
            raise CheckFailed(
                "the case makes a numpy array of a tensor on setup.device, which a GPU refuses; take Tensor.cpu()"
            )
        value = value_of(tensor)
        if value is not None:
            return value
        if not tensor.is_floating_point() or tensor.numel() > LIMIT:
            raise CheckFailed(
                "the case reads the content of a tensor (Tensor.numpy), which a prediction does not know: measure it instead"
            )
        with _disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)


COPY_AS: Final = "_gputrain_copy_as"
"""Attribute of a parameter of another kind: makes one of it, the copied data and the memo of ``copy.deepcopy``."""

_CUDA: Final = "the code asks for the device cuda, which a prediction does not have; take setup.device"

_MAKERS: Final = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor})

_CHECKS: Final = {
    torch.isfinite: True,
    Tensor.isfinite: True,
    torch.isnan: False,
    Tensor.isnan: False,
    torch.isinf: False,
    Tensor.isinf: False,
}
"""The checks of losses and gradients in a training, with the answers that it expects."""


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _of_numbers(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Make what ``torch.tensor`` makes of a list that may hold tensors, whose numbers C++ would read from their memory."""
    data, *others = args or (kwargs.pop("data"),)
    tensors = list(tensors_in(data)) if isinstance(data, list | tuple) else []
    if not tensors:
        return func(data, *others, **kwargs)
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = functools.reduce(torch.promote_types, _dtypes(data))
    made = func(_numbers(data), *others, **kwargs)
    if any(value_of(tensor) is None for tensor in tensors):
        forget(made)
    return made


def _numbers(data: Any) -> Any:
    """Return the tensors of a list as what their ``tolist`` gives: a float that nobody knows is 0.0."""
    if isinstance(data, list | tuple):
        return [_numbers(part) for part in data]
    if not isinstance(data, Tensor):
        return data
    return data.tolist() if data.dim() else data.item()


def _dtypes(data: Any) -> Iterator[torch.dtype]:
    """Return what torch makes a tensor of, by each of the numbers."""
    for part in data:
        if isinstance(part, list | tuple):
            yield from _dtypes(part)
        else:
            yield part.dtype if isinstance(part, Tensor) else _OF_NUMBER.get(type(part), torch.get_default_dtype())


_OF_NUMBER: Final = {bool: torch.bool, int: torch.int64, complex: torch.complex64}


def deepcopied(tensor: Any, memo: dict[Any, Any]) -> Tensor:
    """Copy a fake like ``copy.deepcopy``, allocating what the copy of a real tensor does.

    A parameter is cloned. Of another tensor the whole storage is copied, once for all views of it.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that are leaves of the graph can be copied by copy.deepcopy; detach it first")
    with torch.no_grad():
        if isinstance(tensor, nn.Parameter):
            copied = tensor.detach().clone(memory_format=torch.preserve_format)
            copy_as = vars(tensor).get(COPY_AS, _parameter)
            memo[id(tensor)] = parameter = copy_as(tensor, copied, memo)
            return parameter  # type: ignore[no-any-return]
        made = _copy_of_storage(tensor, memo)
    made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = made
    own = vars(tensor).keys() - vars(made).keys()
    vars(made).update({name: copy.deepcopy(vars(tensor)[name], memo) for name in own if not name.startswith("_gputrain")})
    return made


def _parameter(tensor: Any, copied: Tensor, memo: dict[Any, Any]) -> nn.Parameter:
    return nn.Parameter(copied, tensor.requires_grad)


def _copy_of_storage(tensor: Any, memo: dict[Any, Any]) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()  # type: ignore[no-any-return]
    storage = tensor.untyped_storage()
    key = ("storage of a fake", storage._cdata)
    whole = tensor.numel() * tensor.itemsize == storage.nbytes()
    copied = memo.get(key)
    first = copied is None
    if copied is None and whole:
        copied = memo[key] = tensor.detach().clone(memory_format=torch.preserve_format)
    elif copied is None:
        elements = storage.nbytes() // tensor.itemsize
        copied = memo[key] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
    tensor.new_empty(())  # which torch then gives the copied storage
    if first and whole:
        return copied
    flat = copied.as_strided((copied.untyped_storage().nbytes() // copied.itemsize,), (1,), 0).view(tensor.dtype)
    made = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    value = value_of(tensor)
    if value is not None:
        with _disable_current_modes():
            keep(made, value.clone())
    return made


def _truncated_normal(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Fill like torch's, which draws anew what lies outside of the bounds until nothing does: how often follows from the
    bounds."""

    @functools.wraps(original)
    def fill(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        outside = 1 - (math.erf((b - mean) / std / math.sqrt(2)) - math.erf((a - mean) / std / math.sqrt(2))) / 2
        try:
            return original(tensor, mean, std, a, b, generator=generator)
        except DataDependentOutputException:
            if outside >= 0.7:  # it draws in another way
                raise
        with torch.no_grad():
            result = tensor
            for times in (1, 2):  # a third time allocates what the second does
                if tensor.numel() * outside**times < 0.5:
                    break
                mask = (result < a) | (result > b)
                drawn = torch.empty_like(result).normal_(mean, std, generator=generator)
                result = torch.where(mask, drawn, result)
                del drawn
            return tensor if result is tensor else tensor.copy_(result)

    return fill


def _refuse_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise CheckFailed("the case saves tensors, whose contents a prediction does not have; leave checkpoints out of the step")


def _refuse_lazy(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise CheckFailed(
        f"a prediction cannot run {type(self).__name__}, whose weights get their shape from the first input; give it the "
        "size of its input, or measure the case instead"
    )


def _refuse_fsdp1(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise CheckFailed(
        "a prediction cannot run FullyShardedDataParallel (FSDP1), whose flat parameters are made of memory; take "
        "torch.distributed.fsdp.fully_shard (FSDP2), or measure the case instead"
    )
