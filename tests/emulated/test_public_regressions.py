"""Public regressions of whole runs, tried on an emulated GPU; one test of `tests/plugin` tries them on a CPU."""

import public_regressions
import pytest


@pytest.mark.weekly
def test_each_regression_fails_by_its_own_figure(run_tests_in, tmp_path):
    (tmp_path / "test_regressions.py").write_text(public_regressions.PROGRAMS)
    public_regressions.check_caught(
        lambda *options, **variables: run_tests_in(tmp_path, "-n2", *options, **variables)[1], emulated=True
    )
