"""An agent's workers are gone before their ranks start elsewhere, whatever the network and the clocks do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unirun.failover.silence import (
    CLOCK_DRIFT,
    FENCE_TIMEOUT,
    GIVE_UP_DELAY,
    HEARTBEAT_INTERVAL,
    KILL_SECONDS,
    REJOIN_SECONDS,
    SILENCE_POLL_INTERVAL,
    SILENCE_TIMEOUT,
    UNMARKED_SECONDS,
    Silence,
    gone_after,
)
from unirun.launcher.contact import Fence

END = 60.0
RATES = st.floats(1 - CLOCK_DRIFT, 1 + CLOCK_DRIFT)
DELAYS = st.one_of(st.just(0.0), st.floats(0.0, 0.3), st.floats(0.0, 20.0))


class Stream:
    """One stream: in order in both directions, each way lost from some beat on; and when it begins."""

    def __init__(self, begins: float, up: int, down: int, delays: list[float]) -> None:
        self.begins, self.up, self.down, self._delays = begins, up, down, delays

    def delay(self, number: int) -> float:
        return self._delays[number % len(self._delays)]


STREAMS = st.builds(
    Stream,
    st.floats(0.0, END / 2),
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(DELAYS, min_size=1, max_size=6),
)


@given(
    streams=st.lists(STREAMS, min_size=1, max_size=4),
    pauses=st.lists(st.one_of(st.just(0.0), st.floats(0.0, 8.0)), min_size=1, max_size=5),
    stalls=st.lists(st.tuples(st.floats(0.0, END), st.floats(0.0, 15.0)), max_size=3),
    agent=RATES,
    master=RATES,
)
def test_the_workers_are_killed_before_the_node_is_given_up(
    streams: list[Stream],
    pauses: list[float],
    stalls: list[tuple[float, float]],
    agent: float,
    master: float,
) -> None:
    """Streams follow one another, with beats that are late or lost on either way; the agent's beats are late, the master
    does not run for a while, and the two clocks run apart. Real time is the simulation's."""
    streams.sort(key=lambda stream: stream.begins)
    ends = [stream.begins for stream in streams[1:]] + [END]
    heard: list[float] = []
    answered: list[tuple[float, float]] = []
    for stream, end in zip(streams, ends, strict=True):
        sent, arrived, back = stream.begins, 0.0, 0.0
        for beat in range(stream.up):
            if sent >= end:
                break
            arrived = running(max(arrived, sent + stream.delay(beat)), stalls)
            heard.append(arrived)
            if beat < stream.down:
                back = max(back, arrived + stream.delay(beat + 1))
                answered.append((back, sent))
            sent += HEARTBEAT_INTERVAL / agent + pauses[beat % len(pauses)]
    lost = given_up(sorted(heard), stalls, master)
    fence = Fence()
    fence.joins(streams[0].begins * agent)
    for back, sent in sorted(answered):
        if lost is None or sent < lost:
            fence.beats(sent * agent)
            fence.answered(back * agent, 0.0)
    if lost is not None:
        assert fence.until / agent + KILL_SECONDS < lost


def running(when: float, stalls: list[tuple[float, float]]) -> float:
    """`when`, or when the master runs again."""
    for begin, length in sorted(stalls):
        if begin <= when < begin + length:
            when = begin + length
    return when


def given_up(heard: list[float], stalls: list[tuple[float, float]], rate: float) -> float | None:
    """The time at which the master first gives the node up, if it does: it looks on time whenever it runs."""
    if not heard:
        return None
    now = running(heard[0], stalls)
    silence = Silence(now * rate)
    while now < 2 * END:
        while heard and heard[0] <= now:
            heard.pop(0)
            silence.heard("n0", now * rate)
        silent, lost, _ = silence.look(now * rate)
        silence.marked(silent, now * rate)
        if lost:
            return now
        now = running(now + SILENCE_POLL_INTERVAL / rate, stalls)
    return None


def test_no_master_gives_a_node_up_before_its_workers_have_ended() -> None:
    assert gone_after(FENCE_TIMEOUT) <= REJOIN_SECONDS
    assert REJOIN_SECONDS == SILENCE_TIMEOUT + GIVE_UP_DELAY


def test_an_agent_that_lives_by_reads_of_the_store_is_gone_before_its_marked_node_is_given_up() -> None:
    """Its last read began just before the mark was written."""
    assert gone_after(UNMARKED_SECONDS) <= GIVE_UP_DELAY
