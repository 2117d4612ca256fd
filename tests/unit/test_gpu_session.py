"""What is done next on a borrowed GPU."""

import json

import gpu_session
import pytest
from gpu_session import Asked, Done, Step, left_over

STEPS = [Step(name, ()) for name in ("driver", "tests", "a", "b", "c")]


def _next(*done, left=1000.0):
    step = left_over(iter(STEPS), done, left)
    return step.name if step else None


def test_a_call_goes_on_where_the_last_one_ended_and_begins_nothing_that_may_not_end_in_time():
    assert _next() == "driver"
    assert _next(Done("driver", 0, 1.0), Done("tests", 1, 300.0)) == "a"
    assert _next(*[Done(step.name, 0, 1.0) for step in STEPS]) is None
    done = (Done("driver", 0, 1.0), Done("tests", 0, 500.0), Done("a", 0, 130.0))
    assert (_next(*done, left=131), _next(*done, left=129)) == ("b", None)
    assert _next(left=gpu_session.LEAST_SECONDS - 1) is None


@pytest.mark.slow
@pytest.mark.weekly
def test_a_session_on_the_cpu_records_case_after_case(tmp_path, monkeypatch):
    """The whole of it, but for the cases' processes: those are of a suite that trains in an instant."""
    pytest.importorskip("torch", reason="the cases train")
    root = tmp_path / "root"
    (root / "benchmarks").mkdir(parents=True)
    (root / "tests" / "gpu").mkdir(parents=True)
    (root / "tests" / "gpu" / "test_gpu.py").write_text("def test_one(): pass\n")
    (root / "tox.ini").write_text("[pytest]\n")
    (root / "benchmarks" / "test_ctr.py").write_text(
        "import pytest\nfrom pytest_gputrain import Case, grid\n"
        "CASES = grid(Case(model='ctr-dnn', precision='fp32', batch_size=8, steps=2, warmup=1), method=['full'],"
        " batch_size=[8, 16])\n"
        "@pytest.mark.parametrize('case', CASES, ids=str)\n"
        "def test_ctr(gputrain, case):\n    gputrain.check(case)\n"
    )
    monkeypatch.setattr(gpu_session, "ROOT", root)
    monkeypatch.setattr(gpu_session, "LEVERS", ())
    monkeypatch.setattr(gpu_session, "LEAST_SECONDS", 0.0)
    asked = Asked(tmp_path / "out", "cpu", "", 1)
    asked.folder.mkdir()
    assert gpu_session.work(asked, 120) == 0
    log = gpu_session.log_of(asked.folder)
    assert json.loads((asked.folder / "driver.json").read_text()) is not None
    assert [one.name.partition("::")[2] or one.name for one in log] == [
        "driver",
        "tests",
        "test_ctr[ctr-dnn-full-fp32-batch_size=8] on cpu",
        "test_ctr[ctr-dnn-full-fp32-batch_size=16] on cpu",
    ]
    stored = json.loads((asked.folder / "baselines" / "cpu" / "ctr.json").read_text())["cases"]
    assert len(stored) == 2
    rows = gpu_session.rows(asked.folder)
    assert sorted(row[0] for row in rows) == sorted(stored), "the CPU measures the cases at tiny scale, and says so"
    assert all(row[0].endswith("@tiny") for row in rows)
    assert gpu_session.work(asked, 120) == 0
    assert gpu_session.log_of(asked.folder) == log
