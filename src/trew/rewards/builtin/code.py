"""Grades programs in a sandbox by what they print (``code_stdin``) or what a function returns (``code_func``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..isolation.pool import run_together
from ..sandbox import Job, JobLimits, JobOutcome, boundary, pool
from ..thinking import after_thinking
from ..verdict import Verdict, bad_gold, no_answer, right_or_wrong
from . import code_asserts, code_block

TIMEOUT_S, MEMORY_MB = 10.0, 512
LONGEST = 16 << 20  # characters of a program
STDIN_COLUMNS = "tests (a list of {input, output}), input_output, or reward_model.ground_truth"
FUNC_COLUMNS = "entry_point with asserts, test_list or test, or reward_model.ground_truth"


@dataclass(frozen=True, slots=True)
class _Case:
    input: str
    output: str


# ---------------------------------------------------------------------------------------------------------- code_stdin


def grade_stdin(
    completion: str,
    gold: Any = None,
    *,
    tests: Any = None,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
    thinking: bool = False,
) -> Verdict:
    """Scores 1 if the last ```` ```python ```` block, run as a program, prints each ``output`` for its ``input``.

    Output is compared line by line, without trailing white space and trailing empty lines. The program must exit with
    status 0. Each test may use ``timeout_s`` seconds of CPU plus idle time, and ``memory_mb`` MiB. ``tests`` may be
    given as ``gold``. Raises SandboxError if this machine has no sandbox.

    >>> grade_stdin("I would add them.", tests=[{"input": "2 3", "output": "5"}]).detail
    'no complete ```python block'
    >>> grade_stdin("```python\\nprint(5)\\n```", tests=[]).status
    'bad_gold'
    """
    cases = stdin_cases(tests if tests is not None else gold)
    if isinstance(cases, str):
        return bad_gold(cases)
    program = _program(completion, thinking=thinking)
    if isinstance(program, Verdict):
        return program
    # Only now: bad tests and completions without a program are told on machines without a sandbox too.
    limits = _limits(timeout_s, memory_mb)
    box = boundary()
    # A fresh sandbox per test, so that no test sees what another left. The first failure decides.
    for number, case in enumerate(cases, start=1):
        # Room for the right output with a wide margin, however long it is; what prints more than that is wrong. In
        # bytes, of which a character may have four.
        most = max(limits.output, 2 * len(_encoded(case.output)) + (1 << 16))
        allowed = JobLimits(seconds=limits.seconds, memory=limits.memory, output=most)
        outcome = box.run(Job("script", (_encoded(program), _encoded(case.input)), allowed))
        if verdict := _not_judged(outcome):
            return verdict
        if wrong := _printed_wrong(outcome, case.output):
            return right_or_wrong(False, extracted=program, detail=f"test {number} of {len(cases)}: {wrong}")
    return right_or_wrong(True, extracted=program)


def stdin_cases(tests: Any) -> list[_Case] | str:
    """Reads the tests as inputs and outputs; returns a message if they are malformed.

    >>> stdin_cases('{"inputs": ["1"], "outputs": ["2"]}')
    [_Case(input='1', output='2')]
    >>> stdin_cases([{"input": "1"}])
    "test 1 has no output, got {'input': '1'}"
    """
    tests = _parsed(tests)
    if isinstance(tests, Mapping):
        if called := _called(tests):
            return f"the tests {called}"
        if "inputs" in tests and "outputs" in tests:
            tests = _paired(tests)
            if tests is None:
                return "inputs and outputs must be lists of one length"
        else:
            tests = _parsed(tests.get("tests"))
    listed = _listed(tests)
    if not listed:
        return f"tests must be a list of {{input, output}} with at least one, got {tests!r:.80}"
    cases = []
    for number, test in enumerate(listed, start=1):
        case = _stdin_case(test)
        if isinstance(case, str):
            return f"test {number}{case}"
        cases.append(case)
    return cases


def _paired(tests: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Turns a list of inputs and one of outputs into tests; None if they do not fit each other."""
    inputs, outputs = _listed(tests["inputs"]), _listed(tests["outputs"])
    if inputs is None or outputs is None or len(inputs) != len(outputs):
        return None
    return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]


def _stdin_case(test: Any) -> _Case | str:
    """Reads one test; returns the end of a message, which begins with the test's number, if it is malformed."""
    if not isinstance(test, Mapping):
        return f" must be {{input, output}}, got {test!r:.80}"
    if called := _called(test):
        return f" is one of those that {called}"
    for name in ("input", "output"):
        # A program may read nothing, so that an input of null stands for an empty one; an output must be there.
        if test.get(name) is None and not (name == "input" and name in test):
            return f" has no {name}, got {dict(test)!r:.80}"
    given, expected = _lines_of(test["input"]), _lines_of(test["output"])
    if given is None or expected is None:
        return f": input and output must be text, or lists of lines, got {dict(test)!r:.80}"
    return _Case(given, expected)


