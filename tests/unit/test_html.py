"""Tests the HTML report as a document: what it shows, that no data become markup, and that it loads nothing."""

import base64
import hashlib
import importlib.util
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from unit_examples import (
    CASE,
    crashed,
    emulated_run,
    gpu_environment,
    live_tensor,
    measurement,
    recorded,
    report,
    result,
    summary,
)

from pytest_gputrain.cli.main import main
from pytest_gputrain.gate.emulation import judge
from pytest_gputrain.records import Case, CountCause, Counts, MetricVerdict, Place, StepCounts, Verdict
from pytest_gputrain.records.study import LossCurve
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.storage.history import append
from pytest_gputrain.utils.git import RunInfo
from pytest_gputrain.utils.units import GiB

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("matplotlib", reason="the extra `report` is not installed")

from pytest_gputrain.report.html import page, trends
from pytest_gputrain.report.html.charts import Bar, Charts, LevelChange, Line

BASELINES = Path(__file__).parents[2] / "baselines"
HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(1)>"' {{ 7*7 }} &amp; $x_{1$ \x00\x1b 模型"""


class Reader(HTMLParser):
    """Elements and their text, as a browser's parser would see them."""

    LINES = {"h1", "h2", "h3", "p", "li", "tr", "dt", "summary", "figure", "svg", "caption"}  # noqa: RUF012

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.text = ""
        self.raw = {}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        self.text += f"\n\f{dict(attrs).get('id')}\n" if tag == "section" else "\n" if tag in self.LINES else " "

    def handle_data(self, data):
        if self._inside in ("style", "script"):
            self.raw[self._inside] = self.raw.get(self._inside, "") + data
            self._inside = ""
        else:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def sections(self):
        return [attributes.get("id") for attributes in self.all("section")]

    def lines(self, section):
        """The text of a section, a line for each paragraph, row and caption."""
        of_sections = dict(part.split("\n", 1) for part in self.text.split("\f")[1:])
        return [line for line in map(squeezed, of_sections[section].splitlines()) if line]

    @property
    def structure(self):
        return Counter((tag, tuple(sorted(attributes))) for tag, attributes in self.elements)


def read(*reports, history_trends=None):
    return Reader(page.page(reports, history_trends, baseline_dir=BASELINES))


def squeezed(text):
    return " ".join(text.split())


def history_trends_of(tmp_path, *sessions):
    """A history of a run a day."""
    path = tmp_path / "history.jsonl"
    for day, results in enumerate(sessions):
        created = f"2026-{1 + day // 28:02}-{1 + day % 28:02}T08:00:00Z"
        append(path, lines_of(results, RunInfo(id=f"s{day}", created=created, commit=f"c{day}", branch="main")))
    return page.read_trends([path], lambda _: None)


def timed(seconds, peak=40 * GiB, **fields):
    run = measurement(step_seconds=(seconds,) * 3, peak_allocated_bytes=peak)
    return result(**{"summary": summary(seconds, peak), "replies": (run,), **fields})


def everything(text):
    """A report with ``text`` wherever a page shows text, and something for each of its sections."""
    case = CASE.replace(model=text)
    environment = gpu_environment(device_name=text, host=text, packages={text: text}, topology=(("X", text), (text, "X")))
    run = measurement(environment=environment)
    two = msgspec.structs.replace(
        run, environment=msgspec.structs.replace(environment, device_count=2), one_worker_seconds=0.9
    )
    curves = (
        LossCurve(precision=text, outcome="recorded", losses=(3.0, 2.0), trend="converging"),
        LossCurve(precision="fp16-amp", outcome="recorded", losses=(3.0,), non_finite_step=2, trend="diverging"),
        LossCurve(precision="bf16", outcome="out_of_memory", reason=text),
    )
    failed = Verdict(status="failed", sentence=text)
    common = {"suite": text, "key": text, "device": text}
    results = (
        result(case, **common, replies=(run,)),
        result(case.replace(gpus=2, parallel="ddp", named=("gpus",)), **common | {"key": f"{text}2"}, replies=(two,)),
        result(case, **common | {"key": f"{text}3"}, replies=(crashed(detail=text),), summary=None, verdict=failed),
        result(case, **common, replies=(crashed(),), summary=None, verdict=None, loss_curves=curves),
        result(
            case,
            **common | {"device": f"emulated/{text}"},
            reply=emulated_run(largest={"forward": (live_tensor(operator=text, dtype=text),)}, packages={text: text}),
        ),
    )
    return report(*results, commit=text, branch=text, arguments=(text,), notes=(text,), generator=text)


