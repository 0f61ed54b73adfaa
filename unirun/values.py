"""How a small frozen value is written: ``class Point(Value)`` with annotated fields, as a frozen dataclass."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value with slots, equal to others of its class by its fields.

    To create such a class takes a twentieth of what a dataclass takes, and a command creates two hundred of them before
    it does anything. msgspec makes values from JSON and checks each field (`unirun.wire.codec`).
    """
