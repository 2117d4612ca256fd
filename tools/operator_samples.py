"""Runs samples of torch's databases on the emulated GPU of this process, and compares them with the CPU and FakeTensor."""

from __future__ import annotations

import copy
import gc
import re
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

import memory_api_checks
import torch
import torch.utils._triton
from operator_outcomes import AGREES, ASSUMED, LEFT_OUT, RAISED, WRONG, Outcome, difference
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from pytest_gputrain.worker.emulated_values import tracking

MOST_SAMPLES: Final = 30
"""The most samples of an operator, of each kind."""

_MEMORY_STEPS: Final = 3
_GRANULE_BYTES: Final = 512
"""What torch's allocator rounds the bytes of a tensor up to."""


ALSO_ON_A_GPU: Final = re.compile(
    r"cudnn RNN backward can only be called in training mode|`driver` other than `gels` is not supported on CUDA"
    r"|Could not run 'aten::_sparse_mm_reduce_impl'"
)
"""Errors of a GPU that neither a CPU nor FakeTensor knows."""


class Database:
    """torch's databases, imported without using the GPU, because a process that has used it cannot fork others that do."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        try:
            import expecttest  # noqa: F401
        except ImportError:  # torch's tests need it, and the databases do not
            sys.modules["expecttest"] = types.ModuleType("expecttest")
            sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
            mock.patch.object(torch.utils._triton, "has_triton", return_value=True),
        ):
            from torch.testing._internal import common_cuda

            common_cuda.TEST_CUDNN = True  # otherwise it is found out by a tensor on the GPU
            from torch.testing._internal.common_methods_invocations import op_db
            from torch.testing._internal.common_modules import module_db
            from torch.testing._internal.common_optimizers import optim_db
        self._entries: dict[tuple[str, str], Any] = {("memory", "torch.cuda"): None}
        for kind, database in (("operator", op_db), ("module", module_db), ("optimizer", optim_db)):
            for one in database:
                variant = getattr(one, "variant_test_name", "")
                self._entries[kind, f"{one.name}.{variant}" if variant else one.name] = one

    def entries(self) -> list[tuple[str, str]]:
        """Return all kinds and names, in the order of the alphabet."""
        return sorted(self._entries)

    def run(self, kind: str, name: str) -> Iterator[Outcome]:
        """Run an operator, a module, an optimizer or the checks of memory in this process."""
        warnings.simplefilter("ignore")
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(enabled=None)  # nobody asks where memory was allocated
        try:
            yield from _RUNNERS[kind](self._entries[kind, name], name)
        except Exception as error:
            rest = f"the rest of the samples cannot be made: {text_of(error)}"
            yield Outcome("known" if kind == "operator" else kind, name, LEFT_OUT, rest)


class Told:
    """What the report of this process says so far: that it read numbers, and that sizes rest on an assumption."""

    def __init__(self) -> None:
        report: dict[str, Any] = dict(tracking.report())
        self.reads = sum(int(row["count"]) for row in report.pop("unknown_reads"))
        self.assumptions = sum(int(row["count"]) for rows in report.values() for row in rows)


class Ran(NamedTuple):
    """What an operator gave on one device."""

    values: Any = None
    error: Exception | None = None
    part: str = "forward"
    """The pass that raised the error."""


def attempt(call: Callable[[], Any], gradients_of: Iterable[Any] = ()) -> Ran:
    """Run forward and backward."""
    part = "forward"
    try:
        output = call()
        outputs = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        inputs = [one for one in gradients_of if one.requires_grad]
        gradients: Any = ()
        if outputs and inputs:
            part = "backward"
            sent = [one.detach().clone() for one in outputs]
            gradients = torch.autograd.grad(outputs, inputs, sent, allow_unused=True)
        return Ran([output, gradients])
    except Exception as error:
        return Ran(error=error, part=part)


def signature(value: Any) -> Any:
    """Describe size, type, layout and strides of all tensors. Strides over one element or none have no meaning."""
    if isinstance(value, torch.Tensor):
        described: list[Any] = [str(value.dtype), list(value.size()), str(value.layout)]
        if value.layout == torch.strided:
            strides = zip(value.size(), value.stride(), strict=True)
            return [*described, [stride if size != 1 else 0 for size, stride in strides] if value.numel() else []]
        if value.layout == torch.sparse_coo:
            # The strides of indices are what torch's code for CUDA makes them, and a CPU's code makes others.
            return [*described, list(value._indices().size()), signature(value._values())]
        rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        compressed = value.crow_indices() if rows else value.ccol_indices()
        plain = value.col_indices() if rows else value.row_indices()
        return [*described, *map(signature, (compressed, plain, value.values()))]
    if isinstance(value, (list, tuple)):
        return [signature(one) for one in value]
    if isinstance(value, dict):
        return {str(key): signature(one) for key, one in value.items()}
    return type(value).__name__


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


class Samples:
    """Makes the inputs of one sample on the CPU, on the emulated GPU and as FakeTensors, each time anew."""

    def __init__(self, inputs: Any) -> None:
        self._inputs = tree_map_only(
            torch.Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), inputs
        )

    def on(self, make: Callable[[Any], Any]) -> Any:
        def one(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return make(value if make is fake else value.detach()).requires_grad_(value.requires_grad)
            if make is on_cpu:
                return value
            return torch.device("cuda") if isinstance(value, torch.device) else "cuda" if value == "cpu" else value

        return tree_map(one, self._inputs)


def on_cpu(tensor: Any) -> Any:
    return tensor.clone()


def known(tensor: Any) -> Any:
    return tensor.to("cuda")


def unknown(tensor: Any) -> Any:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return known(tensor)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")


def fake(tensor: Any) -> Any:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")


def tensors_of(value: Any) -> list[Any]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def fake_signature(samples: Samples, call: Callable[[Any], Any]) -> Any:
    """Return the signature that torch expects on a GPU, or the error; None where it needs values."""
    needs_values = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )
    torch.manual_seed(0)
    with fake_tensor.FakeTensorMode():
        try:
            inputs = samples.on(fake)
        except Exception:
            return None
        ran = attempt(lambda: call(inputs), tensors_of(inputs))
        if ran.error is None:
            return signature(ran.values)
        return None if isinstance(ran.error, needs_values) else ran.error


def compare(
    kind: str, name: str, samples: Samples, call: Callable[[Any], Any], make: Callable[[Any], Any]
) -> Iterator[Outcome]:
    """Run a sample on both devices and compare it."""

    def run(make: Callable[[Any], Any]) -> Ran:
        torch.manual_seed(0)
        inputs = samples.on(make)
        return attempt(lambda: call(inputs), tensors_of(inputs))

    expected = run(on_cpu)
    before = Told()
    found = run(make)
    after = Told()
    if found.error is not None:
        if (
            expected.error is not None
            or ALSO_ON_A_GPU.search(str(found.error))
            or isinstance(fake_signature(samples, call), Exception)
        ):
            yield Outcome(kind, name, AGREES)
        else:
            yield Outcome(kind, name, RAISED, f"{found.part}: {text_of(found.error)}")
        return
    if expected.error is not None:
        as_fake = fake_signature(samples, call)
        if as_fake is None or isinstance(as_fake, Exception):
            yield Outcome(kind, name, LEFT_OUT)
        else:
            same = as_fake == signature(found.values)
            yield Outcome(
                kind, name, AGREES if same else WRONG, "" if same else difference(signature(found.values), as_fake)
            )
        return
    if is_number(found.values[0]):
        if after.reads > before.reads:
            yield Outcome(kind, name, LEFT_OUT)
        else:
            same = same_values(found.values[0], expected.values[0]) or not same_values(
                with_other_numbers(lambda: run(on_cpu)).values[0], expected.values[0]
            )
            reason = f"the number {found.values[0]} in place of {expected.values[0]}"
            yield Outcome(kind, name, AGREES if same else WRONG, "" if same else reason)
        return
    one, other = signature(found.values), signature(expected.values)
    if one != other and one != fake_signature(samples, call):
        assumed = after.assumptions > before.assumptions
        yield Outcome(kind, name, ASSUMED if assumed else WRONG, "" if assumed else difference(one, other))
        return
    yield Outcome(kind, name, AGREES)
    if kind == "known" and not name.startswith(("empty", "new_empty")):
        yield from compare_values(name, found, expected, lambda: with_other_numbers(lambda: run(on_cpu)))


def with_other_numbers(run: Callable[[], Ran]) -> Ran:
    """Run with other random numbers, although the databases set the seed themselves."""
    seed = torch.manual_seed
    with mock.patch.object(torch, "manual_seed", lambda number: seed(number + 1)):
        return run()


def compare_values(name: str, found: Ran, expected: Ran, again: Callable[[], Ran]) -> Iterator[Outcome]:
    """Compare the values that the emulation takes as known with those of the CPU, unless they are random."""
    rights = [one.detach().cpu() for one in tensors_of(expected.values)]
    others = None
    for index, (tensor, right) in enumerate(zip(tensors_of(found.values), rights, strict=True)):
        if tensor.layout != torch.strided or not tensor.is_cuda or not tensor.numel() or tensor.size() != right.size():
            continue
        before = Told()
        values = tensor.detach().to("cpu")
        if Told().reads > before.reads:
            yield Outcome("value", name, LEFT_OUT)
        elif same_values(values, right):
            yield Outcome("value", name, AGREES)
        else:
            others = others or again()
            if others.error is None and same_values(tensors_of(others.values)[index].detach().cpu(), right):
                zero = not values.any() and right.any()
                yield Outcome("value", name, WRONG, "zero" if zero else "another value")


def same_values(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    except (AssertionError, RuntimeError):
        return False
    return True


def text_of(error: BaseException) -> str:
    """Return the first line of an error, without the numbers that differ from run to run."""
    line = (str(error).strip() or "no text").splitlines()[0]
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '0x...', line)[:160]}"


def run_operator(info: Any, name: str) -> Iterator[Outcome]:
    dtype = dtype_of(info)
    gradients = dtype in info.supported_backward_dtypes("cuda") and dtype in info.supported_backward_dtypes("cpu")

    def call(inputs: Any) -> Any:
        first, others, keywords = inputs
        return info(first, *others, **keywords)

    def samples_of(inputs: Iterator[Any]) -> Iterator[tuple[int, Samples]]:
        for number, sample in zip(range(MOST_SAMPLES), inputs, strict=False):
            yield number, Samples((sample.input, list(sample.args), sample.kwargs))

    for number, samples in samples_of(iter(info.sample_inputs("cpu", dtype, requires_grad=gradients))):
        has_floats = any(one.dtype.is_floating_point or one.dtype.is_complex for one in tensors_of(samples.on(on_cpu)))
        for kind, make in (("known", known), ("unknown", unknown)) if has_floats else (("known", known),):
            for outcome in compare(kind, name, samples, call, make):
                yield outcome._replace(sample=number)
    yield from run_sparse(info, name, dtype, call, samples_of)
    if info.error_inputs_func is not None:
        yield from run_errors(info, name)


def dtype_of(info: Any) -> Any:
    """Return float32, or else a type that the operator has on both devices."""
    both = info.supported_dtypes("cuda") & info.supported_dtypes("cpu") or info.supported_dtypes("cuda")
    preferred = (torch.float32, torch.complex64, torch.int64, torch.bool)
    return next((one for one in preferred if one in both), min(both, key=str))


def run_sparse(info: Any, name: str, dtype: Any, call: Any, samples_of: Any) -> Iterator[Outcome]:
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        if not info.supports_sparse_layout(layout):
            continue
        try:
            found = list(samples_of(info.sample_inputs_sparse(layout, "cpu", dtype, requires_grad=False)))
        except (unittest.SkipTest, NotImplementedError):
            continue
        for number, samples in found:
            for outcome in compare("sparse", name, samples, call, known):
                yield outcome._replace(sample=number)


def run_errors(info: Any, name: str) -> Iterator[Outcome]:
    if unittest.expectedFailure in info.get_decorators("TestCommon", "test_errors", "cuda", None, {}):
        return
    for number, expected in zip(range(MOST_SAMPLES), info.error_inputs("cuda"), strict=False):
        sample = expected.sample_input
        try:
            output = info(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:
            right = isinstance(error, expected.error_type) and re.search(expected.error_regex, str(error))
            reason = "" if right else f"{text_of(error)} in place of {expected.error_type.__name__}: {expected.error_regex}"
            yield Outcome("error", name, AGREES if right else WRONG, reason, number)
        else:
            refused = output is NotImplemented  # for which Python raises an error
            reason = "" if refused else f"no error in place of {expected.error_type.__name__}"
            yield Outcome("error", name, AGREES if refused else WRONG, reason, number)


def run_module(info: Any, name: str) -> Iterator[Outcome]:
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for number, one in enumerate(inputs):
            if one.forward_input is None:
                continue
            made, given = one.constructor_input, one.forward_input
            torch.manual_seed(0)
            module = info.module_cls(*made.args, **made.kwargs).train(training)

            def call(inputs: Any, module: Any = module) -> Any:
                arguments, keywords = inputs
                own = copy.deepcopy(module)
                tensors = [one for one in tensors_of(inputs) if one.is_floating_point()]
                own = own.to(tensors[0].device) if tensors else own
                output = own(*arguments, **keywords)
                parameters = [one for one in own.parameters() if one.requires_grad]
                results = [one for one in tensors_of(output) if one.requires_grad]
                if not parameters or not results:
                    return output
                sent = [one.detach().clone() for one in results]
                gradients = torch.autograd.grad(results, parameters, sent, allow_unused=True, retain_graph=True)
                return [output, gradients, dict(own.named_buffers())]

            for outcome in compare("module", name, Samples((list(given.args), given.kwargs)), call, known):
                yield outcome._replace(sample=number)


def run_optimizer(info: Any, name: str) -> Iterator[Outcome]:
    """Train three steps and compare the state's sizes with the CPU's, and what it allocates with its sizes."""
    from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs

    variants = _get_optim_inputs_including_global_cliquey_kwargs(
        torch.device("cuda"), torch.float32, info, skip=("differentiable",)
    )
    sizes = [(300, 40), (64, 64)] if name == "Muon" else [(300, 40), (64,), ()]
    for number, variant in enumerate(variants):
        for make in (known, unknown):
            outcome = compare_state(info, variant.kwargs, sizes, make)
            yield outcome._replace(name=name, sample=number)


def compare_state(info: Any, options: dict[str, Any], sizes: Sequence[tuple[int, ...]], make: Any) -> Outcome:
    def train(make: Any, options: dict[str, Any], steps: int = _MEMORY_STEPS) -> tuple[Any, int, int]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(make(torch.rand(size))) for size in sizes]
        targets = [make(torch.rand(size)) for size in sizes]
        moved = {
            key: one.to("cuda") if isinstance(one, torch.Tensor) and make is not on_cpu else one
            for key, one in options.items()
        }

        def closure() -> Any:
            for one in parameters:
                one.grad = None
            loss = sum(((one - target) ** 2).sum() for one, target in zip(parameters, targets, strict=True))
            loss.backward(create_graph=False)
            if info.only_supports_sparse_grads:
                for one in parameters:
                    one.grad = one.grad.to_sparse()
            return loss

        loss = closure()
        del loss
        gc.collect()
        before = torch.cuda.memory_allocated()
        optimizer = info.optim_cls(parameters, **moved)
        for _ in range(steps):
            closure()
            optimizer.step(closure if info.step_requires_closure else None)
        gc.collect()
        state = optimizer.state_dict()["state"]
        grown = torch.cuda.memory_allocated() - before
        given = {one.untyped_storage().data_ptr() for one in tensors_of(moved)}
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in tensors_of(state)
            if one.is_cuda and one.untyped_storage().data_ptr() not in given
        }
        return (
            signature(
                {key: {k: v for k, v in one.items() if isinstance(v, (torch.Tensor, list))} for key, one in state.items()}
            ),
            grown,
            sum(-(-bytes_ // _GRANULE_BYTES) * _GRANULE_BYTES for bytes_ in storages.values()),
        )

    told = Told()
    label = ", ".join(f"{key}={value}" for key, value in options.items() if value) or "defaults"
    try:
        train(make, options, steps=1)  # libraries take their workspaces at first
        state, grown, held = train(make, options)
    except Exception as error:
        return Outcome("optimizer", "", RAISED, f"{label}: {text_of(error)}")
    on_host = {key: value for key, value in options.items() if key not in ("capturable", "fused")}
    try:
        expected, _, _ = train(on_cpu, on_host)
    except Exception:
        return Outcome("optimizer", "", LEFT_OUT)
    if state != expected:
        assumed = Told().assumptions > told.assumptions
        reason = f"{label}: {difference(state, expected)}"
        return Outcome("optimizer", "", ASSUMED if assumed else WRONG, "" if assumed else reason[:200])
    if grown != held:
        return Outcome("optimizer", "", WRONG, f"{label}: {grown} bytes are allocated for a state of {held}")
    return Outcome("optimizer", "", AGREES)


def run_memory(_: Any, name: str) -> Iterator[Outcome]:
    for number, (label, error) in enumerate(memory_api_checks.run()):
        reason = f"{label}: {error}" if error else ""
        yield Outcome("memory", name, WRONG if error else AGREES, reason, number)


_RUNNERS: Final[dict[str, Callable[[Any, str], Iterator[Outcome]]]] = {
    "operator": run_operator,
    "module": run_module,
    "optimizer": run_optimizer,
    "memory": run_memory,
}
