"""Chats with tools, recorded by tokens: what the model has made stays as it was made, over all turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.effort import examples
from tests.unit.rollout.fake_completer import FakeCompleter, made
from unirun.errors import UsageError
from unirun.rollout.chatting import Chats, calls_in_tags, message_of
from unirun.rollout.completing import Trajectory, trajectories
from unirun.rollout.pool import Recorder

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content or '' }}"
    "{% for call in each.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 4,"b": 9}}</tool_call>'
WORDS = ("yes", "no", "13")


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token for each character, and one for `CALL` and each of the `WORDS` as well as for their characters."""
    special = ["<|im_start|>", "<|im_end|>"]
    letters = [chr(number) for number in range(32, 127)]
    names = {each: number for number, each in enumerate([*special, "\n", *letters, CALL, *WORDS])}
    inner = Tokenizer(models.WordLevel(names, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    make: Any = PreTrainedTokenizerFast
    made: Any = make(
        tokenizer_object=inner, eos_token="<|im_end|>", extra_special_tokens=special, unk_token="?"
    )
    made.chat_template = template
    # As the decoder of such a tokenizer puts blanks between tokens.
    decode = lambda tokens, skip_special_tokens=False: "".join(  # noqa: E731
        each for each in made.convert_ids_to_tokens(tokens) if not (skip_special_tokens and each in special)
    )
    made.decode = decode
    return made


class Says:
    """An engine that says these things, one after the other, each as these tokens."""

    def __init__(self, *answers: Sequence[int]) -> None:
        left = iter(answers)
        self.completer = FakeCompleter(lambda prompt: next(left))

    def client(self, own: Any) -> Recorder:
        return Recorder(self.completer, lambda completion: None, conversation="c", tokenizer=own)


def text_of(own: Any, each: Trajectory, *, trained: bool) -> str:
    tokens = [t for t, is_trained in zip(each.token_ids, each.trained, strict=True) if is_trained is trained]
    return str(own.decode(tokens))


def test_an_agent_with_tools_is_one_trajectory_of_the_tokens_that_were_made() -> None:
    own = tokenizer()
    end = own.eos_token_id
    # The call as one token: the template would have made many of it, and with another blank.
    said = [[own.convert_tokens_to_ids(CALL), end], [*own.encode("13"), end], [*own.encode("yes"), end]]
    engine = Says(*said)
    client = engine.client(own)

    async def agent() -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "4+9?"}]
        reply = await client.chat(messages, tools=TOOLS, max_tokens=9)
        assert (reply.text, reply.finish_reason) == ("", "tool_calls")
        (call,) = reply.tool_calls
        assert call["function"]["name"] == "add"
        found = sum(json.loads(call["function"]["arguments"]).values())
        # As a library gives it back.
        again = {**reply.message, "content": None, "reasoning": ""}
        messages += [again, {"role": "tool", "tool_call_id": call["id"], "content": str(found)}]
        reply = await client.chat(messages, tools=TOOLS)
        assert (reply.text, reply.tool_calls, reply.finish_reason) == ("13", [], "stop")
        messages += [reply.message, {"role": "user", "content": "sure?"}]
        reply = await client.chat(messages, tools=TOOLS)
        return [*messages, reply.message]

    messages = asyncio.run(agent())
    assert messages[-1]["content"] == "yes"
    assert engine.completer.requests[0][2] == {"max_tokens": 9}
    (whole,) = trajectories(client.turns, 1.0)
    assert text_of(own, whole, trained=True) == f"{CALL}<|im_end|>13<|im_end|>yes<|im_end|>"
    start = "<|im_start|>"
    assert text_of(own, whole, trained=False).partition("assistant")[2] == (
        f"\n\n{start}tool\n13<|im_end|>\n{start}assistant\n\n{start}user\nsure?<|im_end|>\n{start}assistant\n"
    )


def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    own = tokenizer()
    client = Says(own.encode("13"), own.encode("14")).client(own)

    async def agent() -> None:
        messages = [{"role": "user", "content": "4+9?"}]
        reply = await client.chat(messages)
        await client.chat([*messages, reply.message, {"role": "user", "content": "no"}])

    asyncio.run(agent())
    (whole,) = trajectories(client.turns, 1.0)
    assert "\n13<|im_end|>\n<|im_start|>user\nno<|im_end|>" in own.decode([*whole.token_ids])


def test_a_chat_that_was_rewritten_begins_another_trajectory_and_branches_share_their_beginning() -> None:
    own = tokenizer()
    end = own.eos_token_id
    client = Says(*([*own.encode(each), end] for each in ("a", "b", "c"))).client(own)

    async def agent() -> None:
        messages = [{"role": "user", "content": "1"}]
        reply = await client.chat(messages)
        await client.chat([*messages, reply.message, {"role": "user", "content": "2"}])
        await client.chat([{"role": "user", "content": "in short: a"}])

    asyncio.run(agent())
    first, second = trajectories(client.turns, 1.0)
    assert text_of(own, first, trained=True) == "a<|im_end|>b<|im_end|>"
    assert text_of(own, second, trained=True) == "c<|im_end|>"


