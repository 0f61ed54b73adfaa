"""Nonsense on a command line or in a job file is refused in one line, and nothing is made for the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli

ROLES = ("--roles", "actor=1,rollout=1")

Captured = pytest.CaptureFixture[str]


def said(capsys: Captured, home: Path) -> list[str]:
    """The lines on stderr of a command that has started nothing."""
    output = capsys.readouterr()
    assert output.out == ""
    assert not (home / "jobs").exists(), "nothing is made for a job that cannot be"
    return output.err.splitlines()


class TestACommandLine:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((*ROLES, "--env", "rolout:K=V"), "--env: no role is called 'rolout'; did you mean 'rollout'?"),
            ((*ROLES, "--script", "actr=x.py"), "--script: no role is called 'actr'; did you mean 'actor'?"),
            (
                (*ROLES, "--max-restarts", "critic=1"),
                "--max-restarts: no role is called 'critic'; known: actor, rollout",
            ),
            (
                (*ROLES, "--nproc-per-node", "acter=2"),
                "--nproc-per-node: no role is called 'acter'; did you mean 'actor'?",
            ),
            ((*ROLES, "--cwd", "acter=."), "--cwd: no role is called 'acter'; did you mean 'actor'?"),
            ((*ROLES, "--primary", "actors"), "primary: no role is called 'actors'; did you mean 'actor'?"),
            (("--roles", "actor=0"), "roles.actor.count: expected a number from 1 to 1000000, found 0"),
            (("--roles", "actor=-2"), "roles.actor.count: expected a number from 1 to 1000000, found -2"),
            (("--roles", "actor=two"), "roles.actor.count: expected a whole number, found 'two'"),
            (
                ("--roles", "actor=1,actor=2"),
                "--roles: role 'actor' is there twice; give each role one name and number",
            ),
            (
                ("--roles", "2actor=1"),
                "roles.2actor: '2actor' is no name for a role; a letter, then letters,",
            ),
            (("--nproc-per-node", "gpu"), "has no GPU; use a number, 'cpu' or 'auto'"),
            (("--max-restarts", "-1"), "max_restarts: expected a number from 0"),
            (("--fatal-exit-codes", "1,256"), "fatal_exit_codes: expected a number from 1 to 255, found"),
            (("--env", "K"), "--env: 'K' has no value; write K=V or ROLE:K=V"),
            (("--env", "RANK=3"), "env.RANK: unirun sets this for every worker itself"),
            (("--start-method", "thread"), "--start-method: invalid choice: 'thread'"),
            (("--no-such-option",), "unknown option --no-such-option"),
            (("--max-restart-s", "1"), "unknown option --max-restart-s; did you mean '--max-restarts'?"),
            (("--config", "missing.yaml"), "missing.yaml: cannot be read: no such file or directory"),
            (("--cwd", "nowhere"), "roles.default.cwd: 'nowhere' is no directory"),
            (("--roles", "a=1@pkg.mod:Class"), "each has an entry of its own"),
        ],
    )
    def test_that_cannot_be_meant_is_refused_in_one_line(
        self,
        capsys: Captured,
        home: Path,
        scripts: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: tuple[str, ...],
        message: str,
    ) -> None:
        # With an empty mask a machine with GPUs has none either.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert run_cli(*options, str(scripts / "train.py")) == 2
        (line,) = said(capsys, home)
        assert line.startswith("unirun: ")
        assert message in line

    def test_names_everything_that_is_wrong_at_once(
        self, capsys: Captured, home: Path, scripts: Path
    ) -> None:
        script = str(scripts / "train.py")
        assert run_cli("--roles", "actor=0,rollout=x", "--cwd", "nowhere", script) == 2
        assert len(said(capsys, home)) == 4

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("missing.py", "script 'missing.py' does not exist; looked in "),
            ("pkg", "script 'pkg' is a directory; name the file in it"),
        ],
    )
    def test_whose_script_is_no_file_is_refused(
        self, capsys: Captured, home: Path, scripts: Path, name: str, message: str
    ) -> None:
        (scripts / "pkg").unlink()
        (scripts / "pkg").mkdir()
        assert run_cli(name) == 2
        (line,) = said(capsys, home)
        assert message in line

    def test_whose_program_is_nowhere_is_refused(self, capsys: Captured, home: Path) -> None:
        assert run_cli("--no-python", "no-such-program") == 2
        (line,) = said(capsys, home)
        assert "program 'no-such-program' is not found" in line


class TestAJobFile:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("roles: {actor: {count: many}}", "roles.actor.count: expected a whole number, found 'many'"),
            ("roles: [actor]", "roles: expected a mapping with names as keys, found ['actor']"),
            (
                "roles: {actor: {count: 1, scirpt: x.py}}",
                "roles.actor.scirpt: unknown key; did you mean 'script'?",
            ),
            ("max_restart: 1", "max_restart: unknown key; did you mean 'max_restarts'?"),
            ("log: {tees: 1}", "log.tees: unknown key; did you mean 'tee'?"),
            ("env: {K: [1]}", "env.K: expected a text or a number, found [1]; quote it"),
            (
                "shutdown_timeout: soon",
                "shutdown_timeout: expected a number of seconds, at least 0, found 'soon'",
            ),
            ("args: {a: 1}", "args: expected a list of texts, found {'a': 1}"),
            ("virtual_local_rank: 3", "virtual_local_rank: expected true or false, found 3"),
            ("name: ${nothing.here}", "nothing.here"),
            ("roles: {a: 1}: x", "job.yaml: is no YAML: "),
            ("- a list", "job.yaml: holds a list, expected a mapping with keys like 'roles'"),
        ],
    )
    def test_that_says_what_cannot_be_is_refused_in_one_line(
        self, capsys: Captured, home: Path, scripts: Path, text: str, message: str
    ) -> None:
        (scripts / "job.yaml").write_text(text)
        assert run_cli("--config", "job.yaml", *(["script=train.py"] if ":" in text else [])) == 2
        (line,) = said(capsys, home)
        assert message in line

    def test_that_is_no_text_is_refused(self, capsys: Captured, home: Path, scripts: Path) -> None:
        (scripts / "job.yaml").write_bytes(b"name: \xff\xfe\n")
        assert run_cli("--config", "job.yaml") == 2
        (line,) = said(capsys, home)
        assert "job.yaml" in line


class TestAnId:
    @pytest.mark.parametrize("name", ["../up", "a/b", "x" * 80])
    def test_that_is_no_name_is_refused(self, capsys: Captured, home: Path, scripts: Path, name: str) -> None:
        assert run_cli(f"--rdzv-id={name}", "train.py") == 2
        (line,) = said(capsys, home)
        assert line.startswith("unirun: ")
        assert not (scripts / "up").exists()


class TestAStore:
    @pytest.mark.parametrize("detach", [(), ("-d",)])
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("store.db", ("begins with sqlite: or etcd://", "write sqlite:PATH or etcd://HOST:PORT")),
            ("sqlite:", ("it names no file", "write sqlite:PATH")),
            ("etcd://host:1?colour=red", ("there is no option 'colour'",)),
            ("etcd://me:secret@host:1", ("a password stands before the hosts", "UNIRUN_STORE_PASSWORD")),
        ],
    )
    def test_whose_url_is_none_is_refused_before_anything_is_made(
        self, capsys: Captured, home: Path, url: str, words: tuple[str, ...], detach: tuple[str, ...]
    ) -> None:
        assert run_cli(*detach, "--store", url, "train.py") == 2
        (line,) = said(capsys, home)
        assert all(word in line for word in words)
        assert "secret" not in line
