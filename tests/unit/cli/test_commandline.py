"""Every torchrun option is taken, and its value lands where it should."""

from __future__ import annotations

import argparse

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from tests.unit.cli.torchrun_parsers import NEWEST, options_of
from unirun.cli.commandline import CommandLine, from_environment, parse
from unirun.cli.options import OPTIONS, TORCHRUN, WITHOUT_VARIABLE, Option
from unirun.errors import UsageError

TORCHRUN_ONLY = {option.dest for option in TORCHRUN}
TORCH = [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]
BY_SPELLING = {spelling: option for option in OPTIONS for spelling in option.spellings}


def sample(action: argparse.Action) -> str:
    """A value that both commands allow; unirun knows what torchrun looks up later."""
    choices = action.choices or BY_SPELLING[action.option_strings[0]].choices
    return str(next(iter(choices))) if choices else "some-value"


def taken(argv: list[str], dest: str) -> object:
    value = parse([*argv, "train.py"]).options[dest]
    return value[0] if isinstance(value, list) else value


spellings = [(action, name) for action in TORCH for name in action.option_strings]


@pytest.mark.parametrize(("action", "name"), spellings, ids=[name for _, name in spellings])
class TestEveryTorchrunOption:
    def test_every_spelling_of_torchrun_is_known(self, action: argparse.Action, name: str) -> None:
        assert name in BY_SPELLING, f"torchrun takes {name}, unirun does not"

    def test_an_option_of_torchrun_has_the_same_dest(self, action: argparse.Action, name: str) -> None:
        assert BY_SPELLING[name].dest == action.dest

    def test_an_option_takes_a_value_where_torchrun_takes_one(
        self, action: argparse.Action, name: str
    ) -> None:
        if action.nargs == 0:
            assert taken([name], action.dest) is True
            return
        value = sample(action)
        assert taken([name, value], action.dest) == value
        joined = f"{name}={value}" if name.startswith("--") else f"{name}{value}"
        assert taken([joined], action.dest) == value

    def test_an_option_has_a_pet_variable_exactly_when_torchrun_has_it(
        self, action: argparse.Action, name: str
    ) -> None:
        known = isinstance(action, env | check_env)
        found = from_environment({f"PET_{action.dest.upper()}": "1"})
        assert (action.dest in found) == known
        assert (action.dest not in WITHOUT_VARIABLE) == known

    def test_an_option_of_torchrun_is_in_the_torchrun_table(self, action: argparse.Action, name: str) -> None:
        assert action.dest in TORCHRUN_ONLY


def test_the_table_has_no_torchrun_option_that_torchrun_has_not() -> None:
    assert options_of(NEWEST) >= TORCHRUN_ONLY


def test_no_two_options_share_a_spelling() -> None:
    names = [spelling for option in OPTIONS for spelling in option.spellings]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("value", ["0", "1", "2", "-1", " 1 ", "+0"])
@pytest.mark.parametrize("dest", [a.dest for a in TORCH if isinstance(a, check_env)])
def test_a_flag_in_the_environment_means_what_int_says(
    dest: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"PET_{dest.upper()}"
    monkeypatch.setenv(variable, value)
    theirs = getattr(get_args_parser().parse_args(["train.py"]), dest)
    assert from_environment({variable: value}).get(dest, False) == theirs


def test_a_flag_in_the_environment_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="PET_STANDALONE='yes' is no number"):
        from_environment({"PET_STANDALONE": "yes"})
    for value in ("²", "9" * 5000):
        with pytest.raises(UsageError, match="is no number; use 0 or 1"):
            from_environment({"PET_STANDALONE": value})


def test_a_list_in_the_environment_is_one_item() -> None:
    assert from_environment({"PET_NPROC_PER_NODE": "2"}) == {"nproc_per_node": ["2"]}


