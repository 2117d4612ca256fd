"""Takes from root what no other user may do, so that tests of permissions are the same for both."""

import contextlib
import ctypes
import os
import struct

import pytest

_VERSION_3 = 0x20080522
_OVERRIDE = (1 << 1) | (1 << 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: to read, write and enter what the mode forbids."""


@contextlib.contextmanager
def without_rights_of_root():
    """Have this thread obey the modes of files and folders, as any user's does."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    if libc.capget(header, held):
        pytest.skip("capabilities cannot be changed here")
    effective, *rest = struct.unpack("=6I", held.raw)
    if libc.capset(header, struct.pack("=6I", effective & ~_OVERRIDE, *rest)):
        pytest.skip("capabilities cannot be changed here")
    try:
        yield
    finally:
        libc.capset(header, held.raw)