def asking(*launches, waits=0, moved=0):
    """What ten equal steps ask of the GPU, by one line each, which stand that many lines further down."""

    def cause(what, line, number):
        own = Place(file="benchmarks/test_train.py", function="train", text=f"x = layer_{line}(x)", line=line + moved)
        return CountCause(what=what, own=own, counts=(number,))

    causes = [cause("launches", line, number) for line, number in enumerate(launches, 1) if number]
    kind = StepCounts(launches=sum(launches), waits=waits)
    return Counts(steps=(0,) * 10, kinds=(kind,), causes=(*causes, *([cause("waits", 3, waits)] if waits else [])))


BEFORE = emulated_run(counts=asking(*range(20, 30)).as_stored())


def regressed(**now):
    """A case that asks for more than is recorded of it."""
    now = msgspec.structs.replace(BEFORE, **now)
    verdict = judge(CASE, now, recorded(BEFORE), "h100")
    return result(device="emulated/h100", reply=now, verdict=verdict)


def test_a_failing_case_is_drawn_beside_its_baseline():
    """Each bar of today has the baseline's before it, and lines that have only moved are not marked."""
    more = {**BEFORE.phase_peak_bytes, "backward": 33 * GiB}
    failing = regressed(phase_peak_bytes=more, counts=asking(20, 21, 60, *range(23, 30), waits=2, moved=7))
    drawn = page.page([report(failing)], baseline_dir=BASELINES)
    told = dict(re.findall(r"<title[^>]*>([^<]*)</title><desc[^>]*>([^<]*)</desc>", drawn))
    assert told["Peak memory by phase"].split("; ")[2] == "backward: 32.0 GiB before, 33.0 GiB now"
    assert told["Waits of a step by line"] == "benchmarks/test_train.py:10 in train, x = layer_3(x): 0 before, 2 now"
    lines = told["Work of a step by line"].split("; ")
    assert lines[0] == "benchmarks/test_train.py:10 in train, x = layer_3(x): 22 before, 60 now"
    assert lines[1] == "benchmarks/test_train.py:17 in train, x = layer_10(x): 29 before, 29 now"
    assert lines[-1].startswith("4 other lines: ")
    assert re.search(r"Waits Work .* 2 283 ", " ".join(read(report(failing)).lines("cases")))
    marked = {metric.metric: [line.more for line in metric.lines] for metric in failing.verdict.metrics if metric.lines}
    assert marked == {"waits": [2], "work": [38, 0, 0, 0, 0, 0, 0]}


def test_charts_of_what_fails_a_case_come_first():
    """Memory that has not grown is beside them, and a count that all tables have is drawn before others."""
    asked = asking(20, 21, 60, *range(23, 30), waits=2)
    kind = msgspec.structs.replace(asked.kinds[0], mallocs=1)
    mallocs = CountCause(what="mallocs", own=asked.causes[2].own, counts=(1,))
    asked = msgspec.structs.replace(asked, kinds=(kind,), causes=(*asked.causes, mallocs))
    failing = regressed(counts=asked)
    assert {"waits", "mallocs", "work"} <= {one.metric for one in failing.verdict.metrics if one.status == "regressed"}
    drawn = re.findall(r"<title[^>]*>([^<]*)</title><desc", page.page([report(failing)], baseline_dir=BASELINES))
    assert drawn[:3] == ["Waits of a step by line", "Work of a step by line", "Peak memory by phase"]


def published_result(**fields):
    """A row of the paddlemix table, measured at 66 samples a second."""
    case = Case(
        model="llava-1.6-7b",
        method="pretrain",
        parallel="zero2",
        gpus=8,
        batch_size=16,
        sequence_length=2048,
        resolution="336x336",
        activation_checkpointing=True,
    )
    run = measurement(step_seconds=(128 / 66,) * 3, batch_size=128, peak_allocated_bytes=19 * GiB)
    figures = summary(128 / 66, 19 * GiB, samples_per_second=66.0)
    return result(case, **{"suite": "vision_language", "platform": "h800", "replies": (run,), "summary": figures, **fields})


