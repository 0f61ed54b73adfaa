"""Datasets of rows: what they make of each row, and which rows do not fit."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import SpecError, UsageError
from unirun.experiments.checks import dataset_keys
from unirun.experiments.config import DATASETS
from unirun.experiments.datasets import (
    DatasetUtility,
    Joined,
    PairedDataset,
    PromptAnswerDataset,
    PromptDataset,
    content_of,
    load_tokenizer,
    read_rows,
    register_tokenizer,
)
from unirun.experiments.sample import SequenceSample

PROMPTS = [{"prompt": "ab", "answer": "c"}, {"prompt": "abc", "answer": "", "id": "x7"}]


class Letters:
    """A token for each letter; 0 fills up, 1 ends."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, /) -> list[int]:
        return [2 + ord(each) - ord("a") for each in text]

    def decode(self, tokens: Sequence[int], /) -> str:
        return "".join(chr(ord("a") + each - 2) for each in tokens if each > 1)


UTIL = DatasetUtility(Letters())
register_tokenizer("tests-letters", Letters)


def faults(read: Callable[[], object]) -> list[str]:
    """All that is wrong, without what to do."""
    with pytest.raises(SpecError) as caught:
        read()
    return [f"{fault.where}: {fault.problem}" for fault in caught.value.faults]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