class TestAbbreviations:
    @pytest.mark.parametrize(
        ("word", "dest"), [("--max-r", "max_restarts"), ("--rdzv-b", "rdzv_backend"), ("--nnod", "nnodes")]
    )
    def test_an_option_may_be_abbreviated(self, word: str, dest: str) -> None:
        assert taken([word, "1"], dest) == "1"
        assert taken([f"{word}=1"], dest) == "1"

    def test_an_ambiguous_abbreviation_names_the_options(self) -> None:
        with pytest.raises(UsageError, match="--rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id"):
            parse(["--rdzv", "x", "train.py"])

    def test_a_whole_option_name_wins_over_a_longer_one(self) -> None:
        assert parse(["--role", "a", "train.py"]).options == {"role": "a"}
        assert parse(["--roles", "a=1", "train.py"]).options == {"roles": ["a=1"]}

    @pytest.mark.parametrize("action", TORCH, ids=lambda action: action.dest)
    def test_whatever_torchrun_understands_is_the_same_or_refused(self, action: argparse.Action) -> None:
        parser = get_args_parser()
        value = [] if action.nargs == 0 else [sample(action)]
        for name in (name for name in action.option_strings if name.startswith("--")):
            for end in range(3, len(name)):
                word = name[:end]
                options = [match[0].dest for match in parser._get_option_tuples(word)]
                if len(set(options)) != 1:
                    continue
                try:
                    line = parse([word, *value, "train.py"])
                except UsageError as error:
                    assert "can mean" in str(error), f"torchrun takes {word}: {error}"
                else:
                    assert [*line.options] == [action.dest]


class TestAnUnknownOption:
    def test_an_unknown_option_gets_the_nearest_one(self) -> None:
        with pytest.raises(
            UsageError, match=r"unknown option --max-restart5; did you mean '--max-restarts'\?"
        ):
            parse(["--max-restart5", "3", "train.py"])

    def test_an_unknown_short_option_is_refused(self) -> None:
        with pytest.raises(UsageError, match="unknown option '-x'"):
            parse(["-x", "train.py"])

    def test_an_unknown_option_after_the_script_is_an_argument(self) -> None:
        assert parse(["train.py", "--max-restart5", "3"]).args == ("--max-restart5", "3")


class TestValues:
    def test_a_value_may_be_glued_to_a_short_option(self) -> None:
        assert parse(["-r3", "-t1", "train.py"]).options == {"redirects": "3", "tee": "1"}

    def test_a_value_may_be_glued_with_an_equals_sign(self) -> None:
        assert parse(["-r=3", "train.py"]).options == {"redirects": "3"}

    def test_a_value_may_begin_with_a_dash(self) -> None:
        assert parse(["--env", "-K=V", "train.py"]).options == {"env": ["-K=V"]}
        assert parse(["--name", "--strange", "train.py"]).options == {"name": "--strange"}
        assert parse(["-r", "-1", "train.py"]).options == {"redirects": "-1"}

    def test_a_value_may_hold_equals_signs_and_spaces(self) -> None:
        assert parse(["--env=K=a b=c", "train.py"]).options == {"env": ["K=a b=c"]}

    def test_short_flags_may_be_glued_together(self) -> None:
        assert parse(["-dqr3", "train.py"]).options == {"detach": True, "quiet": True, "redirects": "3"}
        with pytest.raises(UsageError, match="--quiet takes no value, found '1'"):
            parse(["-dq=1", "train.py"])

    def test_a_missing_value_is_refused(self) -> None:
        for argv in (["--nnodes"], ["-r"], ["--max-r"]):
            with pytest.raises(UsageError, match=f"{argv[0]} needs a value"):
                parse(argv)

    def test_a_value_for_a_flag_is_refused(self) -> None:
        with pytest.raises(UsageError, match="standalone"):
            parse(["--standalone=1", "train.py"])

    def test_a_value_that_is_not_a_choice_is_refused(self) -> None:
        with pytest.raises(UsageError, match="--start-method: invalid choice: 'thread'"):
            parse(["--start-method", "thread", "train.py"])

    def test_the_last_value_counts_unless_the_option_may_be_repeated(self) -> None:
        line = parse(["--tee", "1", "--tee", "2", "--env", "A=1", "--env", "B=2", "train.py"])
        assert line.options == {"tee": "2", "env": ["A=1", "B=2"]}


