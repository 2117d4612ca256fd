"""Draws what host and GPU do in a step that the GPU decides, and in one that the host decides, and what each is held to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pytest_gputrain.gate.host_bound import GPU_BOUND, LEAST_HOST_TOLERANCE

LAUNCHES: Final = 9
HOST, GPU, STEP = 2.0, 1.0, 0.0
"""The rows of a panel."""


@dataclass(frozen=True)
class Pace:
    title: str
    launch: float
    """The time in which the host asks for a kernel, as a share of the step."""
    kernel: float
    """The time of a kernel."""
    wall: str
    """What is said of the step's wall seconds."""
    kernels: str


PACES: Final = (
    Pace(
        f"The GPU is busy for {GPU_BOUND:.0%} of the step or more",
        0.035,
        0.108,
        "wall seconds: judged by the time tolerance, on any host",
        "the GPU always has work: the host is ahead of it",
    ),
    Pace(
        "The GPU waits for the host",
        0.107,
        0.026,
        f"wall seconds: {LEAST_HOST_TOLERANCE:.0%} or the spread of the baseline on its machine, told on another one",
        "GPU seconds: the sum of these, without the gaps",
    ),
)


def draw(path: Path, paper: str, ink: str, muted: str, rule: str, series: tuple[str, ...]) -> None:
    """Write both panels as an SVG without a background."""
    style = {
        "svg.hashsalt": "pace",
        "font.size": 10,
        "text.color": ink,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "ytick.color": ink,
    }
    with mpl.rc_context(mpl.rcParamsDefault), mpl.rc_context(style):
        figure = Figure(figsize=(10, 4.6))
        for axes, pace in zip(figure.subplots(2, 1), PACES, strict=True):
            _draw(axes, pace, paper, muted, series)
        figure.tight_layout(h_pad=1.6)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _draw(axes: Axes, pace: Pace, paper: str, muted: str, series: tuple[str, ...]) -> None:
    asked = [number * pace.launch for number in range(LAUNCHES)]
    begins: list[float] = []
    for begin in asked:
        begins.append(max(begin + pace.launch, begins[-1] + pace.kernel if begins else 0.0))
    end = max(begins[-1] + pace.kernel, asked[-1] + pace.launch)
    for row, colour, starts, length in ((HOST, series[0], asked, pace.launch), (GPU, series[1], begins, pace.kernel)):
        axes.barh([row] * LAUNCHES, [length] * LAUNCHES, left=starts, height=0.55, color=colour, edgecolor=paper)
    axes.annotate("", (0, STEP + 0.15), (end, STEP + 0.15), arrowprops={"arrowstyle": "<->", "color": muted})
    axes.text(0, STEP - 0.05, pace.wall, va="top", color=muted)
    axes.text(1.03, GPU, pace.kernels, va="center", color=muted)
    axes.text(1.03, HOST, "the host asks for kernels", va="center", color=muted)
    axes.set_title(pace.title)
    axes.set_yticks([HOST, GPU], ["host", "GPU"])
    axes.set_xticks([])
    axes.set_xlim(0, 1.55)
    axes.set_ylim(-0.75, 2.45)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
