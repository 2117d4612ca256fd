"""Records when and of which commit a pytest run was, which all of its results share, and tells whether it is in CI."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BRANCHES: Final = (
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME",
    "CI_COMMIT_BRANCH",
    "BUILDKITE_BRANCH",
    "BRANCH_NAME",
)
"""The variables for a branch of GitHub, GitLab, Buildkite and Jenkins, which check a commit out without its branch; a pull
request's own first."""

_PULL_REQUESTS: Final = ("CI_MERGE_REQUEST_IID", "BUILDKITE_PULL_REQUEST", "CHANGE_ID")
"""The variables for a pull request of GitLab, Buildkite and Jenkins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """The time and the commit of a run."""

    id: str
    created: str
    """UTC, ISO 8601."""
    commit: str
    """The commit, with ``+dirty`` if tracked files differ from it; empty outside of a repository."""
    changes: str = ""
    """Tells uncommitted changes of tracked files from others, of files apart that runs write; empty for none."""
    branch: str
    """The branch; empty outside of a repository, and for a detached head that no variable of CI names."""

    @classmethod
    def begin(cls, root: Path, written: Sequence[Path] = ()) -> RunInfo:
        """Return the time and the commit of a run that begins now, in the repository of ``root``.

        Args:
            written: files and folders whose changes are the run's own.
        """
        commit = git_output(root, "rev-parse", "--short=12", "HEAD")
        if commit and uncommitted(root):
            commit += "+dirty"
        now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 - the date of the run
        return cls(
            id=uuid.uuid4().hex[:12],
            created=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
            commit=commit,
            changes=_changes(root, written) if commit.endswith("+dirty") else "",
            branch=git_output(root, "branch", "--show-current") or (_branch_of_ci() if commit else ""),
        )


def uncommitted(folder: Path) -> bool:
    """Tell whether tracked files differ from the current commit."""
    return bool(git_output(folder, "status", "--porcelain", "--untracked-files=no"))


def archive(folder: Path, reference: str) -> bytes:
    """Return the files that a commit has in ``folder``, as a tar archive; empty for none.

    Raises:
        ValueError: there is no such commit, or no repository.
    """
    commit = git_output(folder, "rev-parse", "--verify", "--end-of-options", f"{reference}^{{commit}}")
    if not commit:
        raise ValueError(f"{reference!r} is not a commit of the repository of {folder}; fetch it, or give another")
    if not git_output(folder, "ls-tree", "--name-only", commit):
        return b""
    files = _output(folder, "archive", "--format=tar", commit)
    if files is None:
        raise ValueError(f"git archive does not give the files that {reference} has in {folder}")
    return files


def files_of_repository(folder: Path) -> list[Path]:
    """Return the files of the repository that ``folder`` is in, without ignored ones; none outside of a repository."""
    top = git_output(folder, "rev-parse", "--show-toplevel")
    listed = _output(Path(top), "ls-files", "-z", "--cached", "--others", "--exclude-standard") if top else None
    paths = (Path(top, os.fsdecode(name)) for name in (listed or b"").split(b"\0") if name)
    return [path for path in paths if path.exists()]


def in_ci() -> bool:
    """Tell whether this process runs in continuous integration, which sets ``CI``."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no", "off")


def in_pull_request() -> bool:
    """Tell whether this is a job for a pull request, or a merge request, of GitHub, GitLab, Buildkite or Jenkins."""
    if os.environ.get("GITHUB_EVENT_NAME", "").startswith("pull_request"):
        return True
    return any(os.environ.get(name, "") not in ("", "false") for name in _PULL_REQUESTS)


def _branch_of_ci() -> str:
    named = {name: os.environ.get(name, "") for name in _BRANCHES}
    if os.environ.get("GITHUB_REF_TYPE") == "tag":
        del named["GITHUB_REF_NAME"]
    return next(filter(None, named.values()), "")


def _changes(root: Path, written: Sequence[Path]) -> str:
    """Return a digest of the changes that are not committed. Without an answer of git it equals no other digest."""
    top = Path(git_output(root, "rev-parse", "--show-toplevel"))
    own = [path.resolve().relative_to(top) for path in written if path.resolve().is_relative_to(top)]
    apart = [f":(top,exclude,literal){path}" for path in own if path != Path()]
    diff = _output(root, "diff", "--no-ext-diff", "--no-color", "--full-index", "HEAD", "--", ":/", *apart)
    if diff is None:
        return uuid.uuid4().hex[:12]
    return hashlib.sha256(diff).hexdigest()[:12] if diff else ""


def git_output(root: Path, *arguments: str) -> str:
    """Return what a git command in ``root`` prints; empty if there is no git or no repository."""
    return (_output(root, *arguments) or b"").decode(errors="surrogateescape").strip()


def _output(root: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command; None if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
