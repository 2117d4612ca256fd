"""What torch kept when figures were published explains how far an emulated GPU is below them."""

import pytest
from older_torch import ROWS, reserved

pytestmark = [pytest.mark.slow, pytest.mark.weekly, pytest.mark.usefixtures("stand_ins")]


@pytest.mark.parametrize("name", ["bert-1", "vit-64-bf16"])
def test_published_memory_is_met_with_what_older_torch_kept(name):
    now, then = (reserved(name, older=older) / ROWS[name].published - 1 for older in (False, True))
    assert now < -0.04
    assert abs(then) < 0.005
