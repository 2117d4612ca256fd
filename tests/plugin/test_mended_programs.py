"""What docs/finding-waits.md mends has the same losses as before: the values, which an emulated GPU does not compute."""

import pytest
from documents import ROOT, blocks
from recipes import patched

PAGE = "docs/finding-waits.md"
FINDS = ROOT / "tests" / "emulated" / "finds" / "finds.py"


def losses(project, *arguments):
    """The losses of each test."""
    result = project.spawn("--gpu-platform=cpu", "--gpu-steps=2", "--gpu-warmup=1", "--gpu-json=report.json", *arguments)
    assert {*result.parseoutcomes()} == {"passed"}, result.stdout.str()
    return {each["nodeid"]: each["replies"][0]["losses"] for each in project.report()["results"]}


@pytest.mark.slow
@pytest.mark.weekly
def test_the_mended_program_has_the_losses_of_the_program(project):
    (program,), (mend,) = (blocks(PAGE, language) for language in ("python", "diff"))
    project.write(test_gemma=program, test_gemma_mended=patched(program, mend))
    before, after = losses(project).values()
    assert before == after
    assert len(set(before)) == 2


@pytest.mark.slow
@pytest.mark.weekly
def test_a_mended_find_has_the_losses_of_the_find(project):
    project.write(test_finds=FINDS.read_text())
    trained = losses(project, "-n2")
    finds = [name for name in trained if name.endswith("-False]")]
    assert len(finds) == len(trained) / 2 > 8
    assert [name for name in finds if trained[name] != trained[name.replace("-False]", "-True]")]] == []
