"""The judging of emulated memory against published figures."""

import compare_published
import pytest
from compare_published import CONDITIONS, Outcome

CONDITIONS_OF_TABLE = CONDITIONS["llm-trainer"]
PUBLISHED_BYTES = 36 * 1000 * 2**20
"""LoRA of Llama 3.1 8B on an H100."""


@pytest.fixture
def judge(monkeypatch, tmp_path, capsys):
    """Judge that row by what it takes of an emulated GPU: the exit status, and what was printed last."""
    outcome = Outcome(
        table="llm-trainer",
        platform="h100",
        case="llama-3.1-8b-lora-bf16",
        conditions=CONDITIONS_OF_TABLE,
        fits=True,
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
    )

    def run(ratio, *, fits=True):
        reserved = int(ratio * PUBLISHED_BYTES) - CONDITIONS_OF_TABLE.context_bytes
        figures = compare_published.msgspec.structs.replace(outcome, fits=fits, peak_reserved_bytes=reserved)
        monkeypatch.setattr(compare_published, "lacking", lambda packages: [])
        monkeypatch.setattr(compare_published.Emulations, "_run", lambda self, row, conditions: figures)
        status = compare_published.main(
            ["llm-trainer", "--platform=h100", "--only=llama-3.1-8b-lora", f"--results={tmp_path / 'results.json'}"]
        )
        return status, capsys.readouterr().out.splitlines()[-1]

    return run


def test_rows_close_to_their_figures_reach_the_goals(judge):
    assert judge(1.014)[0] == 0


@pytest.mark.parametrize(("ratio", "fits"), [(1.02, True), (0.98, True), (1.0, False)])
def test_a_row_too_far_from_its_figure_or_called_wrongly_misses_them(judge, ratio, fits):
    status, text = judge(ratio, fits=fits)
    assert (status, text.endswith("The goals are MISSED.")) == (1, True)


def test_a_row_is_not_run_again_that_the_file_of_results_has(judge, monkeypatch, tmp_path):
    judge(1.0)
    kept = (tmp_path / "results.json").read_bytes()
    assert judge(2.0)[0] == 0
    assert (tmp_path / "results.json").read_bytes() == kept
