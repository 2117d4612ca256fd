"""Reads README.md, CONTRIBUTING.md and docs/*.md for tests: blocks by language, and every command that they show."""

import re
import shlex
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}

_FENCED = re.compile(r"^```([\w{}-]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROMPT = re.compile(r"^\w*\$ ", re.MULTILINE)
_IN_TEXT = re.compile(r"`((?:(?:pytest|gputrain|pip|tox|python3?) |(?=tools/))[^`]+)`")
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")
"""What a synopsis has and a command has not, outside of names of variables."""
_REDIRECTIONS = (">", ">>", "<")
_JOINTS = ("&&", "||", "|", ";", *_REDIRECTIONS)


@dataclass(frozen=True)
class Command:
    """One program with its arguments, as a shell would start it."""

    page: str
    words: tuple[str, ...]

    @property
    def program(self):
        return Path(self.words[0]).name

    @property
    def arguments(self):
        return self.words[1:]

    def __str__(self):
        return f"{self.page}: {shlex.join(self.words)}"


def blocks(page, language):
    return [text for block_language, text in _FENCED.findall(PAGES[page]) if block_language == language]


def workflow_steps(page):
    """Of all jobs of GitHub's workflows."""
    for document in map(yaml.safe_load, blocks(page, "yaml")):
        for job in document.get("jobs", {}).values():
            yield from job["steps"]


def commands():
    """Those of consoles, scripts, workflows and running text, each once."""
    seen = set()
    for page in PAGES:
        for line in _lines(page):
            for words in _split(line):
                if words not in seen:
                    seen.add(words)
                    yield Command(page, words)


def _lines(page):
    for console in blocks(page, "console"):
        # Where there are prompts, lines without one are output.
        with_prompt = [line for line in console.splitlines() if _PROMPT.match(line)]
        yield from (_PROMPT.sub("", line) for line in with_prompt or console.splitlines())
    for script in (*blocks(page, "bash"), *(step["run"] for step in workflow_steps(page) if "run" in step)):
        yield from script.splitlines()
    for text in _IN_TEXT.findall(_FENCED.sub("", PAGES[page])):
        if not _PLACEHOLDER.search(text):
            yield text


def _split(line):
    """The commands of a line, without assignments to variables before them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|<>;")
    lexer.whitespace_split = True
    words = list(lexer)
    while words:
        command = list(takewhile(lambda word: word not in _JOINTS, words))
        joint, words = words[len(command) : len(command) + 1], words[len(command) + 1 :]
        while command and re.match(r"\w+=", command[0]):
            del command[0]
        if command:
            yield tuple(command)
        if joint and joint[0] in _REDIRECTIONS:  # the rest is a file
            return
