"""Programs as answers: what is taken from a completion, how values and asserts are read, rows, limits, together."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trew.errors import ConfigError, SandboxError
from trew.rewards import KINDS, grade
from trew.rewards.builtin import code, code_asserts, code_block, code_rows, code_values
from trew.rewards.builtin.kinds import gold_problem
from trew.rewards.known_answers import known_answers
from trew.rewards.sandbox import Job, JobLimits, boundary, pool

RIGHT = "```python\ndef f(x):\n    return x + 1\n```"


@pytest.fixture(scope="module")
def sandbox():
    try:
        return boundary()
    except SandboxError as error:
        pytest.skip(str(error))


# ---- values

LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def line(value: object) -> bytes:
    return json.dumps(code_values.wire(value)).encode()


@given(LITERALS, LITERALS)
@settings(max_examples=300, deadline=None)
def test_values_are_equal_exactly_when_python_says_so(one, other):
    assert code_values.equal(line(one), one)
    assert code_values.equal(line(one), other) == (one == other)
    assert code_values.is_true(line(one)) == bool(one)


@given(st.sets(st.integers(-3, 3)), st.sets(st.sampled_from([1, 1.0, True, 2, "a", (1, 2), (1.0, 2), None])))
def test_sets_are_equal_exactly_when_python_says_so(one, other):
    for a, b in itertools.product((one, other, frozenset(one)), repeat=2):
        assert code_values.equal(line(a), b) == (a == b)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=4), max_leaves=12
    )
)
@settings(max_examples=200, deadline=None)
def test_nonsense_from_a_program_equals_nothing_and_raises_nothing(nonsense):
    text = json.dumps(["zzz", nonsense]).encode()
    assert not code_values.equal(text, 1)
    assert not code_values.equal(b"[" + json.dumps(nonsense).encode(), 1)
    code_values.equal(json.dumps(nonsense).encode(), [1])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"[" * 100000,
        b'["i"]',
        b'["i","zz"]',
        b'["d",1]',
        b'["F","1/0"]',
        b'["F","1e999999999"]',
        b'["F",1]',
        b'["c","x"]',
        b"[[]]",
        b"[null]",
        b'["s",[]]',
        b"\xff",
    ],
)
def test_broken_values_equal_nothing(text):
    assert not code_values.equal(text, {1: 2})
    assert code_values.is_true(text) in (True, False)


def test_an_enormous_value_is_not_even_read():
    assert not code_values.equal(b"[" * (8 << 20), 1)
    assert not code_values.equal(b'["l"' + b",1" * (1 << 20) + b"]", [1])


def test_decimals_and_fractions_are_exact():
    assert code_values.equal(b'["D","0.5"]', 0.5)
    assert not code_values.equal(b'["D","0.1"]', 0.1)
    assert code_values.equal(b'["F","1/2"]', 0.5)
    assert not code_values.equal(b'["D","1E+999999999"]', 1)
    assert code_values.equal(b'["f","inf"]', math.inf)
    assert code_values.equal(b'["D","Infinity"]', math.inf)


# ---- asserts


@pytest.mark.parametrize(
    ("text", "checked_here"),
    [
        ("assert f(1) == 2", True),
        ("assert 2 == f(1)", True),
        ("assert f(1, [2], k={'a': (3,)}) != None", True),
        ("assert f(1) is None", True),
        ("assert not f('x')", True),
        ("assert f(1) in [2, 3], 'message'", True),
        ("assert f(-1) == -2", True),
        ("def check(candidate):\n    assert candidate(1) == 2\n    assert f(1) == 2", True),
        ("assert f(3 * 19) == 2", False),
        ("assert f(f(1)) == 3", False),
        ("assert f(1) == f(2)", False),
        ("assert abs(f(1) - 2) < 1e-6", False),
        ("assert f(1) < 3", False),
        ("x = 1\nassert f(x) == 2", False),
        ("assert f(*[1]) == 2", False),
        ("assert f(**{'x': 1}) == 2", False),
        ("assert 1 < f(1) < 3", False),
    ],
)
def test_usual_asserts_are_taken_apart_and_others_left_whole(text, checked_here):
    found = code_asserts.read((text,), "f")
    assert isinstance(found, code_asserts.Asserts)
    assert (found.checks is not None) == checked_here


@pytest.mark.parametrize(
    ("asserts", "says"),
    [
        (("assert f(1) ==",), "no Python"),
        (("f(1)",), "no assert"),
        (("assert g(1) == 2",), "no assert calls candidate or f"),
        (("assert f(Node(1)) == 2",), "use Node"),
        (("assert f(lambda x: x) == 2",), "plain values"),
        (("def g(x):\n    return x\nassert f(g) == 2",), "plain values"),
        (("x = [2, 1]\nf(x)\nassert x == [1, 2]",), "change in its arguments"),
        (("assert f(1) == 2\0",), "no Python"),
    ],
)
def test_asserts_that_are_no_test_are_refused_with_the_reason(asserts, says):
    found = code_asserts.read(asserts, "f")
    assert isinstance(found, str)
    assert says in found
    verdict = grade("code_func", RIGHT, None, entry_point="f", asserts=list(asserts))
    assert (verdict.score, verdict.status) == (None, "bad_gold")


@pytest.mark.parametrize(
    "args", [{"timeout_s": 0}, {"timeout_s": "5"}, {"memory_mb": 1}, {"memory_mb": 64.5}, {"unsafe": True}]
)
def test_settings_are_checked(args):
    with pytest.raises(ConfigError):
        grade("code_func", RIGHT, None, entry_point="f", asserts=["assert f(1) == 2"], **args)


# ---- rows

HUMANEVAL = {
    "prompt": "def twice(x):\n    return 2 * x\n\ndef f(x):\n    '''One more.'''\n",
    "entry_point": "f",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    for i in range(3):\n        assert twice(candidate(i)) == 2 * i + 2\n",
}
MBPP = {
    "code": "import math\ndef f(x):\r\n    return x + 1",
    "test_list": ["assert f(1) == 2", "assert math.isclose(f(2), 3)"],
    "test_setup_code": "",
    "test_imports": [],
}


@pytest.mark.parametrize("row", [HUMANEVAL, MBPP])
def test_rows_of_the_public_sets_are_checked_with_their_own_reference(row, sandbox):
    assert gold_problem("code_func", row, {}) == ""
    worse = {key: value.replace("x + 1", "x + 2") if isinstance(value, str) else value for key, value in row.items()}
    assert "its own reference does not pass" in gold_problem("code_func", worse, {})
    gold, arguments = code_rows.func_gold(row) or (None, {})
    assert grade("code_func", code_rows.answer_with(str(gold)), gold, **arguments).score == 1
    for probe in known_answers("code_func", row, {}):
        assert grade("code_func", probe.text, gold, **arguments).score == probe.score, probe.what


def test_rows_of_stdin_tests_in_every_form(sandbox):
    pairs = [{"input": "1", "output": "2"}]
    lists = {"inputs": ["1"], "outputs": ["2"]}
    for row in ({"tests": pairs}, {"tests": json.dumps(pairs)}, {"input_output": json.dumps(lists)},
                {"reward_model": {"ground_truth": json.dumps(lists)}}):  # fmt: skip
        row = {**row, "solution": "print(int(input()) + 1)"}
        assert gold_problem("code_stdin", row, {}) == ""
        assert "does not pass" in gold_problem("code_stdin", {**row, "solution": "print(1)"}, {})
    assert KINDS["code_stdin"].gold({"answer": "7"}) is None
    assert "at least one" in gold_problem("code_stdin", {"tests": "none"}, {})


@pytest.mark.parametrize(
    "tests",
    [
        '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}',  # APPS, TACO and sets made of them
        [{"input": "1\n2", "output": "3", "testtype": "functional"}],  # LiveCodeBench
        [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}],
    ],
)
def test_tests_that_call_a_function_are_no_lines_of_standard_input(tests):
    """The right answer defines the function and prints nothing: every completion would score 0."""
    columns = {"tests": tests}
    assert "call a function" in KINDS["code_stdin"].row_problem(*KINDS["code_stdin"].gold(columns))
    answer = "```python\ndef add(a, b):\n    return a + b\n```"
    verdict = grade("code_stdin", answer, tests=tests)
    assert (verdict.score, verdict.status) == (None, "bad_gold")
    plain = [{"input": "1 2", "output": "3", "testtype": "stdin", "fn_name": None}]
    assert not isinstance(code.stdin_cases(plain), str)


def test_the_setup_is_the_rows_fault_and_not_the_programs(sandbox):
    verdict = grade("code_func", RIGHT, None, entry_point="f", asserts=["assert f(1) == 2"], setup="x = 1 / 0")
    assert (verdict.score, verdict.status) == (None, "bad_gold")
    assert "ZeroDivisionError" in verdict.detail
    forged = "```python\nimport sys\nsys.stderr.write('SETUP: ')\nsys.exit(1)\n```"
    assert grade("code_func", forged, None, entry_point="f", asserts=["assert f(1) == 2"]).score == 0


def test_asserts_that_give_the_function_no_plain_value_are_the_rows_fault(sandbox):
    setup, asserts = "class Thing:\n    pass", ["for thing in (Thing(),):\n    assert f(thing) == 2"]
    verdict = grade("code_func", RIGHT, None, entry_point="f", asserts=asserts, setup=setup)
    assert (verdict.score, verdict.status) == (None, "bad_gold")
    assert "no plain value" in verdict.detail


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "class E(BaseException): pass\nE.__name__ = 'an argument is no plain value'\ndef f(x): raise E",
            "abs(f(1)) < 2",
        ),
        ("def f(x): return object()", "f(f(1)) == 1"),
        ("def f(x):\n    for _ in range(100): x = [x]\n    return x", "f(f(1)) == 1"),
    ],
)
def test_a_program_cannot_put_its_own_failure_on_the_asserts(sandbox, program, test):
    verdict = grade("code_func", f"```python\n{program}\n```", None, entry_point="f", asserts=[f"assert {test}"])
    assert (verdict.score, verdict.status) == (0.0, "scored"), verdict.detail


# ---- blocks


@given(st.text(alphabet="`~python \n\tx{}", max_size=200))
def test_any_text_has_a_block_or_none(text):
    found = code_block.extract(text)
    assert found is None or "```" in text


@given(st.text(alphabet=st.characters(blacklist_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=60))
def test_what_is_fenced_comes_back(program):
    assert code_block.extract("so\n" + code_rows.answer_with(program)) == program.rstrip() + "\n"


@pytest.mark.parametrize("mark", ["1. ", "- ", "  12) "])
def test_a_program_in_an_item_of_a_list_is_not_indented(mark):
    """As Markdown has it: what an item's lines are indented by is not the program's."""
    program = "def f(x):\n  y = x\n\n  return y + 1\n"
    margin = " " * len(mark)
    inside = "".join(f"{margin}{line}" if line.strip() else line for line in program.splitlines(keepends=True))
    assert code_block.extract(f"So:\n\n{mark}```python\n{inside}{margin}```\n") == program
    assert code_block.extract(f"{mark}```python\n{program}```") == program  # not indented at all
    assert code_block.extract(f"Here is it: ```python\n{inside}```") == inside


def test_megabytes_of_fences_cost_nothing():
    for text in ("```python\n" * 200_000, "`" * 5_000_000, "```python" * 300_000, "```\n" * 500_000):
        assert grade("code_stdin", text, None, tests=[{"input": "", "output": ""}]).seconds < 3


@pytest.mark.parametrize("empty", [None, [], ""])
def test_a_row_of_a_mixed_file_has_empty_cells_where_the_other_kind_has_its_own(empty):
    tests = [{"input": "1", "output": "2"}]
    row = {"tests": tests, "asserts": empty, "entry_point": empty}
    assert code_rows.stdin_gold(row) == (None, {"tests": tests})
    assert code_rows.func_gold(row) is None
    row = {"tests": empty, "asserts": ["assert f(1) == 2"], "entry_point": "f"}
    assert code_rows.stdin_gold(row) is None
    assert code_rows.func_gold(row) is not None


# ---- limits


def test_the_clock_of_the_wall_is_ours_and_gives_no_score(sandbox, monkeypatch):
    monkeypatch.setattr(JobLimits, "wall", property(lambda self: 0.3))
    spin = "```python\nwhile True: pass\n```"
    verdict = grade("code_stdin", spin, None, tests=[{"input": "", "output": ""}], timeout_s=30)
    assert (verdict.score, verdict.status) == (None, "timeout")


def test_two_programs_never_meet(sandbox):
    """What one writes, the next one does not find, on the same supervisor or another."""
    leave = (
        "import os\nos.environ['LEFT'] = 'x'\n"
        "try: open('/tmp/left', 'w').write('x')\nexcept OSError: pass\nprint('left')"
    )
    # Tried, not asked: os.access knows nothing of what Landlock forbids.
    look = (
        "import os\ntry: names = os.listdir('/tmp')\nexcept OSError: names = []\n"
        "try: text = open('/tmp/left').read()\nexcept OSError: text = ''\n"
        "print(repr(text), 'LEFT' in os.environ, names)"
    )
    box = pool(sandbox.design)
    for _ in range(3):
        left = box.run_many([Job("script", (leave.encode(), b""))] * 4)
        assert {outcome.parts[0] for outcome in left} == {b"left\n"}
        outcomes = box.run_many([Job("script", (look.encode(), b""))] * 4)
        assert {outcome.parts[0] for outcome in outcomes} == {b"'' False []\n"}
