"""Cases of every model by every method that it has."""

from pytest_gputrain import Case
from pytest_gputrain.architectures import architectures

_NEEDED = {"sequence_length": 8192, "resolution": "512x512", "frames": 9}


def example(model, method=None, **knobs):
    """A case of the model by the method (its first, if none is named), with the fields that it needs."""
    architecture = architectures()[model]
    needed = {field: _NEEDED[field] for field in architecture.needs}
    fields = {"model": model, "method": method or next(iter(architecture.trainable)), "batch_size": 2, **needed}
    return Case(**{**fields, **knobs})


MODELS = list(architectures())
METHODS_OF_MODELS = [(model, method) for model, known in architectures().items() for method in known.trainable]
"""Pairs of names."""
EXAMPLES = [example(*pair) for pair in METHODS_OF_MODELS]
"""One case per pair."""
LANGUAGE = [model for model, known in architectures().items() if known.family == "language"]
