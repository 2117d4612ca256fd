"""Implements the fixtures: ``gputrain`` measures and judges cases, and ``gpu`` reserves a GPU for code of the test
itself."""

from __future__ import annotations

import functools
import inspect
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar, cast

import msgspec
import pytest

from pytest_gputrain.cases.arguments import arguments_of
from pytest_gputrain.cases.identity import suite_of
from pytest_gputrain.cases.model_config import with_model
from pytest_gputrain.cases.script import Script, case_of
from pytest_gputrain.cases.sweep import override
from pytest_gputrain.execution.executor import Executor
from pytest_gputrain.execution.local import LocalExecutor
from pytest_gputrain.gate.loss_trend import describe_divergence
from pytest_gputrain.gate.summary import detail_of, failure_of
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.hardware.devices import Gpu, HardwareError
from pytest_gputrain.hardware.lease import lease
from pytest_gputrain.plugin.case_tests import skipped
from pytest_gputrain.plugin.items import ASKED_BY_A_CHILD, ENDINGS, FORKED, RESULTS, expression_of
from pytest_gputrain.plugin.marker_help import ONLY_ON
from pytest_gputrain.plugin.markers import terms_of
from pytest_gputrain.records import (
    FAILING,
    STRICTLY_FAILING,
    Case,
    Emulated,
    EmulatedRun,
    LossStudy,
    Measurement,
    Result,
    Scale,
)
from pytest_gputrain.records.case import IN_EVERY_ID, KNOBS
from pytest_gputrain.session.criteria import is_strict
from pytest_gputrain.session.request import CaseRunner, Request
from pytest_gputrain.utils.errors import BadCase, CannotRun, OtherPlatform
from pytest_gputrain.utils.sanitize import shown
from pytest_gputrain.utils.suggest import did_you_mean

StepBuilder = Callable[..., Any]
_Request = TypeVar("_Request", bound=Callable[..., Any])

_NO_ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType({})


