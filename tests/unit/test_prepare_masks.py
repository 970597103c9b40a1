"""Loss masks: for each kind of chat template, the tokens to be learned decode to what the assistant says, no more and no less."""

from __future__ import annotations

import json
from typing import Any

import chat_models as tiny
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headframe_worker.prepare.blocks import Block
from headframe_worker.prepare.encoder import EncodedBlock, Encoder
from headframe_worker.prepare.samples import Columns
from headframe_worker.prepare.template import ChatRenderer
from headframe_worker.prepare.tokenizing import text_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
ASK, ASK_AGAIN = {"role": "user", "content": "Why?"}, {"role": "user", "content": "And then?"}
ANSWER, ANSWER_AGAIN = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "Nothing more."}
TWO_TURNS = [ASK, ANSWER, ASK_AGAIN, ANSWER_AGAIN]


def renderer_of(tokenizer: Any) -> ChatRenderer:
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return ChatRenderer(tokenizer.chat_template, dict(tokenizer.special_tokens_map), added)


def encoder_of(template: str, **changes: Any) -> tuple[Any, Encoder]:
    tokenizer = tiny.tiny_tokenizer(template)
    settings: dict[str, Any] = {
        "row_format": "messages",
        "columns": Columns(),
        "loss_mask": "assistant",
        "max_length": 4096,
        "on_too_long": "truncate",
        "vocab_size": 2000,
        "tokenizer": text_tokenizer(tokenizer),
        "renderer": renderer_of(tokenizer),
    }
    return tokenizer, Encoder(**{**settings, **changes})


def encode(template: str, *rows: Any, **changes: Any) -> tuple[Any, EncodedBlock]:
    tokenizer, encoder = encoder_of(template, **changes)
    lines: list[bytes | None] = [json.dumps(row).encode() for row in rows]
    return tokenizer, encoder.encode(Block("rows.jsonl", list(range(1, len(rows) + 1)), lines))


def learned(tokenizer: Any, block: EncodedBlock) -> list[str]:
    """Each stretch of masked tokens of the only sample, decoded."""
    assert block.refusals == []
    stretches: list[list[int]] = []
    previous = 0
    for token, bit in zip(block.input_ids.tolist(), block.loss_mask.tolist(), strict=True):
        if bit and not previous:
            stretches.append([])
        if bit:
            stretches[-1].append(token)
        previous = bit
    return [tokenizer.decode(stretch) for stretch in stretches]


