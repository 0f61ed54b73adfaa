"""Secrets are in no spec, and masked in what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from unirun.errors import RendezvousError, SpecError
from unirun.launcher.environment import mask_of, with_env_files
from unirun.launcher.events import masked
from unirun.spec.job import JobSpec
from unirun.spec.parse import parse_job
from unirun.spec.secrets import MASK, masking, read_env_file, secret_names
from unirun.wire.reports import EngineWeights, Notice, Stuck, WorkerError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.env"
    path.write_text("# for the hub\n\nexport HF_TOKEN='hf_a b=c'\nB=1\n")
    return path


def parse(**job: Any) -> JobSpec:
    data = {"roles": {"a": {"program": "true"}}, **job}
    return parse_job(data, count_slots=lambda _: 1, run_id="x")


def test_a_file_has_a_variable_on_each_line(file: Path) -> None:
    assert read_env_file(str(file)) == {"HF_TOKEN": "hf_a b=c", "B": "1"}


@pytest.mark.parametrize(
    ("line", "value"),
    [("A=''", ""), ('A="', '"'), ("A='b\"", "'b\""), ("A=", ""), ("A=\"'b'\"", "'b'"), ("A= b ", " b")],
)
def test_quotes_around_a_value_are_no_part_of_it_and_others_are(
    tmp_path: Path, line: str, value: str
) -> None:
    (tmp_path / "env").write_text(f"{line}\n")
    assert read_env_file(str(tmp_path / "env")) == {"A": value}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("word", "line 1 is not NAME=VALUE"),
        ("1A=x", "line 1 is not NAME=VALUE"),
        ("RANK=0", "unirun sets RANK"),
        ("UNIRUN_JOB=x", "unirun sets UNIRUN_JOB"),
    ],
)
def test_another_line_is_refused_and_not_repeated(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "env"
    path.write_text(f"{line}\n")
    with pytest.raises(SpecError, match=problem):
        parse(env_file=str(path))


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"roles\.a\.env_file: .* cannot be read: no such file"):
        parse(roles={"a": {"program": "true", "env_file": str(tmp_path / "none")}})


def test_a_spec_has_the_path_and_no_value(file: Path) -> None:
    spec = parse(env_file=str(file), secret=["HF_TOKEN"])
    assert "hf_a" not in str(spec.to_json())
    assert spec.env_file == str(file)


def test_a_secret_with_its_value_in_the_job_file_is_refused() -> None:
    with pytest.raises(SpecError, match=r"env\.KEY: KEY is secret, and its value is in the job file"):
        parse(env={"KEY": "x"}, secret=["KEY"])


def test_variables_of_a_file_come_below_those_of_its_level(file: Path) -> None:
    roles = {"a": {"program": "true", "env_file": str(file), "env": {"B": "2"}}}
    spec = with_env_files(parse(env={"HF_TOKEN": "job's", "B": "0"}, roles=roles))
    assert spec.role("a").env == {"HF_TOKEN": "hf_a b=c", "B": "2"}
    assert spec.role("a").env_file is None


def test_a_file_that_is_gone_when_workers_start_is_named(file: Path) -> None:
    spec = parse(env_file=str(file))
    file.unlink()
    with pytest.raises(RendezvousError, match="an env_file cannot be read on this host"):
        with_env_files(spec)


def test_a_mask_has_long_values_of_files_and_of_named_variables(file: Path) -> None:
    spec = parse(env_file=str(file), secret=["KEY", "MISSING"])
    mask = mask_of(spec, {"KEY": "k-123456", "OTHER": "public-value"})
    assert mask("k-123456 and hf_a b=c, B=1, public-value") == f"{MASK} and {MASK}, B=1, public-value"
    assert mask_of(parse(), {"KEY": "k-123456"})("k-123456") == "k-123456"


def test_values_in_the_file_of_one_role_are_masked_for_all(file: Path) -> None:
    spec = parse(roles={"a": {"program": "true"}, "b": {"program": "true", "env_file": str(file)}})
    assert secret_names(spec) == {"HF_TOKEN", "B"}
    assert mask_of(spec, {})("hf_a b=c") == MASK


def test_a_value_that_contains_another_is_masked_as_a_whole() -> None:
    assert masking(["secret", "secret-longer"])("secret-longer secret") == f"{MASK} {MASK}"


def test_texts_of_messages_are_masked() -> None:
    mask = masking(["hf_token"])
    error = masked(WorkerError("bad hf_token", "line: hf_token", 1.0), mask)
    assert error == WorkerError(f"bad {MASK}", f"line: {MASK}", 1.0)
    assert masked(Stuck("hf_token", "at hf_token"), mask) == Stuck(MASK, f"at {MASK}")
    assert masked(Notice("a:0", "hf_token"), mask) == Notice("a:0", MASK)
    torn = EngineWeights("policy", 0, 0, None, 1.0, "the server said: hf_token")
    assert masked(torn, mask) == replace(torn, problem=f"the server said: {MASK}")
