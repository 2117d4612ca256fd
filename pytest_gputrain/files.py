"""Files that are whole or absent, and changed by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write ``data`` beside ``path`` and rename over it: whoever reads sees the old file or the new one, whole.

    Args:
        data: in parts where it is not all to be in memory at once.

    Raises:
        OSError: the folder cannot be made or written; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)  # mkstemp's 0600 is for secrets
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context that one process of this user at a time is in, of those that name the same file.

    Raises:
        OSError: the lock cannot be made.
    """
    from filelock import FileLock

    # Outside of the file's folder: it would be committed with it.
    locks = Path(tempfile.gettempdir()) / f"gputrain-locks-{os.getuid()}"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / hashlib.sha256(os.fsencode(path)).hexdigest()):
        yield
