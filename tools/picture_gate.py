"""Draws false alarms and power of the time gate from the simulation of tools/measure_gate.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measure_gate import Array, Flags, Noise, SimulatedMachine, vote

SEED: Final = 0
REPLICATES: Final = 400_000
"""The number of cases for each figure, as in docs/gate.md."""
SLOWDOWNS: Final = tuple(step / 400 for step in range(41))
"""0 to 10 %."""
SHARES: Final = (0.001, 0.01, 0.1, 1.0, 10.0)
"""The ticks of the axis of false alarms, in percent."""


def one_against_one(base: Array, new: Array) -> Flags:
    """The naive rule: one run is more than 3 % slower than another."""
    return np.asarray(new[:, 0] - base[:, 0] > math.log1p(0.03))


def gate(base: Array, new: Array) -> Flags:
    return vote(base, new, tolerance=0.03)


@dataclass(frozen=True)
class Setting:
    name: str
    rule: Callable[[Array, Array], Flags]
    baseline_runs: int
    noise: Noise
    colour: int


SETTINGS: Final = (
    Setting("gate, 5 baseline runs", gate, 5, Noise(), 0),
    Setting("gate, 1 baseline run", gate, 1, Noise(), 1),
    Setting("gate, 5 baseline runs, processes differ by 3 %", gate, 5, Noise(process=0.03), 2),
    Setting("one run against one, fails beyond 3 %", one_against_one, 1, Noise(), 3),
)


def shares() -> list[list[float]]:
    """The percentage of cases that fail, for each setting and slowdown."""
    machine = SimulatedMachine(SEED)
    found = []
    for setting in SETTINGS:
        base, new = machine.case(REPLICATES, setting.baseline_runs, setting.noise)
        found.append([100 * float(setting.rule(base, new + math.log1p(slowdown)).mean()) for slowdown in SLOWDOWNS])
    return found


def draw(
    path: Path, failing: list[list[float]], paper: str, ink: str, muted: str, rule: str, series: tuple[str, ...]
) -> None:
    """Write both panels as an SVG without a background."""
    style = {
        "svg.hashsalt": "gate",
        "hatch.color": paper,
        "font.size": 10,
        "text.color": ink,
        "axes.edgecolor": rule,
        "axes.labelcolor": muted,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "xtick.color": muted,
        "ytick.color": muted,
        "grid.color": rule,
        "grid.linewidth": 0.6,
    }
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(style):
        figure = Figure(figsize=(10, 3.9))
        alarms, power = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _power(power, failing, series)
        _false_alarms(alarms, failing, ink, series)
        for axes in (power, alarms):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0)
            axes.set_axisbelow(True)
        figure.tight_layout(w_pad=3)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _power(axes: Axes, failing: list[list[float]], series: tuple[str, ...]) -> None:
    for setting, percents in zip(SETTINGS, failing, strict=True):
        dash = (0, (4, 1.5)) if setting.rule is one_against_one else "-"
        slowdowns = [100 * slowdown for slowdown in SLOWDOWNS]
        axes.plot(slowdowns, percents, linestyle=dash, color=series[setting.colour], linewidth=2)
    axes.set_title("Slower cases that fail, %")
    axes.set_xlabel("true slowdown, %; colours and dashes as on the left")
    axes.set_xticks(range(11))
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 102)
    axes.grid(axis="y")


def _false_alarms(axes: Axes, failing: list[list[float]], ink: str, series: tuple[str, ...]) -> None:
    for row, (setting, percents) in enumerate(zip(SETTINGS, failing, strict=True)):
        alarms = percents[0]
        hatch = "////" if setting.rule is one_against_one else ""
        axes.barh(row, alarms - SHARES[0], left=SHARES[0], height=0.32, color=series[setting.colour], hatch=hatch)
        axes.text(SHARES[0], row - 0.3, setting.name, va="center", color=ink)
        axes.text(alarms * 1.15, row, f"{alarms:.1g} %", va="center", color=ink)
    axes.set_title("False alarms: unchanged cases that fail, %")
    axes.set_xscale("log")
    axes.set_xlim(SHARES[0], 30)
    axes.set_xticks(SHARES, [f"{share:g}" for share in SHARES])
    axes.minorticks_off()
    axes.set_xlabel("share, logarithmic scale")
    axes.set_ylim(len(SETTINGS) - 0.6, -0.6)
    axes.set_yticks([])
    axes.grid(axis="x")
