"""The colours of role states, for all pictures."""

from __future__ import annotations

from unirun.values import Value


class Look(Value):
    """Colours in ``#rrggbb`` that are legible together on any background, and the code of a terminal's colour."""

    fill: str
    stroke: str
    text: str
    ansi: str


PLAIN = Look("#e2e8f0", "#64748b", "#0f172a", "")
_GREEN = Look("#bbf7d0", "#15803d", "#052e16", "32")
_RED = Look("#fecaca", "#b91c1c", "#450a0a", "31")
_AMBER = Look("#fde68a", "#b45309", "#451a03", "33")
_BLUE = Look("#bfdbfe", "#1d4ed8", "#172554", "34")

LOOKS = {
    "running": _GREEN,
    "succeeded": _GREEN,
    "restarting": _AMBER,
    "reforming": _AMBER,
    "stopping": _AMBER,
    "stopped": _AMBER,
    "starting": _BLUE,
    "waiting": _BLUE,
    "launching": _BLUE,
    "failed": _RED,
    "lost": _RED,
}
"""By the word for the phase of a role."""


def look(state: str) -> Look:
    """The look of a state; grey for one that is not known, and for none."""
    return LOOKS.get(state, PLAIN)
