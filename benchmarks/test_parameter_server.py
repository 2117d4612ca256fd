"""Word vectors and click-through rates: the parameter-server systems of paddle-distributed, and wide & deep beside them.

Published as pictures, without figures, for a cluster of CPU machines. word2vec: batch 100, five negatives, plain SGD on
sparse gradients. CTR-DNN: batch 1,000, Adam. Few ids are frequent and most are rare, as in the 1-Billion words and in
Criteo's clicks that they trained on. As many servers as workers, and synchronous updates, are this suite's choice.
Beside each system: other numbers of servers, asynchronous updates, and the same work in one process.
"""

import pytest

from pytest_gputrain import Case, grid

FP32 = Case(precision="fp32")
WORDS = FP32.replace(model="word2vec", batch_size=100, optimizer="sgd", learning_rate=1.0)
CLICKS = FP32.replace(batch_size=1000, optimizer="adam", learning_rate=1e-4)
SERVED = {"parallel": "ps", "id_distribution": "zipf", "platforms": ("cpu",)}

CASES = [
    # gpus is the number of workers.
    *(case for workers in (4, 8, 16, 32) for case in grid(WORDS.replace(servers=workers, **SERVED), gpus=[workers])),
    *(
        case
        for workers in (4, 8, 16, 32)
        for case in grid(CLICKS.replace(servers=workers, **SERVED), model=["ctr-dnn"], gpus=[workers])
    ),
    *grid(WORDS.replace(**SERVED), gpus=[2], servers=[1, 2], asynchronous=[False, True]),
    *grid(CLICKS.replace(**SERVED), model=["ctr-dnn"], gpus=[2], servers=[1], asynchronous=[False, True]),
    # In one process, with even ids and with those of the published data sets.
    WORDS,
    *grid(CLICKS, model=["ctr-dnn", "wide-deep"]),
    *grid(WORDS, id_distribution=["zipf"]),
    *grid(CLICKS, model=["ctr-dnn"], id_distribution=["zipf"]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameter_server(gputrain, case):
    gputrain.check(case)
