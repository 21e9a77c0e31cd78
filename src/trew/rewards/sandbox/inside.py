"""What the interpreter in the sandbox runs first, compiled outside. It never runs outside.

Modes: ``script`` runs the program as ``__main__``; ``calls`` imports it and answers calls of one of its functions;
``tests`` runs a data row's asserts, whose calls are answered by a program in *another* sandbox. So a program and the
values that it should return are never in the same process. Values travel as JSON with their types, one line each.

The interpreter gets the sections that its mode needs.
"""

import builtins
import os
import resource
import sys


def set_limits(cpu, memory, processes, file):
    limits = (
        # CPU: SIGXCPU at the soft limit can be caught, SIGKILL at the hard one cannot.
        ("CPU", cpu, cpu + 1), ("AS", memory, memory), ("NPROC", processes, processes), ("FSIZE", file, file),
        ("NOFILE", 128, 128), ("CORE", 0, 0), ("MEMLOCK", 0, 0), ("MSGQUEUE", 0, 0),
    )  # fmt: skip
    for name, soft, hard in limits:
        what = getattr(resource, "RLIMIT_" + name)
        most = resource.getrlimit(what)[1]
        # A hard limit can only be lowered. RLIM_INFINITY is -1, which min() would take for the smallest.
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(what, (soft, hard))


def read_all(descriptor):
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts)


def run(source, name, names=(), path="main.py"):
    """Runs source text as a module, as the interpreter's loader does with a file."""
    # From the frozen module, which is loaded already; importlib would have to be imported.
    base = sys.modules["_frozen_importlib_external"].SourceFileLoader

    class Loader(base):
        def get_code(self, fullname):
            return self.source_to_code(source, path)

    module = type(sys)(name)
    module.__file__ = path
    module.__dict__.update(names)
    sys.modules[name] = module
    Loader(name, path).exec_module(module)
    return module.__dict__


# ==== values
import _json  # noqa: E402  # json itself costs half as much as Python: it imports re

NONFINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
DEEPEST, MOST = 100, 1_000_000  # of a value that travels: nesting, and parts in it


class ChannelClosed(BaseException):
    """The other side is gone. Not an Exception, so that no test catches it."""


class JsonForm:
    """How JSON is read, in the form that the interpreter's own scanner wants it."""

    strict, object_hook, object_pairs_hook = False, None, None
    parse_float, parse_int, parse_constant = float, int, float


