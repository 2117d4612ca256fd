"""Patches torch and libraries so that fake tensors pass for real ones and act as on CUDA; applies the patches of `zero` and
`own_code`.

Fakes are labelled ``cpu``, so that a torch without CUDA can run them. All patches are global: a prediction has a
process of its own, and undoes them for tests that share one.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from pytest_gputrain.records import Target
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.emulated_values.after_import import after_import
from pytest_gputrain.worker.prediction import attention, engines, norms, own_code, zero
from pytest_gputrain.worker.prediction.shapes import forget_shape
from pytest_gputrain.worker.prediction.values import forget_all, keep, value_of

_AUTOCAST_FP32: Final = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus layer_norm native_layer_norm
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar rms_norm group_norm cosine_similarity poisson_nll_loss nll_loss nll_loss2d
    cosine_embedding_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits dist cdist renorm logsumexp
"""
"""Operators that CUDA's autocast runs in fp32 (AT_FORALL_FP32 of ATen/autocast_mode.h); a CPU's leaves most alone."""

_AUTOCAST_FP32_RESULT: Final = "prod softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList"
"""Operators whose ``dtype`` it sets to fp32, where none is given (AT_FORALL_FP32_SET_OPT_DTYPE)."""

_PAGED_FROM: Final = 100_000
"""Elements of a weight whose state bitsandbytes pages."""


@contextlib.contextmanager
def patched(target: Target, device: torch.device) -> Iterator[None]:
    """Provide a context in which the recipe runs on fakes as it would on ``target``."""
    with contextlib.ExitStack() as stack:
        stack.callback(forget_all)
        gpu = device if target.kind == "cuda" else None
        for patch in itertools.chain(own_code.patches(gpu), _fake_patches()):
            stack.enter_context(patch)
        libraries: dict[str, Callable[[], Iterator[Any]]] = {
            "deepspeed": lambda: zero.patches(gpu),
            "transformers": _transformers_patches,
            "peft.tuners.lora": _peft_patches,
            "bitsandbytes": lambda: _bitsandbytes_patches(gpu),
            "torchdata.stateful_dataloader.stateful_dataloader": _torchdata_patches,
            "torch._dynamo.eval_frame": own_code.dynamo_patches,
        }
        if gpu is not None:
            libraries["transformers.training_args"] = lambda: own_code.trainer_patches(gpu)
        for name, make in libraries.items():
            patch_when_imported(name, make, stack)
        if target.kind == "cuda":
            for patch in _gpu_patches(device):
                stack.enter_context(patch)
            if target.lists:
                for patch in _list_patches():
                    stack.enter_context(patch)
            library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
            _register_cuda(library, target)
        else:
            # A process group of CPUs reduces in a copy.
            for name in {"reduce_scatter_tensor", "reduce_scatter_single"} & set(vars(distributed)):
                stack.enter_context(mock.patch.object(distributed, name, _reduce_scatter_by_gloo))
        yield


def patch_when_imported(name: str, make: Callable[[], Iterator[Any]], stack: contextlib.ExitStack) -> None:
    """Apply a library's patches once it is there: the zoo's is imported before, and own code's when it likes.

    Args:
        name: the module that tells that the library is there.
        make: returns the patches.
        stack: undoes them.
    """

    def patch(module: ModuleType) -> None:
        for each in make():
            stack.enter_context(each)

    stack.callback(after_import(name, patch))


def _to_list(self: FakeTensor) -> Any:
    value = value_of(self)
    return Tensor.tolist(self if value is None else value)


