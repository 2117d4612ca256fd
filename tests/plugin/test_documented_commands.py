"""Runs every command of README.md and docs/*.md as far as this machine can. A new command needs a rule here.

pytest really runs on a copy of benchmarks/, with recorded replies instead of processes that train; so do the commands of
gputrain that read reports, histories and tables. What takes other machines, networks or hours is parsed by the parser that
would read it: test_ab.py, tests/worker/test_several_nodes.py and test_benchmark_json.py run such commands.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from typing import ClassVar

import msgspec
import numpy  # noqa: F401  # a process can import it only once, and what tests import is taken out again
import pytest
from documents import PAGES, ROOT, Command, blocks, commands
from immediate_scheduler import stand_in
from packaging.requirements import Requirement
from plugin_project import H100, RECORDED

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cli import emulate_install, main
from pytest_gputrain.execution.settings import OPTIONS
from pytest_gputrain.records import EmulatedRun

COMMANDS = list(commands())
RUN = msgspec.json.decode((RECORDED / "h100_emulated.json").read_bytes(), type=EmulatedRun)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUITES = ("conftest.py", "test_diffusion.py", "test_llm_finetuning.py")
NOT_OURS = ("bencher", "cd", "echo", "git", "grep", "otava", "pre-commit", "sed", "source", "unshare")
LOOPS = "docs/own-loops"
"""Pages whose programs test_recipes.py runs."""
OWN_CODE = "import torch"
"""Tells a program that trains its own code from one whose cases are the zoo's."""


class Cells:
    """Stands in for the emulated GPUs of ``gputrain predict``, which need a CUDA build of torch: all cases take the same."""

    about = ()

    def __init__(self, gpus, *others):
        self.titles = {gpu: gpu for gpu in gpus}

    def figures(self, *asked, **how):
        return RUN

    def close(self):
        pass


class CommandProject:
    """A project with the suites of this one, an H100 or none, and the reports that pages take for granted."""

    written: ClassVar[dict[str, bytes]] = {}
    """By suffix: made once."""

    def __init__(self, project):
        self.project = project
        self.path = project.path
        (self.path / "benchmarks").mkdir()

    def add_suites(self, words):
        """All where some are chosen; of a whole folder a part is enough, and quicker."""
        chosen = "-k" in words or any(word.endswith(".py") for word in words)
        for path in ROOT.glob("benchmarks/*.py"):
            if chosen or path.name in SUITES:
                shutil.copy(path, self.path / "benchmarks")

    def add_programs(self, page):
        """Those that the page shows."""
        for number, program in enumerate(blocks(page, "python")):
            # Nothing is built here, and a process can import torch only once.
            without_torch = re.sub(r"^(import|from) torch.*\n", "", program, flags=re.MULTILINE)
            (self.path / "benchmarks" / f"test_of_page_{number}.py").write_text(without_torch)

    def add_reports(self, *names):
        """As if earlier commands had written them."""
        if not self.written:
            written = ("--gpu-json=wrote.json", "--gpu-history=wrote.jsonl")
            self.run("benchmarks", "-m", "h100", "-k", "llama", *written)
            self.written.update({suffix: (self.path / f"wrote{suffix}").read_bytes() for suffix in (".json", ".jsonl")})
        for path in (self.path / name for name in names):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.written[path.suffix])

    def run(self, *words):
        """pytest accepts them, selects tests and runs them.

        They may fail: all cases get the same figures, and none has a baseline.
        """
        self.add_suites(words)
        self.project.machine(H100 if any("h100" in word for word in words) else None)
        result = self.project.run(*words, "-n0")  # recorded replies are for this process
        if "--gpu-emulate" in words and "is not a CUDA build" in result.stderr.str():
            return  # The options were taken, and then this machine lacked what they need.
        assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), result.stderr.str()
        outcomes = result.parseoutcomes()
        assert "errors" not in outcomes
        elsewhere = any(platform in word for word in words for platform in ("mi300x", "l40s"))
        assert {"passed", "failed"} & set(outcomes) or (elsewhere and "skipped" in outcomes)


