"""Which tokens of a demonstration are learned: found by rendering, and refused where that is not certain."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from trew.config import Config, DataConfig, SetConfig, SftConfig
from trew.data import load_prompts
from trew.data.rows import Row, Split
from trew.data.tasks.demonstrations import ANSWERS, Rollouts
from trew.errors import DataError
from trew.rollout import Renderer
from trew.rollout.demonstrations import Encoder, shortened
from trew.rollout.given import encode
from trew.types import Prompt

TALK = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "yes"}, {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "no"},
]  # fmt: skip
# As Qwen3's: what an assistant thought is dropped as soon as the user has spoken again.
THINKS = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{%- else %}{{ m.content }}{%- endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompt(messages: list[dict[str, Any]]) -> Prompt:
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return Prompt("p", messages=tuple(messages[:first]), columns={ANSWERS: messages[first:]})


def renderer(template: str = tiny.CHATML, **options: bool) -> Renderer:
    tokenizer = tiny.tokenizer(**options)
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def learned(render: Renderer, rollout: Any) -> list[str]:
    """The texts of the runs of learned tokens, and with them that the whole is what the template writes."""
    ids, mask = rollout.token_ids, rollout.sampled
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [render.decode_whole(ids[a:b]) for a, b in pairwise(borders) if mask[a]]


def whole(render: Renderer, rollout: Any) -> str:
    return render.decode_whole([*rollout.prompt_ids, *rollout.token_ids])


def test_answers_and_their_end_tokens_are_learned_and_nothing_else():
    render = renderer()
    (rollout,) = Encoder(render, loss_on="all").encode(prompt(TALK))
    assert learned(render, rollout) == ["yes<|im_end|>", "no<|im_end|>"]
    assert whole(render, rollout) + "\n" == render.apply(TALK, generation_prompt=False)
    assert render.decode_whole(rollout.prompt_ids) == render.apply(TALK[:2])


def test_the_last_answer_alone_has_the_others_in_its_prompt():
    render = renderer()
    (rollout,) = Encoder(render, loss_on="last").encode(prompt(TALK))
    assert learned(render, rollout) == ["no<|im_end|>"]
    assert render.decode_whole(rollout.prompt_ids) == render.apply(TALK[:4])


def test_a_template_that_rewrites_earlier_turns_gives_a_rollout_for_each_answer():
    render = renderer(THINKS)
    talk = [m | ({"content": f"<think>hm</think>{m['content']}"} if m["role"] == "assistant" else {}) for m in TALK]
    encoder = Encoder(render, loss_on="all")
    first, second = encoder.encode(prompt(talk))
    assert encoder.split == 1
    assert learned(render, first) == ["<think>hm</think>yes<|im_end|>"]
    assert learned(render, second) == ["<think>hm</think>no<|im_end|>"]
    assert "hm" not in render.decode_whole(second.prompt_ids)  # as the policy would be asked


def test_a_template_that_ends_no_turn_gives_a_rollout_for_each_answer():
    render = renderer("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    encoder = Encoder(render, loss_on="all")
    first, second = encoder.encode(prompt(TALK))
    assert encoder.split == 1
    assert [learned(render, one) for one in (first, second)] == [["yes\n<|im_end|>"], ["no\n<|im_end|>"]]
    # As the policy would be asked: without an end token after the first answer.
    assert render.decode_whole(second.prompt_ids) == render.apply(TALK[:4])
    (last,) = Encoder(render, loss_on="last").encode(prompt(TALK))
    assert second.prompt_ids.tolist() == last.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            tiny.CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
            "a conversation differently",
        ),
        (
            tiny.CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"),
            "changes the assistant message",
        ),
    ],
)
def test_answers_that_cannot_be_told_from_the_rest_are_refused(template, why):
    with pytest.raises(DataError, match=why):
        Encoder(renderer(template), loss_on="all").encode(prompt(TALK))


@pytest.mark.parametrize(("at", "why"), [(2, "goes on behind the end token"), (1, "user message has the end token")])
def test_an_end_token_inside_a_text_is_refused(at, why):
    talk = [dict(m) for m in TALK]
    talk[at]["content"] = "a<|im_end|>b"
    with pytest.raises(DataError, match=why):
        Encoder(renderer(), loss_on="all").encode(prompt(talk))


def test_a_template_may_end_a_conversation_with_another_end_token():
    render = renderer(tiny.CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    (rollout,) = Encoder(render, loss_on="all").encode(prompt(TALK))
    assert learned(render, rollout) == ["yes<|im_end|>", "no<|im_end|>"]


def test_texts_end_with_the_tokenizer_s_end_token_and_begin_with_its_begin_token():
    render = Renderer(tiny.tokenizer(chat=False, bos=True))
    row = Prompt("p", text="2+2=", columns={ANSWERS: [{"role": "assistant", "content": "4"}]})
    (rollout,) = Encoder(render, loss_on="all").encode(row)
    assert whole(render, rollout) == "<|endoftext|>2+2=4<|endoftext|>"
    assert learned(render, rollout) == ["4<|endoftext|>"]


def test_a_token_across_the_border_is_not_taken_apart():
    """'x 4' has the token ' 4', which a policy that is asked with 'x ' could never sample."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "Ġ4"])}, [("Ġ", "4")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens([AddedToken("<e>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    x, space, four, end = tokenizer.convert_tokens_to_ids(["x", "Ġ", "4", "<e>"])
    assert tokenizer("x 4")["input_ids"] == [x, 256]
    row = Prompt("p", text="x ", columns={ANSWERS: [{"role": "assistant", "content": "4"}]})
    (rollout,) = Encoder(Renderer(tokenizer), loss_on="all").encode(row)
    assert (rollout.prompt_ids.tolist(), rollout.token_ids.tolist()) == ([x, space], [four, end])


