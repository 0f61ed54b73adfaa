"""The nodes that a master takes for silent and for lost, and the times of that."""

from __future__ import annotations

from unirun.failover.silence import (
    HEARTBEAT_INTERVAL,
    SILENCE_POLL_INTERVAL,
    SILENCE_TIMEOUT,
    Echoes,
    Silence,
)

START = 100.0

Look = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""The nodes that are silent, lost and back."""

NOTHING: Look = ((), (), ())


class Watched:
    """A master that looks on time, and marks at once what is silent."""

    def __init__(self, **heard: float) -> None:
        self.silence, self.now = Silence(START), START
        for node, when in heard.items():
            self.silence.heard(node, START + when)

    def until(self, when: float, *, marks: bool = True) -> list[tuple[float, Look]]:
        """Look until `when`. Returns what was found, and when."""
        found = []
        while self.now + SILENCE_POLL_INTERVAL <= START + when:
            self.now += SILENCE_POLL_INTERVAL
            look = self.silence.look(self.now)
            if marks:
                self.silence.marked(look[0], self.now)
            if look != NOTHING:
                found.append((self.now - START, look))
        return found


def test_a_node_is_silent_after_three_beats_and_lost_when_its_mark_is_old_enough() -> None:
    watched = Watched(n0=0.0)
    assert watched.until(SILENCE_TIMEOUT) == []
    assert watched.until(8.0) == [
        (4.25, (("n0",), (), ())),
        (7.25, ((), ("n0",), ())),
    ]


def test_a_node_that_is_lost_is_not_watched_any_more() -> None:
    watched = Watched(n0=0.0)
    watched.until(8.0)
    assert watched.until(60.0) == []


def test_a_node_that_is_heard_again_is_back_and_nothing_follows() -> None:
    watched = Watched(n0=0.0)
    watched.until(6.0)
    watched.silence.heard("n0", watched.now)
    assert watched.until(6.5) == [(6.25, ((), (), ("n0",)))]
    assert watched.until(10.0) == []


def test_a_node_that_beats_is_never_silent() -> None:
    watched = Watched(n0=0.0)
    for beat in range(100):
        watched.silence.heard("n0", watched.now)
        assert watched.until((beat + 1) * HEARTBEAT_INTERVAL) == []


def test_a_node_is_not_lost_before_its_mark_is_written() -> None:
    watched = Watched(n0=0.0)
    watched.until(30.0, marks=False)
    watched.silence.marked(["n0"], watched.now)
    assert watched.until(40.0) == [(33.0, ((), ("n0",), ()))]


def test_a_mark_of_a_node_that_is_back_means_nothing() -> None:
    watched = Watched(n0=0.0)
    watched.until(5.0, marks=False)
    watched.silence.heard("n0", watched.now)
    watched.until(5.5)
    watched.silence.marked(["n0"], watched.now)
    assert watched.until(9.0) == []


def test_the_mark_of_an_earlier_silence_means_nothing_for_the_present_one() -> None:
    """It is removed from the store before the mark of the present one is written."""
    watched = Watched(n0=0.0)
    watched.until(5.0, marks=False)
    watched.silence.heard("n0", watched.now)
    watched.until(10.0, marks=False)
    watched.silence.marked(["n0"], watched.now)
    assert watched.until(20.0) == []
    watched.silence.marked(["n0"], watched.now)
    assert watched.until(30.0) == [(23.0, ((), ("n0",), ()))]


def test_the_loss_of_a_rack_is_one_decision() -> None:
    """Its power fails at once; the last beats of its nodes came within one period."""
    watched = Watched(n0=0.0, n1=0.4, n2=0.9)
    found = [(when, lost) for when, (_, lost, _) in watched.until(20.0) if lost]
    assert found == [(8.0, ("n0", "n1", "n2"))]


def test_a_node_that_is_silent_does_not_wait_for_ever_for_others() -> None:
    watched = Watched(n0=0.0, n1=2.1)
    found = [(when, lost) for when, (_, lost, _) in watched.until(20.0) if lost]
    assert found == [(8.25, ("n0",)), (9.25, ("n1",))]


def test_a_master_that_did_not_run_holds_nothing_against_the_nodes() -> None:
    watched = Watched(n0=0.0)
    watched.until(3.0)
    watched.now += 30.0
    assert watched.silence.look(watched.now) == NOTHING
    assert watched.silence.stalled == 30.0 - SILENCE_POLL_INTERVAL
    assert watched.until(36.0) == [(34.0, (("n0",), (), ()))]


def test_a_master_that_did_not_run_gives_a_silent_node_its_last_seconds_anew() -> None:
    watched = Watched(n0=0.0)
    watched.until(6.75)
    watched.now += 30.0
    assert watched.silence.look(watched.now) == NOTHING
    assert watched.until(50.0) == [(39.75, ((), ("n0",), ()))]


def test_what_was_heard_while_the_master_came_to_itself_is_not_in_the_future() -> None:
    watched = Watched(n0=0.0)
    watched.now += 30.0
    watched.silence.heard("n0", watched.now)
    watched.silence.look(watched.now)
    assert watched.until(34.0) == []
    assert watched.until(34.25) == [(34.25, (("n0",), (), ()))]


def test_a_node_is_silent_until_it_is_back_or_forgotten() -> None:
    watched = Watched(n0=0.0, n1=0.0, n2=3.0)
    watched.until(6.0)
    assert [watched.silence.is_silent(node) for node in ("n0", "n1", "n2", "n3")] == [
        True,
        True,
        False,
        False,
    ]
    watched.silence.heard("n0", watched.now)
    watched.silence.forget("n1")
    watched.until(6.5)
    assert not watched.silence.is_silent("n0")
    assert not watched.silence.is_silent("n1")


class TestTheAgeOfAnAnswer:
    def test_it_counts_from_the_renewal_of_the_term(self) -> None:
        assert Echoes().age(12.0, 10.0, ["n0"], ()) == 2.0

    def test_it_counts_from_when_all_nodes_were_with_this_master_if_that_is_later(self) -> None:
        echoes = Echoes()
        echoes.heard("n0", 98.0)
        echoes.heard("n1", 99.0)
        echoes.heard("n1", 0.0)
        assert echoes.age(100.0, 10.0, ["n0", "n1"], ()) == 2.0
        assert echoes.age(100.0, 10.0, ["n0", "n1", "n2"], ()) == 90.0
        assert echoes.age(100.0, 10.0, ["n0", "n1", "n2"], ["n2"]) == 2.0
