"""Which selected tests may run on which machine."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.session.selection import platforms_of, why_skipped

H100 = ("h100", "cpu")
BOTH = ("h100", "a100", "cpu")


@pytest.mark.parametrize(
    ("declared", "carried"),
    [
        ((), MARKERS),
        (("h100",), ("h100", "cpu")),
        (("h100", "h200"), ("h100", "h200", "cpu")),
        (("cpu",), ("cpu",)),
        (("h100", "h100", "cpu"), ("h100", "cpu")),
        (("h1000",), MARKERS),
        (("h100", "h1000"), MARKERS),
    ],
)
def test_a_case_carries_its_platforms_and_cpu(declared, carried):
    assert platforms_of(declared) == carried


# That both conditions and platforms are read as pytest reads them is a property below; here is what it does not draw.
@pytest.mark.parametrize(
    ("markers", "expression", "platform"),
    [
        (H100, "", "h100"),
        (H100, "", "cpu"),
        (H100, "not h200", "cpu"),
        (H100, "(h100 or a100)", "h100"),
        ((*H100, "lora"), "lora", "cpu"),
        ((*H100, "lora"), "cpu and not slow", "cpu"),
        (MARKERS, "", "unknown"),
        (MARKERS, "not h100", "unknown"),
        (("lora",), "h100", "cpu"),
        ((), "", "cpu"),
        # Not Python, and about something else than platforms: pytest has selected the test, and what the expression says of
        # other marks cannot be the platform's fault.
        ((*H100, "2fast"), "2fast", "cpu"),
        ((*H100, "a-b"), "a-b", "cpu"),
        ((*H100, "level"), "level(number=1)", "cpu"),
        *((H100, text, "cpu") for text in ("not level(number=1)", "not a-b", "not a.b", "not 2fast", "h100 or not a-b")),
    ],
)
def test_runs_where_the_machine_is_what_was_selected(markers, expression, platform):
    assert why_skipped(markers, expression, platform, 1) is None


@pytest.mark.parametrize(
    ("markers", "expression", "platform", "needs"),
    [
        (H100, "h100", "cpu", "h100 x1"),
        (BOTH, "h100 or a100", "cpu", "h100 x1 or a100 x1"),
        (BOTH, "not cpu", "cpu", "h100 x1 or a100 x1"),
        (BOTH, "not h100", "h100", "a100 x1"),
        ((*H100, "lora"), "lora and not cpu", "cpu", "h100 x1"),
        (H100, "", "a100", "h100 x1"),
        (H100, "", "unknown", "h100 x1"),
        (MARKERS, "h100", "unknown", "h100 x1"),
        (("cpu",), "", "h100", "cpu"),
    ],
)
def test_skips_elsewhere_and_says_what_it_needs(markers, expression, platform, needs):
    assert why_skipped(markers, expression, platform, 1) == f"needs {needs}, found {platform}"


@given(st.text(), st.sampled_from(["h100", "cpu", "unknown"]))
@example("\0", "h100")
def test_any_expression_gets_an_answer_of_one_line(expression, platform):
    reason = why_skipped(H100, expression, platform, 1)
    assert reason is None or reason.splitlines() == [reason]
    assert {why_skipped(platforms_of(["h1000"]), marker, marker, 1) for marker in MARKERS} == {None}, "a misspelt platform"


ATOMS = st.sampled_from(["h100", "a100", "cpu", "lora"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or", "and not"]), inner),
    max_leaves=5,
) | ATOMS.map("not {}".format)


@given(EXPRESSIONS, st.sampled_from(["h100", "a100", "cpu"]), st.booleans())
def test_expressions_hold_as_pytest_evaluates_them(expression, platform, lora):
    markers = {*BOTH, "lora"} if lora else set(BOTH)
    here = {platform, "lora"} if lora else {platform}
    holds = eval(expression, {name: name in here for name in ("h100", "a100", "cpu", "lora")})
    assert (why_skipped(markers, expression, platform, 1) is None) == holds