class JsonPipe:
    """Values over two pipes, a line of JSON each. It holds what it uses, whatever a program does to modules."""

    def __init__(self, request, reply):
        self.read, self.write, self.request, self.reply = os.read, os.write, request, reply
        self.quote, self.rest = _json.encode_basestring_ascii, b""
        self.scan = _json.make_scanner(JsonForm)  # pyrefly: ignore[bad-argument-type]

    def receive(self):
        parts = [self.rest]
        while b"\n" not in parts[-1]:
            part = self.read(self.request, 1 << 16)
            if not part:
                raise ChannelClosed
            parts.append(part)
        line, _, self.rest = b"".join(parts).partition(b"\n")
        return self.scan(line.decode("ascii"), 0)[0]

    def send(self, text):
        data = memoryview(text.encode("ascii") + b"\n")
        while data:
            data = data[self.write(self.reply, data) :]

    def encoded(self, value):
        """``value`` as text; what is no plain value becomes its type's name, which equals nothing."""
        out = []
        try:
            self._encode(value, out.append, DEEPEST, [MOST])
        except (RecursionError, ValueError, MemoryError, OverflowError):
            return '["o","too deep or too large"]'
        except Exception as error:  # an iterator that raises
            return f'["o",{self.quote(type(error).__name__)}]'
        return "".join(out)

    def raised(self, error):
        """An error's line: its type and message, the built-in type that it is or derives from, and its arguments."""
        base = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins").__name__
        name, message = self.quote(type(error).__name__), self.quote(str(error)[:300])
        return f'["x",{name},{message},{self.quote(base)},{self.encoded(error.args)}]'

    def _encode(self, value, put, depth, left):
        left[0] -= 1
        if depth < 0 or left[0] < 0:
            raise ValueError
        if (text := self._plain(value)) is not None:
            put(text)
        elif items := self._parts(value):
            mark, values = items
            self._items(mark, values, put, depth, left)
        else:
            put(self._named(value))

    def _plain(self, value):
        """What JSON has a form for, or a number or bytes with a mark of ours; None for anything else."""
        # Methods of the base types, not the value's own: a program may derive a class from int that answers anything.
        if value is None or type(value) is bool:
            return "null" if value is None else "true" if value else "false"
        if isinstance(value, int):
            value = int.__index__(value)
            return int.__repr__(value) if -(2**53) < value < 2**53 else f'["i","{value:x}"]'
        if isinstance(value, float):
            text = float.__repr__(value)
            return f'["f","{text}"]' if text in NONFINITE else text
        if isinstance(value, str):
            return self.quote(str.__str__(value))
        if isinstance(value, (bytes, bytearray)):
            return f'["{"b" if isinstance(value, bytes) else "B"}","{bytes(value).hex()}"]'
        return f'["c","{value.real!r}","{value.imag!r}"]' if isinstance(value, complex) else None

    def _named(self, value):
        """A built-in type by its name, an exact number by its digits, and what is no plain value by its type's name."""
        kind = type(value)
        # kind is type: a metaclass of the program's own could answer anything for the name.
        if kind is type and getattr(sys.modules["builtins"], type.__getattribute__(value, "__name__"), None) is value:
            return f'["y",{self.quote(type.__getattribute__(value, "__name__"))}]'
        # By name: importing decimal and fractions takes time, and few programs use them.
        if f"{kind.__module__}.{kind.__qualname__}" in ("decimal.Decimal", "fractions.Fraction"):
            return f'["{kind.__name__[0]}",{self.quote(str(value))}]'
        return f'["o",{self.quote(str(kind.__name__))}]'

    def _parts(self, value):
        """The mark of a value that has parts, and the parts; None if it has none."""
        kind = type(value)
        if isinstance(value, range):
            return "R", (value.start, value.stop, value.step)
        if isinstance(value, dict):
            return "d", (x for pair in dict.items(value) for x in pair)
        for container, mark in CONTAINERS + VIEWS:
            if isinstance(value, container):
                return mark, value
        # Python has a type of its own for the iterator of each type: list, reversed list, range, ...
        if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
            return "g", value
        return ("q", value) if f"{kind.__module__}.{kind.__qualname__}" == "collections.deque" else None

    def _items(self, mark, values, put, depth, left):
        put(f'["{mark}"')
        for value in values:
            put(",")
            self._encode(value, put, depth - 1, left)
        put("]")

    def decoded(self, value):
        """The value behind parsed JSON; inverse of ``encoded``."""
        if not isinstance(value, list):
            return value
        mark, rest = value[0], value[1:]
        if mark in ("i", "f", "b", "B", "c", "o", "y", "D", "F"):
            return self._single(mark, rest)
        items = [self.decoded(part) for part in rest]
        if mark == "R":
            return range(*items)
        if mark == "d":
            return dict(zip(items[::2], items[1::2], strict=True))
        if mark == "q":
            from collections import deque

            return deque(items)
        if mark in "KVI":  # a table's view; only one of keys or pairs tells which table
            table = dict(items) if mark == "I" else dict.fromkeys(items) if mark == "K" else dict(enumerate(items))
            return {"K": table.keys, "V": table.values, "I": table.items}[mark]()
        return {"l": list, "t": tuple, "s": set, "z": frozenset, "g": iter}[mark](items)

    def _single(self, mark, rest):
        if mark == "i":
            return int(rest[0], 16)
        if mark == "f":
            return NONFINITE[rest[0]]
        if mark in "bB":
            return (bytes if mark == "b" else bytearray).fromhex(rest[0])
        if mark == "c":
            return complex(float(rest[0]), float(rest[1]))
        if mark == "y":
            kind = getattr(sys.modules["builtins"], rest[0])
            return kind if isinstance(kind, type) else Opaque()
        if mark in "DF":
            from decimal import Decimal
            from fractions import Fraction

            return (Decimal if mark == "D" else Fraction)(rest[0])
        return Opaque()


class Opaque:
    """Something that is no plain value: equal to nothing but itself."""


VIEWS = ((type({}.keys()), "K"), (type({}.values()), "V"), (type({}.items()), "I"))
CONTAINERS = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"))


