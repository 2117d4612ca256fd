"""What a vendor's library replied, written down on one machine and replayed on another.

A recording is JSON: calls by function and arguments, each with its replies in their order. Handles, which mean nothing
elsewhere, are numbered. Replayed, a call that is asked more often than it was recorded repeats its last reply, and a call
that was never recorded raises the library's error for what is not supported.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pytest_gputrain.hardware import amd

ERRORS: Final = {"pynvml": "NVMLError", "amdsmi": "AmdSmiException"}
"""Base of each library's exceptions."""

_UNSUPPORTED: Final = {"pynvml": 3, "amdsmi": 2}


class _Handle:
    """A handle of a recording."""

    def __init__(self, number: int) -> None:
        self.number = number


class Recorder:
    """Stands in a library's place, and keeps what it replies in `calls`."""

    def __init__(self, library: Any, name: str) -> None:
        self._library, self._error = library, getattr(library, ERRORS[name])
        self._handles: list[Any] = []
        self.calls: dict[str, list[Any]] = {}
        self.constants: dict[str, Any] = {}
        self.document = {"library": name, "constants": self.constants, "calls": self.calls}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import machinery
            raise AttributeError(name)
        found = getattr(self._library, name)
        if isinstance(found, type):
            if issubclass(found, enum.Enum):
                self.constants[name] = {member: one.value for member, one in found.__members__.items()}  # aliases, too
            return found
        if not callable(found):
            self.constants[name] = found
            return found
        return lambda *arguments: self._call(name, found, arguments)

    def _call(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        key = _key(name, [self._plain(argument) for argument in arguments])
        replies = self.calls.setdefault(key, [])
        try:
            reply = function(*arguments)
        except self._error as error:
            code = getattr(error, "value", None) or getattr(error, "err_code", None)
            replies.append({"error": code, "says": str(error)})
            raise
        replies.append({"reply": self._plain(reply)})
        return reply

    def _plain(self, value: Any) -> Any:
        """JSON's kinds of values; what is none of them is a handle."""
        if isinstance(value, enum.Enum):
            return value.value
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, dict):
            return {str(key): self._plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(one) for one in value]
        if isinstance(value, ctypes.Structure):
            return {"fields": {field[0]: self._plain(getattr(value, field[0])) for field in value._fields_}}
        if isinstance(value, _Handle):
            return {"handle": value.number}
        if isinstance(value, ctypes._SimpleCData | ctypes._Pointer):
            return {"handle": self._handle(value)}
        return {"fields": {name: self._plain(one) for name, one in vars(value).items()}}

    def _handle(self, value: Any) -> int:
        """Handles are equal that point to the same."""
        known = [_address(handle) for handle in self._handles]
        if _address(value) not in known:
            self._handles.append(value)
            return len(known)
        return known.index(_address(value))


class Said(msgspec.Struct):
    """One reply, or one error."""

    reply: Any = None
    error: int | None = None
    says: str = ""


class _Recording(msgspec.Struct):
    library: Literal["pynvml", "amdsmi"]
    calls: dict[str, list[Said]]
    constants: dict[str, int | float | str | bool | dict[str, int] | None] = {}


class Replay(types.ModuleType):
    """A recording as the library that it was made from."""

    def __init__(self, recording: Any) -> None:
        """Raises:
        ValueError: it is no recording.
        """
        try:
            sound = msgspec.convert(recording, _Recording)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"it is no recording of a vendor's library ({error}); make one with gputrain devices --record"
            ) from None
        super().__init__(sound.library)
        self.asked: list[str] = []
        """Calls in their order."""
        self._calls = sound.calls
        self._left = {key: list(replies) for key, replies in self._calls.items()}
        self._unsupported = _UNSUPPORTED[sound.library]
        base = _error_class(ERRORS[sound.library])
        setattr(self, ERRORS[sound.library], base)
        self._error = base
        for name, value in sound.constants.items():
            setattr(self, name, enum.IntEnum(name, value) if isinstance(value, dict) else value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in {_function(key) for key in self._calls}:
            raise AttributeError(name)
        return lambda *arguments: self._reply(name, arguments)

    def _reply(self, name: str, arguments: Iterable[Any]) -> Any:
        key = _key(name, [_plain_again(argument) for argument in arguments])
        self.asked.append(key)
        replies = self._left.get(key)
        if not replies:
            raise self._error(self._unsupported, f"{key} was not recorded")
        found = replies.pop(0) if len(replies) > 1 else replies[0]
        if found.error is not None:
            raise self._error(found.error, found.says)
        return _live(found.reply)


@contextlib.contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """What the libraries of this machine reply in the block, one recording each."""
    with _in_place_of_libraries() as put:
        found = []
        for name, load in {"pynvml": _pynvml, "amdsmi": amd.load}.items():
            library = load()
            if library is not None:
                recorder = Recorder(library, name)
                put(name, recorder)
                found.append(recorder.document)
        yield found


@contextlib.contextmanager
def replayed(path: Path) -> Iterator[None]:
    """The libraries reply in the block as they did in a file of recordings; those that it lacks are not there.

    Raises:
        ValueError: no recording, or one with replies that no library gives; one sentence.
        OSError: it cannot be read.
    """
    try:
        recordings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    try:
        libraries = [Replay(one) for one in (recordings if isinstance(recordings, list) else [recordings])]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    with _in_place_of_libraries() as put:
        for name in ERRORS:
            put(name, None)
        for library in libraries:
            put(library.__name__, library)
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{path} has replies that no driver gives ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def _in_place_of_libraries() -> Iterator[Callable[[str, Any], None]]:
    """A way to have `import` find something else, undone in the end."""
    before = {name: sys.modules[name] for name in ERRORS if name in sys.modules}

    def put(name: str, library: Any) -> None:
        sys.modules[name] = library

    try:
        yield put
    finally:
        for name in ERRORS:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _error_class(name: str) -> type[Exception]:
    class Error(Exception):
        def __init__(self, value: int | None, says: str) -> None:
            super().__init__(says)
            self.value = self.err_code = value

    Error.__name__ = name
    return Error


def _key(name: str, arguments: list[Any]) -> str:
    return f"{name}({', '.join(json.dumps(argument) for argument in arguments)})"


def _function(key: str) -> str:
    return key.partition("(")[0]


def _address(handle: Any) -> Any:
    return ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, ctypes._Pointer) else handle.value


def _plain_again(value: Any) -> Any:
    if isinstance(value, _Handle):
        return {"handle": value.number}
    return value.value if isinstance(value, enum.Enum) else value


def _live(value: Any) -> Any:
    """The inverse of `Recorder._plain`, with fields as attributes."""
    if isinstance(value, list):
        return [_live(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"handle"}:
        return _Handle(value["handle"])
    if value.keys() == {"fields"}:
        return types.SimpleNamespace(**{name: _live(one) for name, one in value["fields"].items()})
    return {key: _live(one) for key, one in value.items()}
