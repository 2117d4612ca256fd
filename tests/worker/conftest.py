import pytest
import torch
from preloaded_worker import PRELOADED


@pytest.fixture(autouse=True, scope="session")
def _no_process_stays():
    yield
    PRELOADED.close()


@pytest.fixture(autouse=True)
def _one_thread():
    """As in a worker; more would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
