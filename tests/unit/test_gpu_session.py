"""What is done next on a borrowed GPU."""

import importlib.util
import json
import subprocess
from pathlib import Path

import gpu_session
import pytest
from gpu_session import Asked, Done, Step, left_over

STEPS = [Step(name, ()) for name in ("driver", "tests", "a", "b", "c")]


def _next(*done: Done, left: float = 1000.0) -> str | None:
    step = left_over(iter(STEPS), done, left)
    return step.name if step else None


def test_a_call_goes_on_where_the_last_one_ended_and_begins_nothing_that_may_not_end_in_time() -> None:
    assert _next() == "driver"
    assert _next(Done("driver", 0, 1.0), Done("tests", 1, 300.0)) == "a"
    assert _next(*[Done(step.name, 0, 1.0) for step in STEPS]) is None
    done = (Done("driver", 0, 1.0), Done("tests", 0, 500.0), Done("a", 0, 130.0))
    assert (_next(*done, left=131), _next(*done, left=129)) == ("b", None)
    assert _next(left=gpu_session.LEAST_SECONDS - 1) is None


@pytest.mark.slow
def test_cases_come_by_their_predicted_memory() -> None:
    asked = Asked(Path("out"), "h100", "llama-3.1-8b or phi-3", 1)
    nodes = gpu_session.ordered(gpu_session.collected(asked), "h100")
    names = [node.partition("[")[2] for node in nodes]
    assert len(names) > 4
    assert names.index("phi-3-mini-128k-qlora-bf16]") < names.index("llama-3.1-8b-lora-bf16]")
    assert names.index("llama-3.1-8b-lora-bf16]") < names.index("llama-3.1-8b-full-bf16]")


@pytest.mark.slow
def test_a_session_on_the_cpu_records_case_after_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [row[0] for row in rows] == ["ctr-ctr-dnn-full-fp32-batch_size=16", "ctr-ctr-dnn-full-fp32-batch_size=8"]
    assert gpu_session.work(asked, 120) == 0
    assert gpu_session.log_of(asked.folder) == log


@pytest.mark.slow
def test_levers_lead_from_the_published_case_to_the_tuned_one(tmp_path: Path) -> None:
    asked = Asked(tmp_path, "h100", "", 1)
    for count in (1, len(gpu_session.LEVERS)):
        levers = gpu_session.LEVERS[:count]
        command = gpu_session.with_levers(asked, levers)
        # What it would record for an H100 is collected anywhere.
        words = [word for word in command if not word.startswith(("--gpu-platform", "--gpu-baseline-update"))]
        done = subprocess.run([*words, "--collect-only"], cwd=gpu_session.ROOT, capture_output=True, text=True, check=False)
        assert [line for line in done.stdout.splitlines() if "::" in line] == [
            f"benchmarks/test_llm_finetuning.py::test_llm_finetuning[{gpu_session.LEVERED}-{'-'.join(levers)}]"
        ]
    spec = importlib.util.spec_from_file_location("tuned", gpu_session.ROOT / "benchmarks" / "test_llm_tuned.py")
    spec.loader.exec_module(tuned := importlib.util.module_from_spec(spec))
    case = next(case for case in tuned.CASES if str(case) == gpu_session.LEVERED)
    assert [f"{knob}={getattr(case, knob)}" for knob in (lever.partition("=")[0] for lever in levers)] == list(levers)
    assert case.compile == "default"
