"""Says in one sentence why there is no prediction, with the line of own code and without torch's."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pytest_gputrain.records import Crashed
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.own_lines import is_installed
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.run import crash

_TWO_DEVICES: Final = (
    "an operator gets tensors of two devices, which fails on a GPU as well: one is on setup.device, the other on cpu, "
    "the host. A tensor is on the host if it names no device or only setup.device.type; make it on setup.device, or move it "
    "there"
)
_MEMORY: Final = "the case reads the memory of a tensor, which a prediction does not have: measure it instead"
_PACKED: Final = (
    "weights that are packed in 4 bits are not sharded in a prediction by rules: run the case on an emulated GPU, for which "
    "gputrain emulate --install puts a CUDA build of torch beside yours"
)
_UNKNOWN: Final = "the case calls an operator that a prediction does not know ({}): measure it instead"

_SENTENCES: Final = (
    ("Expected all tensors to be on the same device", _TWO_DEVICES),
    ("Unhandled FakeTensor Device Propagation", _TWO_DEVICES),
    (".tolist() is not supported for tensor subclasses", _MEMORY),
    ("isinstance() arg 2 must be a type", _PACKED),
    ("its data is not allocated yet", _MEMORY),
    ("Cannot access data pointer of Tensor", _MEMORY),
    ("There was no rule registered for HigherOrderOperator", _UNKNOWN),
    ("no fake impl or Meta kernel registered", _UNKNOWN),
)
"""torch's errors about fake tensors, and the sentences for them."""

_INTERNAL: Final = (Path(torch.__file__).parent, Path(__file__).parents[2])


def refusal(error: Exception, progress: Progress, *, own_code: bool) -> Crashed:
    """Turn an exception in a prediction into a reply."""
    crashed = crash(error, progress)
    refused = isinstance(error, CheckFailed)
    sentence = str(error) if refused else sentence_of_fakes(error) or crashed.sentence
    detail = "" if refused else crashed.detail
    if own_code:
        place = _place(error)
        sentence = f"{sentence.rstrip('.')}, at {place}" if place else sentence
        detail = detail and _without_internals(error)
    return msgspec.structs.replace(crashed, sentence=sentence, detail=detail, refused=refused)


def sentence_of_fakes(error: Exception) -> str | None:
    """Return why a prediction cannot run what may train all the same; None where it is another exception."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"the case reads the content of a tensor ({error.func}), which a prediction does not know: measure it instead"
    message = str(error)
    return next((sentence.format(_first_line(message)) for words, sentence in _SENTENCES if words in message), None)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0].partition(". ")[0].partition(".Hint")[0]


def _place(error: Exception) -> str:
    """Name the last line of own code that the exception came through, ``test_mine.py:41: loss.backward()``; empty without
    one."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(Path(frame.filename))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _is_own(path: Path) -> bool:
    if not path.is_absolute():  # made by exec
        return False
    return not _is_internal(path) and not is_installed(path)


def _is_internal(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _INTERNAL)


def _without_internals(error: Exception) -> str:
    """Return the traceback without the lines of torch and of this package."""
    described = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = described
    while link is not None:
        kept = [frame for frame in link.stack if not _is_internal(Path(frame.filename))]
        link.stack = traceback.StackSummary.from_list(kept)
        link.__context__ = None  # on its way, torch raised and caught others
        link = link.__cause__
    return "".join(described.format())