def test_no_data_become_markup(tmp_path):
    """The same elements with the same attributes, whatever the text is; and all of the text is there to be read."""
    pasts = {}
    for number, text in enumerate((HOSTILE, "harmless")):
        folder = tmp_path / str(number)
        case = [timed(1.0 + 0.2 * (day > 9), suite=text, key=text, device=text) for day in range(20)]
        pasts[text] = history_trends_of(folder, *([day_result] for day_result in case))
    hostile, harmless = (read(everything(text), history_trends=pasts[text]) for text in (HOSTILE, "harmless"))
    assert hostile.sections == harmless.sections
    assert len(hostile.sections) == 8
    assert hostile.structure == harmless.structure
    assert hostile.text.count("<img src=x onerror=alert(1)>") > 20
    assert "49" not in hostile.raw["script"]


def test_nothing_is_loaded_only_its_own_script_and_style_may_run_and_what_refers_to_an_id_finds_it():
    reader = read(everything("x"), report(published_result()))
    policies = [meta["content"] for meta in reader.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policies[0]).split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(reader.raw[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert len(reader.all("script")) == len(reader.all("style")) == 1
    assert "url(" not in reader.raw["style"]
    ids = Counter(attributes["id"] for _, attributes in reader.elements if "id" in attributes)
    assert [name for name, times in ids.items() if times > 1] == []
    references = set()
    for tag, attributes in reader.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            assert name != "style", tag
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert str(value).startswith(("#", "data:")), (tag, value)
            if name in ("href", "xlink:href", "clip-path", "aria-labelledby"):
                references |= {*re.findall(r"#([\w-]+)", str(value))}
                references |= {*(str(value).split() if name == "aria-labelledby" else [])}
    assert len(references) > 10
    assert references <= set(ids)


SLOW = Verdict(
    status="regressed",
    sentence="gemma is 7.2 % slower",
    metrics=(MetricVerdict(metric="step_seconds", status="regressed", value=5.36, baseline=5.0, limit=5.15),),
)
SCALED = result(
    CASE.replace(parallel="ddp", gpus=4, named=("gpus",), batch_size=2),
    replies=(measurement(one_worker_seconds=0.8, batch_size=8, environment=gpu_environment(device_count=4)),),
    summary=summary(1.0, 1, samples_per_second=8.0),
)
LARGEST = (live_tensor(bytes=20 * GiB, phase="build"), live_tensor(bytes=10 * GiB, phase="forward", shape=(3, 5)))
MORE = live_tensor(bytes=2 * GiB, phase="backward")


def emulated(*largest):
    figures = emulated_run(largest={"backward": largest}, phase_peak_bytes={"backward": 32 * GiB})
    return result(reply=figures, device="emulated/h100")


def in_environment(key, **fields):
    return result(key=key, replies=(measurement(environment=gpu_environment(**fields)),))


FAILING = report(timed(1.0), timed(5.36, key="gemma", verdict=SLOW), timed(2.0, key="phi", verdict=None))
SCENES = {
    "no case": ("verdicts", report()),
    "counts of verdicts": ("verdicts", FAILING),
    "failures first, and a row for every case": ("cases", FAILING),
    "published figures beside measured ones": ("published", report(published_result())),
    "samples a second, and one worker alone": ("scaling", report(SCALED)),
    "tensors by the phase that made them, and the rest": ("memory", report(emulated(*LARGEST))),
    "all tensors": ("memory", report(emulated(*LARGEST, MORE))),
    "loss curves": ("losses", everything("x")),
    "environments once, with all counts": (
        "environment",
        report(in_environment("1"), in_environment("4", device_count=4), in_environment("other", driver="590.1")),
    ),
}


def test_what_a_section_says(snapshot):
    assert {what: read(written).lines(section) for what, (section, written) in SCENES.items()} == snapshot


def test_a_table_has_ten_figures_and_a_row_says_the_others():
    """What tells nothing apart, a single suite or device, has no column. Notes are below the failures and the cases."""
    every = {"gpu_seconds": 0.9, "gpu_busy_share": 0.9, "model_flops_utilization": 0.5, "joules_per_sample": 7.0}
    busy = timed(1.0, key="busy", summary=summary(1.0, 40 * GiB, tokens_per_second=9.0, scaling_efficiency=0.8, **every))
    waiting = msgspec.structs.replace(regressed(counts=asking(20, waits=2)), device=busy.device)
    drawn = page.page([report(busy, waiting, notes=("a note",))], baseline_dir=BASELINES)
    about, of_table = re.split(r"<table id=.table", drawn[drawn.index("<h2>Cases</h2>") :])
    assert "llm on nvidia-h100-80gb-hbm3" in about
    head = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)<", of_table.partition("</thead>")[0])
    assert head[:2] == ["Case", "Verdict"]
    assert len(head) == 12
    assert head[-1] == "Waits"
    assert "<p>MFU 50.0 %, Energy 7.00 J, Model 14.9 GiB</p>" in drawn
    assert drawn.index('id="failures"') < drawn.index('id="cases"') < drawn.index("<li>a note</li>")


def test_of_a_case_in_several_reports_the_latest_counts():
    early, late = (report(timed(seconds), created=f"2026-02-0{day}T00:00:00Z") for day, seconds in ((1, 1.0), (2, 7.5)))
    reader = read(late, early)
    assert len([row for row in reader.all("tr") if "data-verdict" in row]) == 1
    assert ("7.50 s" in reader.text, "1.00 s" in reader.text) == (True, False)


@pytest.mark.parametrize(
    "fields", [{"scale": "tiny"}, {"platform": "h100"}, {"summary": None, "replies": (crashed(),)}, {"batch_size": 2}]
)
def test_what_is_no_published_row_has_no_bars(fields):
    """The same id at another batch is not what was published, either."""
    row = published_result()
    changed = {"case": row.case.replace(**fields)} if "batch_size" in fields else fields
    assert "published" not in read(report(msgspec.structs.replace(row, **changed))).sections


def points_of(reader):
    """Of each chart: to the right, down, and what is said of the point."""
    return [json.loads(str(chart["data-points"])) for chart in reader.all("div") if chart.get("data-points")]


def test_trends_have_their_levels_changes_and_commits(tmp_path):
    runs = ([timed(1.0 if day < 12 else 1.1), timed(2.0, key="steady")] for day in range(24))
    reader = read(history_trends=history_trends_of(tmp_path, *runs))
    text = squeezed(reader.text)
    assert reader.sections == ["trends"]
    assert "+10.0 % on 2026-01-13: 1.00 s to 1.10 s commits c11..c12" in text
    assert text.index("+10.0 %") < text.index("1 case without a change") < text.index("steady")
    first, *others = points_of(reader)
    assert len(others) == 3
    rights, heights, said = zip(*first, strict=True)
    assert said[:2] == ("2026-01-01 c0 1.00 s", "2026-01-02 c1 1.00 s")
    assert list(rights) == sorted(rights)
    assert min(heights[:12]) > max(heights[12:])  # slower is higher up


def test_what_is_too_much_to_draw_is_left_out_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(trends, "MOST_CARDS", 2)
    monkeypatch.setattr(trends, "MOST_RUNS", 10)
    runs = ([timed(1.0 + 0.2 * (name == "c" and day > 9), key=name) for name in "abcd"] for day in range(30))
    reader = read(report(timed(1.0, key="d")), history_trends=history_trends_of(tmp_path, *runs))
    titles = re.findall(r"Time of a step of (\w)", reader.text)
    assert titles == ["c", "d"]  # the one that changed, then the one that has just run
    assert "trends are drawn of 2 of 4 cases, those with the largest changes first" in reader.text
    days = [f"2026-{1 + day // 28:02}-{1 + day % 28:02}" for day in range(20, 30)]
    assert [point[2][:10] for point in points_of(reader)[0]] == days, "the end of a long series"


def drawn():
    charts = Charts()
    yield charts.bars([(HOSTILE, [Bar(parts=((0.0, 0), (1.0, 1)), text=HOSTILE)])], title=HOSTILE, description=HOSTILE)
    yield charts.lines([Line(name="one", x=[1], y=[0.0], labels=["x"])], x="x", y="y", title="t", description="d")
    from datetime import UTC, datetime

    day = datetime(2026, 1, 1, tzinfo=UTC)
    step = LevelChange(index=1, text="+1 %", worse=True)
    yield charts.trend(
        [day] * 3, [1.0] * 3, [(0, 1.0), (1, 1.0)], [step], ["x"] * 3, kind="seconds", title="t", description="d"
    )


def test_charts_are_sound_xml_in_colours_that_become_variables_of_the_sheet():
    for chart in drawn():
        root = ElementTree.fromstring(chart.svg)
        assert root.get("role") == "img"
        assert "#0001" not in chart.svg
        box = [float(side) for side in str(root.get("viewBox")).split()]
        assert all(0 <= right <= box[2] and 0 <= down <= box[3] for right, down, _ in chart.points)
    charts = Charts()
    charts.lines([Line(name="one", x=[1, 2], y=[1.0, 2.0], labels=["x"] * 2)], x="x", y="y", title="t", description="d")
    assert "stroke:var(--series-1)" in charts.css
    assert "#0001" not in charts.css
    sheet = (Path(page.__file__).parent / "page.css").read_text()
    assert set(re.findall(r"var\((--[\w-]+)\)", charts.css)) <= set(re.findall(r"(--[\w-]+):", sheet))


def test_charts_do_not_follow_the_settings_of_whoever_runs_them():
    import matplotlib

    plain = [chart.svg for chart in drawn()]
    with matplotlib.rc_context({"text.usetex": True, "font.size": 40, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert [chart.svg for chart in drawn()] == plain
        assert matplotlib.rcParams["font.size"] == 40


def write(path, document):
    path.write_bytes(msgspec.json.encode(document))
    return str(path)


def test_the_command_writes_a_page(tmp_path):
    history_trends_of(tmp_path, *([timed(1.0)] for _ in range(5)))
    output = tmp_path / "deep" / "page.html"
    written = write(tmp_path / "a.json", report(timed(1.0)))
    assert main(["export", written, "--history", str(tmp_path / "history.jsonl"), "--format=html", "-o", str(output)]) == 0
    assert Reader(output.read_text()).sections == ["verdicts", "cases", "trends", "environment"]


def test_a_change_of_a_count_from_0_is_drawn_with_its_commit(tmp_path):
    waiting = [result(device="emulated/h100", reply=emulated_run(counts=asking(20, waits=waits))) for waits in (0, 0, 3, 3)]
    reader = read(history_trends=history_trends_of(tmp_path, *([case] for case in waiting)))
    assert "more on 2026-01-03: 0 to 3 commits c1..c2" in reader.lines("trends")
    assert "launches_per_step" not in reader.text


def test_gputrain_trend_draws_what_it_tells(tmp_path, capsys):
    history_trends_of(
        tmp_path, *([timed(1.0 if day < 9 else 1.02 if day < 18 else 1.3, key=key) for key in "ab"] for day in range(27))
    )
    history, output = str(tmp_path / "history.jsonl"), tmp_path / "page.html"
    assert main(["trend", history, "--html", str(output), "--case=a", "--least=10%", "--metric=samples_per_second"]) == 1
    text = squeezed(Reader(output.read_text()).text)
    assert "samples_per_second" in text
    assert "-21.5 % on" in text
    assert text.count("commits c") == 1
    assert "Peak memory" not in text


def test_bad_input_of_the_command_is_one_sentence(tmp_path, capsys, monkeypatch, snapshot):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.json", report())
    (tmp_path / "file").touch()
    said = {}
    find = importlib.util.find_spec
    commands = ("", "missing.json", "a.json --history none.jsonl", "a.json -o file/page.html")
    exports = [f"export --format html {words}" for words in (*commands, "a.json -o x.html")]
    for words in (*exports, "trend a.json --html x.html"):
        if "x.html" in words:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
        assert main(words.split()) == 2
        (said[words],) = capsys.readouterr().err.replace(str(tmp_path), "").splitlines()
    assert said == snapshot
