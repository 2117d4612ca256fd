"""Traces of what is allocated: their peaks, and what lived there."""

from pytest_gputrain.worker.trace import ENTER, TRAINING, Trace, peaks


def allocate(trace, size, phase="forward", operator="aten.empty", line=""):
    return trace.allocate(size, operator, phase, (size,), "uint8", line)


def test_peaks_begin_anew_with_training_and_belong_to_phases():
    trace = Trace(rounding=512)
    model, scratch = allocate(trace, 1000, "build"), allocate(trace, 9000, "build")
    trace.free(scratch)
    trace.events.append(TRAINING)
    trace.events.append(ENTER["forward"])
    activation = allocate(trace, 2000)
    trace.events.append(ENTER["backward"])
    trace.free(activation)
    gradient = allocate(trace, 512, "backward")
    trace.events.append(ENTER["optimizer"])
    of_phases = peaks(trace)
    assert of_phases.by_phase == {"build": 1024 + 9216, "forward": 3072, "backward": 3072, "optimizer": 1536}
    assert (of_phases.bytes, of_phases.phase) == (3072, "forward")
    # A phase that begins with its peak holds what the one before it made.
    assert [row.bytes for row in trace.largest_at(of_phases.events["backward"], 8)] == [2048, 1024]
    assert [row.bytes for row in trace.largest_at(of_phases.events["optimizer"], 8)] == [1024, 512]
    assert (model, gradient) == (0, 3)


def test_no_peak_is_taken_of_a_step_that_is_not_judged():
    trace = Trace()
    allocate(trace, 10, "build")
    trace.enter(None)
    trace.free(allocate(trace, 1000))
    gradient = allocate(trace, 7, "backward")
    trace.begin_training()
    trace.enter("forward")
    trace.free(gradient)
    of_phases = peaks(trace)
    assert of_phases.by_phase == {"build": 10, "forward": 17}
    assert (of_phases.bytes, of_phases.phase) == (17, "forward")
    assert [row.phase for row in trace.largest_at(of_phases.events["forward"], 8)] == ["build", "backward"]


def test_alike_tensors_are_told_together_and_the_small_ones_by_their_operator():
    trace = Trace()
    for number, size in enumerate((10, 30, 20, 30, 10, 10, 9, 8)):
        allocate(trace, size, line=f"a.py:{number}")
    for size in (3, 4):
        allocate(trace, size, "backward", "aten.mm", "a.py:9")
    allocate(trace, 5, "backward", "aten.sum")
    rows = trace.largest_at(len(trace.events), 2)
    assert [(row.bytes, row.count, row.shape) for row in rows] == [
        *((60, 2, (30,)), (30, 3, (10,)), (37, 3, ()), (7, 2, ()), (5, 1, (5,)))
    ]
    assert [row.lines for row in rows[2:]] == [("a.py:2", "a.py:6", "a.py:7"), ("a.py:9",), ()]
    assert sum(row.bytes for row in rows) == sum(trace.sizes)
