"""Certificates of a job: made from its token by everybody who has it, and by nobody else."""

from __future__ import annotations

import os
import ssl
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.wire.endpoints import credentials_in
from unirun.errors import JobError
from unirun.wire.certificates import issue, make_tls
from unirun.wire.credentials import NODE_URI, Credentials, load_credentials, node_of, node_uri, server_name
from unirun.wire.handshake import Token, new_token

TOKEN = Token(b"t" * 32)
POINT, MARK = (
    "7cd96bbb12a8012fc1b386950838cd6ad6eeabc1001c46711cb6fbb03ff7b84a",
    "7867441575a492a020da65b6553f3576",
)
"""Of the authority of that token: a coordinate of its public key, and the end of its name."""

nodes = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300) | st.sampled_from(
    ["node_0", "GPU-17.Example.ORG", "10.0.0.1", "::1", "*.example.org", "a" * 255, "ä", "x\0y", "\udce4"]
)


def shaken(client: Credentials, server: Credentials, node: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a connection that `client` has made to `node`, in memory. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours, theirs = client.client_context(), server.server_context()
    assert ours is not None
    assert theirs is not None
    ends = (
        ours.wrap_bio(to_client, to_server, server_hostname=server_name(node)),
        theirs.wrap_bio(to_server, to_client, server_side=True),
    )
    done = [False, False]
    while not all(done):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done[number] = True
            except ssl.SSLWantReadError:
                pass
    return ends


class TestTheNodesOfAJob:
    @examples(20)
    @given(nodes)
    def test_both_ends_know_each_other_by_any_name(
        self, tmp_path_factory: pytest.TempPathFactory, node: str
    ) -> None:
        folder = tmp_path_factory.mktemp("job")
        server = credentials_in(folder / "server", TOKEN, node)
        client = credentials_in(folder / "client", TOKEN, f"{node}'s neighbour")
        ours, theirs = shaken(client, server, node)
        assert node_of(ours) == node
        assert node_of(theirs) == f"{node}'s neighbour"
        assert ours.version() == "TLSv1.3"

    def test_a_server_on_another_node_than_the_address_says_is_refused(self, tmp_path: Path) -> None:
        one, two = (credentials_in(tmp_path / node, TOKEN, node) for node in ("one", "two"))
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            shaken(one, two, "three")

    def test_a_node_of_another_job_is_refused_by_both_ends(self, tmp_path: Path) -> None:
        ours = credentials_in(tmp_path / "ours", TOKEN, "node")
        theirs = credentials_in(tmp_path / "theirs", new_token(), "node")
        for client, server in ((ours, theirs), (theirs, ours)):
            with pytest.raises(ssl.SSLCertVerificationError):
                shaken(client, server, "node")
        # An authority with the subject of ours, and another key.
        assert theirs.tls is not None
        assert ours.tls is not None
        (theirs.tls / "ca.pem").write_bytes((ours.tls / "ca.pem").read_bytes())
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken(theirs, ours, "node")

    def test_a_server_refuses_a_client_without_a_certificate(self, tmp_path: Path) -> None:
        server = credentials_in(tmp_path / "job", TOKEN, "node")
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        assert server.tls is not None
        bare.load_verify_locations(server.tls / "ca.pem")

        class Bare:
            def client_context(self) -> ssl.SSLContext:
                return bare

        with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            shaken(Bare(), server, "node")  # type: ignore[arg-type]

    def test_a_nodes_certificate_makes_no_other_certificates(self) -> None:
        from cryptography import x509

        authority, node = (x509.load_pem_x509_certificate(each) for each in issue(TOKEN, "node"))
        limits = [
            each.extensions.get_extension_for_class(x509.BasicConstraints).value for each in (authority, node)
        ]
        assert [(limit.ca, limit.path_length) for limit in limits] == [(True, 0), (False, None)]

    @given(nodes, nodes)
    def test_two_nodes_have_two_names(self, one: str, other: str) -> None:
        assert (server_name(one) == server_name(other)) == (one == other)
        assert (node_uri(one) == node_uri(other)) == (one == other)
        assert node_uri(one).startswith(NODE_URI)
        assert node_uri(one).isascii()


class TestTheAuthority:
    def test_the_authority_is_the_same_wherever_its_token_is(self) -> None:
        assert issue(TOKEN, "one")[0] == issue(TOKEN, "two")[0]
        assert issue(TOKEN, "one")[0] != issue(new_token(), "one")[0]

    def test_two_certificates_of_a_node_have_different_keys(self) -> None:
        assert issue(TOKEN, "one")[1] != issue(TOKEN, "one")[1]

    def test_certificates_are_valid_whatever_the_clock_says(self) -> None:
        from cryptography import x509

        for each in issue(TOKEN, "node"):
            certificate = x509.load_pem_x509_certificate(each)
            assert certificate.not_valid_before_utc.year == 2000
            assert certificate.not_valid_after_utc.year == 2100

    def test_they_are_what_verifiers_of_rfc_5280_expect(self) -> None:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority, node = map(x509.load_pem_x509_certificate, issue(TOKEN, "node", ("10.0.0.1", "fe80::1")))
        for each, critical in (
            (authority, {"BasicConstraints", "KeyUsage"}),
            (node, {"BasicConstraints", "KeyUsage"}),
        ):
            assert {type(found.value).__name__ for found in each.extensions if found.critical} == critical
            key = x509.SubjectKeyIdentifier.from_public_key(each.public_key())
            assert each.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value == key
            each.verify_directly_issued_by(authority)
        assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
        of = node.extensions.get_extension_for_class
        assert not of(x509.BasicConstraints).value.ca
        assert {*of(x509.ExtendedKeyUsage).value} == {
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        }
        names = of(x509.SubjectAlternativeName).value
        assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "fe80::1"]
        assert names.get_values_for_type(x509.DNSName) == [server_name("node")]
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [node_uri("node")]
        assert of(x509.AuthorityKeyIdentifier).value.key_identifier is not None

    def test_the_authority_of_a_token_is_the_same_in_every_version(self) -> None:
        """Hosts of a job may have different ones, and its nodes verify each other."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        authority = x509.load_pem_x509_certificate(issue(TOKEN, "node")[0])
        key = authority.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert f"{key.public_numbers().x:064x}" == POINT
        assert authority.subject.rfc4514_string() == f"CN=unirun job {MARK}"

    def test_the_token_is_in_no_certificate(self) -> None:
        for each in issue(TOKEN, "node"):
            assert bytes(TOKEN) not in each
            assert TOKEN.hex().encode() not in each.lower()


class TestTheFiles:
    def test_a_context_takes_tls_of_this_job_only(self, tmp_path: Path) -> None:
        found = credentials_in(tmp_path / "job", TOKEN, "node")
        client, server = found.client_context(), found.server_context()
        assert client is not None
        assert server is not None
        assert (client.protocol, server.protocol) == (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        assert server.num_tickets == 0
        for each in (client, server):
            assert each.minimum_version == ssl.TLSVersion.TLSv1_3
            assert each.verify_mode == ssl.CERT_REQUIRED
            assert each.verify_flags & ssl.VERIFY_X509_STRICT
            assert each.options & ssl.OP_NO_TICKET
            assert each.options & ssl.OP_NO_COMPRESSION
        assert client.check_hostname
        any_node = found.client_context(any_node=True)
        assert any_node is not None
        assert not any_node.check_hostname
        assert any_node.verify_mode == ssl.CERT_REQUIRED

    def test_the_files_are_private_whatever_the_umask(self, tmp_path: Path) -> None:
        previous = os.umask(0)
        try:
            make_tls(tmp_path, TOKEN, "node")
        finally:
            os.umask(previous)
        assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
        assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "tls").iterdir()} == {0o600}

    def test_a_job_of_one_host_has_a_token_and_no_tls(self, tmp_path: Path) -> None:
        found = credentials_in(tmp_path / "job", TOKEN, "", tls=False)
        assert found == Credentials(TOKEN)
        for make in (found.client_context, found.server_context):
            with pytest.raises(JobError, match="one of one host"):
                make()

    def test_an_insecure_job_has_no_contexts_of_tls(self, tmp_path: Path) -> None:
        found = credentials_in(tmp_path / "job", TOKEN, "node", insecure=True)
        assert (found.node, found.insecure) == ("node", True)
        assert found.client_context() is None
        assert found.server_context() is None

    @pytest.mark.parametrize("name", ["ca.pem", "node.pem"])
    def test_a_job_that_is_not_insecure_does_not_go_without_its_files(
        self, tmp_path: Path, name: str
    ) -> None:
        found = credentials_in(tmp_path / "job", TOKEN, "node")
        (tmp_path / "job" / "tls" / name).unlink()
        with pytest.raises(JobError, match=r"the certificates in .* cannot be used"):
            found.client_context()

    def test_a_token_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        credentials_in(tmp_path / "job", TOKEN, "node")
        (tmp_path / "job" / "token").chmod(0o640)
        with pytest.raises(JobError, match="can be read by others"):
            load_credentials(tmp_path / "job")

    def test_without_the_package_cryptography_the_remedy_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cryptography", None)
        with pytest.raises(JobError) as caught:
            make_tls(tmp_path, TOKEN, "node")
        assert caught.value.remedy == "pip install torch-unirun[hosts]"