def _loading_in_this_process(loader: type[DataLoader[Any]]) -> Any:
    """Return the patch by which a class of loaders starts no processes: they would get no fakes."""
    initialize = loader.__init__
    of_processes = {
        "num_workers",
        "multiprocessing_context",
        "timeout",
        "prefetch_factor",
        "persistent_workers",
        "worker_init_fn",
    }

    def initialize_without(*args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(initialize).bind(*args, **kwargs).arguments
        initialize(**{name: value for name, value in arguments.items() if name not in of_processes})

    return mock.patch.object(loader, "__init__", initialize_without)


def _torchdata_patches() -> Iterator[Any]:
    from torchdata.stateful_dataloader.stateful_dataloader import StatefulDataLoader

    yield _loading_in_this_process(StatefulDataLoader)
    load = StatefulDataLoader.load_state_dict

    def load_own(self: Any, state_dict: dict[str, Any]) -> None:
        if "_snapshot" in state_dict:
            raise CheckFailed(
                "a prediction loads data without processes and cannot load the state of a StatefulDataLoader that had some; "
                "leave load_state_dict() out"
            )
        load(self, state_dict)

    yield mock.patch.object(StatefulDataLoader, "load_state_dict", load_own)


def _fake_patches() -> Iterator[Any]:
    # A fake of one element stays the real tensor that it was made of, on that one's device.
    yield mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1, create=True)
    # Tells of every exception what it raises anyway.
    yield mock.patch.object(fake_tensor.log, "disabled", True)
    # Reads one element after another.
    yield mock.patch.object(FakeTensor, "tolist", _to_list, create=True)
    yield _loading_in_this_process(DataLoader)
    # Module.to() swaps fakes instead of setting their data, and refuses those with weak references, as ours all have.
    yield mock.patch.object(nn.Module, "_apply", _apply)
    # Data that is set leaves a fake its device and its value.
    yield mock.patch.object(FakeTensor, "data", property(Tensor.data.__get__, _set_data), create=True)  # type: ignore[attr-defined]
    # Foreach optimizers, the default on a GPU, know two types of tensors only, and fakes are of a third.
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        types = sys.modules[module]._foreach_supported_types
        yield mock.patch.object(sys.modules[module], "_foreach_supported_types", [*types, FakeTensor])
    # DTensor asks fakes of its own for the shape of the whole, which nobody allocates.
    if "torch.distributed.tensor" in sys.modules:
        sharding = sys.modules["torch.distributed.tensor._sharding_prop"].ShardingPropagator
        name = "_propagate_tensor_meta_non_cached"
        yield mock.patch.object(sharding, name, _without_modes(getattr(sharding, name)))
    for name in ("torch.nn.parallel", "pytest_gputrain.worker.parallel.data_parallel"):
        yield mock.patch.object(sys.modules[name], "DistributedDataParallel", engines.DistributedDataParallel)
    yield mock.patch("pytest_gputrain.worker.parallel.parameter_server.sparse", engines.row_gradient)


def _transformers_patches() -> Iterator[Any]:
    # Takes fakes for tracing, for which it makes masks that a real run leaves out.
    import transformers.utils.import_utils as transformers_utils

    yield mock.patch.object(transformers_utils, "is_fake_tensor", _no)


def _bitsandbytes_patches(gpu: torch.device | None) -> Iterator[Any]:
    import bitsandbytes

    # A subclass of Parameter cannot be made of a fake: a plain one stands in, with the attributes that are read.
    for module in (bitsandbytes.nn, bitsandbytes.nn.modules):
        yield mock.patch.object(module, "Params4bit", _four_bits)
    # A table of tensors, filled when first used: fakes must neither stay in it nor meet real ones there.
    yield mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True)
    # Takes a device label with a number for another GPU.
    yield mock.patch.object(bitsandbytes.functional, "is_on_gpu", _no)
    if gpu is not None:
        yield mock.patch.object(bitsandbytes.optim.optimizer.Optimizer8bit, "get_state_buffer", _state_of_8bit_optimizer)


def _peft_patches() -> Iterator[Any]:
    # DoRA unpacks a 4-bit weight, which it knows by its class.
    from peft.tuners.lora import dora

    unpacked = dora.dequantize_module_weight

    def unpack(module: Any) -> Any:
        state = getattr(module.weight, "quant_state", None)
        if state is None:
            return unpacked(module)
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(module.weight.data, state)

    yield mock.patch.object(dora, "dequantize_module_weight", unpack)