def test_rows_that_are_too_long_are_refused_dropped_or_cut():
    render, rows = renderer(), [prompt(TALK), prompt(TALK[:3])]
    (long,) = Encoder(render, loss_on="all").encode(rows[0])
    (short,) = Encoder(render, loss_on="all").encode(rows[1])
    most = len(short.prompt_ids) + len(short.token_ids)

    def encoded(overlong: Any, *, limit: int | None = None) -> Any:
        config = Config(model="m", sft=SftConfig(max_tokens=most, overlong=overlong))
        return encode(rows, render, config, limit=limit, what="training")

    with pytest.raises(DataError, match=rf"1 of 2 training rows are longer than {most} tokens .the longest has"):
        encoded("error")
    kept, (note,) = encoded("drop")
    assert len(kept) == 1
    assert note.endswith("left out")
    kept, _ = encoded("truncate", limit=most)
    (cut,) = kept[0].group.rollouts
    assert learned(render, cut) == ["yes<|im_end|>"]  # the second answer begins beyond
    half = shortened(long, len(long.prompt_ids) + 2)
    assert half is not None
    assert (half.token_ids.tolist(), half.status) == (long.token_ids[:2].tolist(), "truncated")
    assert shortened(long, len(long.prompt_ids)) is None


def test_a_data_set_without_a_row_that_is_short_enough_is_named():
    rows = [dataclasses.replace(prompt(TALK[:n]), uid=uid) for uid, n in (("a/1", 3), ("b/1", 5))]
    (short,) = Encoder(renderer(), loss_on="all").encode(rows[0])
    own = SftConfig(max_tokens=len(short.prompt_ids) + len(short.token_ids), overlong="drop")
    sets = tuple(SetConfig(name=name, task="demonstrations", train="x") for name in "ab")
    with pytest.raises(DataError, match="no training rows of data set b are left: all are longer than"):
        encode(rows, renderer(), Config(model="m", data=sets, sft=own), limit=None, what="training")


ROWS = [
    ({"messages": TALK[1:4]}, "ends with a user message"), ({"messages": TALK[2:]}, "begins with an answer"),
    ({"messages": "hi"}, "must be a list of messages"),
    ({"messages": [*TALK[:2], {"role": "assistant", "content": " "}]}, "is empty"),
    ({"prompt": "a", "completion": ""}, "'completion' is empty"),
    ({"prompt": "a", "completion": TALK[2:]}, "set data.args.chat = true"),
    ({"prompt": TALK[:2], "completion": TALK[1:3]}, "begins with a user message"), ({"text": "a"}, "'messages', or"),
    ({"messages": [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]},
     r"messages\[1\] has 'tool_calls', accepts messages of texts"),
    ({"messages": TALK[1:3], "tools": [{"type": "function"}]}, r"has 'tools', with which the chat template would"),
    ({"messages": TALK[1:3], "chat_template_kwargs": {"a": 1}}, r"has 'chat_template_kwargs', with which"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "why"), ROWS)
def test_rows_that_are_no_demonstrations_are_named(tmp_path, row, why):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=why):
        load_prompts(DataConfig(task="demonstrations", train=str(file)))


