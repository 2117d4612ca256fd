"""Runs a command and draws what it prints, colours included, as an SVG: the picture in the README.

python tools/render_picture.py docs/output.svg pytest benchmarks --color=yes ...
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

WIDTH: Final = 112


def main(picture: str, *command: str) -> None:
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi(output.rstrip()))
    # Fonts from the network would make the picture look different offline.
    drawing = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="pytest-gputrain"), flags=re.DOTALL)
    Path(picture).write_text(drawing)


if __name__ == "__main__":
    main(*sys.argv[1:])