def _state_of_8bit_optimizer(self: Any, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make the state of one weight: of a paged optimizer in unified memory, which is the host's until the GPU has room for
    it."""
    if self.is_paged and parameter.numel() >= _PAGED_FROM:
        return torch.zeros(parameter.shape, dtype=dtype, device="cpu")
    return torch.zeros_like(parameter, dtype=dtype)


def _reduce_scatter_by_gloo(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> None:
    """Reduce the whole input in all processes, of which each then keeps its part (ProcessGroupGloo.cpp)."""
    output.copy_(input.clone().view(-1)[: output.numel()].view(output.shape))


def _no(*values: object) -> bool:
    # A mock would remember its arguments, and keep them alive.
    return False


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return called


def _gpu_patches(device: torch.device) -> Iterator[Any]:
    # FSDP knows one CPU.
    if "torch.distributed.fsdp" in sys.modules:
        yield mock.patch("torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh", return_value=device)


def _list_patches() -> Iterator[Any]:
    # Optimizers loop over tensors on a CPU, and take lists of them on a GPU: its temporaries are as large as all weights.
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        yield mock.patch.object(sys.modules[module], "_get_foreach_kernels_supported_devices", return_value=["cpu"])


def _register_cuda(library: Any, target: Target) -> None:
    """Register CUDA's operators, where those of a CPU allocate otherwise."""
    with warnings.catch_warnings():
        # torch tells that a kernel is overridden, which is what this is for.
        warnings.simplefilter("ignore", UserWarning)
        # The kernel of attention decides whether the scores are ever whole in memory.
        library.impl("scaled_dot_product_attention", attention.chooser(target), "AutogradCPU")
        # A GPU keeps a mask of bool; a CPU one of the activations' type.
        library.impl("dropout", _dropout, "AutogradCPU")
        # It has kernels for what a CPU takes apart.
        library.impl("rms_norm", norms.rms_norm, "AutogradCPU")
        library.impl("group_norm", norms.group_norm, "AutogradCPU")
        library.impl("linear", _linear, "AutogradCPU")
        library.impl("softmax.int", norms.softmax, "AutogradCPU")
        library.impl("log_softmax.int", norms.log_softmax, "AutogradCPU")
        for name in _AUTOCAST_FP32.split():
            _register_cast(library, name, _in_fp32)
        for name in _AUTOCAST_FP32_RESULT.split():
            _register_cast(library, name, _to_fp32)


def _register_cast(library: Any, name: str, adapt: Callable[[Any, Any, Any], Any]) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return adapt(operator, args, kwargs)

    library.impl(name, kernel, "AutocastCPU")


def _in_fp32(operator: Any, args: Any, kwargs: Any) -> Any:
    cast = [value.float() if _is_half(value) else value for value in args]
    with torch._C._DisableAutocast():
        return operator(*cast, **kwargs)


def _to_fp32(operator: Any, args: Any, kwargs: Any) -> Any:
    position = next(index for index, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    if given is None and _is_half(args[0]):
        kwargs = {**kwargs, "dtype": torch.float32}
        args = args[:position]
    with torch._C._DisableAutocast():
        return operator(*args, **kwargs)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _dropout(values: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return values
    dropped_out: Tensor = torch.native_dropout(values, p, True)[0]
    return dropped_out


def _linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias in place where torch multiplies first: it makes another tensor where a mode looks on, as here."""
    if bias is None or source.dim() == 2 or source.is_contiguous():
        fused: Tensor = torch.ops.aten.linear.default.decompose(source, weight, bias)
        return fused
    return torch.matmul(source, weight.t()).add_(bias)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Do what `torch.nn.Module._apply` does for tensors that keep their identity, as all but fakes do."""
    if recurse:
        for module in self.children():
            module._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = fn(parameter)
        if not torch._has_compatible_shallow_copy_type(parameter, applied):  # torch, too, replaces what was on meta
            self._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
            continue
        if applied is not parameter:
            parameter.data = applied
        quantise = getattr(parameter, "quantise", None)
        if quantise is not None and applied.device.type != "meta":
            quantise()
        if parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.data = fn(parameter.grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _set_data(tensor: Any, value: Any) -> None:
    Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    forget_shape(tensor)
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device
        keep(tensor, value_of(value))


def _four_bits(
    data: Tensor,
    requires_grad: bool = False,
    quant_state: Any = None,
    blocksize: int = 64,
    compress_statistics: bool = True,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
    module: Any = None,
    bnb_quantized: bool = False,
) -> nn.Parameter:
    """Stand in for ``bitsandbytes.nn.Params4bit``; moving it to its device quantises it, see `_apply`."""
    parameter: Any = nn.Parameter(data, requires_grad=requires_grad)

    def quantise() -> None:
        import bitsandbytes

        packed, state = bitsandbytes.functional.quantize_4bit(
            parameter.data,
            blocksize=blocksize,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
        )
        parameter.data = packed
        parameter.quant_state = state
        parameter.bnb_quantized = True
        parameter.quantise = None
        if module is not None:
            module.quant_state = state

    setattr(parameter, own_code.COPY_AS, _copy_of_four_bits)
    parameter.quantise = None if bnb_quantized else quantise
    parameter.quant_state = quant_state
    parameter.blocksize = blocksize
    parameter.compress_statistics = compress_statistics
    parameter.quant_type = quant_type
    parameter.quant_storage = quant_storage
    parameter.bnb_quantized = bnb_quantized
    four_bits: nn.Parameter = parameter
    return four_bits


def _copy_of_four_bits(parameter: Any, data: Tensor, memo: dict[Any, Any]) -> nn.Parameter:
    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
    options = {name: getattr(parameter, name) for name in names}
    return _four_bits(data, parameter.requires_grad, copy.deepcopy(parameter.quant_state), **options)