class Episode:
    """Chats that go on from each other, under one set of tools or another. The reference has the tokens of each."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.own = data, tokenizer()
        self.chats = Chats(self.own)
        self.known: list[tuple[list[dict[str, Any]], bool, tuple[int, ...]]] = []
        self.ids: list[str] = []

    def ask(self) -> None:
        """A request, which goes on from any chat before, or from a part of it."""
        before = self.data.draw(st.sampled_from([[], *(known for known, _, _ in self.known)]), "before")
        kept = self.data.draw(st.integers(0, len(before)) if before else st.just(0), "kept")
        messages = [*before[:kept], {"role": "user", "content": self.data.draw(st.sampled_from("ab"))}]
        offers = self.data.draw(st.booleans(), "tools")
        prompt = self.chats.prompt(messages, TOOLS if offers else [])
        self.check(messages, offers, prompt)
        said = self.data.draw(st.sampled_from((*WORDS, CALL)), "says")
        ended = self.data.draw(st.booleans(), "ends")
        tokens = [self.own.convert_tokens_to_ids(said), *([self.own.eos_token_id] if ended else [])]
        reply = self.chats.answered(messages, TOOLS if offers else [], prompt, made(*tokens), calls_in_tags)
        assert (reply.text, len(reply.tool_calls)) == (("", 1) if said == CALL else (said, 0))
        self.ids += [call["id"] for call in reply.tool_calls]
        assert len({*self.ids}) == len(self.ids)
        self.known.append(([*messages, reply.message], offers, (*prompt, *tokens)))

    def check(self, messages: list[dict[str, Any]], offers: bool, prompt: tuple[int, ...]) -> None:
        """It has all tokens of the longest chat that it goes on from, and what the template makes of the rest."""
        same = [
            (len(known), tokens)
            for known, offered, tokens in self.known
            if offered is offers and without_ids(messages[: len(known)]) == without_ids(known)
        ]
        whole = self.text(messages, offers)
        if not same:
            assert prompt == tuple(self.own.encode(whole, add_special_tokens=False))
            return
        longest = max(length for length, _ in same)
        (*_, tokens) = [
            tokens for length, tokens in same if length == longest and prompt[: len(tokens)] == tokens
        ]
        rest = "<|im_end|>" * (tokens[-1] != self.own.eos_token_id) + "\n"
        rest += self.text(messages[longest:], offers=False)
        assert self.own.decode([*prompt[len(tokens) :]]) == rest

    def text(self, messages: list[dict[str, Any]], offers: bool) -> str:
        """As the template makes it of messages, up to the next answer."""
        found = f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n" if offers else ""
        for each in messages:
            calls = [
                f"<tool_call>{json.dumps({**call['function'], 'arguments': json.loads(call['function']['arguments'])})}"
                "</tool_call>"
                for call in each.get("tool_calls", ())
            ]
            found += f"<|im_start|>{each['role']}\n{each['content']}{''.join(calls)}<|im_end|>\n"
        return f"{found}<|im_start|>assistant\n"


def without_ids(messages: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The parts of messages that make them the same."""
    return [
        (each["role"], each["content"], [call["function"] for call in each.get("tool_calls", ())])
        for each in messages
    ]


@examples(100, shrunk=False)
@given(st.data())
def test_a_request_keeps_the_tokens_of_the_longest_chat_that_it_goes_on_from(data: st.DataObject) -> None:
    episode = Episode(data)
    for _ in range(data.draw(st.integers(2, 8), "requests")):
        episode.ask()


def test_what_is_no_call_stays_text() -> None:
    broken = "so <tool_call>{add 4 9}</tool_call>"
    assert calls_in_tags(broken) == (broken, [])
    assert calls_in_tags("<tool_call>[1]</tool_call>")[1] == []
    text, calls = calls_in_tags(f"first {CALL} {CALL}")
    assert (text, len(calls)) == ("first", 2)


def test_the_message_of_an_answer_has_the_form_of_openai() -> None:
    assert message_of("13", calls_in_tags, 0) == {"role": "assistant", "content": "13"}
    call = {"name": "add", "arguments": '{"a": 4, "b": 9}'}
    assert message_of(CALL, calls_in_tags, 2) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_2_0", "type": "function", "function": call}],
    }


def test_a_tokenizer_without_templates_is_refused() -> None:
    with pytest.raises(UsageError, match="chat template"):
        asyncio.run(Says([1]).client(None).chat([{"role": "user", "content": "1"}]))
