"""How a small frozen value is written: ``class Point(Value)`` with annotated fields, as a frozen dataclass."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value with slots, equal to others of its class by its fields.

    Making the class takes a twentieth of the time of a dataclass, of which a command would make two hundred before it
    does anything; and msgspec reads values from JSON, with each field checked (`unirun.wire.codec`).
    """
