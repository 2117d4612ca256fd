"""Examples and strategies of the records, shared by the unit tests."""

import re
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.regression import judge
from pytest_gputrain.records import (
    Baseline,
    BaselineRun,
    BatchSearch,
    Case,
    Counts,
    Crashed,
    Emulated,
    EmulatedRun,
    Environment,
    LiveTensor,
    LossStudy,
    Measured,
    Measurement,
    OperatorWork,
    OutOfMemory,
    Recorded,
    Report,
    Summary,
    TimedOut,
    Verdict,
)
from pytest_gputrain.storage.baselines import BaselineStore, SuiteStore
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.utils.bounds import MOST_RUNS
from pytest_gputrain.utils.units import GiB

CASE = Case(model="llama-3.1-8b", method="lora", batch_size=2, sequence_length=8192)


def made(type_, **example):
    """Return a function that makes a record of these fields, some of which its caller may replace."""
    return lambda **fields: type_(**{**example, **fields})


gpu_environment = made(
    Environment,
    device_name="NVIDIA H100 80GB HBM3",
    device_type="cuda",
    device_count=1,
    device_memory_bytes=85_899_345_920,
    host="node-1",
    cpu_model="EPYC 9654",
    os="Linux 6.8",
    python="3.12.3",
    packages={"torch": "2.13.0", "transformers": "5.1.0"},
    runtime="13.0",
    driver="580.10",
)


cpu_environment = made(
    gpu_environment, device_name="cpu", device_type="cpu", device_memory_bytes=None, runtime=None, driver=None
)


measurement = made(
    Measurement,
    step_seconds=(1.0, 1.0, 1.0),
    warmup_seconds=(2.0,),
    losses=(3.0, 2.0, 1.0),
    batch_size=2,
    sequence_length=8192,
    updates=4,
    parameters=8_030_261_248,
    trainable_parameters=20_971_520,
    model_bytes=16_000_000_000,
    peak_allocated_bytes=40_000_000_000,
    peak_host_bytes=3_000_000_000,
    environment=gpu_environment(),
)


out_of_memory = made(
    OutOfMemory,
    where="device",
    phase="measure",
    message="CUDA out of memory.",
    step=1,
    environment=gpu_environment(),
)


crashed = made(Crashed, sentence="ValueError: loss is NaN", phase="measure", step=0)


timed_out = made(TimedOut, timeout_seconds=1800.0, phase="build")


baseline_run = made(
    BaselineRun,
    outcome="measured",
    environment=gpu_environment(),
    date="2026-01-31T12:00:00Z",
    session="abc123",
    step_seconds=(1.0, 1.0, 1.0),
    peak_allocated_bytes=40_000_000_000,
)


oom_run = made(baseline_run, outcome="out_of_memory", out_of="device", step_seconds=(), peak_allocated_bytes=None)


def baseline(*runs, case=CASE, **fields):
    defaults = {"device": "nvidia-h100-80gb-hbm3", "scale": "full", **fields}
    return Baseline(case=case, runs=runs or (baseline_run(),), **defaults)


live_tensor = made(
    LiveTensor,
    bytes=4 * GiB,
    count=1,
    operator="aten._log_softmax",
    phase="forward",
    shape=(16384, 128256),
    dtype="bfloat16",
)


def emulated_run(**fields):
    """One that fits an H100 with room to spare."""
    peaks = {"build": 16 * GiB, "forward": 30 * GiB, "backward": 32 * GiB, "optimizer": 20 * GiB}
    example = {
        "device_name": "NVIDIA H100 80GB HBM3",
        "device_memory_bytes": 79 * GiB,
        "runtime": "13.0",
        "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
        "fits": True,
        "peak_allocated_bytes": 32 * GiB,
        "peak_reserved_bytes": 35 * GiB,
        "device_used_bytes": 36 * GiB,
        "phase_peak_bytes": peaks,
        "largest": {phase: (live_tensor(),) for phase in peaks},
        "parameters": 8_030_261_248,
        "trainable_parameters": 20_971_520,
        "model_bytes": 16 * GiB,
        "flops_per_step": 10**15,
        "recomputed_flops_per_step": 3 * 10**14,
        "bytes_per_step": 10**12,
        "operators": {"aten.mm": OperatorWork(calls=449, flops=10**15, bytes=9 * 10**11)},
    }
    return EmulatedRun(**{**example, **fields})


def summary(seconds=1.0, peak=40_000_000_000, **fields):
    unknown = dict.fromkeys(("tokens_per_second", "model_flops_utilization"))
    example = {"median_step_seconds": seconds, "samples_per_second": 2 / seconds, "peak_allocated_bytes": peak, **unknown}
    return Summary(**{**example, **fields})


SETTINGS = {"time_tolerance": 0.03, "memory_tolerance": {"ratio": 0.02, "bytes": 0}, "judge_cpu_time": False}
"""Tolerances of a report."""
RESULT_KINDS = (Measured, Emulated, BatchSearch, LossStudy)