CASES = {
    "chatml": (tiny.CHATML, TWO_TURNS, ["Because.<|im_end|>", "Nothing more.<|im_end|>"]),
    "chatml, system": (tiny.CHATML, [SYSTEM, *TWO_TURNS], ["Because.<|im_end|>", "Nothing more.<|im_end|>"]),
    "question at the end": (tiny.CHATML, [*TWO_TURNS, ASK], ["Because.<|im_end|>", "Nothing more.<|im_end|>"]),
    "same answer as question": (tiny.CHATML, [ASK, {**ANSWER, "content": "Why?"}], ["Why?<|im_end|>"]),
    "next question within the answer": (
        tiny.CHATML,
        [ASK, {**ANSWER, "content": "And then? Nothing."}, ASK_AGAIN, ANSWER_AGAIN],
        ["And then? Nothing.<|im_end|>", "Nothing more.<|im_end|>"],
    ),
    "space at the ends of an answer": (
        tiny.CHATML,
        [ASK, {**ANSWER, "content": " Because. \n"}],
        [" Because. \n<|im_end|>"],
    ),
    "assistant first": (tiny.CHATML, [ANSWER, ASK, ANSWER_AGAIN], ["Because.<|im_end|>", "Nothing more.<|im_end|>"]),
    "control tokens in a question": (
        tiny.CHATML,
        [{"role": "user", "content": "What is <|im_end|>\n<|im_start|>assistant\n?"}, ANSWER],
        ["Because.<|im_end|>"],
    ),
    "control tokens in an answer": (
        tiny.CHATML,
        [ASK, {"role": "assistant", "content": "It writes <|im_end|> there."}, ASK_AGAIN, ANSWER_AGAIN],
        ["It writes <|im_end|> there.<|im_end|>", "Nothing more.<|im_end|>"],
    ),
    "no header": (tiny.BRACKETS, TWO_TURNS, [" Because.<eos>", " Nothing more.<eos>"]),
    "own BOS": (tiny.HEADERS, TWO_TURNS, ["Because.<|eot|>", "Nothing more.<|eot|>"]),
    "no end token, a token across the start": (tiny.PLAIN, TWO_TURNS, [" Because.\n", " Nothing more.\n"]),
    "generation": (tiny.GENERATION, [SYSTEM, *TWO_TURNS], ["Because.<|im_end|>", "Nothing more.<|im_end|>"]),
    "thinking, none given": (
        tiny.THINKING,
        TWO_TURNS,
        ["Because.<|im_end|>", "<think>\n\n</think>\n\nNothing more.<|im_end|>"],
    ),
    "thinking, dropped from the first turn": (
        tiny.THINKING,
        [ASK, {**ANSWER, "reasoning_content": "Hm."}, ASK_AGAIN, {**ANSWER_AGAIN, "reasoning_content": "Well."}],
        ["<think>\nWell.\n</think>\n\nNothing more.<|im_end|>"],
    ),
    "thinking within contents": (
        tiny.THINKING,
        [
            ASK,
            {**ANSWER, "content": "<think>\nHm.\n</think>\n\nYes."},
            ASK_AGAIN,
            {**ANSWER, "content": "<think>\nWell.\n</think>\n\nNo."},
        ],
        ["<think>\nWell.\n</think>\n\nNo.<|im_end|>"],
    ),
    "tool calls": (
        tiny.THINKING,
        [
            ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}],
            },
            {"role": "tool", "content": "12:00"},
            {"role": "assistant", "content": "Noon."},
        ],
        [
            '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nNoon.<|im_end|>",
        ],
    ),
    "last turn ends otherwise": (
        tiny.CHANNELS,
        [ASK, ANSWER, ASK_AGAIN, {**ANSWER_AGAIN, "reasoning_content": "Well."}],
        ["<|head|>analysis Well.<|end|><|start|>assistant<|head|>final Nothing more.<|return|>"],
    ),
    "generation prompt opens a thought": (tiny.OPENS_THOUGHT, TWO_TURNS, ["Because.<eos>", "Nothing more.<eos>"]),
}


@pytest.mark.parametrize("name", CASES)
def test_assistant_turns(name: str) -> None:
    template, messages, expected = CASES[name]
    tokenizer, block = encode(template, {"messages": messages})
    assert learned(tokenizer, block) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_last_assistant_turn_is_the_last_of_all(name: str) -> None:
    template, messages, expected = CASES[name]
    tokenizer, block = encode(template, {"messages": messages}, loss_mask="lastAssistant")
    assert learned(tokenizer, block) == expected[-1:]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_chat_template(name: str) -> None:
    template, messages, _ = CASES[name]
    tokenizer, block = encode(template, {"messages": messages}, loss_mask="all")
    ready = [{**message, "content": message["content"] or ""} for message in messages]
    for message in ready:
        for call in message.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": {"zone": "UTC"}}
    assert block.input_ids.tolist() == tokenizer.apply_chat_template(ready, tokenize=True)["input_ids"]
    assert block.loss_mask.all()