def _noted(request: _Request) -> _Request:
    """Provide a context that notes each request which ends in an exception, so that the run reports it even if the test
    catches it."""

    @functools.wraps(request)
    def ask(gputrain: GpuTrain, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != gputrain._process:
            gputrain._item.stash[FORKED][0] = True
            raise _failed(ASKED_BY_A_CHILD)
        endings = gputrain._item.stash.setdefault(ENDINGS, [])
        ending = [f"gputrain.{request.__name__}() had not ended when its test did", "failure"]
        endings.append(ending)
        try:
            answer = request(gputrain, *args, **kwargs)
        except pytest.skip.Exception as reason:
            ending[:] = [f"its case was skipped: {reason.msg}", "skip"]
            raise
        except pytest.fail.Exception as failure:
            ending[0] = str(failure.msg)
            raise
        except BaseException as error:
            ending[0] = f"gputrain.{request.__name__}() ended by {type(error).__name__}: {shown(str(error))}"
            raise
        endings.remove(ending)
        return answer

    return cast("_Request", ask)


class GpuTrain:
    """Measures and judges cases. A case is measured once per pytest process, however many tests ask for it."""

    def __init__(self, item: pytest.Item, runner: CaseRunner, overridden: Mapping[str, Any]) -> None:
        """
        Args:
            overridden: knobs that ``--gpu-set`` sets, which replace those of each case.
        """
        self._item = item
        self._runner = runner
        self._overridden = overridden
        self._process = os.getpid()
        item.stash[FORKED] = mmap.mmap(-1, 1)

    @property
    @_noted
    def scale(self) -> Scale:
        """``full``, or ``tiny`` for the stand-ins that a CPU trains. Not every assertion about a model holds for them."""
        try:
            return self._runner.scale()
        except BadCase as error:
            raise _failed(error) from None

    @_noted
    def measure(
        self,
        what: Case | Script | StepBuilder,
        *,
        args: Mapping[str, Any] = _NO_ARGUMENTS,
        inline: bool = False,
        **knobs: Any,
    ) -> Measurement | EmulatedRun:
        """Measure a case, a script, or a function that builds a step, without judging the figures.

        Args:
            what: a case, a `Script`, or a function ``build(setup) -> step`` at the top level of a test file. It gets a
                `Setup`, builds everything, and returns a function that runs one step and may return its loss. It runs in the
                worker, which imports it by file and name.
            args: keyword arguments for that function, after its setup. They must be plain JSON values, and they are part
                of the case's id.
            inline: run in this process. Any callable will do, but torch and its state stay in the process.
            knobs: fields of `Case` to set. The id of a `Case` shows only those that every id has; use `grid` for the others.

        A case without figures (out of memory, crashed, timed out) fails the test with the reason, and so does a case that
        exceeds a ``gpu_limit``. Under ``--gpu-find-batch`` the figures are those of the fastest batch. Under
        ``--gpu-emulate`` they are an `EmulatedRun`: a test that reads a figure which only a `Measurement` has, such as
        ``step_seconds``, is skipped there, and fails when strict.
        """
        result = self._run(functools.partial(self._case, what, inline, knobs, args), what, inline=inline, judged=False)
        failure = failure_of(result)
        if not failure and result.verdict is not None and result.verdict.status == "over-limit":
            failure = result.verdict.sentence
        if failure:
            raise _failed(failure)
        assert result.figures is not None, "without any there was a failure"
        return result.figures

    @_noted
    def check(
        self,
        what: Case | Script | StepBuilder,
        *,
        args: Mapping[str, Any] = _NO_ARGUMENTS,
        scaling: bool = False,
        inline: bool = False,
        **knobs: Any,
    ) -> Result:
        """Measure a case like `measure`, and compare it with its baseline. A regression fails the test with one sentence.

        Args:
            scaling: also judge the scaling efficiency of a case of several GPUs: its throughput, divided by that of as many
                single workers. One worker alone is measured for it, as often as the case. A case of one GPU has none.

        Under ``--gpu-find-batch`` and ``--gpu-loss`` nothing is judged. The test then fails if there are no figures, or if
        a precision diverges that should converge.

        Returns:
            A `Measured`, `Emulated`, `BatchSearch` or `LossStudy`. Its ``figures`` are those of the first
            process that gave some, as `measure` returns them. They are None if running out of memory is the case's baseline.
        """
        case = functools.partial(self._case, what, inline, knobs, args)
        return self._passed(self._run(case, what, inline=inline, judged=True, scaling=scaling))

    def _passed(self, result: Result) -> Result:
        """Return the result of a case that passes. Otherwise fail the test with the sentence of the verdict."""
        verdict = result.verdict
        if verdict is None:  # A search and loss curves have no baseline, so they have no verdict.
            curves = result.loss_curves if isinstance(result, LossStudy) else ()
            failure = failure_of(result) or describe_divergence(result.case, curves)
            if failure:
                raise _failed(failure)
            return result
        strict = verdict.status in STRICTLY_FAILING and is_strict(self._runner.settings)
        if verdict.status in FAILING or strict:
            raise _failed(f"{verdict.sentence}{' (strict)' if strict else ''}")
        return result

    def _run(
        self,
        make_case: Callable[[], Case],
        what: Case | Script | StepBuilder,
        *,
        judged: bool,
        inline: bool = False,
        scaling: bool = False,
    ) -> Result:
        builder = None if isinstance(what, Case | Script) else what
        try:
            request = Request(
                nodeid=self._item.nodeid,
                suite=suite_of(self._item.path),
                case=with_model(self._override(make_case()), self._item.path.parent),
                markers=frozenset(mark.name for mark in self._item.iter_markers()),
                expression=expression_of(self._item.config),
                judged=judged,
                scaling=scaling,
                inline=inline,
                builder=builder if inline else None,
                module=getattr(builder, "__module__", "") or "",
                terms=terms_of(self._item),
            )
            result = self._runner.run(request)
        except CannotRun as reason:
            raise skipped(shown(str(reason)), "platform" if isinstance(reason, OtherPlatform) else "unfit") from None
        except BadCase as error:
            # If the exception had its cause, pytest would print the sentence twice.
            raise _failed(error) from None
        self._note(result)
        return _to_be_read(result, is_strict(self._runner.settings))

    def _case(self, what: Case | Script | StepBuilder, inline: bool, knobs: dict[str, Any], args: Mapping[str, Any]) -> Case:
        if args and isinstance(what, Case | Script):
            raise BadCase(f"args are for the function of own code, and {what} is a {type(what).__name__}; leave them out")
        if isinstance(what, Script):
            if inline:
                raise BadCase(f"{what} is a script, which needs a process of its own; leave out inline=True")
            return case_of(what, knobs, self._runner.settings.root)
        unknown = sorted(set(knobs) - set(Case.__struct_fields__))
        if unknown:
            name = unknown[0]
            if inspect.isfunction(what) and name in inspect.signature(what).parameters:
                given = f"args={{{name!r}: {knobs[name]!r}}}"
                raise BadCase(f"{name} is an argument of the function and not a field of a case; pass {given}")
            hint = did_you_mean(unknown[0], Case.__struct_fields__)
            raise BadCase(f"{', '.join(unknown)} is not a field of a case{hint}; known: {', '.join(Case.__struct_fields__)}")
        if isinstance(what, Case):
            return what.replace(**knobs)
        called: object = what  # Tests are seldom type-checked, so this may be any object.
        if inspect.isgenerator(called):
            function = called.__name__
            raise BadCase(f"{function}(...) was called before; pass the function {function} itself, and args={{...}}")
        if not callable(what):
            raise BadCase(f"{what!r} is neither a Case, a Script, nor a function that builds a step")
        name = getattr(what, "__name__", type(what).__name__)
        if inline:
            # The closures of a parametrized test differ only by the test's id, so they are named after it.
            code, callspec = f"inline:{self._item.nodeid}", getattr(self._item, "callspec", None)
            name += f"[{callspec.id}]" if callspec else ""
        else:
            code = _address(what, self._runner.settings.root)
        shown = tuple(knob for knob in knobs if KNOBS[knob].identity and knob not in IN_EVERY_ID)
        fields = {"model": name, "method": "custom", "code": code, "args": arguments_of(what, args), "named": shown}
        return Case(**{**fields, **knobs})

    def _override(self, case: Case) -> Case:
        if case.method == "script" and self._overridden:
            raise BadCase(f"{case} is a script, whose arguments --gpu-set does not reach; deselect its test")
        foreign = {"model", "method"} & set(self._overridden)
        if case.method == "custom" and foreign:
            raise BadCase(
                f"{case} is own code, which has no {' or '.join(sorted(foreign))} for --gpu-set; deselect its test"
            )
        return override(case, self._overridden)

    def _note(self, result: Result) -> None:
        """Store the result for the report of this test."""
        self._item.stash.setdefault(RESULTS, []).append(result)
        properties: dict[str, object] = {"gputrain.case": result.key, "gputrain.device": result.device}
        if result.verdict is not None:
            properties["gputrain.verdict"] = result.verdict.status
            judged = [metric for metric in result.verdict.metrics if metric.baseline is not None]
            properties |= {f"gputrain.baseline.{metric.metric}": metric.baseline for metric in judged}
            properties |= {f"gputrain.limit.{limit.metric}": limit.limit for limit in result.verdict.limits}
            properties |= {
                f"gputrain.{limit.metric}": limit.value for limit in result.verdict.limits if limit.value is not None
            }
            properties |= {f"gputrain.{metric.metric}": metric.value for metric in judged if metric.value is not None}
        if result.summary is not None:
            properties["gputrain.median_step_seconds"] = result.summary.median_step_seconds
            properties["gputrain.peak_allocated_bytes"] = result.summary.peak_allocated_bytes
            if result.summary.scaling_efficiency is not None:
                properties["gputrain.scaling_efficiency"] = result.summary.scaling_efficiency
        if isinstance(result, Emulated) and result.figures is not None:
            properties["gputrain.emulated_peak_allocated_bytes"] = result.figures.peak_allocated_bytes
            properties["gputrain.emulated_to_fit"] = result.figures.fits
        self._item.user_properties += properties.items()
        detail = detail_of(result)
        if detail:
            self._item.add_report_section("call", f"worker of {result.case}", detail)


class _ReadFigures(EmulatedRun, frozen=True, kw_only=True, tag="emulated"):
    """The figures of an emulated run. A test that reads a figure which only a measurement has is skipped.

    It fails where the run is strict: all figures of a run are of one kind, so the test would never be more than skipped.
    """

    strict: bool

    def __getattr__(self, name: str) -> None:
        EmulatedRun.__getattr__(self, name)
        self._refuse(name)

    def update_seconds(self, accumulation: int) -> None:
        self._refuse("update_seconds")

    def _refuse(self, name: str) -> NoReturn:
        sentence = f"reads {name}, which an emulated GPU does not have"
        remedy = f'leave the test out by @pytest.mark.{ONLY_ON}("cpu", "gpu", reason="it reads {name}")'
        raise _failed(f"{sentence}; {remedy} (strict)") if self.strict else skipped(sentence)


def _to_be_read(result: Result, strict: bool) -> Result:
    if not isinstance(result, Emulated) or result.figures is None:
        return result
    fields = {name: getattr(result.figures, name) for name in EmulatedRun.__struct_fields__}
    return msgspec.structs.replace(result, reply=_ReadFigures(**fields, strict=strict))


def _failed(reason: object) -> BaseException:
    """Return the exception that fails the test with this sentence alone."""
    return pytest.fail.Exception(shown(str(reason)), pytrace=False)


def _address(function: StepBuilder, root: Path) -> str:
    """Return the address by which a worker imports a function: ``tests/test_mine.py::my_step``.

    Raises:
        BadCase: a worker could not find the function by file and name.
    """
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        shown = name or repr(function)
        raise BadCase(
            f"{shown} is not a function at the top level of a file, so the worker cannot import it; define it there "
            "and pass values from the test with args={...}, or measure it with inline=True"
        )
    try:
        file = Path(inspect.getfile(inspect.unwrap(function))).resolve()
        relative = file.relative_to(root.resolve())
    except (TypeError, ValueError):
        raise BadCase(f"{name} does not lie in a file below {root}, so the worker may not run it") from None
    return f"{relative.as_posix()}::{name}"


def lend_gpu(executor: Executor[Any]) -> Iterator[Gpu]:
    """Provide a GPU of this machine that nobody else uses, or skip the test if there is none."""
    if executor.is_remote:
        pytest.skip("--gpu-executor runs cases on other machines, so there is no GPU to lend here")
    if not isinstance(executor, LocalExecutor):
        pytest.skip("--gpu-emulate lends no GPU")
    try:
        machine = executor.machine
    except HardwareError as error:
        raise _failed(error) from None
    if not machine.gpus:
        pytest.skip(f"needs a GPU, found {CPU}{f': {machine.unseen}' if machine.unseen else ''}")
    with lease(machine.gpus, 1) as (device,):
        yield device
