"""What waits for the import of a module, as the recorders of scripts do."""

import importlib
import importlib.util
import sys

import pytest

from pytest_gputrain.worker.emulated_values.after_import import after_import


@pytest.fixture
def latecomer(tmp_path, monkeypatch):
    """A module that can be imported, and is not yet."""
    (tmp_path / "latecomer.py").write_text("finished = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "latecomer"
    sys.modules.pop("latecomer", None)


def seen(name):
    calls = []
    stop = after_import(
        name,
        lambda module: calls.append(("after", module.finished)),
        lambda module: calls.append(hasattr(module, "finished")),
    )
    return calls, stop


def test_a_program_may_look_for_the_module_before_it_imports_it(latecomer):
    calls, _ = seen(latecomer)
    for _ in range(2):
        assert importlib.util.find_spec(latecomer)
    assert calls == []
    importlib.import_module(latecomer)
    assert calls == [False, ("after", True)]
    importlib.reload(sys.modules[latecomer])
    assert len(calls) == 2


def test_several_may_wait_for_one_module(latecomer):
    (one, _), (two, _) = seen(latecomer), seen(latecomer)
    importlib.import_module(latecomer)
    assert one == two == [False, ("after", True)]


def test_nothing_is_called_once_the_waiting_stopped(latecomer):
    calls, stop = seen(latecomer)
    spec = importlib.util.find_spec(latecomer)
    stop()
    stop()
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    importlib.import_module(latecomer)
    assert calls == []


def test_an_import_that_fails_may_be_tried_again(latecomer, tmp_path):
    calls, _ = seen(latecomer)
    (tmp_path / "latecomer.py").write_text("raise ModuleNotFoundError('torch')\n")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(latecomer)
    (tmp_path / "latecomer.py").write_text("finished = 'at last'\n")
    importlib.invalidate_caches()
    importlib.import_module(latecomer)
    assert calls[-1] == ("after", "at last")