def _called(tests: Mapping[str, Any]) -> str:
    """Says that tests give arguments to a function, as some of public sets (APPS, TACO, LiveCodeBench) do; empty for
    those of a program. As lines of standard input, no right answer would pass them."""
    for name in ("fn_name", "testtype", "type"):
        value = tests.get(name)
        if value and (name == "fn_name" or value in ("functional", "function_call")):
            return (
                f"call a function ({name} = {value!r:.60}), and code_stdin runs programs that read standard input; "
                "give such rows entry_point and asserts, which code_func checks"
            )
    return ""


def _lines_of(value: Any) -> str | None:
    """Returns text as it is, a number as text, a list of lines joined; None for anything else."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    lines = _listed(value)
    if lines is None or not all(isinstance(line, (str, int)) for line in lines):
        return None
    # Lines as readlines() gives them have their ends already: another one would make an empty line of each.
    return "\n".join(str(line).removesuffix("\n") for line in lines)


def _printed_wrong(outcome: JobOutcome, expected: str) -> str:
    """Says how a program's run differs from what a test expects; empty if it does not."""
    if outcome.ended == "limit":
        return outcome.why
    if outcome.status != 0:
        said = outcome.parts[1].decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"ended with status {outcome.status}{': ' + said if said else ''}"
    got, want = _lines(outcome.parts[0].decode("utf-8", "replace")), _lines(expected)
    if len(got) != len(want):
        return f"wrote {len(got)} line{'' if len(got) == 1 else 's'}, expected {len(want)}"
    for number, (one, other) in enumerate(zip(got, want, strict=True), start=1):
        if one != other:
            return f"line {number} is {one[:60]!r}, expected {other[:60]!r}"
    return ""


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


# ----------------------------------------------------------------------------------------------------------- code_func


def grade_func(
    completion: str,
    gold: Any = None,
    *,
    entry_point: str | None = None,
    asserts: Any = None,
    setup: str = "",
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
    thinking: bool = False,
) -> Verdict:
    """Scores 1 if every assert holds for the function ``entry_point`` of the last ```` ```python ```` block.

    The program never runs in one process with the asserts: calls go into its sandbox, and plain values come out to be
    compared outside, or in a second sandbox if an assert is more than a comparison. ``setup`` is code for both, such as
    definitions from the prompt. All calls together may use ``timeout_s`` seconds of CPU plus idle time.

    >>> grade_func("Two times x.", entry_point="double", asserts=["assert double(2) == 4"]).status
    'no_answer'
    >>> grade_func("```python\\n```", entry_point="double", asserts=["assert triple(2) == 6"]).detail
    'no assert calls candidate or double'
    """
    tests = func_tests({"entry_point": entry_point, "asserts": asserts, "setup": setup}, gold)
    if isinstance(tests, str):
        return bad_gold(tests)
    program = _program(completion, thinking=thinking)
    if isinstance(program, Verdict):
        return program
    limits, before = _limits(timeout_s, memory_mb), _encoded(setup or "")
    # If all asserts have a usual shape, their calls are compared outside, and no second sandbox is needed.
    if tests.checks is not None:
        calls = "\n".join(check.call for check in tests.checks).encode()
        outcome = boundary().run(Job("calls", (_encoded(program), before, calls), limits, tests.entry))
        wrong = _not_judged(outcome) or _returned_wrong(outcome, tests.checks)
    else:
        outcome = boundary().run(Job("tests", (_encoded(program), before, _encoded(tests.text)), limits, tests.entry))
        wrong = _not_judged(outcome) or _failed_tests(outcome)
    if isinstance(wrong, Verdict):
        return wrong
    return right_or_wrong(not wrong, extracted=program, detail=wrong)


def func_tests(row: Mapping[str, Any], gold: Any = None) -> code_asserts.Asserts | str:
    """Parses the asserts of a row; returns a message if they are malformed."""
    row = _with_nested_asserts(row, gold)
    asserts = _parsed(row.get("asserts"))
    listed = [asserts] if isinstance(asserts, str) else _listed(asserts)
    if not listed or not all(isinstance(one, str) and one.strip() for one in listed):
        return f"asserts must be a list of texts such as 'assert f(1) == 2', with at least one, got {asserts!r:.80}"
    setup = row.get("setup") or ""
    if not isinstance(setup, str):
        return f"setup must be Python source text, got {setup!r:.80}"
    entry = row.get("entry_point") or code_asserts.likely_entry(listed)
    if not isinstance(entry, str):
        return f"entry_point must name the function that the asserts call, got {entry!r:.80}"
    return code_asserts.read(tuple(listed), entry, setup)


def _with_nested_asserts(row: Mapping[str, Any], gold: Any) -> Mapping[str, Any]:
    """The row with the asserts of its gold, a table or a list, if it has none of its own."""
    if row.get("asserts") is not None:
        return row
    nested = _parsed(gold)
    if isinstance(nested, Mapping):
        return {**nested, "setup": row.get("setup") or nested.get("setup")}
    return row if _listed(nested) is None else {**row, "asserts": nested}


