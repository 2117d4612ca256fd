"""The type of counts in records."""

from __future__ import annotations

from typing import Annotated

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A count that a file may hold. Larger ones are damage, and too large for arithmetic with floats."""
