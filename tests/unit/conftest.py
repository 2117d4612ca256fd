"""Settings of Hypothesis, and snapshots of few lines."""

import errno
import fcntl
import os
import stat

import pytest
from hypothesis import HealthCheck, settings
from syrupy.extensions.amber import AmberSnapshotExtension

# No deadline and no check of speed: no test here depends on how fast the machine is.
settings.register_profile("unit", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
# For mutmut's thousands of mutants and for further versions of Python: few examples, and the same ones.
settings.register_profile("few", settings.get_profile("unit"), max_examples=10, derandomize=True)
settings.load_profile("unit")


class _Brief(AmberSnapshotExtension):
    """Writes what is nested in a snapshot on one line each, where that is short."""

    def serialize(self, data, **options):
        return super().serialize(_parts(_ordered(data)), **options)


@pytest.fixture
def snapshot(snapshot):
    return snapshot.use_extension(_Brief)


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def no_locks_of_folders(monkeypatch):
    """Have the file system refuse to lock folders, as some of the network do."""
    lock = fcntl.flock

    def flock(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def _ordered(data):
    """Return the data with lists for sets, whose order differs from run to run."""
    if isinstance(data, dict):
        return {name: _ordered(value) for name, value in data.items()}
    if isinstance(data, set | frozenset):
        return sorted(data)
    return type(data)(map(_ordered, data)) if type(data) in (list, tuple) else data


def _parts(data):
    if isinstance(data, dict):
        return {name: _brief(value) for name, value in data.items()}
    return [_brief(value) for value in data] if isinstance(data, list | tuple) else data


def _brief(data):
    if not isinstance(data, dict | list | tuple):
        return data
    line = repr(data)
    if "\\n" not in line and len(line) <= 600:
        return line
    return _packed(data) if all(isinstance(value, str) for value in data) and not isinstance(data, dict) else _parts(data)


def _packed(lines):
    """Return lines of up to 200 characters, each of some of the given ones."""
    packed = [""]
    for line in lines:
        if packed[-1] and "\n" not in packed[-1] + line and len(packed[-1] + line) < 200:
            packed[-1] += f" | {line}"
        else:
            packed.append(line)
    return packed[1:]