def _returned_wrong(outcome: JobOutcome, checks: Sequence[code_asserts.AssertedCall]) -> str:
    """Names the first check that does not hold; empty if all do."""
    # Lines are ["r", value] for what was returned and ["x", kind, message, ...] for what was raised (JsonPipe.raised).
    lines = outcome.parts[0].split(b"\n") if outcome.parts and outcome.parts[0] else []
    if outcome.ended == "limit":
        return outcome.why
    if not lines:
        return f"ended with status {outcome.status} before the tests"
    if not lines[0].startswith(b'["r",'):
        return "could not be loaded: " + _raised(lines[0])
    # Line 0 answers the import, each later line one check. Answers may be missing where the program ended early; the
    # count is compared after those that came, so that the detail names the first wrong one.
    answers = lines[1:]
    for check, line in zip(checks, answers, strict=False):
        if not line.startswith(b'["r",'):
            return f"{check.source[:80]}: raised {_raised(line)}"
        # The value's own text: without ["r", in front and ] behind.
        if not check.holds(line[5:-1]):
            return f"{check.source[:80]}: got {line[5:-1][:80].decode('ascii', 'replace')}"
    if len(answers) != len(checks):
        return f"answered {len(answers)} of {len(checks)} calls, and ended with status {outcome.status}"
    return ""


def _raised(line: bytes) -> str:
    try:
        _, kind, message, *_ = json.loads(line)
        return f"{kind}: {message}"[:160]
    except (ValueError, RecursionError):
        return "something unreadable"


def _failed_tests(outcome: JobOutcome) -> str | Verdict:
    """Reads the result of the asserts in the second sandbox; empty if all held."""
    # The order assigns the blame: a broken sandbox, the program's limit, the judge's limit, then the judge's finding.
    judge = outcome.judge or {}
    if judge.get("ended") == "failed":
        return Verdict(None, "sandbox_error", None, judge["why"])
    if outcome.ended == "limit":
        return outcome.why
    if judge.get("ended") == "limit":
        # The wall clock says nothing about the program: a loaded machine may have run out of it.
        if str(judge["why"]).startswith("clock: "):
            return Verdict(None, "timeout", None, judge["why"][7:])
        return f"the asserts {judge['why']} on what came back"
    answered, done = outcome.parts[:2]
    if done:
        return _judgement(done)
    if answered.startswith(b'["x",'):  # the answer to the import, the first that a program gives
        return "could not be loaded: " + _raised(answered)
    return f"ended with status {outcome.status} before the tests were done"


def _judgement(done: bytes) -> str | Verdict:
    """Reads the judge's last line; empty if all asserts held."""
    try:
        _, held, kind, detail = json.loads(done)
    except (ValueError, RecursionError):
        return "the tests ended without a result"
    if kind == "NotPlain":
        return bad_gold("the asserts give the function something that is no plain value")
    if kind == "NothingCalled":
        return bad_gold("the asserts ended without a call of the function, so that any program would pass them")
    return "" if held is True else str(detail) or "an assert did not hold"


# ------------------------------------------------------------------------------------------------------------- shared


def _program(completion: str, *, thinking: bool) -> str | Verdict:
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return no_answer("the thought was not finished")
    program = code_block.extract(text)
    if program is None:
        return no_answer("no complete ```python block")
    if not program.strip():
        return no_answer("the ```python block is empty")
    if len(program) > LONGEST:
        return no_answer(f"the program is longer than {LONGEST:,} characters")
    return program


def _limits(timeout_s: float, memory_mb: int) -> JobLimits:
    return JobLimits(seconds=float(timeout_s), memory=int(memory_mb) << 20)


def _encoded(text: str) -> bytes:
    """Encodes ``text``. Lone surrogates pass as invalid UTF-8, so Python rejects the program instead of this process
    raising."""
    return text.encode("utf-8", "surrogatepass")


def _not_judged(outcome: JobOutcome) -> Verdict | None:
    """Returns a verdict if the sandbox, the setup or the wall clock is at fault rather than the program."""
    if outcome.ended == "failed":
        _, mark, said = outcome.why.partition("SETUP: ")  # written by inside.py before the program is loaded
        return bad_gold(f"the setup fails: {said}") if mark else Verdict(None, "sandbox_error", None, outcome.why)
    # Without "clock: " in front.
    return Verdict(None, "timeout", None, outcome.why[7:]) if outcome.clock else None


def grade_many(grade: Any, items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
    """Grades (completion, gold, arguments) with ``grade``, as many at a time as the sandbox has processes."""
    # Threads suffice: the work happens in the supervisors, and each thread only waits for one.
    size = pool(boundary().design).size
    return run_together(lambda item: grade(item[0], item[1], **item[2]), items, size=size)


def grade_many_stdin(items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
    """Grades several completions with ``code_stdin``; the verdicts equal those of one at a time."""
    return grade_many(grade_stdin, items)


def grade_many_func(items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
    """Grades several completions with ``code_func``; the verdicts equal those of one at a time."""
    return grade_many(grade_func, items)


def _parsed(value: Any) -> Any:
    """Parses JSON text; returns anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _listed(value: Any) -> list[Any] | None:
    """Converts lists, tuples and arrays to a list; None for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "tolist") and not isinstance(value, (str, bytes)):
        made = value.tolist()
        return made if isinstance(made, list) else None
    return None
