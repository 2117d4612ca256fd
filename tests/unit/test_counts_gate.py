"""Verdicts on what the steps of a case ask of the GPU."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gputrain.gate.count_lines import count_changes, lines_beside
from pytest_gputrain.gate.counts import judge_counts
from pytest_gputrain.records import CountCause, Counts, Place, StepCounts
from pytest_gputrain.records.tolerance import CountTerms, CountTolerance

LOSS = Place(file="train.py", function="train", text="loss.item()", line=42)
STEP = Place(file="train.py", function="train", text="optimizer.step()", line=45)
ADAM = Place(file="torch/optim/adam.py", function="_single_tensor_adam", line=400)
FOREACH = Place(file="torch/optim/adam.py", function="_multi_tensor_adam", line=600)


def cause(what, *counts, own=None, **fields):
    return CountCause(what=what, counts=counts, own=own, **fields)


def counts(*kinds, steps=None, causes=(), lines_unknown=""):
    """Return counts of one step of each kind, or of these steps."""
    kinds = tuple(kind if isinstance(kind, StepCounts) else StepCounts(**kind) for kind in kinds)
    return Counts(
        steps=tuple(range(len(kinds)) if steps is None else steps),
        kinds=kinds,
        causes=tuple(causes),
        lines_unknown=lines_unknown,
    )


def judged(before, now, **terms):
    """Judge steps that are all alike."""
    before, now = ({"launches": 1000} | figures for figures in (before, now))
    return judge_counts(counts(before, steps=[0] * 10), counts(now, steps=[0] * 10), CountTerms(**terms))


def statuses(verdict):
    return {metric.metric: metric.status for metric in verdict.metrics}


@pytest.mark.parametrize(("warmup", "status"), [(3, "regressed"), (1, "pass"), (0, "pass")])
def test_steps_are_compared_by_their_number_with_those_of_the_warm_up(warmup, status):
    """The recorded run had one step of warm-up, and the cache of the allocator has grown in the next two."""
    recorded = counts({"mallocs": 1}, {}, steps=[0, 0, *[1] * 8])
    grown = counts({"mallocs": 1}, {}, steps=[*[0] * (3 - warmup), *[1] * 7] if warmup < 3 else [0, *[1] * 6])
    before, now = (msgspec.structs.replace(one, first=first) for one, first in ((recorded, 1), (grown, warmup)))
    assert statuses(judge_counts(before, now, again=now))["mallocs"] == status


def test_runs_without_a_step_of_the_same_number_are_not_compared():
    before, now = counts({}, steps=[0] * 3), msgspec.structs.replace(counts({}, steps=[0] * 3), first=3)
    assert judge_counts(before, now) is None


def test_an_edited_line_stands_beside_what_it_asked_for_before_the_edit():
    def at(text, number, function="train"):
        return cause("launches", number, own=Place(file="train.py", function=function, text=text, line=3))

    before = (at("loss = f(x)", 9), at("y = g(x)", 30), at("z = x + 1", 5, "other"))
    now = (at("loss = f(x.float())", 12), at("y = g(x)", 30), at("z = x + 1", 5, "moved"))
    lines = lines_beside("work", 0, *(counts({"launches": 50}, causes=causes) for causes in (before, now)))
    assert [(line.line.rpartition(", ")[2], line.baseline, line.value, line.more) for line in lines] == [
        ("loss = f(x.float())", 9, 12, 3),
        ("y = g(x)", 30, 30, 0),
        ("z = x + 1", 5, 5, 0),
    ]


ANY = ("waits", "collectives", "compilations", "graph_breaks", "mallocs", "frees")
FIELDS = [
    name for name in StepCounts.__struct_fields__ if name not in ("update", "slow_flops", "library_flops", "d2d_bytes")
]
whole = st.integers(min_value=0, max_value=10**6)
step_counts = st.builds(StepCounts, **dict.fromkeys(FIELDS, whole), update=st.booleans())


@st.composite
def any_counts(draw):
    kinds = draw(st.lists(step_counts, min_size=1, max_size=4))
    steps = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=12))
    return counts(*kinds, steps=steps)


@given(any_counts())
def test_equal_counts_pass_in_silence(same):
    verdict = judge_counts(same, same)
    assert {metric.status for metric in verdict.metrics} == {"pass"}
    assert verdict[1:] == ((), (), (), (), False)


@given(step_counts, step_counts)
def test_no_figure_is_worse_both_ways(some, others):
    others = msgspec.structs.replace(others, update=some.update)
    there, back = (judge_counts(counts(a), counts(b)) for a, b in ((some, others), (others, some)))
    worse = [{name for name, status in statuses(verdict).items() if status == "regressed"} for verdict in (there, back)]
    assert not worse[0] & worse[1]


@pytest.mark.parametrize("figure", ANY)
@given(data=st.data())
def test_growth_of_any_single_step_fails(figure, data):
    base = StepCounts(waits=3, launches=1000, collectives=4)
    grown = msgspec.structs.replace(base, **{figure: getattr(base, figure) + data.draw(st.integers(1, 9))})
    steps = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12).filter(any))
    verdict = judge_counts(counts(base, steps=[0] * len(steps)), counts(base, grown, steps=steps))
    assert statuses(verdict)[figure] == "regressed"


@pytest.mark.parametrize(
    ("before", "more", "expected"),
    [
        (100, {"launches": 5}, "pass"),
        (100, {"launches": 6}, "regressed"),
        (1000, {"launches": 10}, "pass"),
        (1000, {"launches": 5, "library_calls": 3, "d2d": 3}, "regressed"),
        (9023, {"launches": 60}, "pass"),
        (9023, {"launches": 96}, "regressed"),  # one pointwise kernel in each block
        (9023, {"d2d": 64}, "regressed"),  # one clone in each block, forwards and backwards
        (100, {"launches": -5}, "pass"),
        (100, {"launches": -6}, "improved"),
    ],
)
def test_work_may_grow_by_little(before, more, expected):
    now = {"launches": before} | more
    now["launches"] = before + more.get("launches", 0)
    assert statuses(judged({"launches": before}, now))["work"] == expected


@pytest.mark.parametrize(
    ("figure", "before", "most"),
    [
        ("h2d_bytes", 1000, 1010),
        ("d2h_bytes", 0, 0),
        ("collective_bytes", 1000, 1010),
        ("stream_waits", 0, 8),
        ("stream_waits", 25, 37),
        ("memsets", 0, 1000),
        ("blocks", 0, 1000),
    ],
)
def test_other_figures_fail_above_their_limits(figure, before, most):
    assert statuses(judged({figure: before}, {figure: most}))[figure] == "pass"
    over = statuses(judged({figure: before}, {figure: most + 1}))[figure]
    assert over == ("pass" if figure in ("memsets", "blocks") else "regressed")


@pytest.mark.parametrize(("flops", "expected"), [(10, "pass"), (11, "regressed")])
def test_a_share_of_the_flops_may_move_to_a_slower_class(flops, expected):
    verdict = judged({"library_flops": 1000}, {"library_flops": 1000, "slow_flops": {"unaligned": flops}})
    assert statuses(verdict)["unaligned_flops"] == expected


def test_more_of_all_products_and_a_move_between_slower_classes_are_no_move_to_a_slower_class():
    before = {"library_flops": 1000, "slow_flops": {"fp32": 400}}
    verdict = judged(before, {"library_flops": 2000, "slow_flops": {"fp32": 800}})
    assert statuses(verdict)["fp32_flops"] == "pass"
    verdict = judged(before, {"library_flops": 1000, "slow_flops": {"unaligned": 400}})
    assert statuses(verdict)["unaligned_flops"] == "pass"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"waits": 2}, {"waits": 1, "launches": 1050}, "pass"),
        ({"waits": 2}, {"waits": 1, "launches": 1051}, "regressed"),
        ({"h2d_pageable": 1}, {"launches": 1050}, "pass"),
        ({"waits": 3}, {"waits": 1, "d2h_pageable": 1, "launches": 1050}, "regressed"),
        ({}, {"launches": 1050}, "regressed"),
    ],
)
def test_work_may_grow_more_where_a_step_waits_less(before, now, expected):
    assert statuses(judged(before, now))["work"] == expected


def test_what_graphs_run_may_grow_more_where_a_step_waits_less():
    before, now = {"waits": 1, "replays": 1, "replayed": 1000}, {"replays": 1, "replayed": 1050}
    assert set(statuses(judged(before, now)).values()) == {"pass", "improved"}


def test_fewer_kernels_do_not_excuse_a_wait():
    assert statuses(judged({"waits": 1}, {"waits": 2, "launches": 100}))["waits"] == "regressed"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([0] * 10, [0] * 9 + [1], "regressed"),
        ([4, 2] + [0] * 5, [4, 2] + [1] * 5, "regressed"),
        ([4, 2] + [0] * 5, [9, 2] + [0] * 5, "pass"),  # the cache still grew
        ([4, 2] + [0] * 4, [4, 2] + [1] * 4, "pass"),
        ([0, 0], [0, 1], "regressed"),
        ([1] * 10, [0] * 10, "improved"),
    ],
)
def test_memory_is_asked_for_no_more_often_once_the_cache_has_stopped_to_grow(before, now, expected):
    before, now = (counts(*({"mallocs": number} for number in numbers)) for numbers in (before, now))
    assert statuses(judge_counts(before, now))["mallocs"] == expected


def test_a_baseline_that_compiles_in_each_step_is_judged_all_the_same():
    before, now = (counts({"compilations": number}, steps=[0] * 4) for number in (1, 2))
    assert statuses(judge_counts(before, now))["compilations"] == "regressed"


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ({"launches": 100}, {"launches": 0, "replays": 1, "replayed": 100}, set()),
        ({"launches": 0, "replays": 1, "replayed": 100}, {"launches": 0, "replays": 1, "replayed": 106}, {"gpu_work"}),
        ({"launches": 0, "replays": 1, "replayed": 100}, {"launches": 0, "replays": 1, "replayed": 105}, set()),
        ({"launches": 0, "replays": 1, "replayed": 100}, {"launches": 100}, {"work"}),
        ({"launches": 100}, {"launches": 120}, {"work"}),
    ],
)
def test_the_host_asks_for_a_graph_once_and_the_gpu_does_all_of_it(before, now, worse):
    found = statuses(judged(before, now))
    assert {figure for figure, status in found.items() if status == "regressed"} == worse
    assert ("gpu_work" in found) == any(figures.get("replays") for figures in (before, now))


def test_micro_batches_are_not_compared_with_updates():
    before = counts({"update": False}, {"waits": 1}, steps=[0, 1])
    now = counts({"waits": 1}, {"waits": 2, "update": False}, {"waits": 1}, steps=[0, 1, 2])
    assert judge_counts(before, now) is None
    now = counts({"waits": 1}, {"waits": 1}, {"waits": 2}, steps=[0, 1, 2])
    assert judge_counts(before, now).worse == ()


@pytest.mark.parametrize(
    ("tolerances", "now", "expected"),
    [
        ({"waits": CountTolerance(more=2)}, {"waits": 3}, {"waits": "pass"}),
        ({"waits": CountTolerance(more=2)}, {"waits": 4}, {"waits": "regressed"}),
        ({"work": CountTolerance()}, {"launches": 1001}, {"work": "regressed"}),
        ({"launches": CountTolerance(ratio=0.05)}, {"launches": 1050}, {"launches": "pass", "work": "pass"}),
        ({"launches": CountTolerance(ratio=0.05)}, {"launches": 1050, "d2d": 6}, {"work": "regressed"}),
        ({"launches": CountTolerance(ratio=0.05, more=2)}, {"launches": 1053}, {"launches": "regressed", "work": "pass"}),
        ({"mallocs": CountTolerance(more=1)}, {"mallocs": 1}, {"mallocs": "pass"}),
        ({"memsets": CountTolerance(more=1)}, {"memsets": 2}, {"memsets": "regressed"}),
        ({"nchw_flops": CountTolerance(ratio=0.5)}, {"library_flops": 9, "slow_flops": {"nchw": 4}}, {"nchw_flops": "pass"}),
    ],
)
def test_a_tolerance_replaces_the_rule_of_its_figure(tolerances, now, expected):
    verdict = statuses(judged({"waits": 1}, {"waits": 1} | now, tolerances=tolerances))
    assert {figure: verdict[figure] for figure in expected} == expected


@given(any_counts(), any_counts())
def test_nothing_fails_where_growth_is_only_told(before, now):
    judged, told = judge_counts(before, now), judge_counts(before, now, CountTerms(mode="tell"))
    if judged is not None:
        assert not told.worse
        assert len(judged.worse) + len(judged.told) == 0 or told.told


def _differing(before, now, causes_before=(), causes=(), **fields):
    """Judge ten equal steps, with what asks for their figures, against stored ones."""
    before = counts(before, steps=[0] * 10, causes=causes_before).as_stored()
    return judge_counts(before, counts(now, steps=[0] * 10, causes=causes), **fields)


def _said(verdict):
    kinds = ("worse", "better", "told", "doubtful")
    return " / ".join(f"{kind}: {sentence}" for kind in kinds for sentence in getattr(verdict, kind)) or "nothing"


def _unplaced(figure):
    """Growth without a line. Baselines keep no names of kernels, so nobody knows which of them are new."""
    before, now = ([cause(figure, 900, by="cudaFree"), cause(figure, number, by="cudaMemcpy")] for number in (10, 11))
    return _differing({figure: 10}, {figure: 911}, before, now)


def _in_some(steps):
    return judge_counts(counts({}, steps=[0] * len(steps)), counts({}, {"waits": 2}, steps=steps))


BLOCK = Place(file="model.py", function="Block.forward", text="x = x.clone()", line=7)
HEAD = Place(file="model.py", function="GPT.forward", text="logits = self.head(x)", line=90)
LOAD = Place(file="train.py", function="train", text="rows = rows.to(device)", line=39)


def test_changes_are_told_with_all_that_matters(snapshot):
    reads = {"waits": 1, "d2h_pinned": 1, "d2h_bytes": 4}
    read = [cause("waits", 1, own=LOSS), cause("d2h_pinned", 1, own=LOSS, bytes=(4,))]
    read_twice = [cause("waits", 2, own=LOSS), cause("d2h_pinned", 1, own=LOSS, bytes=(8,))]
    copied = [cause("waits", 1, own=LOAD), cause("h2d_pageable", 1, own=LOAD, bytes=(4096,))]
    rest = cause("launches", 468, own=LOSS)
    foreach = [rest, cause("launches", 16, own=STEP, library=FOREACH)]
    single = [rest, cause("launches", 1184, own=STEP, library=ADAM, by="vectorized_elementwise_kernel")]
    edited = [cause("waits", 10, own=msgspec.structs.replace(LOSS, text="total.item()")), cause("waits", 12, own=STEP)]
    equal = [cause("waits", 4, own=msgspec.structs.replace(LOSS, line=99)), cause("waits", 1, own=LOSS)]
    unaligned = {"shape": "64 x 50257 x 512 bf16", "slow": "unaligned", "bytes": (3 * 10**9,)}
    products = [cause("library_calls", 1, own=HEAD, **unaligned), cause("library_calls", 9, own=LOSS, bytes=(7 * 10**9,))]
    library = {"library_calls": 10, "library_flops": 10**10}
    replayed = [cause("launches", 28, own=STEP, replayed=True), cause("replays", 1, own=LOSS)]
    compiled = counts({"compilations": 3}, {}, steps=[0, 1, 1, 1])
    captured, replays = {"captures": 2}, {"replays": 2, "replayed": 90}
    first, second = (counts({"waits": waits}, {"waits": 1}, causes=[cause("waits", waits, 1, own=LOSS)]) for waits in (1, 2))
    again = {"as many": {"waits": 2, "launches": 990}, "fewer": {"waits": 1, "launches": 1000}, "more": {"waits": 3}}
    verdicts = {
        "work that is excused": judged({"waits": 1}, {"launches": 1050}),
        "a small part of more work": judged({}, {"launches": 1090, "d2d": 10}),
        "a few bytes": judged({"h2d_bytes": 2**20}, {"h2d_bytes": 2**20 + 1}, tolerances={"h2d_bytes": CountTolerance()}),
        "fewer waits": judged({"waits": 2, "d2h_bytes": 8}, {"waits": 1, "d2h_bytes": 4}),
        "first steps compile more": judge_counts(compiled, counts({"compilations": 4, "waits": 1}, {}, steps=[0, 1, 1, 1])),
        "a capture more in the first step": judge_counts(
            counts(captured, replays, steps=[0, 1, 1, 1]), counts({"captures": 3}, replays, steps=[0, 1, 1, 1])
        ),
        "captures in steady steps": judge_counts(
            counts(captured, replays, steps=[0, 1, 1, 1]), counts(captured, {**replays, **captured}, steps=[0, 0, 1, 1])
        ),
        "a larger graph": _differing({"replays": 1, "replayed": 20}, {"replays": 1, "replayed": 28}, (), replayed),
        "a value that is read twice": _differing(reads, reads | {"waits": 2, "d2h_bytes": 8}, read, read_twice),
        "a copy that also waits": _differing({}, {"waits": 1, "h2d_pageable": 1, "h2d_bytes": 4096}, (), copied),
        "a function of a library": _differing({"launches": 484}, {"launches": 1652}, foreach, single),
        "the two places with most": _differing(
            {"launches": 10},
            {"launches": 90},
            [cause("launches", 10, own=LOSS)],
            [
                cause("launches", 20, own=LOSS),
                cause("launches", 40, own=BLOCK),
                cause("launches", 30, own=BLOCK, backward=True),
            ],
        ),
        "an edited line": _differing({"waits": 10}, {"waits": 22}, [cause("waits", 10, own=LOSS)], edited),
        "a backward pass in place of a line": _differing(
            {"waits": 5}, {"waits": 9}, [cause("waits", 5, own=LOSS)], [cause("waits", 9, own=STEP, backward=True)]
        ),
        "equal lines": _differing({}, {"waits": 5}, (), equal),
        **{f"no line for {figure}": _unplaced(figure) for figure in ("waits", "graph_breaks", "launches")},
        "a slower class": _differing(library, library | {"slow_flops": {"unaligned": 3 * 10**9}}, (), products),
        **{f"steps {steps}": _in_some(steps) for steps in ([0, 1] * 5, [0, 0, 1, 0], [1, 1], [1])},
        "lines are not known": judge_counts(
            counts({"waits": 1}, lines_unknown="Python 3.15"),
            counts({"waits": 2}, causes=[cause("waits", 2, own=LOSS)]),
        ),
        "a little more": judge_counts(
            counts({"launches": 484}), counts({"launches": 487}, causes=[cause("launches", 487, own=LOSS)])
        ),
        **{
            f"a second run has {what}": judge_counts(first, second, again=counts(it, {"waits": 1}))
            for what, it in again.items()
        },
        "a second run has nothing": judge_counts(first, second, again=counts()),
        "more Python": judge_counts(calling(1000), calling(1101)),
        "a tenth more Python": judge_counts(calling(1000), calling(1100)),
        "less Python": judge_counts(calling(1101), calling(1000)),
        "more Python for less work": judge_counts(calling(1000), calling(2000, launches=99)),
        "more Python for as many operators": judge_counts(_calling_on_cpu(1000, 100), _calling_on_cpu(2000, 100)),
        "more Python for fewer operators": judge_counts(_calling_on_cpu(1000, 100), _calling_on_cpu(2000, 99)),
        "fewer reads for more operators": judge_counts(
            on_cpu({"operators": 1000, "reads": 2}), on_cpu({"operators": 1030, "reads": 1})
        ),
        # A program may log in every tenth step.
        "other steps of the training": judge_counts(on_cpu({}, first=13), on_cpu({"reads": 1}, first=6)),
    }
    assert {what: _said(verdict) for what, verdict in verdicts.items()} == snapshot
    more = verdicts["a little more"]
    assert [metric.note for metric in more.metrics if metric.note] == list(more.told)


def _calling_on_cpu(calls, operators):
    kinds = (StepCounts(operators=operators, python_calls=calls),)
    return msgspec.structs.replace(calling(calls, launches=0), on_cpu=True, kinds=kinds)


def test_the_step_that_differs_most_is_shown():
    verdict = judge_counts(counts({"waits": 1}, steps=[0] * 3), counts(*({"waits": number} for number in (2, 5, 3))))
    waits = next(metric for metric in verdict.metrics if metric.metric == "waits")
    assert (waits.value, waits.baseline, waits.limit) == (5, 1, 1)


def test_fewer_bytes_are_no_improvement_where_work_rose():
    assert statuses(judged({"h2d_bytes": 9}, {"h2d_bytes": 1}))["h2d_bytes"] == "improved"
    assert statuses(judged({"h2d_bytes": 9}, {"h2d_bytes": 1, "launches": 1001}))["h2d_bytes"] == "pass"


asking_lines = st.tuples(st.sampled_from(["a.py", "b.py"]), st.sampled_from("fg"), st.integers(1, 20))
moves = st.sampled_from([{}, {"line": 99}, {"function": "h", "file": "c.py"}, {"text": "edited"}])


@given(st.lists(st.tuples(asking_lines, moves), max_size=8), st.integers(1, 50))
def test_lines_that_only_moved_or_were_edited_are_never_named(lines, more):
    before, now = [], []
    for number, ((file, function, waits), move) in enumerate(lines):
        place = Place(file=file, function=function, text=f"x{number}.item()", line=number)
        before.append(cause("waits", waits, own=place))
        now.append(cause("waits", waits, own=msgspec.structs.replace(place, **move)))
    now.append(cause("waits", more, own=Place(file="new.py", function="new", text="loss.item()", line=1)))
    total = sum(waits for (_, _, waits), _ in lines)
    (sentence,) = _differing({"waits": total}, {"waits": total + more}, before, now).worse
    assert sentence.endswith(f" a step ({total} before): {more} more at new.py:1 in new, loss.item()")


def test_every_figure_that_changes_is_named_with_both_values():
    before = counts({"launches": 1000, "d2h_bytes": 4}, {"launches": 1000, "waits": 1, "d2h_bytes": 4}, steps=[0, 1] * 3)
    now = counts({"launches": 1002, "waits": 1}, {"launches": 1002}, steps=[0, 1, 0, 0])
    assert [*count_changes(before, now)] == [
        "waits 2 -> 3 in 4 steps",
        "launches 1,000 -> 1,002 a step",
        "d2h_bytes 4 B -> 0 B a step",
    ]
    assert [*count_changes(before, now, only_more=True)] == ["waits 2 -> 3 in 4 steps", "launches 1,000 -> 1,002 a step"]
    moved = counts({"waits": 1}, {}, steps=[0, 1])
    assert [*count_changes(moved, counts({}, {"waits": 1}))] == ["waits 1 -> 1 in 2 steps at other steps"]


CHECKED = Place(file="train.py", function="checked", text="validate(loss)", line=50)


def calling(number, launches=100, python="3.12", line=CHECKED):
    """Return counts of ten equal steps that call so many functions of Python, all but 500 of them from this line."""
    causes = [cause("python_calls", 500, own=STEP), cause("python_calls", number - 500, own=line)]
    step = {"launches": launches, "python_calls": number}
    return msgspec.structs.replace(counts(step, steps=[0] * 10, causes=causes), python=python)


@pytest.mark.parametrize(("now", "status"), [(1050, "pass"), (1051, "regressed"), (949, "improved")])
@pytest.mark.parametrize("launches", [100, 99])
def test_a_tolerance_has_calls_of_python_functions_judged(now, status, launches):
    terms = CountTerms(tolerances={"python_calls": CountTolerance(ratio=0.05)})
    verdict = judge_counts(calling(1000), calling(now, launches=launches), terms)
    assert statuses(verdict)["python_calls"] == status
    assert bool(verdict.worse) == (status == "regressed")


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ("3.11", "3.12", "they were recorded with Python 3.11, and this is Python 3.12"),
        ("", "3.12", "they were not recorded"),
        ("3.12", "", "they were not counted"),
    ],
)
def test_calls_of_two_versions_of_python_are_not_compared(before, now, why):
    sides = (calling(1000 if version else 0, python=version) for version in (before, now))
    verdict = judge_counts(*sides)
    (metric,) = (metric for metric in verdict.metrics if metric.metric == "python_calls")
    assert (metric.status, metric.note) == ("not-comparable", why)
    assert verdict[1:] == ((), (), (), (), False)


def test_steps_in_which_no_calls_were_counted_are_not_compared_with_those_in_which_they_were():
    """An optimizer acts in each second step, and the step in which calls are counted is one of the others."""
    before = counts({"launches": 5, "python_calls": 10}, {"launches": 9}, steps=[0, 1] * 3)
    now = counts({"launches": 5}, {"launches": 9, "python_calls": 90}, steps=[0, 1] * 3)
    sides = (msgspec.structs.replace(side, python="3.12") for side in (before, now))
    (metric,) = (metric for metric in judge_counts(*sides).metrics if metric.metric == "python_calls")
    assert (metric.status, metric.note) == ("not-comparable", "they were recorded in other steps")


def test_steps_in_which_no_calls_were_counted_do_not_lower_their_mean_and_change_nothing():
    """The first step also asks the driver for memory, so the calls are those of the others."""
    first, others = {"launches": 5, "mallocs": 1}, {"launches": 5, "python_calls": 10}
    before = msgspec.structs.replace(counts(first, others, steps=[0, 1, 1]), python="3.12")
    now = msgspec.structs.replace(counts(others, steps=[0, 0, 0]), python="3.12")
    assert before.per_step("python_calls") == 10
    assert list(count_changes(before, now)) == ["mallocs 1 -> 0 in 3 steps"]


@pytest.mark.parametrize(("python", "changes"), [("3.12", ["python_calls 1,000 -> 1,200 a step"]), ("3.11", [])])
def test_an_update_names_calls_of_python_functions_of_the_same_python(python, changes):
    assert list(count_changes(calling(1000, python=python), calling(1200))) == changes


# --- On a CPU


def on_cpu(*kinds, first=4, **fields):
    return msgspec.structs.replace(counts(*kinds, **fields), on_cpu=True, first=first)


@pytest.mark.parametrize(
    ("before", "now", "status"),
    [
        ({"operators": 100}, {"operators": 105}, "pass"),
        ({"operators": 100}, {"operators": 106}, "regressed"),
        ({"operators": 1000}, {"operators": 1010}, "pass"),
        ({"operators": 1000}, {"operators": 1011}, "regressed"),
        ({"operators": 100_000}, {"operators": 100_061}, "regressed"),
        ({"reads": 1}, {"reads": 2}, "regressed"),
        ({"other_reads": 1}, {"other_reads": 100}, "pass"),
        ({"collectives": 1}, {"collectives": 2}, "regressed"),
        ({"graph_breaks": 0, "compilations": 1}, {"graph_breaks": 1, "compilations": 1}, "regressed"),
        ({"compilations": 1}, {"compilations": 2}, "pass"),
    ],
)
def test_on_a_cpu_operators_have_the_rule_of_work_and_reads_fail_as_waits_do(before, now, status):
    verdict = judge_counts(on_cpu(before), on_cpu(now))
    assert statuses(verdict)[next(figure for figure in now if before[figure] != now[figure])] == status
    assert set(statuses(verdict)) == {
        "operators", "reads", "other_reads", "collectives", "collective_bytes", "compilations", "graph_breaks", "loads",
        "loaded_bytes", "loader_workers", "repeated_updates",
    }  # fmt: skip


def test_other_reads_are_told_and_judged_where_a_tolerance_asks_for_it():
    before, now = on_cpu({"other_reads": 1}), on_cpu({"other_reads": 3})
    assert judge_counts(before, now).told == ("reads other values 3 times a step (1 before), which is not judged",)
    terms = CountTerms(tolerances={"other_reads": CountTolerance(more=1)})
    assert statuses(judge_counts(before, now, terms))["other_reads"] == "regressed"


LOADED = "loads {} samples a step ({} before)"
WORKERS = "loads its batches by {} a step ({} before)"


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {"repeated_updates": 1}, ["updates again by the same optimizer 1 time a step (0 before)"]),
        ({"repeated_updates": 3}, {}, ["updates again by the same optimizer 0 times a step (3 before)"]),
        ({"loads": 4, "loaded_bytes": 8}, {"loads": 6, "loaded_bytes": 12}, [LOADED.format(6, 4)]),
        ({"loads": 4, "loaded_bytes": 8}, {"loads": 2, "loaded_bytes": 4}, [LOADED.format(2, 4)]),
        ({"loads": 4, "loaded_bytes": 8}, {"loads": 4, "loaded_bytes": 9}, ["loads batches of 9 B a step (8 B before)"]),
        ({"loader_workers": 4}, {}, [WORKERS.format("0 DataLoader workers", 4)]),
        ({"loader_workers": 4}, {"loader_workers": 1}, [WORKERS.format("1 DataLoader worker", 4)]),
    ],
)
def test_every_change_of_what_a_program_loads_and_updates_is_told(before, now, told):
    for make in (counts, on_cpu):
        judged = judge_counts(make(before), make(now))
        assert judged.told == tuple(f"{text}, which is not judged" for text in told)
        assert (judged.worse, judged.better) == ((), ())
        (figure, *_) = {**before, **now}
        terms = CountTerms(tolerances={figure: CountTolerance(more=0)})
        fails = statuses(judge_counts(make(before), make(now), terms))[figure] == "regressed"
        assert fails == (now.get(figure, 0) > before.get(figure, 0))


def test_a_function_that_is_compiled_again_in_each_step_fails_behind_the_steps_that_compile():
    before = on_cpu({"compilations": 1}, {}, steps=[0, 0, 1, 1])
    assert statuses(judge_counts(before, before))["compilations"] == "pass"
    assert statuses(judge_counts(before, on_cpu({"compilations": 1}, steps=[0] * 4)))["compilations"] == "regressed"
