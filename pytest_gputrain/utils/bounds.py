"""Bounds of what options accept and baselines hold. Help names them, so pytest imports this module in every project."""

from __future__ import annotations

from typing import Final

MAX_RUNS: Final = 20
"""Runs that a baseline keeps of one case."""
MOST_RUNS: Final = 5
"""Fresh processes of a case in doubt, unless an option says otherwise."""
LEAST_RUNS_ON_A_CPU: Final = 5
"""The least number of runs of a baseline for time on a CPU, because its processes differ too much."""
LEAST_STEPS: Final = 20
"""The least number of steps of a loss curve: four losses a fifth (see `pytest_gputrain.gate.loss_trend`)."""
