"""Runs the command ``gputrain comment``, which puts summaries of runs on the pull request of the CI job that it runs in.

Interfaces: https://docs.github.com/rest/issues/comments and https://docs.gitlab.com/api/notes, whose comments have the same
two fields, and https://docs.github.com/graphql/reference/queries and https://docs.gitlab.com/api/users for the user of a
token. The token of a job of GitHub may not read its user by REST.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_gputrain.report.summary import fitted, is_to_accept
from pytest_gputrain.utils import console, markdown
from pytest_gputrain.utils.reading import read_whole

_PAGE: Final = 100
"""The comments that are asked for at a time, which is the most that both hosts give."""
_SECONDS: Final = 30.0
_FORBIDDEN: Final = (401, 403, 404)


class _Host(NamedTuple):
    """A host of pull requests: where its comments are, and how they are written."""

    comments: str
    """The URL that lists comments and takes a new one."""
    comment: str
    """The URL of one comment, without its number."""
    replaces: str
    """The HTTP method that replaces a comment."""
    headers: Mapping[str, str]
    job: str
    """The page of the job."""
    most_bytes: int
    """The longest comment."""
    me: tuple[str, str, object]
    """How to ask for the number of the user whose token it is: the method, the URL, and what is sent."""
    author: str
    """The field of a comment that has its author."""


class _NoPullRequest(Exception):
    """This job has no pull request, or may not comment on it. The message says so."""


class _Failed(Exception):
    """The host refused the comment. The message says why."""


def add_to(commands: Any) -> None:
    comment = commands.add_parser(
        "comment",
        help="put summaries of runs on the pull request of this CI job, as one comment that later runs replace",
        description="In a job of GitHub or GitLab, put files that --gpu-summary has written on the pull request of the job. "
        "A later run replaces the comment. GITHUB_TOKEN has to hold a token with the permission pull-requests: write, or "
        "GPUTRAIN_GITLAB_TOKEN one of the project with the scope api. A job without a pull request, or of one from a fork, "
        "whose token may only read, says so and succeeds.",
    )
    comment.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a summary, in Markdown")
    comment.add_argument(
        "--name", default="gputrain", help="tells several comments on one pull request apart (default: %(default)s)"
    )
    comment.add_argument(
        "--accept",
        default="",
        metavar="TEXT",
        help="how to accept the new figures, as the last line where one failed or is new",
    )
    comment.add_argument("--print", action="store_true", help="print the comment instead, in a CI job or elsewhere")


def main(options: argparse.Namespace) -> int:
    try:
        if not re.fullmatch(r"[\w .-]*\w", options.name):
            raise _Failed(f"--name {options.name!r} has something else than letters, digits, dots, hyphens and spaces")
        marker = f"<!-- gputrain comment: {options.name} -->"
        if options.print:
            console.put(_body(marker, options.files, options.accept))
            return 0
        host = _host(os.environ)
        console.put(_put(host, marker, _body(marker, options.files, options.accept, host.job, host.most_bytes)))
    except _NoPullRequest as reason:
        console.put(f"nothing was posted: {reason}")
    except _Failed as error:
        console.say(error)
        return 2
    return 0


def _host(environ: Mapping[str, str]) -> _Host:
    """Return the host of this job, with the place of its comments.

    Raises:
        _NoPullRequest: it has none.
        _Failed: a variable is missing.
    """
    if environ.get("GITHUB_ACTIONS") == "true":
        try:
            event = json.loads(read_whole(Path(environ["GITHUB_EVENT_PATH"])))
        except (KeyError, OSError, ValueError) as error:
            raise _Failed(f"GITHUB_EVENT_PATH names no event of GitHub: {error}") from None
        number = event.get("pull_request", {}).get("number")
        if number is None:
            raise _NoPullRequest("this job does not run for a pull request")
        repository = f"{_set(environ, 'GITHUB_API_URL')}/repos/{_set(environ, 'GITHUB_REPOSITORY')}"
        return _Host(
            comments=f"{repository}/issues/{number}/comments",
            comment=f"{repository}/issues/comments",
            replaces="PATCH",
            headers={
                "Authorization": f"Bearer {_set(environ, 'GITHUB_TOKEN')}",
                "Accept": "application/vnd.github+json",
                "X-GitHub-Api-Version": "2022-11-28",
            },
            job="/".join(
                (
                    environ.get("GITHUB_SERVER_URL", ""),
                    environ["GITHUB_REPOSITORY"],
                    "actions/runs",
                    environ.get("GITHUB_RUN_ID", ""),
                )
            ),
            most_bytes=65_536,
            me=("POST", _set(environ, "GITHUB_GRAPHQL_URL"), {"query": "{viewer{id:databaseId}}"}),
            author="user",
        )
    if environ.get("GITLAB_CI") == "true":
        number = environ.get("CI_MERGE_REQUEST_IID")
        if not number:
            raise _NoPullRequest("this job does not run for a merge request")
        notes = f"{_set(environ, 'CI_API_V4_URL')}/projects/{_set(environ, 'CI_PROJECT_ID')}/merge_requests/{number}/notes"
        if not environ.get("GPUTRAIN_GITLAB_TOKEN"):
            raise _NoPullRequest("GPUTRAIN_GITLAB_TOKEN is not set, as in a merge request from a fork")
        headers = {"PRIVATE-TOKEN": environ["GPUTRAIN_GITLAB_TOKEN"]}
        me = ("GET", f"{environ['CI_API_V4_URL']}/user", None)
        return _Host(notes, notes, "PUT", headers, environ.get("CI_JOB_URL", ""), 1_000_000, me, "author")
    raise _Failed("this is no job of GitHub or GitLab; the command is for CI")


def _set(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise _Failed(f"{name} is not set; give it to the step, as docs/ci.md shows")
    return value


def _body(marker: str, files: list[Path], accept: str, job: str = "", most_bytes: int = sys.maxsize) -> str:
    """Return the text of the comment: the summaries, missing summaries, how to accept the figures, and a link to the job.

    Code of a pull request may have written the summaries. So nothing in them mentions anybody, and no line is a command to
    GitLab, which would begin with a slash.
    """
    lines: list[str] = []
    accepting = ""
    for file in files:
        try:
            if file.is_symlink():  # Code of a pull request could have made a link to a file with the token.
                raise FileNotFoundError
            text = read_whole(file).decode()
            lines += [*text.splitlines(), ""]
            accepting = accept if is_to_accept(text) else accepting
        except (OSError, UnicodeDecodeError):
            name = markdown.escaped(file.name)
            lines += [f"**{name}: the run ended before it could write a summary; the job has its log.**", ""]
    lines = [marker, *(re.sub(r"^(\s*)/", r"\1\\/", markdown.unlinked(line)) for line in lines)]
    last = "\n".join(filter(None, [accepting, f"[The job]({job})" if job else ""]))
    return f"{fitted(lines, most_bytes - len(last.encode()) - 2)}\n\n{last}".rstrip()


def _put(host: _Host, marker: str, body: str) -> str:
    """Replace the comment with this marker and this token's author, or make a new one. Return which was done.

    Raises:
        _Failed: the host does not tell whose token it is.
    """
    answer = _ask(host, *host.me)
    try:
        me = answer.get("data", {}).get("viewer", answer)["id"]
    except (AttributeError, KeyError, TypeError):
        raise _Failed(f"{host.me[1]} does not tell whose token this is: {json.dumps(answer)}") from None

    def is_ours(comment: Any) -> bool:
        author = comment.get(host.author) or {}  # the account of a comment may be deleted
        return author.get("id") == me and str(comment.get("body", "")).startswith(marker)

    number = next((comment["id"] for comment in _comments(host) if is_ours(comment)), None)
    if number is None:
        _ask(host, "POST", host.comments, {"body": body})
        return "posted a comment"
    _ask(host, host.replaces, f"{host.comment}/{number}", {"body": body})
    return f"replaced comment {number}"


def _comments(host: _Host) -> Iterator[Any]:
    page = 1
    while found := _ask(host, "GET", f"{host.comments}?per_page={_PAGE}&page={page}"):
        yield from found
        if len(found) < _PAGE:
            return
        page += 1


def _ask(host: _Host, method: str, url: str, sent: object = None) -> Any:
    """Return the host's answer to a request.

    Raises:
        _NoPullRequest: the token may not do this.
        _Failed: the host cannot be reached, or refuses.
    """
    headers = {**host.headers, "Content-Type": "application/json", "User-Agent": "pytest-gputrain"}
    data = None if sent is None else json.dumps(sent).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        told = f"{error.code} {error.reason}"
        if error.code in _FORBIDDEN:
            raise _NoPullRequest(
                f"the token may not comment ({told}), as in a pull request from a fork; the summary of the job has the same"
            ) from None
        raise _Failed(f"{method} {url} failed: {told}") from None
    except (OSError, ValueError) as error:
        raise _Failed(f"{method} {url} failed: {error}") from None