def result(case=CASE, **fields):
    """A result of the kind that has the ``fields``: a ``reply`` is one of an emulated GPU."""
    example = {
        "nodeid": f"benchmarks/test_llm.py::test[{case}]",
        "suite": "llm",
        "key": str(case),
        "case": case,
        "scale": "full",
        "platform": "h100",
        "device": "nvidia-h100-80gb-hbm3",
        "replies": (measurement(),),
        "summary": summary(tokens_per_second=16384.0, model_flops_utilization=0.5),
        "verdict": Verdict(status="pass", sentence=f"{case} is within its limits"),
    }
    kinds = {"reply": Emulated, "search": BatchSearch, "loss_curves": LossStudy}
    kind = next((kind for name, kind in kinds.items() if name in fields), Measured)
    if kind is Emulated:
        del example["replies"], example["summary"]
    return kind(**{**example, **fields})


def report(*results, **fields):
    defaults = {"generator": "pytest-gputrain 0.1.0", "created": "2026-02-01T00:00:00Z", "session": "s1", "commit": "c0ffee"}
    return Report(**{**defaults, **fields}, results=results)


def recorded(*runs, case=CASE, scale="full"):
    return Recorded(case=case, scale=scale, figures=runs)


def told(verdicts):
    """All of each verdict that people and other programs read."""

    def shown(metric):
        figures = (
            "-" if it is None else f"{it:.10g}" for it in (metric.value, getattr(metric, "baseline", None), metric.limit)
        )
        note = metric.note and f"; {metric.note}"
        return f" [{metric.metric} {metric.status}: {', '.join(figures)}{note}]"

    return {
        name: f"{verdict.status}: {verdict.sentence}{''.join(map(shown, (*verdict.metrics, *verdict.limits)))}"
        for name, verdict in verdicts.items()
    }


def without_digests(sentence):
    """A sentence without the name of stored conditions: it is their digest, which changes with each field that they gain."""
    return re.sub(r"(conditions '?)[0-9a-f]{8}\b", r"\1DIGEST", sentence)


class Kind(NamedTuple):
    """A kind of baselines: its store, and examples of what that keeps."""

    name: str
    store: type[SuiteStore[Any, Any]]
    device: str
    folder: str
    """Of the device, below that of the baselines."""
    shared: str
    """The file's table of what entries share."""
    entries: str
    record: Any
    other: Any
    """The record with one figure changed."""

    def update(self, folder, records, suite="llm"):
        return self.store(folder).update(self.device, suite, records)

    def get(self, folder, key):
        return self.store(folder).get(self.device, "llm", key)

    def file(self, folder):
        return folder / self.folder / "llm.json"


KINDS = (
    Kind(
        name="measured",
        store=BaselineStore,
        device="nvidia-h100-80gb-hbm3",
        folder="nvidia-h100-80gb-hbm3",
        shared="environments",
        entries="runs",
        record=baseline(),
        other=baseline(baseline_run(step_seconds=(9.0,))),
    ),
    Kind(
        name="emulated",
        store=EmulationStore,
        device="h100",
        folder="emulated/h100",
        shared="conditions",
        entries="runs",
        record=recorded(emulated_run()),
        other=recorded(emulated_run(flops_per_step=5)),
    ),
)


def values_of(type_):
    """Every JSON-representable value of a record, or of a field's type, from the annotations themselves."""
    return _strategy(msgspec.inspect.type_info(type_))


def unsigned(record):
    """The record with every number in it as far above zero as it was below."""

    def above(value):
        if isinstance(value, dict):
            return {name: above(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [above(inner) for inner in value]
        return abs(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    return msgspec.convert(above(msgspec.to_builtins(record)), type(record))


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SCALARS = {
    msgspec.inspect.StrType: _TEXT,
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.IntType: st.integers(1 - 2**63, 2**63 - 1),
    msgspec.inspect.FloatType: st.floats(allow_nan=False, allow_infinity=False),
    msgspec.inspect.NoneType: st.none(),
}
_SCALARS[msgspec.inspect.AnyType] = st.one_of(*_SCALARS.values())


def _counts(steps, kinds, **fields):
    return Counts(steps=tuple(step % len(kinds) for step in steps if kinds), kinds=kinds, **fields)


def _strategy(info):
    match info:
        case msgspec.inspect.StructType():
            make = _counts if info.cls is Counts else info.cls
            return st.builds(make, **{field.name: _strategy(field.type) for field in info.fields})
        case msgspec.inspect.UnionType():
            return st.one_of(*map(_strategy, info.types))
        case msgspec.inspect.VarTupleType():
            return st.lists(_strategy(info.item_type), min_size=info.min_length or 0, max_size=3).map(tuple)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(_strategy, info.item_types))
        case msgspec.inspect.DictType():
            return st.dictionaries(_strategy(info.key_type), _strategy(info.value_type), max_size=3)
        case msgspec.inspect.LiteralType():
            return st.sampled_from(info.values)
        case msgspec.inspect.FloatType(gt=0):
            return st.floats(0, exclude_min=True, allow_infinity=False)
        case _:
            return _SCALARS[type(info)]


def judged(replies, stored, tolerance, *, case=CASE, shift=0.0, no_scaling="", **criteria):
    """Judge replies against a baseline; further processes may run."""
    held_to = {"scale": "full", "most": MOST_RUNS, "case": case, "baseline": stored, "tolerance": tolerance} | criteria
    return judge(Criteria(**held_to), replies, shift, no_scaling)