class TestRows:
    def test_a_file_has_an_object_in_each_line(self, file: Path) -> None:
        file.write_text("".join(f"{json.dumps(row)}\n\n" for row in PROMPTS))
        assert read_rows("rows", {"prompt": str}, path=str(file)) == PROMPTS

    @pytest.mark.parametrize("indent", [None, 2])
    def test_a_file_may_be_one_array_of_objects(self, file: Path, indent: int | None) -> None:
        file.write_text("\n" + json.dumps(PROMPTS, indent=indent))
        assert read_rows("rows", {"prompt": str}, path=str(file)) == PROMPTS
        file.write_text(json.dumps(PROMPTS, indent=indent)[:-1])
        (fault,) = faults(lambda: read_rows("rows", {"prompt": str}, path=str(file)))
        assert fault.startswith(f"{file}:1: this is no JSON")
        file.write_text('[{"prompt": "a"}, {}]')
        assert faults(lambda: read_rows("rows", {"prompt": str}, path=str(file))) == [
            f"{file}:2: it has no 'prompt' that is a str"
        ]

    def test_rows_that_are_given_are_taken(self) -> None:
        assert read_rows("rows", {"prompt": str, "answer": str}, rows=PROMPTS) == PROMPTS

    def test_lines_that_do_not_fit_are_told_with_their_numbers(self, file: Path) -> None:
        file.write_text('{"prompt": "a"}\nprompt\n{"prompt": 3}\n["prompt"]\n')
        found = faults(lambda: read_rows("rows", {"prompt": str}, path=str(file)))
        assert found[0].startswith(f"{file}:2: this is no JSON")
        assert found[1:] == [f"{file}:{number}: it has no 'prompt' that is a str" for number in (3, 4)]

    def test_a_text_may_have_every_character_that_json_has(self, file: Path) -> None:
        rows = [{"prompt": "one\u2028two\x85three\x0c"}, {"prompt": "ü"}]
        file.write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
        assert read_rows("rows", {"prompt": str}, path=str(file)) == rows

    def test_every_key_that_is_missing_is_told(self) -> None:
        found = faults(lambda: read_rows("rows", {"prompt": str, "answer": str}, rows=[{"id": 1}]))
        assert found == [
            "rows:1: it has no 'prompt' that is a str",
            "rows:1: it has no 'answer' that is a str",
        ]

    def test_of_many_the_first_ten_are_told(self) -> None:
        assert len(faults(lambda: read_rows("rows", {"prompt": str}, rows=[{}] * 1000))) == 10

    def test_a_file_without_rows_is_told(self, file: Path) -> None:
        file.write_text("\n \n")
        assert faults(lambda: read_rows("rows", {}, path=str(file))) == [f"{file}: it has no rows"]

    @pytest.mark.parametrize(
        "source", [{}, {"rows": []}, {"path": "a", "rows": PROMPTS}, {"path": "a", "hugging_face": "b"}]
    )
    def test_there_is_one_source(self, source: dict[str, Any]) -> None:
        assert faults(lambda: read_rows("rows", {}, **source)) == [
            "rows: it has not one of path, hugging_face and rows"
        ]

    def test_rows_of_hugging_face_are_those_of_the_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Against a stand-in that follows the documentation of `datasets`, which is not installed here."""

        def load_dataset(path: str, *, split: str) -> list[dict[str, str]]:
            return [{"prompt": f"{path} {split}"}]

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        found = read_rows("rows", {"prompt": str}, hugging_face="gsm8k", split="test")
        assert found == [{"prompt": "gsm8k test"}]

    def test_a_file_that_is_not_there_says_so(self, file: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
            read_rows("rows", {}, path=str(file))


class TestPrompts:
    def test_a_sample_has_the_tokens_and_the_rest_of_the_row(self) -> None:
        sample = PromptDataset(UTIL, rows=PROMPTS)[1]
        assert sample.ids == ("x7",)
        assert sample["packed_prompts"].tolist() == [2, 3, 4]
        assert sample.metadata == {"row": [{"answer": "", "id": "x7"}]}

    def test_a_row_without_an_id_is_known_by_its_number(self) -> None:
        assert PromptDataset(UTIL, rows=PROMPTS)[0].ids == ("0",)

    def test_long_prompts_are_cut(self) -> None:
        assert PromptDataset(UTIL, rows=PROMPTS, max_length=2)[1]["packed_prompts"].tolist() == [2, 3]

    def test_all_samples_are_gathered(self) -> None:
        dataset = PromptDataset(UTIL, rows=PROMPTS)
        sample = SequenceSample.gather([dataset[index] for index in range(len(dataset))])
        assert sample.sizes("packed_prompts") == [2, 3]


class TestAnswers:
    def test_a_sample_is_prompt_and_answer_with_an_end(self) -> None:
        sample = PromptAnswerDataset(UTIL, rows=PROMPTS)[0]
        assert sample["packed_input_ids"].tolist() == [2, 3, 4, 1]
        assert sample["prompt_mask"].tolist() == [True, True, False, False]

    def test_an_answer_does_not_begin_as_a_text_does(self) -> None:
        class Beginning(Letters):
            """As the tokenizers of Llama and others of transformers are."""

            all_special_tokens = ("<s>",)

            def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
                return [*[99] * add_special_tokens, *super().encode(text)]

        sample = PromptAnswerDataset(DatasetUtility(Beginning()), rows=[{"prompt": "ab", "answer": "c"}])[0]
        assert (sample["packed_input_ids"] == 99).tolist() == [True, False, False, False, False]

    def test_an_empty_answer_is_an_end(self) -> None:
        sample = PromptAnswerDataset(UTIL, rows=PROMPTS)[1]
        assert sample["packed_input_ids"].tolist() == [2, 3, 4, 1]
        assert sample["prompt_mask"].tolist() == [True, True, True, False]

    def test_both_together_are_cut(self) -> None:
        sample = PromptAnswerDataset(UTIL, rows=PROMPTS, max_length=3)[0]
        assert sample["packed_input_ids"].tolist() == [2, 3, 4]
        assert sample["prompt_mask"].tolist() == [True, True, False]

    def test_rows_without_answers_are_told(self) -> None:
        assert faults(lambda: PromptAnswerDataset(UTIL, rows=[{"prompt": "a"}])) == [
            "dataset PromptAnswerDataset:1: it has no 'answer' that is a str"
        ]


class TestPairs:
    def test_the_better_one_of_each_pair_is_first(self) -> None:
        row = {"prompt": "a", "pos_answers": ["b", "c"], "neg_answers": ["d", ""]}
        sample = PairedDataset(UTIL, rows=[row])[0]
        found = [each.tolist() for each in sample.sequences("packed_input_ids")]
        assert found == [[2, 3, 1], [2, 5, 1], [2, 4, 1], [2, 1]]
        assert sample["prompt_lens"].tolist() == [1]
        assert sample.seqlens == {"packed_input_ids": [[3, 3, 3, 2]], "prompt_lens": [[1]]}

    def test_rows_with_different_numbers_of_pairs_are_gathered(self) -> None:
        rows = [
            {"prompt": "a", "pos_answers": ["b"] * count, "neg_answers": ["c"] * count} for count in (1, 2)
        ]
        dataset = PairedDataset(UTIL, rows=rows)
        sample = SequenceSample.gather([dataset[0], dataset[1]])
        assert sample.seqlens["packed_input_ids"] == [[3, 3], [3, 3, 3, 3]]
        assert torch.equal(sample.reorder([1])["packed_input_ids"], dataset[1]["packed_input_ids"])

    def test_answers_that_are_no_pairs_are_told(self) -> None:
        rows = [
            {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c"]},
            {"prompt": "a", "pos_answers": ["b"], "neg_answers": []},
            {"prompt": "a", "pos_answers": [], "neg_answers": []},
        ]
        problem = "it has not as many neg_answers as pos_answers, or none"
        assert faults(lambda: PairedDataset(UTIL, rows=rows)) == [f"row {n}: {problem}" for n in (2, 3)]


class TestKeys:
    @pytest.mark.parametrize("name", ["prompt", "prompt_answer", "rw_pair"])
    def test_a_sample_has_the_keys_that_its_class_names(self, name: str) -> None:
        row = {"prompt": "a", "answer": "b", "pos_answers": ["b"], "neg_answers": ["c"]}
        cls = DATASETS.find(name)
        assert cls(UTIL, rows=[row])[0].keys == cls.keys

    def test_checks_know_the_keys_of_each_dataset(self) -> None:
        from tests.unit.experiments.sample_configs import ACTOR, at, call, config_of
        from unirun.experiments.config import DatasetAbstraction

        datasets = [DatasetAbstraction("prompt_answer"), DatasetAbstraction("prompt")]
        config = config_of([call("a")], {ACTOR: at()}, datasets)
        assert dataset_keys(config) == {"packed_input_ids", "prompt_mask", "packed_prompts"}


class TestTokenizers:
    def test_one_that_is_registered_is_made(self) -> None:
        tokenizer = load_tokenizer("tests-letters")
        assert isinstance(tokenizer, Letters)
        assert tokenizer.decode(tokenizer.encode("abc")) == "abc"

    def test_one_that_is_not_known_is_told_before_the_hub_is_asked(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from transformers import AutoTokenizer

        def asked(name: str, *, local_files_only: bool = False) -> None:
            assert local_files_only == (
                "the hub" not in capsys.readouterr().err.replace("'s hub", " the hub")
            )
            raise OSError("no connection\nat all")

        monkeypatch.setattr(AutoTokenizer, "from_pretrained", asked)
        with pytest.raises(UsageError) as caught:
            load_tokenizer("tests-leters")
        assert caught.value.problem == "there is no tokenizer 'tests-leters': no connection"
        assert "tests-letters" in caught.value.remedy

    def test_without_a_name_there_is_none(self) -> None:
        assert load_tokenizer("") is None

    @pytest.mark.parametrize("pad", [None, "<pad>"])
    def test_one_of_a_path_pads_with_its_own_token_or_with_that_of_the_end(
        self, tmp_path: Path, pad: str | None
    ) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, unk_token="a"))
        made: Any = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token=pad)  # type: ignore[no-untyped-call]
        made.save_pretrained(tmp_path)
        assert load_tokenizer(str(tmp_path)).pad_token_id == (1 if pad is None else 2)

    def test_another_one_of_the_same_name_is_refused(self) -> None:
        with pytest.raises(UsageError, match="tokenizer 'tests-letters' is registered already"):
            register_tokenizer("tests-letters", lambda: Letters())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
def test_datasets_are_joined_one_after_the_other_and_their_ids_do_not_meet(sizes: list[int]) -> None:
    class Some:
        """So many prompts of one letter."""

        keys: tuple[str, ...] = ("packed_prompts",)

        def __init__(self, size: int) -> None:
            self._size = size

        def __len__(self) -> int:
            return self._size

        def __getitem__(self, index: int) -> SequenceSample:
            return SequenceSample.of({"packed_prompts": [torch.full((index + 1,), self._size)]}, [str(index)])

    joined = Joined([Some(size) for size in sizes])
    whole = SequenceSample.gather([joined[index] for index in range(len(joined))])
    places = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
    assert whole.ids == tuple(f"{number}:{index}" for number, index in places)
    assert whole.lengths("packed_prompts") == [index + 1 for _, index in places]
    assert whole["packed_prompts"].tolist() == [sizes[n] for n, index in places for _ in range(index + 1)]


class Plain:
    """A dataset without a fingerprint, of 100 samples."""

    keys: tuple[str, ...] = ("tokens",)

    def __init__(self, last: int = 0, noise: float = 0.0) -> None:
        self._last, self._noise = last, noise

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> SequenceSample:
        value = self._last if index == 99 else index + self._noise * random.random()
        return SequenceSample.of({"tokens": [torch.tensor([value, 0.5])]}, [str(index)], row=[{"at": index}])


class TestContent:
    def test_samples_of_another_type_are_told(self) -> None:
        class Rows(list[dict[str, torch.Tensor]]):
            keys = ("prompt",)

        rows: Any = Rows([{"prompt": torch.ones(2)}])
        with pytest.raises(
            UsageError, match="dataset Rows has a dict as a sample, .*; return SequenceSample.of"
        ):
            content_of(rows)

    def test_rows_are_known_by_all_that_is_in_them(self) -> None:
        one, same, other = (PromptDataset(UTIL, rows=rows) for rows in (PROMPTS, [*PROMPTS], PROMPTS[::-1]))
        assert content_of(one) == content_of(same)
        assert content_of(one).startswith("2 samples, sha256 ")
        assert content_of(one) != content_of(other)
        assert content_of(Joined([one, one])) != content_of(Joined([one, other]))

    def test_other_datasets_by_samples_that_are_spread_over_them(self) -> None:
        assert content_of(Plain()) == content_of(Plain())
        assert content_of(Plain()) != content_of(Plain(last=1))

    def test_samples_that_are_drawn_at_random_are_known_by_their_number(self) -> None:
        assert content_of(Plain(noise=0.1)) == content_of(Plain(noise=0.1)) == "100 samples"

    def test_rows_may_have_keys_of_all_types(self) -> None:
        def content(inner: dict[Any, Any]) -> str:
            return content_of(PromptDataset(UTIL, rows=[{"prompt": "ab", "more": [inner]}]))

        one: dict[Any, Any] = {1: "a", "1": "b", (2, "x"): [{None: 1}]}
        assert content(one) == content(dict(reversed(one.items())))
        assert content(one) != content({**one, (2, "x"): [{None: 2}]})
        assert content(one) != content({**one, 1: "b", "1": "a"})