@pytest.fixture
def command_project(project, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("pytest_gputrain.cli.predict.EmulatedCells", Cells)
    stand_in(monkeypatch)
    return CommandProject(project)


def check_pytest(command, command_project):
    words = command.arguments
    if words == ("--markers",):
        return
    if words[0].startswith("tests/unit/"):  # the project's own, which run anyway
        assert all((ROOT / word).is_file() for word in words)
        return
    if words[0].startswith("tests/worker/"):  # collecting them imports every library that trains
        *paths, flag, model = words
        assert flag == "-k"
        assert model in architectures()
        assert all((ROOT / path).is_file() for path in paths)
        return
    if not command.page.startswith(LOOPS):
        command_project.add_programs(command.page)
    command_project.add_reports(*re.findall(r"--gpu-baseline=(\S+\.json)", str(command)))
    for name in re.findall(r"--gpu-resume=(\S+\.json)", str(command)):
        command_project.add_reports(name)  # those of other libraries would be refused
        emptied = json.loads((command_project.path / name).read_text()) | {"results": []}
        (command_project.path / name).write_text(json.dumps(emptied))
    if "--benchmark-compare" in words:
        command_project.run("benchmarks", "-k", "gemma", "--benchmark-autosave")
    command_project.run(*words)


def check_gputrain(command, command_project):
    words = [word.replace("*", "one") for word in command.arguments]
    if "--help" in words or (len(words) == 1 and words != ["check-baselines"]):
        with pytest.raises(SystemExit) as exit_info:
            main.main([words[0], "--help"])
        assert exit_info.value.code == 0
        return
    options, rest = main.command_parser().parse_known_args(words)
    if options.command == "emulate":  # needs a CUDA build of torch, or downloads one
        assert bool(options.program) != emulate_install.is_asked(options)
    elif options.command == "ab":
        command_project.run(*rest)
    elif options.command == "predict":
        if options.model.endswith(".json"):
            config = command_project.path / options.model
            config.parent.mkdir(exist_ok=True)
            config.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 36, "vision_config": {}}))
        assert main.main(words) == 0
    elif options.command == "doctor" and options.replay is not None:
        shutil.copy(ROOT / "tests/unit/recordings/nvidia-h100-x2.json", command_project.path / options.replay)
        assert main.main(words) == 0
    elif options.command in ("doctor", "node"):  # the former's exit status depends on the host
        assert rest == []
    else:
        outputs = [words[index + 1] for index, word in enumerate(words) if word == "-o"]
        command_project.add_reports(*(word for word in words if word.endswith((".json", ".jsonl")) and word not in outputs))
        if options.command == "check-baselines":
            shutil.copytree(ROOT / "baselines", command_project.path / options.folder)
            if options.since is not None:
                for words_of_git in ("init -qb main", *["commit --allow-empty -qm one"] * 2):
                    command_project.project.git(*words_of_git.split())
        assert main.main(words) == 0


def check_pip(command, command_project):
    subcommand, *words = command.arguments
    if subcommand == "freeze":
        assert words == ["--exclude-editable"]
        return
    assert subcommand in ("install", "wheel")
    for flag, word in zip(["", *words], words, strict=False):
        if flag == "-c":
            assert (ROOT / word).is_file()
        elif not word.startswith("-") and word != ".":  # the reader's own project
            requirement = Requirement(word.replace(".[", f"{PROJECT['project']['name']}["))
            assert requirement.name != PROJECT["project"]["name"] or requirement.extras <= set(
                PROJECT["project"]["optional-dependencies"]
            )


def check_python(command, command_project):
    if command.arguments[0] == "-m":
        assert command.arguments[1:-1] == ("venv",)
    else:
        check_tool(Command(command.page, command.arguments), command_project)


def check_tool(command, command_project):
    """A program of tools/, each of which takes minutes: its options are there."""
    script = (ROOT / command.words[0]).read_text()
    source = script + ((ROOT / "tools" / "claims.py").read_text() if "from claims import" in script else "")
    constants = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert {word for word in command.arguments if word.startswith("-")} <= constants


def check_tox(command, command_project):
    text = (ROOT / "tox.ini").read_text()
    if command.arguments != ("run-parallel", "--parallel-live"):
        arguments = command.arguments[1:-1] if command.arguments[0] == "devenv" else command.arguments
        assert arguments[0] == "-e"
        assert f"[testenv:{arguments[1]}]" in text
        assert arguments[2:3] in ((), ("--",))


def check_docker(command, command_project):
    """Nothing is built here: the Dockerfile is there, and what runs in the image is a command that works."""
    subcommand, *words = command.arguments
    if subcommand == "build":
        assert (ROOT / words[words.index("--file") + 1]).is_file()
        return
    assert subcommand == "run"
    images = {f"gputrain-{path.stem}" for path in (ROOT / "docker").glob("*.Dockerfile")}
    (image,) = (number for number, word in enumerate(words) if word in {*images, "python:3.12"})
    inside = words[image + 1 :]
    if inside[:2] == ["sh", "-c"]:
        for part in inside[2].split(" && "):
            tool, *rest = part.split()
            assert tool in ("pip", "gputrain")
            RULES[tool](Command(command.page, (tool, *rest)), command_project)
    elif inside:
        assert inside[0] == "pytest"
        check_pytest(Command(command.page, tuple(inside)), command_project)


