"""Where this Python keeps its frames, which stand-ins in C read."""

import builtins
import ctypes
from types import SimpleNamespace

import pytest

from pytest_gputrain.worker import python_frames
from pytest_gputrain.worker.python_frames import LayoutUnknown, read_frames


def written(text):
    """A function of the stand-ins that writes this text."""

    def write(number, to, room):
        if to is not None:
            to.value = text.encode()
        return len(text)

    return write


def library(text):
    switched_off = []
    stand_ins = SimpleNamespace(
        gputrain_counters_python=lambda offsets, code_type: None,
        gputrain_counters_stack=lambda: 1,
        gputrain_counters_places=written(text),
        gputrain_counters_no_stacks=lambda: switched_off.append(True),
    )
    return stand_ins, switched_off


def test_frames_that_are_not_those_that_python_tells_are_not_read():
    stand_ins, switched_off = library("1\tother.py\tread_frames\n2\tother.py\tmain\n")
    with pytest.raises(LayoutUnknown, match="are not read as Python tells them"):
        read_frames(stand_ins)
    assert switched_off


def test_memory_that_may_not_be_read_is_no_error_of_the_training(monkeypatch):
    def refuse(path, *arguments, **keywords):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(LayoutUnknown, match="keeps its frames elsewhere"):
        read_frames(library("")[0])


def test_the_offsets_lead_from_a_code_object_to_its_texts():
    def inner():
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return python_frames._Finder(memory).layout()

    layout = inner()
    file, function, length, ascii_text = layout[5], layout[6], layout[8], layout[11]
    code = inner.__code__
    for at, expected in ((file, code.co_filename), (function, code.co_qualname)):
        string = ctypes.c_void_p.from_address(id(code) + at).value
        size = ctypes.c_size_t.from_address(string + length).value
        assert ctypes.string_at(string + ascii_text, size).decode() == expected
