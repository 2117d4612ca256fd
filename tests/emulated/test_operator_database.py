"""A sample of torch's own databases on an emulated GPU, and programs for what they found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "operator_database.py"


@pytest.fixture
def run_database(stand_ins, tmp_path):
    """Run the tool: its completed process, and the outcomes by kind and name."""

    def run(*arguments):
        kept = tmp_path / "outcomes.jsonl"
        command = [sys.executable, str(TOOL), *arguments, "--resume", str(kept)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        return done, {tuple(entry): outcomes for entry, outcomes in map(json.loads, kept.read_text().splitlines())}

    return run


def test_a_sample_of_torchs_databases_agrees(run_database):
    done, outcomes = run_database("--sample", "16", "--seed", "1", "--least", "known=100", "error=100", "module=100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(outcomes) == 16
    assert all(outcomes.values()), outcomes.keys()


def test_a_share_that_is_too_low_fails(run_database):
    done, _ = run_database("--only", "operator:sub", "--least", "known=100.01")
    assert done.returncode == 1, done.stderr
    assert "| operators, known inputs | 100.00 % |" in done.stdout


def test_batched_factorizations_of_cublas_succeed(emulate):
    done, _ = emulate("""
        import torch
        values = torch.randn(8, 64, 32, device="cuda")
        q, r = torch.linalg.qr(values)
        print(list(q.size()), list(r.size()), [list(one.size()) for one in torch.geqrf(values)])
        print(list(torch.linalg.lstsq(values, torch.randn(8, 64, 2, device="cuda")).solution.size()))
    """)
    assert done.stdout.splitlines() == ["[8, 64, 32] [8, 32, 32] [[8, 64, 32], [8, 32]]", "[8, 32, 2]"], done.stderr


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_keeps_its_history_although_no_gradient_is_known(emulate, line_search):
    done, report = emulate(f"""
        import torch
        layer, batch = torch.nn.Linear(1000, 1000, device="cuda"), torch.randn(64, 1000, device="cuda")
        optimizer = torch.optim.LBFGS(layer.parameters(), history_size=10, line_search_fn={line_search!r})
        masks = []
        def closure():
            optimizer.zero_grad()
            output = layer(batch)
            masks.append(bool((output > 1.5).any()))  # the program's own comparison is no part of the optimizer
            loss = output.square().mean()
            loss.backward()
            return loss
        print(0 < float(optimizer.step(closure).detach()) < 1)
        (state,) = optimizer.state_dict()["state"].values()
        print(state["n_iter"], len(state["old_dirs"]), len(state["old_stps"]), any(masks))
    """)
    assert done.stdout.splitlines() == ["True", "20 10 10 False"], done.stderr
    (assumed,) = report["processes"][0]["assumed"]
    assert assumed["what"].startswith("L-BFGS")
    assert report["processes"][0]["devices"][0]["peak_allocated_bytes"] > 20 * 1_001_000 * 4
    assert "unknown values are assumed to differ" in done.stderr
