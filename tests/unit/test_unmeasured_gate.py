"""Verdicts on figures without times where nothing is recorded under the same conditions."""

import msgspec

from pytest_gputrain.gate.emulation import judge
from pytest_gputrain.records import Case, EmulatedRun
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.utils.units import GiB

CASE = Case(model="gemma-3-1b", method="lora", precision="bf16")
UNFIT = EmulatedRun(
    device_name="NVIDIA H100", device_memory_bytes=79 * GiB, runtime="13.0", packages={"torch": "2.12.0"}, fits=False,
    refused="CUDA out of memory.", peak_allocated_bytes=78 * GiB, peak_reserved_bytes=79 * GiB, device_used_bytes=79 * GiB,
)  # fmt: skip


def test_a_case_that_fits_only_with_other_libraries_is_said_to_fit_now():
    """It would else be said to take the same memory, because figures up to a refusal are not compared."""
    now = msgspec.structs.replace(UNFIT, fits=True, refused="", packages={"torch": "2.13.0"})
    verdict = judge(CASE, now, Recorded(case=CASE, scale="full", figures=(UNFIT,)), "H100")
    assert verdict.status == "not-comparable"
    assert "(torch 2.12.0 -> 2.13.0); it fits H100 now; record it" in verdict.sentence
