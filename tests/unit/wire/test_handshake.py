"""Nobody gets in without the token, whatever they have overheard."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import AuthError, JobError
from unirun.wire import load_token, new_token
from unirun.wire.handshake import ANSWER_SIZE, HELLO_SIZE, PROOF_SIZE, ClientHandshake, ServerHandshake, Token

TOKEN = Token(b"t" * 32)
OTHER = Token(b"o" * 32)


def test_two_who_know_the_token_meet() -> None:
    server, client = ServerHandshake(TOKEN), ClientHandshake(TOKEN)
    hello = server.hello()
    answer = client.answer(hello)
    proof = server.proof(answer)
    client.check(proof)
    assert (len(hello), len(answer), len(proof)) == (HELLO_SIZE, ANSWER_SIZE, PROOF_SIZE)


def test_a_client_with_another_token_is_refused_before_it_learns_anything() -> None:
    server = ServerHandshake(TOKEN)
    with pytest.raises(AuthError, match="the peer does not know this job's token"):
        server.proof(ClientHandshake(OTHER).answer(server.hello()))


def test_a_server_with_another_token_is_found_out() -> None:
    server, client = ServerHandshake(OTHER), ClientHandshake(TOKEN)
    client.answer(server.hello())
    with pytest.raises(AuthError, match="the server does not know this job's token"):
        client.check(b"\0" * PROOF_SIZE)


def test_an_answer_that_was_overheard_is_worth_nothing_later() -> None:
    first = ServerHandshake(TOKEN)
    overheard = ClientHandshake(TOKEN).answer(first.hello())
    assert first.proof(overheard)
    with pytest.raises(AuthError):
        ServerHandshake(TOKEN).proof(overheard)


def test_a_proof_that_was_overheard_is_worth_nothing_later() -> None:
    server, client = ServerHandshake(TOKEN), ClientHandshake(TOKEN)
    overheard = server.proof(client.answer(server.hello()))
    later = ClientHandshake(TOKEN)
    later.answer(server.hello())
    with pytest.raises(AuthError):
        later.check(overheard)


def test_a_server_cannot_be_made_to_answer_for_a_client() -> None:
    """What one server proves is not an answer to another, although both know the token."""
    one, two = ServerHandshake(TOKEN), ServerHandshake(TOKEN)
    mac = one.proof(ClientHandshake(TOKEN).answer(one.hello()))
    with pytest.raises(AuthError):
        two.proof(two.hello() + mac)


def test_a_client_cannot_be_made_to_prove_for_a_server() -> None:
    """An attacker reflects the client's own nonce and its own answer."""
    nonce = b"n" * 32
    client = ClientHandshake(TOKEN, nonce)
    answer = client.answer(ServerHandshake(TOKEN, nonce).hello())
    with pytest.raises(AuthError):
        client.check(answer[HELLO_SIZE:])


def test_another_version_is_told_apart_from_nonsense() -> None:
    hello = bytearray(ServerHandshake(TOKEN).hello())
    hello[6] = 9
    with pytest.raises(
        AuthError, match="speaks version 9 of the wire, this is version 3; use the same unirun"
    ):
        ClientHandshake(TOKEN).answer(bytes(hello))
    with pytest.raises(AuthError, match="does not speak unirun's wire"):
        ClientHandshake(TOKEN).answer(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_hello_of_another_length_is_none() -> None:
    hello = ServerHandshake(TOKEN).hello()
    for other in (hello[:-1], hello + b"x"):
        with pytest.raises(AuthError, match="does not speak unirun's wire"):
            ClientHandshake(TOKEN).answer(other)


@given(st.data())
def test_no_bit_of_an_answer_can_be_changed_or_left_out(data: st.DataObject) -> None:
    server = ServerHandshake(TOKEN)
    answer = bytearray(ClientHandshake(TOKEN).answer(server.hello()))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(answer) - 1))
        answer[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del answer[data.draw(st.integers(0, len(answer) - 1)) :]
    with pytest.raises(AuthError):
        server.proof(bytes(answer))


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_prove_nothing(raw: bytes) -> None:
    with pytest.raises(AuthError):
        ServerHandshake(TOKEN).proof(raw)
    with pytest.raises(AuthError):
        ClientHandshake(TOKEN).check(raw)


def test_every_connection_has_nonces_of_its_own() -> None:
    assert len({ServerHandshake(TOKEN).hello() for _ in range(50)}) == 50
    assert len({new_token() for _ in range(50)}) == 50
    assert {len(new_token()) for _ in range(5)} == {32}, "as many bytes as a token file has"


class TestATokenFile:
    def test_is_read_when_it_is_private(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text(TOKEN.hex() + "\n")
        path.chmod(0o600)
        assert load_token(path) == TOKEN

    @pytest.mark.parametrize("mode", [0o604, 0o640, 0o666])
    def test_that_others_may_read_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "token"
        path.write_text(TOKEN.hex())
        path.chmod(mode)
        with pytest.raises(JobError, match="can be read by others .*; chmod 600"):
            load_token(path)

    @pytest.mark.parametrize(
        ("text", "says"),
        [("00" * 31, "holds 31 bytes, expected 32"), ("", "holds 0 bytes"), ("xyz", "no token can be read")],
    )
    def test_that_holds_none_is_told(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "token"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(JobError, match=says):
            load_token(path)

    def test_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match="no token can be read from"):
            load_token(tmp_path / "token")
