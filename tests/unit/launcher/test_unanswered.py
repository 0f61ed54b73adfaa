"""The hosts that do not answer, read from the kernel's table of connections."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unirun.launcher.monitoring import LOOK_SECONDS, address_of, unanswered

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ESTABLISHED, SYN_SENT, FIN_WAIT = "01", "02", "04"


def row(remote: str, state: str, again: int, *, timer: int = 1, uid: int = 1000) -> str:
    queue = "00000400:00000000"
    return f"   0: 0100007F:8AE4 {remote}:C3A1 {state} {queue} 0{timer}:00000014 {again:08X} {uid:5}        0 12345 2 0\n"


def number(address: str) -> str:
    return f"{int.from_bytes(socket.inet_aton(address), 'little'):08X}"


@pytest.mark.parametrize(
    ("state", "again", "told"),
    [
        (ESTABLISHED, 4, False),
        (ESTABLISHED, 5, True),
        (FIN_WAIT, 5, True),
        (SYN_SENT, 2, False),
        (SYN_SENT, 3, True),
    ],
)
def test_a_host_does_not_answer_when_data_or_a_first_packet_were_sent_again_often(
    tmp_path: Path, state: str, again: int, told: bool
) -> None:
    (tmp_path / "tcp").write_text(HEAD + row(number("198.18.1.3"), state, again))
    assert unanswered(tmp_path, 1000) == ("198.18.1.3",) * told


def test_connections_of_others_and_those_that_only_wait_do_not_count(tmp_path: Path) -> None:
    far = number("198.18.1.3")
    rows = [row(far, ESTABLISHED, 9, uid=1001), row(far, ESTABLISHED, 9, timer=2), "cut off\n"]
    (tmp_path / "tcp").write_text(HEAD + "".join(rows))
    assert unanswered(tmp_path, 1000) == ()
    assert unanswered(tmp_path / "none", 1000) == ()


def test_addresses_of_both_families_are_as_people_write_them(tmp_path: Path) -> None:
    assert address_of("0100007F") == "127.0.0.1"
    assert address_of("00000000000000000000000001000000") == "::1"
    assert address_of("0000000000000000FFFF00000301C612") == "18.198.1.3"
    # What a process has left behind belongs to nobody.
    (tmp_path / "tcp6").write_text(HEAD + row("00000000000000000000000001000000", FIN_WAIT, 7, uid=0))
    assert unanswered(tmp_path, 1000) == ("::1",)


def test_a_look_ends_in_time_however_many_connections_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(number("198.18.1.3"), ESTABLISHED, 9), row(number("198.18.1.4"), ESTABLISHED, 9)]
    (tmp_path / "tcp").write_text(HEAD + "".join(rows))
    times = iter([0.0, 0.1, 0.2, LOOK_SECONDS])
    monkeypatch.setattr("unirun.launcher.monitoring.time.monotonic", lambda: next(times, LOOK_SECONDS))
    assert unanswered(tmp_path, 1000) == ("198.18.1.3",)
