"""Datasets of prompts and answers, from JSON lines, from Hugging Face's `datasets`, or from rows that are given."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from unirun.errors import Fault, SpecError, UsageError
from unirun.experiments.config import Registry, register_dataset
from unirun.experiments.sample import SequenceSample
from unirun.wire.reporting import report

TOKENIZERS: Registry[Callable[[], Any]] = Registry("tokenizer")


def register_tokenizer(name: str, make: Callable[[], Any]) -> None:
    """``tokenizer_name_or_path=name`` is ``make()``: an object with ``eos_token_id``, ``pad_token_id``, ``encode`` and
    ``decode``, as those of transformers have."""
    TOKENIZERS.register(name, make)


def load_tokenizer(name_or_path: str) -> Any:
    """A tokenizer that is registered, or of a path or name that transformers knows; None without a name. Says so before
    it asks the hub, which may take minutes if it cannot be reached. Raises `UsageError`."""
    if not name_or_path:
        return None
    if name_or_path in TOKENIZERS:
        return TOKENIZERS.find(name_or_path)()
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(name_or_path, local_files_only=True)
    except (OSError, ValueError):
        there = ", ".join(TOKENIZERS.names()) or "none"
        report(
            f"unirun: no tokenizer is registered as {name_or_path!r} (there are: {there}), and this host has none of "
            "that name: Hugging Face's hub is asked"
        )
        try:
            found = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError) as error:
            why = str(error).splitlines()[0].rstrip(".")
            raise UsageError(
                f"there is no tokenizer {name_or_path!r}: {why}",
                f"give a path, a name of the hub's, or one that is registered: {there}",
            ) from error
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    return found


@dataclass(frozen=True)
class DatasetUtility:
    """The values that a dataset gets from its worker: the tokenizer and the seed. Every dataset has all
    samples: the master says which ones a rank reads. So `dp_rank` is always 0, and `world_size` is always
    1."""

    tokenizer: Any
    seed: int = 0
    dp_rank: int = 0
    world_size: int = 1


class Dataset(Protocol):
    """Samples by their number: each is a `SequenceSample` of one id, with the keys that the class names. An
    attribute `fingerprint`, a text that changes with the content, is optional (`content_of`)."""

    keys: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SequenceSample: ...


SAMPLES = 16
"""Number of samples in the digest of a dataset without a fingerprint."""


def content_of(dataset: Dataset) -> str:
    """A text that differs for datasets with different content: the number of samples, with the `fingerprint`
    of the dataset, or else with a digest of some samples that are spread over it. For samples that are drawn
    at random it is the number alone."""
    count = len(dataset)
    if count and not isinstance(first := dataset[0], SequenceSample):
        raise UsageError(
            f"dataset {type(dataset).__name__} has a {type(first).__name__} as a sample, which is no SequenceSample",
            "return SequenceSample.of({key: [tensor]}, [id])",
        )
    known = getattr(dataset, "fingerprint", None)
    if known is not None:
        return f"{count} samples, {known}"
    places = sorted({number * (count - 1) // (SAMPLES - 1) for number in range(SAMPLES)} if count else ())
    digest = _digest(dataset, places)
    # Samples that are drawn at random, such as augmented ones, differ at each reading: a digest says nothing.
    return f"{count} samples, {digest}" if _digest(dataset, places) == digest else f"{count} samples"


def _digest(dataset: Dataset, places: Sequence[int]) -> str:
    """A digest of the samples at `places`."""
    digest = hashlib.sha256()
    for at in places:
        sample = dataset[at]
        shape = {key: [list(lengths) for lengths in some] for key, some in sorted(sample.seqlens.items())}
        digest.update(_as_text([sample.ids, shape, sample.metadata]))
        for key in sorted(sample.data or ()):
            digest.update(sample[key].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256 {digest.hexdigest()[:16]}"


def _as_text(value: Any) -> bytes:
    # A value without a form in JSON, such as a picture, counts by its type alone.
    return json.dumps(
        _with_texts(value), sort_keys=True, default=lambda each: type(each).__qualname__
    ).encode()


def _with_texts(value: Any) -> Any:
    """The same value with texts as the keys of mappings: JSON has no other keys, and mixed ones have no order."""
    if isinstance(value, list | tuple):
        return [_with_texts(each) for each in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _with_texts(each) for key, each in value.items()}
    return sorted(([repr(key), _with_texts(each)] for key, each in value.items()), key=lambda pair: pair[0])


class Joined:
    """Datasets with the same keys, one after the other. The ids of each begin with its number, so they do not meet."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.keys = parts[0].keys
        self._parts, self._ends = parts, [*accumulate(map(len, parts))]

    @property
    def fingerprint(self) -> str:
        """The contents of all parts."""
        return " + ".join(map(content_of, self._parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> SequenceSample:
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        sample = part[index - self._ends[number] + len(part)]
        return replace(sample, ids=tuple(f"{number}:{each}" for each in sample.ids))


def read_rows(
    where: str,
    needs: Mapping[str, type],
    *,
    path: str = "",
    hugging_face: str = "",
    split: str = "train",
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> list[Mapping[str, Any]]:
    """The rows of a file with a JSON object in each line, or with one array of objects, of a dataset of Hugging Face,
    or those that are given. Each has the keys `needs`. Raises `SpecError` with all rows that do not fit (the first
    ten)."""
    if sum(map(bool, (path, hugging_face, rows))) != 1:
        raise SpecError([Fault(where, "it has not one of path, hugging_face and rows", "give one of them")])
    found: list[tuple[int, Any]] = [*enumerate(rows or (), 1)]
    faults = []
    if path:
        text = Path(path).read_text("utf-8")
        whole = text.lstrip().startswith("[")
        for number, part in [(1, text)] if whole else enumerate(text.split("\n"), 1):
            if not part.strip():
                continue
            try:
                value = json.loads(part)
            except json.JSONDecodeError as error:
                remedy = "write an object in each line, or one array of objects"
                faults.append(Fault(f"{path}:{number}", f"this is no JSON: {error}", remedy))
                continue
            found += enumerate(value, 1) if whole else [(number, value)]
    elif hugging_face:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]

        found = [*enumerate(load_dataset(hugging_face, split=split), 1)]
    for number, row in found:
        for key, kind in needs.items():
            if not isinstance(row, Mapping) or not isinstance(row.get(key), kind):
                faults.append(
                    Fault(f"{path or where}:{number}", f"it has no {key!r} that is a {kind.__name__}")
                )
    if not found and not faults:
        faults.append(Fault(path or where, "it has no rows", "a dataset has one sample at least"))
    if faults:
        raise SpecError(faults[:10])
    return [row for _, row in found]


class _Rows:
    """The common part of all datasets of rows."""

    keys: tuple[str, ...] = ()
    needs: ClassVar[Mapping[str, type]] = {}

    def __init__(self, util: DatasetUtility, *, max_length: int = 1 << 30, **source: Any) -> None:
        self._util, self._max = util, max_length
        self._rows = read_rows(f"dataset {type(self).__name__}", self.needs, **source)

    @property
    def fingerprint(self) -> str:
        """A digest of all rows."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(_as_text(row))
        return f"sha256 {digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self._rows)

    def _tokens(self, text: str) -> torch.Tensor:
        return torch.tensor(self._util.tokenizer.encode(text)[: self._max], dtype=torch.long)

    def _ended(self, text: str) -> torch.Tensor:
        tokenizer = self._util.tokenizer
        # Those of transformers begin each text with a token of their own: an answer goes on with its prompt.
        more = {"add_special_tokens": False} if hasattr(tokenizer, "all_special_tokens") else {}
        return torch.tensor([*tokenizer.encode(text, **more), tokenizer.eos_token_id], dtype=torch.long)

    def _id(self, index: int) -> list[str]:
        return [str(self._rows[index].get("id", index))]


class PromptDataset(_Rows):
    """``{"prompt": …}``: `packed_prompts`. The other values of a row are `row` in the metadata."""

    keys: tuple[str, ...] = ("packed_prompts",)
    needs: ClassVar[Mapping[str, type]] = {"prompt": str}

    def __getitem__(self, index: int) -> SequenceSample:
        row = self._rows[index]
        rest = {name: value for name, value in row.items() if name != "prompt"}
        data = {"packed_prompts": [self._tokens(row["prompt"])]}
        return SequenceSample.of(data, self._id(index), row=[rest])


class PromptAnswerDataset(_Rows):
    """``{"prompt": …, "answer": …}``: `packed_input_ids` of both, and `prompt_mask`, true for tokens of the prompt."""

    keys: tuple[str, ...] = ("packed_input_ids", "prompt_mask")
    needs: ClassVar[Mapping[str, type]] = {"prompt": str, "answer": str}

    def __getitem__(self, index: int) -> SequenceSample:
        row = self._rows[index]
        prompt, answer = self._tokens(row["prompt"]), self._ended(row["answer"])
        tokens = torch.cat([prompt, answer])[: self._max]
        mask = torch.arange(len(tokens)) < len(prompt)
        return SequenceSample.of({"packed_input_ids": [tokens], "prompt_mask": [mask]}, self._id(index))


class PairedDataset(_Rows):
    """``{"prompt": …, "pos_answers": [..], "neg_answers": [..]}``: `packed_input_ids` with the pairs one after the
    other, the better one first, and `prompt_lens`, the tokens of the prompt."""

    keys: tuple[str, ...] = ("packed_input_ids", "prompt_lens")
    needs: ClassVar[Mapping[str, type]] = {"prompt": str, "pos_answers": list, "neg_answers": list}

    def __init__(self, util: DatasetUtility, **source: Any) -> None:
        super().__init__(util, **source)
        faults = [
            Fault(f"row {number}", "it has not as many neg_answers as pos_answers, or none", "write pairs")
            for number, row in enumerate(self._rows, 1)
            if len(row["pos_answers"]) != len(row["neg_answers"]) or not row["pos_answers"]
        ]
        if faults:
            raise SpecError(faults[:10])

    def __getitem__(self, index: int) -> SequenceSample:
        row = self._rows[index]
        prompt = self._tokens(row["prompt"])
        pairs = zip(row["pos_answers"], row["neg_answers"], strict=True)
        sequences = [torch.cat([prompt, self._ended(text)])[: self._max] for pair in pairs for text in pair]
        return SequenceSample.of(
            {"packed_input_ids": [sequences], "prompt_lens": [torch.tensor(len(prompt))]}, self._id(index)
        )


def is_of_rows(cls: Any) -> bool:
    """Return True if the arguments of a dataset say where its rows are (`read_rows`), as those of the
    built-in ones do."""
    return isinstance(cls, type) and cls.__init__ in (_Rows.__init__, PairedDataset.__init__)  # type: ignore[misc]


OF_TEXT = (PromptDataset, PromptAnswerDataset, PairedDataset)
"""The built-in datasets, all of which need a tokenizer."""

register_dataset("prompt", PromptDataset)
register_dataset("prompt_answer", PromptAnswerDataset)
register_dataset("rw_pair", PairedDataset)
