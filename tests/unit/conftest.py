"""Hypothesis without its deadline and its check of speed: no test here depends on how fast the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
# For mutmut: few examples for each of some thousand mutants, and the same ones.
settings.register_profile("mutants", settings.get_profile("unit"), max_examples=10, derandomize=True)
settings.load_profile("unit")
