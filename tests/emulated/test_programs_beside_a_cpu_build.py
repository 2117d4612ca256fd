"""Programs and cases on an emulated GPU in an environment with a CPU build of torch, beside which the CUDA build lies."""

import os
import textwrap

import msgspec
import pytest

from pytest_gputrain.hardware.emulation import installed
from pytest_gputrain.utils.torch_beside import LOCK, SITE


@pytest.fixture
def variables(torch, tmp_path):
    """Those of such an environment: its torch has only a version, and the CUDA build that is here is beside it."""
    version = installed.release(torch.version)
    own = tmp_path / "environment" / "torch"
    own.mkdir(parents=True)
    (own / "__init__.py").touch()
    (own / "version.py").write_text(f"__version__ = '{version}+cpu'\ncuda: Optional[str] = None\n")
    manifest = installed.Manifest(
        python=installed.this_python(),
        libc=installed.this_libc(),
        versions={"torch": version},
        wheels={f"torch-{version}-any.whl": "abc"},
        origin="this test",
        files={},
    )
    folder = tmp_path / "cache" / "pytest-gputrain-torch" / manifest.key
    (folder / SITE).mkdir(parents=True)
    folder.chmod(0o700)
    (folder / LOCK).touch()
    (folder / installed.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for name in ("torch", "torchgen", "triton", *(path.name for path in torch.site.glob("torch-*.dist-info"))):
        (folder / SITE / name).symlink_to(torch.site / name)
    path = os.pathsep.join([str(own.parent), os.environ.get("PYTHONPATH", "")])
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": path}


def test_a_program_and_what_it_starts_find_the_cuda_build(emulate, variables):
    code = """
        import subprocess, sys, torch
        torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
        show = "import torch; print(torch.version.cuda is not None, torch.__file__)"
        subprocess.run([sys.executable, "-c", show], check=True)
    """
    done, report = emulate(code, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"True {variables['XDG_CACHE_HOME']}/pytest-gputrain-torch/torch-")
    assert report["torch_build"] == f"torch-{report['torch'].partition('+')[0]}-any.whl, sha256 abc, from this test"
    assert [device["peak_allocated_bytes"] for process in report["processes"] for device in process["devices"]] == [1 << 20]


def test_a_case_runs_on_the_cuda_build_and_pytest_on_its_own(run_tests, variables, tmp_path):
    (tmp_path / "test_own.py").write_text(
        textwrap.dedent("""
            import torch

            def train(setup):
                layer = torch.nn.Linear(1024, 1024).to(setup.device)
                while True:
                    loss = layer(torch.randn(64, 1024, device=setup.device)).sum()
                    loss.backward()
                    yield loss

            def test_it(gputrain):
                assert not hasattr(torch, "nn")
                gputrain.check(train, precision="fp32", batch_size=64)
        """)
    )
    done, results = run_tests("test_own.py", **variables)
    assert done.returncode == 0, done.stdout
    reply = results["test_it"]["reply"]
    assert reply["peak_allocated_bytes"] > 4 * 1024 * 1024
    assert reply["torch_build"].endswith("-any.whl, sha256 abc, from this test")
