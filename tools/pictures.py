"""Makes the pictures of the README and of docs/ from real runs, each for light and for dark pages.

    python tools/pictures.py [NAME ...]    # those named, or all

`tox -e pictures,pictures-emulated` runs it with everything that it needs, except for git, chromium and a C compiler.
Emulated memory and the simulation of the gate are the same in every run. Times differ.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.color import Color
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

TOOLS: Final = Path(__file__).parent
INPUTS: Final = TOOLS / "picture_inputs"
PICTURES: Final = TOOLS.parent / "docs" / "pictures"
COLUMNS: Final = 112
"""The width of the terminals."""

THEMES: Final = {
    "light": ("#ffffff", "#1f2328", "#24292f #cf222e #116329 #7a5200 #0969da #8250df #1b7c83 #59616b"),
    "dark": ("#161b22", "#e6edf3", "#6e7681 #ff7b72 #3fb950 #d29922 #58a6ff #bc8cff #39c5cf #b1bac4"),
}
"""Background, foreground, and the eight colours of a terminal."""
CHART_COLOURS: Final = {
    "light": ("#ffffff", "#1b1f24", "#59616b", "#d9dde2", ("#2463c4", "#0f8a77", "#8a45b5", "#b3261e")),
    "dark": ("#161b22", "#e8eaed", "#a3abb5", "#363c46", ("#82b1ff", "#5cd6c0", "#d3a2f5", "#ff8a80")),
}
"""Background, text, quiet text, rules, and series, as in the HTML page."""
BORDER: Final = "#8b949e"
COMMITS: Final = 12
"""The number of commits of the history whose trend is drawn."""
BIGGER_COMMIT: Final = 7


def terminal_theme(background: str, foreground: str, colours: str) -> TerminalTheme:
    parsed = [Color.parse(colour).get_truecolor() for colour in (background, foreground, *colours.split())]
    return TerminalTheme(parsed[0], parsed[1], parsed[2:])


class Terminal:
    """A folder to run commands in, and what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[Text] = []
        (folder / ".gitconfig").write_text("[color]\n ui = always\n[user]\n name = me\n email = me\n")
        self._environ = {
            **os.environ,
            "COLUMNS": str(COLUMNS),
            "PYTHONPATH": str(TOOLS.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTEST_ADDOPTS": "--color=yes -p no:cacheprovider",
            "FORCE_COLOR": "1",
            "GIT_CONFIG_GLOBAL": str(folder / ".gitconfig"),
        }

    def run(self, command: str, *, hidden: bool = False, status: int = 0) -> None:
        """Run ``command`` in a shell. Keep it and what it prints, unless it is ``hidden``."""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=1800,
        )
        if done.returncode != status:
            raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stdout}")
        if not hidden:
            # How long pytest took depends on what else the machine does meanwhile.
            printed = re.sub(r" in \d+\.\d\ds(?: \(\d:\d\d:\d\d\))?", "", done.stdout)
            self.lines += [Text(f"$ {command}", style="bold"), Text.from_ansi(printed.strip("\n")), Text()]

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace ``old``, which is in ``file`` once."""
        text = (self.folder / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{file} has {old!r} {text.count(old)} times")
        (self.folder / file).write_text(text.replace(old, new))

    def commit(self, message: str) -> None:
        """Commit everything, with a change or without."""
        self.run("git add .", hidden=True)
        self.run(f"git commit --quiet --allow-empty --message={shlex.quote(message)}", hidden=True)

    def draw(self, name: str, title: str) -> None:
        """Write the picture of the terminal for both themes."""
        for theme, colours in THEMES.items():
            console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
            for line in self.lines:
                console.print(line)
            drawing = console.export_svg(title=title, theme=terminal_theme(*colours))
            # No fonts from the network, which code hosts do not load, and a border that both themes show.
            drawing = re.sub(r"\s*@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
            drawing = drawing.replace("Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
            drawing = drawing.replace('stroke="rgba(255,255,255,0.35)"', f'stroke="{BORDER}"')
            (PICTURES / f"{name}-{theme}.svg").write_text(drawing)


def photograph(page: Path, selector: str, name: str, *, width: int, height: int) -> None:
    """Write the picture of the first element of ``page`` that ``selector`` finds, for both themes, cut off at ``height``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for theme in THEMES:
            view = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=1.5)
            view.goto(page.as_uri())
            view.evaluate("document.querySelectorAll('.notes').forEach(notes => notes.open = false)")  # as a click does
            box = view.locator(selector).first.bounding_box()
            clip = {**box, "height": min(box["height"], height)}
            view.screenshot(path=PICTURES / f"{name}-{theme}.png", clip=clip, full_page=True)
        browser.close()


def committed(folder: Path, record: str) -> Terminal:
    """Return a terminal in a repository whose branch ``main`` has what the folder has, and what ``record`` records."""
    (folder / ".gitignore").write_text(".*\n")
    terminal = Terminal(folder)
    terminal.run("git init --quiet --initial-branch=main", hidden=True)
    terminal.run(record, hidden=True)
    terminal.commit("Training")
    return terminal


