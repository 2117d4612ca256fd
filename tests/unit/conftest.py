"""Hypothesis without its deadline: no test here depends on how fast the machine is."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, max_examples=60)
settings.load_profile("unit")
