"""Defines the records that travel between the packages, and nothing else.

    Case -> execution -> worker -> Reply -> gate(Baseline) -> Verdict -> report

Both sides of the process boundary import this module, so it needs neither pytest nor torch. Every record is frozen, every
field is keyword-only and carries its unit in its name, and one definition serves the wire, the files and the JSON Schema.
"""

from pytest_gputrain.records.case import FORMAT, Case, Limit, Scale, Task, knob_text
from pytest_gputrain.records.counts import CountCause, CountFigure, CountName, Counts, Place, SlowClass, StepCounts
from pytest_gputrain.records.emulated import EmulatedRun, OperatorWork, Recorded
from pytest_gputrain.records.expected import ExpectedTime, Part, Rates, TracedCall
from pytest_gputrain.records.fleet import Conditions, Delivery, Host, Order
from pytest_gputrain.records.history import HistoryLine
from pytest_gputrain.records.measurement import (
    Environment,
    GpuSteps,
    Holder,
    Measurement,
    Rank,
    Telemetry,
    update_seconds,
)
from pytest_gputrain.records.memory import LiveTensor, TrainingPhase
from pytest_gputrain.records.own_training import BatchShapes, TrainedTensors
from pytest_gputrain.records.reply import (
    Cause,
    Crashed,
    Event,
    Lost,
    OutOfMemory,
    Phase,
    Reply,
    Served,
    TimedOut,
)
from pytest_gputrain.records.result import (
    BatchSearch,
    Emulated,
    LossStudy,
    Measured,
    Origin,
    RankSpread,
    Report,
    Result,
    Study,
    Summary,
)
from pytest_gputrain.records.step_memory import StepMemory
from pytest_gputrain.records.trend import Change, Course, Moment, Trends
from pytest_gputrain.records.verdict import (
    FAILING,
    STRICTLY_FAILING,
    Baseline,
    BaselineRun,
    LimitVerdict,
    LineCount,
    MetricName,
    MetricVerdict,
    Published,
    Status,
    Verdict,
)
from pytest_gputrain.utils.bounds import MAX_RUNS