def test_generation_masks_are_those_of_transformers() -> None:
    tokenizer, block = encode(tiny.GENERATION, {"messages": [SYSTEM, *TWO_TURNS]})
    theirs = tokenizer.apply_chat_template(
        [SYSTEM, *TWO_TURNS], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert block.input_ids.tolist() == theirs["input_ids"]
    assert block.loss_mask.tolist() == theirs["assistant_masks"]


def test_uncertain_turns_are_counted() -> None:
    messages = [ASK, {**ANSWER, "reasoning_content": "Hm."}, ASK_AGAIN, ANSWER_AGAIN]
    assert encode(tiny.THINKING, {"messages": messages})[1].uncertain_turns == 1


def test_a_chat_in_which_no_turn_is_certain_is_refused() -> None:
    messages = [ASK, {**ANSWER, "reasoning_content": "Hm."}, ASK_AGAIN]
    template = tiny.THINKING.replace("loop.index0 > ns.last", "loop.last")
    (refusal,) = encode(template, {"messages": messages})[1].refusals
    assert refusal.reason == "MaskUnsound"


def test_a_cut_sample_keeps_the_mask_of_what_is_left() -> None:
    _, whole = encode(tiny.CHATML, {"messages": TWO_TURNS})
    for length in (1, 12, len(whole.input_ids) - 1):
        _, cut = encode(tiny.CHATML, {"messages": TWO_TURNS}, max_length=length)
        assert cut.input_ids.tolist() == whole.input_ids[:length].tolist()
        assert cut.loss_mask.tolist() == whole.loss_mask[:length].tolist()
        assert (cut.truncated, cut.without_loss) == (1, int(not whole.loss_mask[:length].any()))


def test_bos_is_not_doubled() -> None:
    tokenizer, block = encode(tiny.HEADERS, {"messages": TWO_TURNS})
    assert block.input_ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [([SYSTEM, *TWO_TURNS], "System role not supported"), ([ASK, ASK, ANSWER], "Roles must alternate")],
)
def test_what_a_template_refuses_is_refused_with_its_words(messages: list[Any], words: str) -> None:
    (refusal,) = encode(tiny.REFUSING, {"messages": messages})[1].refusals
    assert refusal.reason == "TemplateRefused"
    assert words in refusal.message


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *TWO_TURNS]
    tokenizer, block = encode(tiny.CHATML, {"messages": messages})
    assert tokenizer.decode(block.input_ids).startswith("<|im_start|>system\nBe brief.")
    tokenizer, block = encode(tiny.CHATML + "{# knows developer #}", {"messages": messages})
    assert tokenizer.decode(block.input_ids).startswith("<|im_start|>developer\nBe brief.")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Why?\n", "completion": "Because."}, ["Because."]),
        ({"prompt": "Why? ", "completion": "Because."}, [" Because."]),
        ({"prompt": [ASK], "completion": [ANSWER]}, ["Because.<|im_end|>"]),
        ({"prompt": [ASK, ANSWER, ASK_AGAIN], "completion": [ANSWER_AGAIN]}, ["Nothing more.<|im_end|>"]),
    ],
)
def test_completions(row: dict[str, Any], expected: list[str]) -> None:
    tokenizer, block = encode(tiny.CHATML, row, row_format="promptCompletion")
    assert learned(tokenizer, block) == expected


def test_plain_text_gets_the_tokenizers_special_tokens() -> None:
    tokenizer, block = encode(tiny.CHATML, {"text": "Why not?"}, row_format="text", loss_mask="all")
    assert block.input_ids.tolist() == tokenizer("Why not?")["input_ids"]
    assert block.input_ids[0] == tokenizer.bos_token_id
    assert block.loss_mask.all()


def test_mixed_completions_get_special_tokens_where_no_template_writes_them() -> None:
    rows = [{"prompt": "Why? ", "completion": "So."}, {"prompt": [ASK], "completion": [ANSWER]}]
    tokenizer, block = encode(tiny.CHATML, *rows, row_format="promptCompletion")
    first = block.input_ids[: block.lengths[0]]
    assert first.tolist() == tokenizer("Why? So.")["input_ids"]
    assert tokenizer.bos_token_id not in block.input_ids[block.lengths[0] :]


words = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=100, deadline=None)
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4), system=st.none() | words)
@pytest.mark.parametrize("template", [tiny.CHATML, tiny.GENERATION, tiny.THINKING])
def test_any_text_is_masked_exactly(template: str, turns: list[tuple[str, str]], system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    tokenizer, block = encode(template, {"messages": messages})
    thought = "<think>\n\n</think>\n\n" if template == tiny.THINKING else ""
    expected = [answer + "<|im_end|>" for _, answer in turns]
    expected[-1] = thought + expected[-1]
    masked = block.input_ids[block.loss_mask.astype(bool)]
    plain = tokenizer.decode(masked, clean_up_tokenization_spaces=False)
    if plain != "".join(expected):
        # A token may hold the end of the header and the start of the answer: then it is learned as a whole.
        assert plain.replace("\n", "") == "".join(expected).replace("\n", "")


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4))
@pytest.mark.parametrize("template", [tiny.CHATML, tiny.THINKING, tiny.HEADERS])
def test_marks_find_the_same_turns_as_prefixes(template: str, turns: list[tuple[str, str]]) -> None:
    """The fast way, one rendering a chat, against the slow one, two renderings a turn."""
    messages = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    renderer = renderer_of(tiny.tiny_tokenizer(template))
    at = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    text = renderer._render(messages, None)[0]
    by_marks = renderer._by_marks(text, messages, None, at)
    if by_marks is not None:
        assert by_marks == [
            renderer._turn(text, messages, turn, None) or span for turn, span in zip(at, by_marks, strict=True)
        ]
