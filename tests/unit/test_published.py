"""The published tables: nothing lost or mistyped, every row a declared case, and sentences for damaged files."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from unit_examples import measurement, out_of_memory

from pytest_gputrain import GiB, MiB
from pytest_gputrain.gate.published import judge_published
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.records.published import Figures
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.published import PublishedStore

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "baselines" / "published"
STORE = PublishedStore(FOLDER)
TABLES = {table.name: table for table in STORE.tables}
ROWS = [row for table in STORE.tables for row in table.published()]


def _name(row):
    return f"{row.table}-{row.platform}-{row.case}"


def _rows(table):
    return pytest.mark.parametrize("row", TABLES[table].published(), ids=_name)


def _as_printed(figure, unit):
    """The digits that ``figure`` was printed with in ``unit``: found by trying, not by how it was read."""
    if figure is None:
        return ""
    decimals = next(count for count in range(4) if abs(figure.rounding / unit - 10**-count) < 1e-6)
    ends = [f"{end / unit:.{decimals}f}" for end in dict.fromkeys((figure.low, figure.high))]
    exact = 0.5 if unit >= MiB else 1e-9  # bytes are whole
    assert all(abs(float(text) * unit - end) <= exact for text, end in zip(ends, (figure.low, figure.high), strict=False))
    return "-".join(ends)


@_rows("llm-trainer")
def test_llm_trainer_figures_are_those_of_their_cells(row):
    figures = row.figures["pytorch"]
    thousand_mib = 1000 * MiB
    peak, speed = _as_printed(figures.device_used_bytes, thousand_mib), _as_printed(figures.step_seconds, 1)
    assert (row.outcome == "out_of_memory") == (row.cells["Sec/step"] == "OOM")
    unit = thousand_mib if row.platform == "h100" else 1e9
    model = f"{_as_printed(figures.model_bytes, unit)} GiB" if figures.model_bytes else "CPU Offload"
    assert row.cells["Peak Mem. (Model Mem.)"] == (f"{peak} GiB ({model})" if peak else f"OOM ({model})")
    assert row.cells["Sec/step"] == (speed or "OOM")
    device, gpus = row.cells["GPU"].split(" x ")
    assert (device.lower().split()[-1] in row.platform, int(gpus)) == (True, row.case.gpus)
    assert row.case.method == row.cells["Tuning Method"].lower()
    assert row.case.cpu_offload == (model == "CPU Offload") == ("*" in row.cells["Model"] and "**" not in row.cells["Model"])


_SPELLINGS = {"-": None, "true": True, "false": False}


@_rows("pangu-deepspeed")
def test_pangu_figures_and_knobs_are_those_of_their_cells(row):
    figures, case = row.figures.get("pytorch", Figures()), row.case
    model, epoch, speed, host, memory, gpus, fp16, bf16, stage, optimizer, pin, param, overlap, bucket, live = (
        row.cells.values()
    )
    speed_here = _as_printed(figures.update_seconds, 1)
    assert speed == (f"{speed_here}s/it" if speed_here else "-")
    device = _as_printed(figures.device_used_bytes, MiB)
    outcome = {"measured": f"{case.gpus}*{device}MB", "out_of_memory": "OOM", "error": "CUDA Error"}
    assert memory == outcome[row.outcome]
    assert host.strip("-") == (f"{_as_printed(figures.peak_host_bytes, GiB)}G" if figures.peak_host_bytes else "")
    minutes, hours = (
        f"{_as_printed(figures.epoch_seconds, size)}" if _fits(figures.epoch_seconds, size) else "" for size in (60, 3600)
    )
    assert epoch in (f"{minutes}min", f"{hours}h") if figures.epoch_seconds else epoch in ("", "-")
    assert gpus.lower().startswith(f"{case.gpus}*{row.platform} ")
    assert case.model == model.lower()
    assert case.precision == (
        "fp16-amp" if fp16 == "true" else "fp32" if bf16 != "true" else "bf16-amp" if stage == "-" else "bf16"
    )
    assert case.parallel == ("single" if stage == "-" else f"zero{stage}")
    assert (case.offload_optimizer, case.pin_memory, case.offload_param) == tuple(
        bool(_SPELLINGS[cell]) for cell in (optimizer, pin, param)
    )
    assert case.overlap_comm is _SPELLINGS[overlap]
    sizes = (case.allgather_bucket_size, case.stage3_max_live_parameters)
    assert sizes == tuple(int(float(cell.replace("-", "0"))) for cell in (bucket, live))
    hidden = {"pangu-350m": 1024, "pangu-2.6b": 2560}[case.model]
    assert case.reduce_bucket_size == {"2": case.allgather_bucket_size, "3": hidden**2}.get(stage, 0)


def _fits(figure, size):
    return figure is not None and any(abs(figure.rounding / size - unit) < 1e-6 for unit in (1, 0.1))


@_rows("paddlemix")
def test_paddlemix_figures_are_those_of_their_cells(row):
    _, stage, paddle, _, pytorch, memory = row.cells.values()
    assert _as_printed(row.figures["paddle"].samples_per_second, 1) == paddle
    assert _as_printed(row.figures["pytorch"].samples_per_second, 1) == pytorch
    peaks = (row.figures["paddle"].peak_allocated_bytes, row.figures["paddle"].peak_reserved_bytes)
    assert memory == ("/".join(_as_printed(peak, GiB) for peak in peaks) if all(peaks) else "-")
    assert stage.lower().startswith(row.case.method) or (stage, row.case.method) == ("SFT (Dreambooth)", "dreambooth")


@_rows("amd-diffusion")
def test_amd_figures_are_those_of_their_cells(row):
    _, second, best = row.cells.values()
    speed = _as_printed(row.figures["pytorch"].samples_per_second_per_gpu, 1)
    assert {1: second, 10: best}[row.case.batch_size] == (
        speed if row.case.batch_size == 1 else f"{speed} (micro batch size = 10)"
    )


def _declared():
    for path in sorted((ROOT / "benchmarks").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"declared_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in module.CASES:
            yield path.stem.removeprefix("test_"), case


DECLARED = list(_declared())
SUITES = {suite for suite, _ in DECLARED}


@pytest.mark.parametrize("row", [row for row in ROWS if row.suite in SUITES], ids=_name)
def test_every_row_is_a_declared_case(row):
    same = [case for suite, case in DECLARED if suite == row.suite and str(case) == str(row.case)]
    mine = [case for case in same if row.platform in case.platforms]
    assert [case.identity() for case in mine] == [row.case.identity()]


DEFAULT = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))


@pytest.mark.parametrize("row", [row for row in ROWS if row.figures or row.outcome != "measured"], ids=_name)
def test_every_row_is_judged_or_says_in_one_phrase_why_not(row):
    seconds = (1.0,) * 2 * row.case.gradient_accumulation
    verdict = judge_published(row.case, [measurement(step_seconds=seconds)], row, DEFAULT, scale="full")
    if row.outcome != "measured":
        assert verdict.status == "improved", "it trains, where it was published that it does not"
    else:
        assert verdict.metrics
        for metric in verdict.metrics:
            assert metric.status in ("pass", "regressed", "improved") or metric.note
            assert len(metric.note) <= 130
    if row.table == "llm-trainer":  # as published: out of memory, or with time and memory as printed
        figures = row.figures["pytorch"]
        time, used = figures.step_seconds, figures.device_used_bytes
        measured = time and used and measurement(step_seconds=(time.middle,), device_used_bytes=round(used.middle))
        verdict = judge_published(row.case, [measured or out_of_memory()], row, DEFAULT, scale="full")
        assert verdict.status == "pass"
        reasons = {metric.metric: metric.note for metric in verdict.metrics if metric.status == "not-comparable"}
        assert list(reasons) == (["device_used_bytes"] if row.case.parallel == "fsdp" else [])
        assert all(reason.startswith("published with FSDP1, which holds") for reason in reasons.values())


def test_a_row_is_found_by_platform_suite_and_key():
    assert (len(ROWS), sum(bool(row.figures) or row.outcome != "measured" for row in ROWS)) == (128, 112)
    assert all(len(row.cells) == len(table.columns) for table in TABLES.values() for row in table.rows)
    assert {row.platform for row in ROWS} <= set(MARKERS)
    row = STORE.get("h100", "llm_finetuning", "llama-3.1-8b-lora-bf16")
    assert row.cells["Sec/step"] == "6.4"
    assert row.made_with == "torch 2.5.1, transformers 4.49.0 on NVIDIA H100"
    assert STORE.get("h200", "llm_finetuning", "llama-3.1-8b-lora-bf16") is None
    assert STORE.platforms_of("llm_finetuning", "llama-3.1-8b-lora-bf16") == ["a100", "h100", "rtx_pro_6000"]


def test_tables_beside_the_baselines_win_over_those_of_the_package(tmp_path):
    assert PublishedStore.beside(tmp_path).folder != tmp_path / "published"
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "amd-diffusion.json").write_bytes((FOLDER / "amd-diffusion.json").read_bytes())
    assert [table.name for table in PublishedStore.beside(tmp_path).tables] == ["amd-diffusion"]
    with pytest.raises(BaselineError, match="there is no published table in"):
        PublishedStore(tmp_path)


def _speed(document):
    return document["rows"][0]["figures"]["pytorch"]["samples_per_second_per_gpu"]


def test_a_damaged_table_is_told_by_file_and_place(tmp_path, snapshot):
    changes = {
        "name": lambda it: it.update(name="other"),
        "no platforms": lambda it: it["platforms"].clear(),
        "no samples": lambda it: it.update(epoch={"samples": 0, "column": "Precision"}),
        "no column": lambda it: it.update(epoch={"samples": 10, "column": "Time"}),
        "a missing cell": lambda it: it["rows"][1]["cells"].pop("Precision"),
        "low above high": lambda it: _speed(it).update(low=3),
        "low below its rounding": lambda it: _speed(it).update(low=0.001),
        "no rounding": lambda it: _speed(it).update(rounding=0),
        "a row twice": lambda it: it["rows"].append(it["rows"][0]),
        "an outcome": lambda it: it["rows"][0].update(outcome="fine"),
        "an earlier format": lambda it: it.update(format=1),
        "a later format": lambda it: it.update(format=99),
    }
    path = tmp_path / "amd-diffusion.json"
    told = {}
    for name, change in changes.items():
        document = json.loads((FOLDER / path.name).read_text())
        change(document)
        path.write_text(json.dumps(document))
        with pytest.raises(BaselineError, match=re.escape(str(path))) as error:
            PublishedStore(tmp_path)
        told[name] = str(error.value).replace(str(tmp_path), "")
    assert told == snapshot
