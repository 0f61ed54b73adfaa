"""Strategies for what a training function may report."""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


class Hostile:
    """An object that raises, whatever is asked of it."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __float__ = __str__

    @property
    def item(self) -> object:
        raise RuntimeError("no")

    tolist = item


ODD = st.sampled_from(
    [
        torch.tensor(1.5),
        torch.tensor([1.0, float("nan")], requires_grad=True),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.empty(2, device="meta"),
        torch.tensor(1 + 2j),
        np.float32(0.1),
        np.float64("inf"),
        np.longdouble(0.5),
        np.int64(7),
        np.bool_(True),
        np.datetime64("2026-01-01"),
        np.array([{"a": 1}, None], dtype=object),
        np.ma.masked_array([1, 2], mask=[True, False]),
        Path("/data"),
        Path("bad\udce9name"),
        datetime.timedelta(seconds=3),
        decimal.Decimal("0.25"),
        decimal.Decimal("sNaN"),
        fractions.Fraction(1, 3),
        b"bytes",
        1 + 2j,
        2**1100,
        -(10**400),
        "lone \ud800",
        object(),
        Hostile(),
        Hostile,
        deque([1]),
        range(3),
    ]
)
KEYS = st.text(max_size=6) | st.sampled_from(
    ["loss", "acc", 1, None, (1, 2), 0.5, "\udc80", "_rank", "a/b", 'q",\r\n']
)
VALUES = st.recursive(
    PLAIN | ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
    ),
    max_leaves=8,
)
RESULTS = st.dictionaries(KEYS, VALUES, max_size=5)