def repository(folder: Path) -> Terminal:
    """Return a terminal in a repository with the inputs and their recorded emulated runs."""
    for file in ("train.py", "test_train.py"):
        shutil.copy(INPUTS / file, folder)
    return committed(folder, "pytest -m h100 --gpu-emulate --gpu-baseline-update")


def failing_pull_request(folder: Path) -> None:
    terminal = repository(folder)
    terminal.run("git switch --quiet --create fp32-loss", hidden=True)
    terminal.replace("train.py", "loss = cross_entropy(logits, ", "loss = cross_entropy(logits.float(), ")
    terminal.run("git diff -U0 main | tail -n 2")
    terminal.run("pytest -q -m h100 --gpu-emulate", status=1)
    terminal.draw("failing-pull-request", "A pull request that needs more memory")


def waiting_pull_request(folder: Path) -> None:
    """Run the README's program with one line more, which the README names."""
    readme = (TOOLS.parent / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "test_training.py").write_text(program)
    gate = "pytest -q benchmarks --gpu-platform=h100 --gpu-emulate"
    terminal = committed(folder, f"{gate} --gpu-baseline-update")
    terminal.run("git switch --quiet --create print-loss", hidden=True)
    terminal.replace("benchmarks/test_training.py", "        yield", "        print(loss.item())\n        yield")
    terminal.run("git diff -U0 main | tail -n 1")
    terminal.run(f"{gate} | sed -n 1,4p", status=1)  # as much as the README has room for
    terminal.draw("waiting-pull-request", "A pull request that makes each step wait for the GPU")


def gate_power(folder: Path) -> None:
    import picture_gate

    failing = picture_gate.shares()
    for theme, colours in CHART_COLOURS.items():
        picture_gate.draw(PICTURES / f"gate-power-{theme}.svg", failing, *colours)


def gate_pace(folder: Path) -> None:
    import picture_pace

    for theme, colours in CHART_COLOURS.items():
        picture_pace.draw(PICTURES / f"gate-pace-{theme}.svg", *colours)


def html_page(folder: Path) -> None:
    terminal = repository(folder)
    terminal.replace("train.py", "loss = cross_entropy(logits, ", "loss = cross_entropy(logits.float(), ")
    terminal.run("pytest -m h100 --gpu-emulate --gpu-html=page.html", status=1)
    photograph(folder / "page.html", "body", "html-page", width=1200, height=860)


def suite_table(folder: Path) -> None:
    """Run a few cases of a suite on this CPU, against the committed baselines."""
    for name in ("benchmarks", "baselines"):
        shutil.copytree(TOOLS.parent / name, folder / name)
    terminal = Terminal(folder)
    terminal.run("pytest -q benchmarks/test_llm_finetuning.py -k 3.1 --gpu-platform=cpu")
    terminal.draw("suite-table", "Cases of a suite on a CPU")


def trend(folder: Path) -> None:
    """Measure a training loop at each of many commits, one of which recomputes no activations any more."""
    shutil.copy(INPUTS / "test_trend.py", folder)
    (folder / ".gitignore").write_text(".*\n*.jsonl\nbaselines\n")
    terminal = Terminal(folder)
    terminal.run("git init --quiet --initial-branch=main", hidden=True)
    for commit in range(COMMITS):
        if commit == BIGGER_COMMIT:
            terminal.replace("test_trend.py", "checkpoint(block, hidden, use_reentrant=False)", "block(hidden)")
        terminal.commit(f"Commit {commit}")
        terminal.run(
            "pytest --gpu-platform=cpu --gpu-isolation=inline --gpu-steps=20 --gpu-history=history.jsonl", hidden=True
        )
    # Times depend on what else the machine does meanwhile; memory is the same in every run.
    terminal.run("gputrain trend history.jsonl --metric=peak_allocated_bytes --html=trend.html", status=1, hidden=True)
    photograph(folder / "trend.html", "#trends article", "trend-chart", width=700, height=700)


def memory_over_steps(folder: Path) -> None:
    terminal = Terminal(folder)
    shutil.copy(INPUTS / "train.py", folder)
    terminal.run("gputrain emulate --gpu h100 --html page.html -- python train.py", hidden=True)
    photograph(folder / "page.html", "#course figure", "memory-over-steps", width=560, height=600)


SCENES: Final[dict[str, Callable[[Path], None]]] = {
    "failing-pull-request": failing_pull_request,
    "waiting-pull-request": waiting_pull_request,
    "gate-power": gate_power,
    "gate-pace": gate_pace,
    "html-page": html_page,
    "suite-table": suite_table,
    "trend": trend,
    "memory-over-steps": memory_over_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *SCENES], metavar="NAME", help=", ".join(SCENES))
    for name in parser.parse_args().names or SCENES:
        with tempfile.TemporaryDirectory() as folder:
            SCENES[name](Path(folder))
        print(name, flush=True)


if __name__ == "__main__":
    main()