def test_tables_that_could_have_tools_and_do_not_are_read(tmp_path):
    """Parquet and JSON lines of several sources have the keys of all of them."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [m | {"tool_calls": []} for m in TALK], "tools": None}) + "\n")
    (row,) = load_prompts(DataConfig(task="demonstrations", train=str(file)))
    assert [*row.messages, *row.columns[ANSWERS]] == TALK


def test_prompts_and_completions_may_be_messages_or_texts(tmp_path):
    rows = [
        {"prompt": TALK[:2], "completion": TALK[2:]}, {"prompt": TALK[:4], "completion": "no"},
        {"prompt": "one?", "completion": "yes"},
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    render = renderer()
    made = load_prompts(DataConfig(task="demonstrations", train=str(file), args={"chat": True, "system": "short"}))
    texts = [learned(render, r) for p in made for r in Encoder(render, loss_on="all").encode(p)]
    # An answer in the prompt is read and not learned.
    assert texts == [["yes<|im_end|>", "no<|im_end|>"], ["no<|im_end|>"], ["yes<|im_end|>"]]
    assert made[2].messages == ({"role": "system", "content": "short"}, {"role": "user", "content": "one?"})


# ------------------------------------------------------------------------------------------------ rollouts as rows


def sampled(token: int, score: float | None, **parts: float) -> dict[str, Any]:
    return {
        "prompt_ids": [1, 2], "token_ids": [token], "sampled": [True], "prompt": "p", "completion": str(token),
        "finish_reason": "stop", "messages": None, "score": score, "parts": list(parts.items()),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ({}, [3, 4]),
        ({"min_reward": 0.5}, [3, 4, 5]),
        ({"unique": False}, [3, 3, 4]),
        ({"reward": "form"}, [3, 6]),
        ({"reward": "form", "min_reward": 0.2}, [3, 5, 6]),
    ],
)
def test_rollouts_are_chosen_by_the_reward_that_was_asked_for_and_once(args, kept):
    rows = [
        sampled(3, 1.0, form=1.0), sampled(3, 1.0, form=1.0), sampled(4, 2.0, form=0.0), sampled(5, 0.5, form=0.2),
        sampled(6, None, form=1.0), sampled(7, 0.0), sampled(8, math.nan),
    ]  # fmt: skip
    split = Split("run", "run", [Row("row", values) for values in rows])
    assert [p.columns["token_ids"] for p in Rollouts(**args).prompts(split)] == [[token] for token in kept]


def test_a_reward_that_no_rollout_has_is_refused_with_those_that_there_are():
    with pytest.raises(DataError, match=r"data.args.reward: got 'from', but run has form"):
        Rollouts(reward="from").prompts(Split("run", "run", [Row("row 1", sampled(3, 1.0, form=1.0))]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"score": ...}, "has no column 'score'; give the folder of a run"),
        ({"prompt_ids": ...}, "has no column 'prompt_ids'; give the folder of a run"),
        ({"sampled": None}, "column 'sampled' must be a list, as in a run's rollouts, got null"),
    ],
)
def test_rows_that_are_no_rollouts_are_named(change, why):
    row = {name: value for name, value in (sampled(3, 1.0) | change).items() if value is not ...}
    with pytest.raises(DataError, match=why):
        Rollouts().prompts(Split("rows.jsonl", "rows", [Row("line 1", row)]))


@pytest.mark.parametrize("parts", [{"form": 1.0}, [["form", 1.0]], [("form", 1.0)]])
def test_the_scores_of_rewards_may_be_a_table_as_in_json(parts):
    row = sampled(3, 0.0) | {"parts": parts}
    assert len(Rollouts(reward="form").prompts(Split("rows.jsonl", "rows", [Row("line 1", row)]))) == 1


def test_what_stood_between_two_turns_of_a_rollout_is_read_and_not_learned():
    row = sampled(3, 1.0) | {
        "token_ids": [3, 4, 50, 51, 5, 60], "sampled": [True, True, False, False, True, False],
        "finish_reason": "length", "completion": renderer().decode([5]),
    }  # fmt: skip
    (made,) = Rollouts().prompts(Split("run", "run", [Row("row", row)]))
    (rollout,) = Encoder(renderer(), loss_on="all").encode(made)
    assert rollout.prompt_ids.tolist() == [1, 2]
    assert rollout.token_ids.tolist() == [3, 4, 50, 51, 5]  # nothing is learned behind the last turn
    assert rollout.sampled is not None
    assert rollout.sampled.tolist() == [True, True, False, False, True]
    assert rollout.status == "truncated"


def test_rollouts_of_a_model_with_another_tokenizer_are_not_learned_as_other_words():
    own = renderer()
    ids = own.tokens("four")
    row = sampled(3, 1.0) | {"token_ids": ids, "sampled": [True] * len(ids), "completion": "four"}
    (made,) = Rollouts().prompts(Split("run", "run", [Row("row", row)]))
    assert Encoder(own, loss_on="all").encode(made)[0].token_ids.tolist() == ids
    shifted = row | {"token_ids": [token + 1 for token in ids]}
    beyond = row | {"token_ids": [token + 100_000 for token in ids]}
    for foreign in (shifted, beyond):
        (made,) = Rollouts().prompts(Split("run", "run", [Row("row", foreign)]))
        with pytest.raises(DataError, match="another text in this model's tokenizer than was recorded"):
            Encoder(own, loss_on="all").encode(made)
