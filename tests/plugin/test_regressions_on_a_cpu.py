"""Public regressions of whole runs of training libraries, tried on a CPU."""

import public_regressions
import pytest


@pytest.mark.slow
@pytest.mark.weekly
def test_each_regression_fails_on_a_cpu(project, monkeypatch):
    def run(*options, **variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            project.spawn("-n2", "--gpu-platform=cpu", "--gpu-json=report.json", *options)
        return {result["nodeid"].partition("::")[2]: result for result in project.report()["results"]}

    project.write(test_regressions=public_regressions.PROGRAMS)
    public_regressions.check_caught(run, emulated=False)
