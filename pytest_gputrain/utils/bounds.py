"""Bounds of what options accept. Their help names them, so pytest imports this module in every project."""

from __future__ import annotations

from typing import Final

MAX_RUNS: Final = 20
"""Runs that a baseline keeps of one case."""
MOST_RUNS: Final = 5
"""Fresh processes of a case in doubt, unless an option says otherwise."""
LEAST_STEPS: Final = 20
"""Of a loss curve: four losses a fifth (see `pytest_gputrain.gate.loss_trend`)."""
