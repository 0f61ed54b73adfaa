"""What holds for all tests: examples of properties have no deadline of their own, as a busy machine is no error.

Fixtures of a function are made once for all examples of a property; those that properties use hold no state.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("busy machine")
