"""Examples of properties have no deadline of their own: a busy machine is no error."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
