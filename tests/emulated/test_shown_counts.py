"""Tests that the README's program fails by counts as the README and docs/counts.md show."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, COUNTS = (ROOT / name for name in ("README.md", "docs/counts.md"))
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
CHANGES = [
    (README, "        yield", "        print(loss.item())\n        yield"),
    (COUNTS, "batch_size, 256, device=setup.device)", "batch_size, 256).to(setup.device)"),
    (COUNTS, "AdamW(model.parameters())", "AdamW(model.parameters(), foreach=False)"),
]


@pytest.fixture(scope="module")
def folder(run_tests_in, tmp_path_factory):
    """A folder with the program's baseline."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "test_training.py").write_text(PROGRAM)
    done, _ = run_tests_in(folder, "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize(("page", "before", "after"), CHANGES, ids=["item", "pageable", "foreach"])
def test_the_sentence_that_a_page_shows_is_that_of_the_change(run_tests_in, folder, page, before, after):
    assert PROGRAM.count(before) == 1
    (folder / "benchmarks" / "test_training.py").write_text(PROGRAM.replace(before, after))
    done, results = run_tests_in(folder)
    assert done.returncode == 1, done.stdout
    assert results["test_training"]["verdict"]["sentence"] in " ".join(page.read_text().split())