def check_mutmut(command, command_project):
    """Takes an hour: what it is told to mutate, and the tests that it runs, are there."""
    assert command.arguments[0] == "run"
    configured = PROJECT["tool"]["mutmut"]
    files = configured["only_mutate"] + configured["pytest_add_cli_args_test_selection"]
    assert all([*ROOT.glob(name)] for name in files)


def check_pytest_benchmark(command, command_project):
    benchmark_cli = pytest.importorskip("pytest_benchmark.cli")
    benchmark_cli.make_parser().parse_args(command.arguments)


TOOLS = {path.name for path in ROOT.glob("tools/*.py")}
RULES = {
    "docker": check_docker,
    "gputrain": check_gputrain,
    "mutmut": check_mutmut,
    "pip": check_pip,
    "pytest": check_pytest,
    "pytest-benchmark": check_pytest_benchmark,
    "python": check_python,
    "python3": check_python,
    "tox": check_tox,
    **dict.fromkeys(TOOLS, check_tool),
}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.program not in NOT_OURS], ids=str)
def test_command(command_project, command):
    assert command.program in RULES, "a program without a rule: say how to check it, or that it is not ours"
    RULES[command.program](command, command_project)


def test_commands_were_found():
    assert len(COMMANDS) > 80
    assert {command.program for command in COMMANDS} >= {*RULES, *NOT_OURS} - TOOLS


PROGRAMS = {f"{page}-{number}": text for page in PAGES for number, text in enumerate(blocks(page, "python"))}
ZOO = [name for name, text in PROGRAMS.items() if OWN_CODE not in text]
OWN = [name for name in PROGRAMS if name not in ZOO and not name.startswith(LOOPS)]


@pytest.mark.parametrize("name", ZOO)
def test_programs_that_declare_cases_run(project, name):
    project.write(test_program=PROGRAMS[name])
    project.machine(None)
    result = project.run()
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), result.stdout.str()
    assert "passed" in result.parseoutcomes()


@pytest.mark.slow
def test_programs_of_own_code_train(project):
    """In one pytest, in processes as on any machine without a GPU."""
    project.write(**{f"test_program_{number}": PROGRAMS[name] for number, name in enumerate(OWN)})
    assert {name.partition("-")[0] for name in OWN} >= {"README.md", "docs/gating", "docs/ab.md"}
    tests = sum(PROGRAMS[name].count("\ndef test_") for name in OWN)
    project.spawn("--gpu-platform=cpu").assert_outcomes(passed=tests)


A_SMALL_FLUX = """
import torch
from diffusers import FluxTransformer2DModel

torch.manual_seed(0)
sizes = dict(in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)
widths = dict(joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8))
FluxTransformer2DModel(**sizes, **widths, guidance_embeds=True).save_pretrained("checkpoint")
for number in range(8):
    sample = {"latents": 1 + torch.randn(64, 16) / 10, "text": torch.randn(8, 32), "pooled": torch.randn(16)}
    torch.save(sample, f"samples/{number}.pt")
"""


@pytest.mark.slow
@pytest.mark.weekly
def test_a_checkpoint_learns_from_files(project, monkeypatch):
    (project.path / "samples").mkdir()
    subprocess.run([sys.executable, "-c", A_SMALL_FLUX], cwd=project.path, check=True, timeout=300)
    monkeypatch.setenv("CHECKPOINT", str(project.path / "checkpoint"))
    monkeypatch.setenv("SAMPLES", str(project.path / "samples"))
    project.write(test_convergence=(ROOT / "docs" / "examples" / "convergence.py").read_text())
    result = project.spawn("--gpu-platform=cpu", "--gpu-loss=40", "--gpu-set=learning_rate=1e-3", "--gpu-json=report.json")
    result.assert_outcomes(passed=1)
    (study,) = project.report()["results"]
    assert {curve["precision"]: curve["trend"] for curve in study["loss_curves"]} == dict.fromkeys(
        ("fp32", "bf16-amp", "fp16-amp"), "converging"
    )


@pytest.mark.parametrize("page", PAGES)
def test_fragments_are_python_and_settings_exist(page):
    for text in blocks(page, "py"):
        # Decorators are complete with what they decorate, elements of a list within one.
        ast.parse(f"{text}\ndef decorated(): ..." if text.startswith("@") else f"({text})" if text.startswith("*") else text)
    for text in blocks(page, "toml"):
        settings = tomllib.loads(text)["tool"]["pytest"]["ini_options"]
        options = {option.ini: option for option in OPTIONS}
        assert all(options[name].parse(value) is not None for name, value in settings.items())
    for text in blocks(page, "json"):
        json.loads(text)
