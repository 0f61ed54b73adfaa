"""The short form of `tests/soak/test_false_alarms.py`."""

from __future__ import annotations

import pytest

from tests.integration.harness import Script, Unirun
from tests.soak.test_false_alarms import script, trains_without_an_alarm, unirun, warm

__all__ = ["script", "unirun", "warm"]

pytestmark = pytest.mark.timeout(300)


def test_no_rank_hangs_that_pauses_and_saves_for_half_a_minute(unirun: Unirun, script: Script) -> None:
    trains_without_an_alarm(unirun, script, 30.0, 40)
