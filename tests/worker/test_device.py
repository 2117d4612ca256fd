"""Peaks of torch's caching allocator, on a stand-in of it: CI has no GPU."""

import pytest
import torch

from pytest_gputrain.worker.checks import CheckFailed, check_peak
from pytest_gputrain.worker.device import Accelerator, Peaks


class Allocator:
    """What torch tells of a GPU's memory, where nothing is reserved that is not allocated."""

    def __init__(self, patch):
        self.live = self.peak = 0
        patch.setattr(torch._C, "_cuda_resetPeakMemoryStats", self.reset, raising=False)
        patch.setattr(torch._C, "_accelerator_resetPeakStats", self.reset, raising=False)
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: self.live)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=0: torch._C._cuda_resetPeakMemoryStats(0))
        for name in ("init", "set_device"):
            patch.setattr(torch.cuda, name, lambda *args: None)
        patch.setattr(torch.cuda, "is_available", lambda: True)

    def reset(self, device):
        self.peak = self.live

    def stats(self, device):
        return {name: {"all": {"peak": self.peak}} for name in ("allocated_bytes", "reserved_bytes")}

    def take(self, size):
        """Allocate and free."""
        self.peak = max(self.peak, self.live + size)


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


@pytest.mark.parametrize("name", ["_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"])
def test_a_reset_in_every_step_hides_no_peak(allocator, name):
    device = Accelerator()
    with device.keeping_peaks():
        device.reset_peaks()
        for size in (10, 70, 20):
            getattr(torch._C, name)(0)  # as a framework that shows memory for each step
            allocator.take(size)
            getattr(torch._C, name)(0)
            device.allocated_bytes()
    assert device.peaks() == Peaks(allocated=70, reserved=70, used=100)


def test_our_own_reset_forgets_and_resets_are_torchs_own_again_afterwards(allocator):
    before = torch._C._cuda_resetPeakMemoryStats
    device = Accelerator()
    with device.keeping_peaks():
        assert torch._C._cuda_resetPeakMemoryStats != before
        allocator.take(90)
        device.allocated_bytes()
        device.reset_peaks()
        allocator.take(30)
        assert device.peaks().allocated == 30
    assert torch._C._cuda_resetPeakMemoryStats == before


def test_a_reset_that_python_does_not_see_is_told(allocator):
    device = Accelerator()
    with device.keeping_peaks():
        device.reset_peaks()
        allocator.take(50)
        device.allocated_bytes()
        allocator.reset(0)
        allocator.take(20)
        peaks = device.peaks()
    assert peaks.reset_unseen
    with pytest.raises(CheckFailed, match="may be too low"):
        check_peak(peaks, held=0)


def test_less_than_the_model_is_no_peak():
    check_peak(Peaks(allocated=10, reserved=10, used=10), held=10)
    with pytest.raises(CheckFailed, match="another allocator"):
        check_peak(Peaks(allocated=9, reserved=9, used=10), held=10)
