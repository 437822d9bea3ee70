"""Hypothesis draws the same examples on every run and every machine."""
from hypothesis import HealthCheck, settings

settings.register_profile(
    "flashlit",
    derandomize=True,
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("flashlit")
