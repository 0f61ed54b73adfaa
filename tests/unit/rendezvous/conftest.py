"""Fixtures of all tests here."""

from __future__ import annotations

from tests.unit.descriptors import no_descriptor_is_left

__all__ = ["no_descriptor_is_left"]
