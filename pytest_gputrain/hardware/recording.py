"""Records what a vendor's library replies on one machine, and replays it on another.

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
from pytest_gputrain.utils.reading import read_whole

ERRORS: Final = {"pynvml": "NVMLError", "amdsmi": "AmdSmiException"}
"""Base of each library's exceptions."""

_UNSUPPORTED: Final = {"pynvml": 3, "amdsmi": 2}

_MOST_UNRECORDED: Final = 10_000
"""A sound recording lacks a few calls of each GPU."""


class _Handle:
    """A handle of the library, by its number in a recording."""

    def __init__(self, number: int) -> None:
        self.number = number


class Recorder:
    """Passes calls on to a library and keeps the replies in `calls`."""

    def __init__(self, library: Any, name: str) -> None:
        self._library, self._error = library, getattr(library, ERRORS[name])
        self._handles: list[Any] = []
        self.calls: dict[str, list[Any]] = {}
        self.constants: dict[str, Any] = {}
        self.document = {"library": name, "constants": self.constants, "calls": self.calls}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # The import system asks for these names.
            raise AttributeError(name)
        attribute = getattr(self._library, name)
        if isinstance(attribute, type):
            if issubclass(attribute, enum.Enum):
                # `__members__` also has aliases.
                self.constants[name] = {member: item.value for member, item in attribute.__members__.items()}
            return attribute
        if not callable(attribute):
            self.constants[name] = attribute
            return attribute
        return lambda *arguments: self._call(name, attribute, arguments)

    def _call(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        key = _key(name, [self._to_json(argument) for argument in arguments])
        replies = self.calls.setdefault(key, [])
        try:
            reply = function(*arguments)
        except self._error as error:
            code = getattr(error, "value", None) or getattr(error, "err_code", None)
            replies.append({"error": code, "says": str(error)})
            raise
        replies.append({"reply": self._to_json(reply)})
        return reply

    def _to_json(self, value: Any) -> Any:
        """Return a value in the types of JSON. A value of any other type is a handle."""
        if isinstance(value, enum.Enum):
            return value.value
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, dict):
            return {str(key): self._to_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple | ctypes.Array):
            return [self._to_json(item) for item in value]
        if isinstance(value, ctypes.Structure | ctypes.Union):
            return {"fields": {field[0]: self._to_json(getattr(value, field[0])) for field in value._fields_}}
        if isinstance(value, _Handle):
            return {"handle": value.number}
        if isinstance(value, ctypes._SimpleCData | ctypes._Pointer):
            return {"handle": self._handle(value)}
        return {"fields": {name: self._to_json(item) for name, item in vars(value).items()}}

    def _handle(self, value: Any) -> int:
        """Return the number of a handle. Handles that point to the same address have the same number."""
        addresses = [_address(handle) for handle in self._handles]
        if _address(value) not in addresses:
            self._handles.append(value)
            return len(addresses)
        return addresses.index(_address(value))


class RecordedReply(msgspec.Struct):
    """A reply of a function, or its error."""

    reply: Any = None
    error: int | None = None
    says: str = ""


class Recording(msgspec.Struct):
    """The replies of a vendor's library."""

    library: Literal["pynvml", "amdsmi"]
    calls: dict[str, list[RecordedReply]]
    constants: dict[str, int | float | str | bool | dict[str, int] | None] = {}


class Replay(types.ModuleType):
    """Replies as a library did when it was recorded."""

    is_replay = True
    """Its GPUs have no files here."""

    def __init__(self, recording: Any) -> None:
        """Load the library that was recorded.

        Raises:
            ValueError: it is no recording.
        """
        try:
            sound = msgspec.convert(recording, Recording)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"it is not a recording of a vendor's library ({error}); make one with gputrain doctor --record"
            ) from None
        super().__init__(sound.library)
        self.asked: list[str] = []
        """Calls in their order."""
        self._calls = sound.calls
        self._left = {key: list(replies) for key, replies in self._calls.items()}
        self._unrecorded = 0
        self._unsupported = _UNSUPPORTED[sound.library]
        base = _error_class(ERRORS[sound.library])
        setattr(self, ERRORS[sound.library], base)
        self._error = base
        for name, value in sound.constants.items():
            setattr(self, name, enum.IntEnum(name, value) if isinstance(value, dict) else value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in {key.partition("(")[0] for key in self._calls}:
            raise AttributeError(name)
        return lambda *arguments: self._reply(name, arguments)

    def _reply(self, name: str, arguments: Iterable[Any]) -> Any:
        key = _key(name, [_handle_to_json(argument) for argument in arguments])
        self.asked.append(key)
        replies = self._left.get(key)
        if not replies:
            self._unrecorded += 1
            if self._unrecorded > _MOST_UNRECORDED:
                # A count in the recording is damaged, and its caller loops up to that count.
                raise ValueError(f"{self._unrecorded} calls that follow from it, as {key}, were not recorded")
            raise self._error(self._unsupported, f"{key} was not recorded")
        said = replies.pop(0) if len(replies) > 1 else replies[0]
        if said.error is not None:
            raise self._error(said.error, said.says)
        return _to_objects(said.reply)


@contextlib.contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """Provide a context that records what the libraries of this machine reply, in a recording for each."""
    with _in_place_of_libraries() as put:
        documents = []
        for name, load in {"pynvml": _pynvml, "amdsmi": amd.load}.items():
            library = load()
            if library is not None:
                recorder = Recorder(library, name)
                put(name, recorder)
                documents.append(recorder.document)
        yield documents


@contextlib.contextmanager
def replayed(path: Path) -> Iterator[None]:
    """Provide a context in which the libraries reply as in a file of recordings. Libraries without a recording are missing
    there.

    Raises:
        ValueError: no recording, or one with replies that no library gives; one sentence.
        OSError: it cannot be read.
    """
    try:
        recordings = json.loads(read_whole(path, pipe=True))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        libraries = [Replay(recording) for recording in (recordings if isinstance(recordings, list) else [recordings])]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    with _in_place_of_libraries() as put:
        for name in ERRORS:
            put(name, None)
        for library in libraries:
            put(library.__name__, library)
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has replies that no driver gives ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def _in_place_of_libraries() -> Iterator[Callable[[str, Any], None]]:
    """Provide a function that makes `import` find another library until the context ends."""
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


def _address(handle: Any) -> Any:
    return ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, ctypes._Pointer) else handle.value


def _handle_to_json(value: Any) -> Any:
    if isinstance(value, _Handle):
        return {"handle": value.number}
    return value.value if isinstance(value, enum.Enum) else value


def _to_objects(value: Any) -> Any:
    """Return a value from its form in JSON, with fields as attributes. This is the inverse of `Recorder._to_json`."""
    if isinstance(value, list):
        return [_to_objects(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"handle"}:
        return _Handle(value["handle"])
    if value.keys() == {"fields"}:
        return types.SimpleNamespace(**{name: _to_objects(item) for name, item in value["fields"].items()})
    return {key: _to_objects(item) for key, item in value.items()}
