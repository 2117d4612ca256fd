"""Does something to a module as soon as the program has imported it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(
    name: str, action: Callable[[Any], None], before: Callable[[ModuleType], None] | None = None
) -> Callable[[], None]:
    """Call ``action`` with a module once, as soon as it is imported.

    A program that only looks for the module, as ``importlib.util.find_spec`` does, still imports it later.

    Args:
        name: the module's full name.
        action: called with the module.
        before: called with the module before its code runs.

    Returns:
        What stops the waiting.
    """
    finder = _Finder(name, action, before)
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, finder)
    return finder.stop


class _Finder:
    """Finds a module as Python would, and lets its loader call what waits for it."""

    def __init__(self, name: str, action: Callable[[Any], None], before: Callable[[ModuleType], None] | None) -> None:
        self._name, self._action, self._before = name, action, before

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        # Finders before this one may wait for the same module, and would then ask this finder again.
        others = [finder for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            waiting = self in sys.meta_path
            if waiting and self._before is not None:
                self._before(module)
            execute(module)
            if waiting:
                self.stop()
                self._action(module)

        loader.exec_module = execute_and_act
        return spec

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
