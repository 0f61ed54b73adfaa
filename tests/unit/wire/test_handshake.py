"""The handshake refuses every peer without the token, also with recorded messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import AuthError, JobError
from unirun.wire.handshake import ANSWER_SIZE, HELLO_SIZE, PROOF_SIZE, Handshake, Token, load_token, new_token

TOKEN = Token(b"t" * 32)
OTHER = Token(b"o" * 32)


def test_a_handshake_succeeds_when_both_ends_know_the_token() -> None:
    server, client = Handshake(TOKEN), Handshake(TOKEN)
    hello = server.hello()
    answer = client.answer(hello)
    proof = server.proof(answer)
    client.check(proof)
    assert (len(hello), len(answer), len(proof)) == (HELLO_SIZE, ANSWER_SIZE, PROOF_SIZE)


def test_a_handshake_refuses_a_client_with_another_token_before_the_servers_proof() -> None:
    server = Handshake(TOKEN)
    with pytest.raises(AuthError, match="the peer does not know this job's token"):
        server.proof(Handshake(OTHER).answer(server.hello()))


def test_a_handshake_refuses_a_server_with_another_token() -> None:
    server, client = Handshake(OTHER), Handshake(TOKEN)
    client.answer(server.hello())
    with pytest.raises(AuthError, match="the server does not know this job's token"):
        client.check(b"\0" * PROOF_SIZE)


def test_a_recorded_handshake_answer_cannot_be_replayed() -> None:
    first = Handshake(TOKEN)
    overheard = Handshake(TOKEN).answer(first.hello())
    assert first.proof(overheard)
    with pytest.raises(AuthError):
        Handshake(TOKEN).proof(overheard)


def test_a_recorded_handshake_proof_cannot_be_replayed() -> None:
    server, client = Handshake(TOKEN), Handshake(TOKEN)
    overheard = server.proof(client.answer(server.hello()))
    later = Handshake(TOKEN)
    later.answer(server.hello())
    with pytest.raises(AuthError):
        later.check(overheard)


def test_a_servers_proof_is_not_accepted_as_a_clients_answer() -> None:
    """The proof of one server is no answer to another, although both know the token."""
    one, two = Handshake(TOKEN), Handshake(TOKEN)
    mac = one.proof(Handshake(TOKEN).answer(one.hello()))
    with pytest.raises(AuthError):
        two.proof(two.hello() + mac)


def test_a_clients_reflected_answer_is_not_accepted_as_a_servers_proof() -> None:
    """An attacker reflects the client's nonce and answer."""
    nonce = b"n" * 32
    client = Handshake(TOKEN, nonce)
    answer = client.answer(Handshake(TOKEN, nonce).hello())
    with pytest.raises(AuthError):
        client.check(answer[HELLO_SIZE:])


def test_a_hello_of_another_wire_version_is_distinguished_from_garbage() -> None:
    hello = bytearray(Handshake(TOKEN).hello())
    hello[6] = 9
    with pytest.raises(
        AuthError, match="speaks version 9 of the wire, this is version 3; use the same unirun"
    ):
        Handshake(TOKEN).answer(bytes(hello))
    with pytest.raises(AuthError, match="does not speak unirun's wire"):
        Handshake(TOKEN).answer(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_hello_of_another_length_is_refused() -> None:
    hello = Handshake(TOKEN).hello()
    for other in (hello[:-1], hello + b"x"):
        with pytest.raises(AuthError, match="does not speak unirun's wire"):
            Handshake(TOKEN).answer(other)


@given(st.data())
def test_a_handshake_answer_with_any_bit_changed_or_missing_is_refused(data: st.DataObject) -> None:
    server = Handshake(TOKEN)
    answer = bytearray(Handshake(TOKEN).answer(server.hello()))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(answer) - 1))
        answer[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del answer[data.draw(st.integers(0, len(answer) - 1)) :]
    with pytest.raises(AuthError):
        server.proof(bytes(answer))


@given(st.binary(max_size=200))
def test_random_bytes_do_not_pass_a_handshake(raw: bytes) -> None:
    with pytest.raises(AuthError):
        Handshake(TOKEN).proof(raw)
    with pytest.raises(AuthError):
        Handshake(TOKEN).check(raw)


def test_each_handshake_has_its_own_nonces() -> None:
    assert len({Handshake(TOKEN).hello() for _ in range(50)}) == 50
    assert len({new_token() for _ in range(50)}) == 50
    assert {len(new_token()) for _ in range(5)} == {32}, "as many bytes as a token file has"


class TestTokenFile:
    def test_a_private_token_file_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text(TOKEN.hex() + "\n")
        path.chmod(0o600)
        assert load_token(path) == TOKEN

    @pytest.mark.parametrize("mode", [0o604, 0o640, 0o666])
    def test_a_token_file_that_others_may_read_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "token"
        path.write_text(TOKEN.hex())
        path.chmod(mode)
        with pytest.raises(JobError, match="can be read by others .*; chmod 600"):
            load_token(path)

    @pytest.mark.parametrize(
        ("text", "says"),
        [("00" * 31, "holds 31 bytes, expected 32"), ("", "holds 0 bytes"), ("xyz", "no token can be read")],
    )
    def test_a_token_file_without_a_token_is_an_error(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "token"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(JobError, match=says):
            load_token(path)

    def test_a_missing_token_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match="no token can be read from"):
            load_token(tmp_path / "token")