class TestWhatFollows:
    def test_words_after_the_script_are_its_arguments(self) -> None:
        args = ["--nnodes", "7", "-r3", "-h", "x", "--", "--roles", "--", "key=value"]
        line = parse(["--nnodes", "1", "train.py", *args])
        assert line == CommandLine({"nnodes": "1"}, (), "train.py", tuple(args))

    def test_the_arguments_of_the_script_are_those_of_torchrun(self) -> None:
        for rest in (["--", "--lr", "1"], ["a", "--", "b"], ["--", "--", "x"], ["-m"], [""]):
            theirs = get_args_parser().parse_args(["train.py", *rest]).training_script_args
            assert [*parse(["train.py", *rest]).args] == theirs

    @pytest.mark.parametrize(
        "argv",
        [
            ["--", "train.py", "--lr", "1"],
            ["--", "train.py", "--", "x"],
            ["--nnodes", "1", "--", "--strange.py", "--", "x"],
            ["-m", "--", "pkg", "x"],
            ["--", "train.py"],
        ],
    )
    def test_the_word_after_two_dashes_is_the_script_as_in_torchrun(self, argv: list[str]) -> None:
        theirs = get_args_parser().parse_args(argv)
        line = parse(argv)
        assert (line.script, [*line.args]) == (theirs.training_script, theirs.training_script_args)

    def test_the_word_after_two_dashes_is_the_script_of_a_role_without_entry(self) -> None:
        line = parse(["--roles", "actor=2@ppo:Actor,critic=1", "--", "train.py", "--lr", "1"])
        assert (line.script, line.args) == ("train.py", ("--lr", "1"))

    @pytest.mark.parametrize(
        "told", [("--roles", "actor=2", "--script", "actor=a.py"), ("--roles", "actor=2@ppo:Actor")]
    )
    def test_words_after_two_dashes_are_arguments_when_all_roles_have_entries(
        self, told: tuple[str, ...]
    ) -> None:
        line = parse([*told, "--", "--lr", "1"])
        assert (line.script, line.args) == (None, ("--lr", "1"))

    def test_words_after_config_are_overrides_until_the_script(self) -> None:
        line = parse(["--config", "job.yaml", "a.b=1", "c=2", "train.py", "d=3"])
        assert (line.overrides, line.script, line.args) == (("a.b=1", "c=2"), "train.py", ("d=3",))

    def test_config_may_have_overrides_and_arguments_without_a_script(self) -> None:
        line = parse(["--config", "job.yaml", "a=1", "--", "b=2", "--c"])
        assert (line.overrides, line.script, line.args) == (("a=1",), None, ("b=2", "--c"))

    def test_options_may_stand_between_overrides(self) -> None:
        line = parse(
            ["--config", "job.yaml", "a=1", "-d", "b=2", "--max-restarts", "3", "train.py", "--lr", "1"]
        )
        assert (line.overrides, line.script, line.args) == (("a=1", "b=2"), "train.py", ("--lr", "1"))
        assert (line.options["detach"], line.options["max_restarts"]) == (True, ["3"])

    def test_an_override_that_is_an_unknown_option_is_told(self) -> None:
        with pytest.raises(UsageError, match="--exclud"):
            parse(["--config", "job.yaml", "a=1", "--exclusive", "n1"])

    def test_without_a_config_an_equals_sign_means_nothing_to_the_parser(self) -> None:
        assert parse(["a=1", "b"]).script == "a=1"

    def test_a_single_dash_is_a_word(self) -> None:
        assert parse(["-", "x"]).script == "-"


def test_a_setting_of_the_rendezvous_is_no_option() -> None:
    with pytest.raises(
        UsageError, match="unknown option --join-timeout; write --rdzv-conf join_timeout=SECONDS"
    ):
        parse(["--join-timeout", "5", "train.py"])


def test_help_names_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        parse(["--help"])
    text = capsys.readouterr().out
    assert leave.value.code == 0
    for option in OPTIONS:
        assert all(name in text for name in option.names)
        assert f"{option.group}:" in text


def test_extra_options_of_a_subcommand_are_known_there_only() -> None:
    extra = Option("--json", OPTIONS[0].group, "for programs")
    assert parse(["--json", "train.py"], extra=(extra,)).options == {"json": True}
    with pytest.raises(UsageError, match="--json"):
        parse(["--json", "train.py"])
