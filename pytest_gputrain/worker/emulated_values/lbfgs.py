"""Lets L-BFGS go on if nothing computed the numbers that it would stop by.

L-BFGS keeps two vectors of the size of all parameters for each iteration that makes progress. If it went by made-up numbers,
it would find no progress, and its history would stay empty.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from .after_import import after_import
from .contents import Contents

_ASSUMED: Final = "L-BFGS, which runs all of its iterations and stores the direction of each"


class Lbfgs:
    """Makes `torch.optim.LBFGS` run all of its iterations, although the numbers by which it would stop are unknown.

    Args:
        contents: the values that are known.
        note: called with a text for each comparison that was assumed.
    """

    def __init__(self, contents: Contents, note: Callable[[str], object]) -> None:
        self._contents, self._note = contents, note
        self._thread = threading.local()
        self._losses = itertools.count()

    def follow(self) -> None:
        """Replace the step of `torch.optim.LBFGS` as soon as the program imports it."""
        after_import("torch.optim.lbfgs", self._replace)

    def _replace(self, module: Any) -> None:
        step = module.LBFGS.step

        @functools.wraps(step)
        def step_and_decide(optimizer: Any, closure: Callable[[], Any]) -> Any:
            def run_model() -> Any:
                with self._deciding(False):
                    return closure()

            with self._deciding(True):
                return step(optimizer, run_model)

        module.LBFGS.step = step_and_decide
        module.float = self._loss

    @contextmanager
    def _deciding(self, decides: bool) -> Iterator[None]:
        before = getattr(self._thread, "decides", False)
        self._thread.decides = decides
        try:
            yield
        finally:
            self._thread.decides = before

    def _loss(self, loss: Any) -> float:
        """Return a loss as a number. One that nobody computed is less than all before: L-BFGS stops if two are equal."""
        number = float(loss)
        unknown = isinstance(loss, Tensor) and loss.is_cuda and self._contents.find(loss) is None
        return -float(next(self._losses)) if unknown else number

    def compared(self, name: str, arguments: Sequence[Any]) -> bool | None:
        """Return what a comparison in a step of L-BFGS finds, outside of the closure; None for all others.

        A direction with positive curvature (``ys > 1e-10``) is stored. The line search takes its first step
        (``abs(gtd_new) <= -c2 * gtd``). Everything else that L-BFGS asks is whether it may stop.
        """
        if not getattr(self._thread, "decides", False):
            return None
        other = arguments[1]
        found = isinstance(other, Tensor) if name == "le" else name == "gt" and isinstance(other, float) and other > 0
        if found:
            self._note(_ASSUMED)
        return found
