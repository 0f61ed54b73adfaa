"""Chats as tokens: the prompt of a request that goes on with one before keeps all tokens of that one.

A template of a tokenizer makes text of messages. The text of an answer, made tokens again, may be other tokens than
those that the model has made: so only what is new in a chat is made tokens, and the rest is what was recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirun.errors import UsageError
from unirun.rollout.completing import Completion
from unirun.values import Value

Message = Mapping[str, Any]
"""A message of OpenAI's form: ``role``, ``content``, ``tool_calls``, ``tool_call_id``."""

Parse = Callable[[str], tuple[str, Sequence[Message]]]
"""Finds the calls of tools in an answer: the text beside them, and ``{"name": …, "arguments": {…}}`` for each."""

_MARK = "answer"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Reply(Value, gc=True):
    """An answer in a chat: the `message` to append to its messages, and the `completion` with its tokens."""

    message: dict[str, Any]
    completion: Completion

    @property
    def text(self) -> str:
        """The text, without calls of tools."""
        return str(self.message["content"] or "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls of tools in OpenAI's form, whose ``function`` has a ``name`` and ``arguments`` as JSON."""
        return list(self.message.get("tool_calls") or ())

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length`` or ``tool_calls``."""
        return "tool_calls" if self.tool_calls else self.completion.finish_reason


def calls_in_tags(text: str) -> tuple[str, list[Message]]:
    """The calls in ``<tool_call>{"name": …, "arguments": …}</tool_call>``, as models of Hermes and Qwen write them. A
    call that is no such JSON stays text."""
    found: list[Message] = []

    def taken(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
        except json.JSONDecodeError:
            return match[0]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return match[0]
        found.append({"name": call["name"], "arguments": call.get("arguments") or {}})
        return ""

    return _CALL.sub(taken, text).strip() if "<tool_call>" in text else text, found


def message_of(text: str, parse: Parse, number: int) -> dict[str, Any]:
    """The message of the answer `text`, the one with this number in its episode."""
    content, calls = parse(text)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for place, call in enumerate(calls)
        ]
    return message


class Chats:
    """The chats of one episode, by the template of its tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises `UsageError` for a tokenizer without templates."""
        if not hasattr(tokenizer, "apply_chat_template"):
            raise UsageError(
                "client.chat needs a tokenizer with a chat template",
                "give the pool that of the model: tokenizer=AutoTokenizer.from_pretrained(…)",
            )
        self._tokenizer = tokenizer
        # The messages of each request with its answer, its tools, and all tokens of both.
        self._known: list[tuple[list[Message], Sequence[Message], tuple[int, ...]]] = []

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a request. It goes on with the longest chat before that it begins with."""
        given = [*messages]
        same = [*map(_substance, given)]
        for known, its_tools, tokens in sorted(self._known, key=lambda each: -len(each[0])):
            if same[: len(known)] == [*map(_substance, known)] and [*its_tools] == [*tools]:
                more = self._after(known[-1], given[len(known) :], tools)
                if more is not None:
                    # The model may have made the token with which the template ends a message.
                    again = bool(more) and more[0] == tokens[-1]
                    return (*tokens, *more[again:])
        return self._encode(self._text(given, tools, goes_on=True))

    def answered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        prompt: Sequence[int],
        made: Completion,
        parse: Parse,
    ) -> Reply:
        """The answer to a request with this prompt."""
        text = str(self._tokenizer.decode([*made.token_ids], skip_special_tokens=True))
        reply = Reply(message_of(text, parse, len(self._known)), made)
        self._known.append(([*messages, reply.message], tools, (*prompt, *made.token_ids)))
        return reply

    def _after(
        self, answer: Message, more: Sequence[Message], tools: Sequence[Message]
    ) -> Sequence[int] | None:
        """The tokens of what follows an answer; None if the template changes what was before it."""
        question = {"role": "user", "content": "question"}
        end = self._text([question, {"role": "assistant", "content": _MARK}], tools)
        before = self._text([question, answer], tools)
        whole = self._text([question, answer, *more], tools, goes_on=True)
        if not whole.startswith(before) or _MARK not in end:
            return None
        return self._encode(end[end.rindex(_MARK) + len(_MARK) :] + whole[len(before) :])

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], *, goes_on: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [*map(_for_template, messages)],
                tools=[*tools] or None,
                tokenize=False,
                add_generation_prompt=goes_on,
            )
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _substance(message: Message) -> tuple[Any, ...]:
    """The part of a message by which it is known again: libraries give an answer back with other ids and fields."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    return message["role"], message.get("content") or "", calls


def _for_template(message: Message) -> Message:
    """A message whose calls have their arguments as values, as templates take them."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": _with_values(call["function"])} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _with_values(function: Message) -> Message:
    arguments = function.get("arguments")
    return {**function, "arguments": json.loads(arguments)} if isinstance(arguments, str) else function