# ==== calls
def answer_calls(line, entry, names, program):
    """Imports the program, then answers calls until the channel closes."""
    # Bound before the program runs, which may replace them.
    leave, encoded, raised = os._exit, line.encoded, line.raised
    try:
        function = run(program, "solution", names)[entry]
    except BaseException as error:
        line.send(raised(error))
        leave(1)
    line.send('["r",null]')
    try:
        while True:
            arguments, keywords = map(line.decoded, line.receive()[1:])
            try:
                text = f'["r",{encoded(function(*arguments, **keywords))}]'
            except BaseException as error:
                text = raised(error)
            line.send(text)
    except BaseException:
        leave(0)


# ==== tests
class NotPlain(BaseException):
    """The asserts give the function something of their own that cannot travel. A type of its own, since the names and
    the messages of other errors may come from the program."""


def raised_again(line, name, message, base, arguments):
    """A built-in exception like the one that a call raised, for asserts that expect it; of a program's or a library's
    own type, the built-in one that it derives from. None if there is none."""
    nearest = getattr(builtins, base, None)
    if not isinstance(nearest, type) or not issubclass(nearest, Exception):
        return None
    # It would end a loop over the calls, as if all had been made.
    if nearest in (StopIteration, StopAsyncIteration):
        return None
    # With its own arguments where they are plain values: UnicodeDecodeError takes five, and str(KeyError) adds quotes.
    given = line.decoded(arguments)
    for kind in nearest.__mro__[:-2]:  # without BaseException and object
        for tried in (given, (message,)) if isinstance(given, tuple) else ((message,),):
            try:
                error = kind(*tried)
            except (TypeError, ValueError):  # it takes other arguments
                continue
            # A type of the program's own may say its message in its own way.
            if tried is not given or name == base or str(error)[:300] == message:
                return error
    return None


def run_tests(line, entry, names, tests):
    """Runs the asserts; calls of ``entry`` go out over the line. Says at the end whether all of them held."""

    called = []

    def candidate(*arguments, **keywords):
        texts = line.encoded(arguments), line.encoded(keywords)
        # Quotes in strings are escaped, so that a string cannot hold this mark.
        if '["o",' in (given := texts[0] + texts[1]):
            # Returned by the program before, and so no fault of the asserts.
            own = called and ('["o","Opaque"]' in given or '["o","too deep' in given)
            raise (
                ChannelClosed("what was returned is given to the function, and is no plain value") if own else NotPlain
            )
        called.append(True)
        line.send(f'["call",{texts[0]},{texts[1]}]')
        mark, *rest = line.receive()
        if mark == "r":
            return line.decoded(rest[0])
        raise raised_again(line, *rest) or ChannelClosed(rest[0])

    verdict = "true", "", ""
    try:
        names = run(tests, "tests", {**names, entry: candidate, "candidate": candidate}, path="asserts")
        # HumanEval's tests only define check.
        if callable(names.get("check")) and names["check"] is not candidate:
            names["check"](candidate)
        if not called:  # what has asked for nothing would hold for any program
            verdict = "false", "NothingCalled", ""
    except BaseException as error:
        # The line of the asserts that is nearest to the error: its trace may end in this file.
        trace, at = error.__traceback__, 0
        while trace is not None:
            at = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "asserts" else at
            trace = trace.tb_next
        verdict = "false", type(error).__name__, f"line {at} of the asserts: {type(error).__name__}: {error}"[:300]
    line.send(f'["done",{verdict[0]},{line.quote(verdict[1])},{line.quote(verdict[2])}]')
    os._exit(0)


# ==== all
def main():
    mode, entry = sys.argv[1:3]
    source, setup, request, reply, *limits = map(int, sys.argv[3:])
    set_limits(*limits)
    # Python's site module defines these, and -S leaves it out: programs that end themselves by them would be wrong.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    # Ten frames lie under the program's own: this file's and the loader's. A plain interpreter has none.
    sys.setrecursionlimit(sys.getrecursionlimit() + 10)
    text, before = read_all(source), read_all(setup)
    names = {}
    if before:
        try:
            names = {
                k: v for k, v in run(before, "setup", path="setup").items() if not k.startswith("__") and k != entry
            }
        except Exception as error:
            sys.stderr.write(f"SETUP: {type(error).__name__}: {error}")
            return
    os.write(reply, b"started\n")
    # Hides the descriptors' numbers from the program.
    sys.argv[:] = ["main.py"]
    if mode == "script":
        os.close(reply)
        os.close(request)
        run(text, "__main__")
        return
    (answer_calls if mode == "calls" else run_tests)(JsonPipe(request, reply), entry, names, text)


if __name__ == "__main__":
    main()
