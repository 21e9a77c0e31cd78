"""The files that ``test_bad_input.py`` names: recipes, rewards, templates and data, good and bad."""

from __future__ import annotations

import json

from recipe_help import recipe

SETTINGS = {
    "steps": 1, "reward": "arithmetic", "rollout": {"prompts": 2, "completions": 2, "max_tokens": 4},
    "eval": {"size": 4},
}  # fmt: skip

REWARDS = """
import sys
def f(completions, **_): return [float(len(str(c))) for c in completions]
def raises(completions, **_): raise ValueError("red \\x1b[31m and \\u202e")
def short(completions, **_): return [1.0]
def text(completions, **_): return ["1.0" for _ in completions]
def nan(completions, **_): return [float("nan") for _ in completions]
def nothing(completions, **_): pass
def leaves(completions, **_): sys.exit(3)
async def later(completions, **_): raise RuntimeError("later")
def column(completions, golden, **_): return [1.0] * len(completions)
def bounded(completions, tolerance=0.1, **_): return [tolerance] * len(completions)
def plain(completions): return [1.0] * len(completions)
class Form: pass
"""


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def verl(i: int, **changes: object) -> dict:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"q{i}"}],
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i},
    }
    return row | changes


FILES: dict[str, bytes] = {
    "r.toml": recipe("model", **SETTINGS).encode(),
    "empty.toml": b"",
    "utf16.toml": "model = 'm'".encode("utf-16"),
    "syntax.toml": b"model = \n",
    "twice.toml": b"model = 'm'\n[data]\n[data]\n",
    "r.yaml": b"model: model\nsteps: 1\n",
    "no.toml": b"model = 'model'\nsteps = 1\n[data]\nshuffle = no\n",
    "digits.toml": b"model = 'model'\nsteps = " + b"9" * 5000,
    "deep.toml": b"model = " + b"[" * 100_000,
    "string.toml": b"model = 'model'\ndata = 'x'\n",
    "table.toml": b"model = 'model'\n[data]\ntask = 'arithmetic'\n[rewards]\nname = 'x'\n",
    "reward.py": REWARDS.encode(),
    "syntax.py": b"def f(completions\n",
    "exits.py": b"import sys\nsys.exit(3)\n",
    "bad.jinja": b"{{ messages }",
    "raises.jinja": b"{% for m in messages %}{{ raise_exception('not this') }}{% endfor %}",
    "good.jsonl": lines(*({"prompt": f"What is {i}?", "gold": str(i)} for i in range(20))),
    "one.jsonl": lines({"prompt": "x"}),
    "same.jsonl": lines(*[{"prompt": "x"}] * 30),
    "long.jsonl": lines(*({"prompt": f"{i}" + "y" * 2000 * (i == 9)} for i in range(20))),
    "chat.jsonl": lines(*({"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(20))),
    "nothing.jsonl": b"",
    "d.csv": b"prompt,gold\nx,y\n",
    "comma.jsonl": b'{"prompt": "a"}\n{"prompt": "b",}\n',
    "latin.jsonl": b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n',
    "nul.jsonl": b'{"prompt": "a"}\r\n{"prompt": "b\x00"}\r\n',
    "half.jsonl": b'{"prompt": "a"}\n{"prompt": "b \\ud800"}\n',
    "huge.jsonl": b'{"prompt": "a"}\n{"prompt": "' + b"x" * 70_000_000 + b"\n",
    "ids.jsonl": lines(*({"id": i % 7, "prompt": f"{i}"} for i in range(9))),
    "missing.jsonl": lines({"prompt": "a", "gold": "1"}, {"promt": "b", "gold": "2"}),
    "types.jsonl": lines({"prompt": "a"}, {"prompt": 5}, {"prompt": [1]}, {"prompt": None}),
    "begun.jsonl": lines(*({"prompt": f"<|endoftext|><|endoftext|>{i}"} for i in range(20))),
    "thought.jsonl": lines(*({"prompt": [{"role": "user", "content": f"<think>{i}</think>?"}]} for i in range(20))),
    "strip.jinja": b"{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{% endfor %}",
    "anew.jinja": b"{{ 'done' if messages[-1]['role'] == 'assistant' else '' }}"
    b"{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "g.jsonl": lines(*({"question": f"q{i}", "answer": f"so\n#### {i}"} for i in range(9))),
    "g_long.jsonl": lines({"question": "why " * 200, "answer": "#### 3"}),
    "g_nohash.jsonl": lines({"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "5"}),
    "g_number.jsonl": lines({"question": "q", "answer": 5}),
    "g_word.jsonl": lines({"question": "q", "answer": "#### five"}),
    "g_names.jsonl": lines({"q": "q", "answer": "#### 5"}),
    "c.jsonl": lines(*[{"nums": [1, 2, 3], "target": 6}] * 9, {"nums": [1], "target": None}),
    "s.jsonl": lines({"prompt": "q", "completion": "#### 3", "gold": "3"}),
    "s_number.jsonl": lines({"prompt": "q", "completion": 3, "gold": "3"}),
    "s_columns.jsonl": lines({"prompt": "q", "completion": "3", "columns": "{bad"}),
    "s_ids.jsonl": lines({"prompt": "q", "completion": "3", "gold": "3", "token_ids": 5}),
    "folder/x.txt": b"",
    "taken/notes.txt": b"mine",
}
