"""What all results of one pytest run share."""

from __future__ import annotations

import datetime
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """When and of which commit a run was."""

    id: str
    created: str
    """UTC, ISO 8601."""
    commit: str
    """With ``+dirty`` where tracked files differ from it; empty outside of a repository."""
    branch: str

    @classmethod
    def begin(cls, root: Path) -> Session:
        """A new session of the repository that ``root`` lies in."""
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        if commit and _git(root, "status", "--porcelain", "--untracked-files=no"):
            commit += "+dirty"
        now = datetime.datetime.now(datetime.UTC)
        return cls(
            id=uuid.uuid4().hex[:12],
            created=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
            commit=commit,
            branch=_git(root, "branch", "--show-current"),
        )


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command in ``root``; empty where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
