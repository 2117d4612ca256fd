"""Runs the recipes of own loops: each program becomes a test by few lines, has its figure, and fails for its regression."""

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import version

import pytest
from documents import PAGES, ROOT
from plugin_project import TESTS
from recipes import patched

_TEXTS = [text for page, text in PAGES.items() if page.startswith("docs/own-loops")]
_TEXTS.append((ROOT / "tests/plugin/recipes_without_page.md").read_text())
OWN_LOOPS = {
    re.sub(r"[^a-z]+", "-", section.partition("\n")[0].lower()): section
    for text in _TEXTS
    for section in text.split("\n## ")[1:]
}
"""The sections of the pages by their headings."""
_STEPS = re.compile(
    r"^```python\n(?P<program>.*?)^```\n.*?^```diff\n(?P<glue>.*?)^```\n.*?peaks at (?P<peak>[\w. ]+?) on a CPU.*?"
    r"^```diff\n(?P<regression>.*?)^```\n.*?^```text\n(?P<sentence>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
PINNED = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
"""Versions that the figures of the pages belong to, by library."""
MOST_LINES = {"a-plain-loop": 15, "a-gan-with-two-optimizers": 15, "torch-compile": 15}
"""Of glue; five for frameworks."""


@dataclass(frozen=True)
class Recipe:
    """A program of a page, what makes it a test, and how it goes wrong."""

    name: str
    program: str
    glue: str
    peak: str
    regression: str
    sentence: str


SCRIPT = "a-script"
"""Needs an emulated GPU: `tests/emulated/test_emulated_scripts.py` runs it."""

RECIPES = [Recipe(name, **found.groupdict()) for name, text in OWN_LOOPS.items() if (found := _STEPS.search(text))]


APART = {"litgpt", "timm"}
"""Libraries that `tox -e recipes` installs, as they do not go together with those of the other environments."""


def libraries(recipe):
    """The modules that a recipe's program imports."""
    return set(re.findall(r"^(?:from|import) (\w+)", recipe.program, re.MULTILINE))


def test_every_program_that_is_made_a_test_is_run():
    made = [name for name, text in OWN_LOOPS.items() if "```python\n" in text and "```diff\n" in text]
    assert [recipe.name for recipe in RECIPES] == [name for name in made if name != SCRIPT]
    assert len(made) == 11


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_glue_is_as_short_as_the_page_says(recipe):
    lines = [line for line in recipe.glue.splitlines() if line.startswith("+") and line != "+"]
    assert len(lines) <= MOST_LINES.get(recipe.name, 5)
    number = ("Four", "Five", "Six", "Seven", "Eight", "Nine")[len(lines) - 4]
    assert re.search(rf"{number} lines.*?:\n\n```diff\n{re.escape(recipe.glue)}", OWN_LOOPS[recipe.name], re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            recipe,
            marks=[
                *([pytest.mark.recipes] if libraries(recipe) & APART else []),
                *([pytest.mark.weekly] if recipe.name in ("sfttrainer", "dpotrainer") else []),  # like the Trainer
            ],
            id=recipe.name,
        )
        for recipe in RECIPES
    ],
)
def test_a_recipe_has_its_figure_and_fails_for_its_regression(project, recipe, monkeypatch):
    if importlib.util.find_spec("torchvision"):
        monkeypatch.setenv("PYTHONPATH", str(TESTS / "standins" / "torchvision_operators"))
    program = project.path / "train.py"
    text = patched(recipe.program, recipe.glue)
    program.write_text(text)
    options = ("train.py", "--gpu-platform=cpu", "--gpu-steps=3", "--gpu-warmup=1")
    result = project.spawn(*options, "--gpu-baseline-update")
    result.assert_outcomes(passed=1)
    has_figures_of_page = all(version(name).partition("+")[0] == PINNED[name] for name in libraries(recipe) & PINNED.keys())
    if has_figures_of_page:
        assert f" {recipe.peak} " in result.stdout.str()
    program.write_text(patched(text, recipe.regression))
    result = project.spawn(*options)
    result.assert_outcomes(failed=1)
    said = " ".join(result.stdout.str().split())
    sentence = " ".join(recipe.sentence.split())
    # With other versions it is still the same case that needs more, or that keeps more after every step.
    beginning = re.match(r"\S+ (?:needs|gave no measurement)", sentence)
    assert beginning
    assert (sentence if has_figures_of_page else beginning[0]) in said, said
