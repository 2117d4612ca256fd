"""Names by which emulated workers find a CUDA build of torch that was installed beside the user's, and others refuse it."""

from __future__ import annotations

from typing import Final

SITE: Final = "site-packages"
"""The name by which code that is none of the program is known."""

LOCK: Final = "in-use.lock"
"""The file beside it that every process locks which may import them."""

SITE_VARIABLE: Final = "GPUTRAIN_EMULATED_SITE"
"""Environment variable: the folder of packages that the ``sitecustomize`` has workers and programs find."""

PYTHON_VARIABLE: Final = "GPUTRAIN_EMULATED_PYTHON"
"""Environment variable: the Python that this folder is for, and no other finds."""

ORIGIN_VARIABLE: Final = "GPUTRAIN_EMULATED_ORIGIN"
"""Environment variable: the wheel that torch came from."""
