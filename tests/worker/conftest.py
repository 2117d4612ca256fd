import pytest
import torch


@pytest.fixture(autouse=True)
def _as_many_threads_as_before():
    """A run in this process leaves torch with one."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
