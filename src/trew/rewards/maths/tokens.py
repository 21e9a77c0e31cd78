r"""Normalised LaTeX and plain formulas as tokens. Units and words are tokens like all others: nothing is left out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import units
from .not_exact import Malformed, TooLarge

_FUNCTIONS = "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot asin acos atan ln log lg exp sqrt"
_NAMES = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell
"""
_SHORT_WORDS = """
    yes no odd one two six ten red all any max min sun mon tue wed thu fri sat tie cat dog up down left right
    ann amy bob dan eve jim joe kim leo max mia roy sam sue ted tim tom zoe none nan dne to
"""
FUNCTIONS, NAMES, SHORT_WORDS = (frozenset(words.split()) for words in (_FUNCTIONS, _NAMES, _SHORT_WORDS))
_SPELLED = "sqrt infty infinity Infinity alpha beta gamma delta theta lambda sigma omega zeta kappa epsilon"
SPELLED = frozenset(_SPELLED.split())
"""Letters that spell a symbol, although they are as many as a word has."""
NO_WORDS = FUNCTIONS | NAMES | {"pi", "infinity", "Infinity", "infty", "base"}
"""What is written in letters and is no word."""
MAX_TOKENS = 1000
MAX_DIGITS = 1000
MAX_TEXT = 3  # texts in texts

# What a unit may follow: kinds of tokens, and signs that end a value.
_VALUES = frozenset({"number", "repeating", "unit", "text"})
_VALUE_ENDS = frozenset({")", "]", "}", "\\}", "!", "\\pi", "\\infty", "e", "i", "pi"})
_SCALES = {"C": "celsius", "F": "fahrenheit"} | {
    w: w.lower() for w in ("Celsius", "Fahrenheit", "celsius", "fahrenheit")
}
_DEGREES = frozenset({"\\degree", "degree", "degrees", "deg"})
_JOINERS = {"or": "\\or", "and": "\\and"}
_MULTIPLES = {"hundred": "2", "thousand": "3", "million": "6", "billion": "9", "trillion": "12"}
_UNIT_COMMANDS = frozenset({"\\$", "\\%", "\\degree", "\\cent", "\\euro", "\\pounds", "\\yen", "\\rupee"})

# In this order: a repeating decimal before a number, texts and matrices before commands, o'clock before letters.
_TOKEN = re.compile(
    r"""(?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\s*\{?\d{1,50}\}?)
    |(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?)
    |(?P<text>\\text\{(?:[^{}]|\{[^{}]*\})*\})
    |(?P<matrix>\\(?:begin|end)\{[A-Za-z]+\})
    |(?P<command>\\[A-Za-z]+)
    |(?P<newline>\\\\)
    |(?P<brace>\\[{}$%])
    |(?P<clock>[aApP]\.\s?[mM]\b\.?)
    |(?P<word>o'clock|[A-Za-z]+)
    |(?P<mark>[-+*/^_!=<>,;:&|'"()\[\]{}])""",
    re.VERBOSE,
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d|,\d)")
_ZERO_GROUP = re.compile(r",0\d\d")
_UNCLEAR = re.compile(r"\d{1,3}(?:,\d{3})*,0\d\d(?!\d)")  # (1,000,2): digits of one number in a list of others
_FORMULA = re.compile(r"\d|=|^\s*[A-Z]\s*,[A-Z ,]*$")  # in a text: letters are names there, also in a list of choices
_WHOLE = re.compile(r"\s+(?:an?|the)\s+([A-Za-z]+)")  # behind "of": three quarters of a mile
_ARGUMENT = re.compile(r"\s*[A-Za-z0-9\\({^_]")
_OPEN, _CLOSE = frozenset({"(", "[", "{", "\\{"}), frozenset({")", "]", "}", "\\}"})


@dataclass(frozen=True, slots=True)
class Token:
    """``kind`` is number, repeating, text, unit, matrix, command, newline, brace, word or mark."""

    kind: str
    text: str


class _Prose(Exception):
    """A text holds a word that is neither a unit nor a number nor a joiner, so it counts as a whole."""


def tokenize(text: str, *, groups: bool = True, letters: bool | None = False) -> list[Token]:
    r"""The tokens of ``text``; raises Malformed for a character that has no meaning here.

    With ``groups`` a number such as 1,234 outside of brackets is one number, else it is two with a comma; 1,000 is one
    everywhere. With
    ``letters`` a single letter behind a value may be a unit (5 m) also where it is not in upright type; with None no
    one or two letters outside of upright type are one (2mg).

    >>> [t.text for t in tokenize(r"2\frac12 x_1")], [t.text for t in tokenize("1,234, (1,234)")]
    (['2', '\\frac', '1', '2', 'x', '_', '1'], ['1234', ',', '(', '1', ',', '234', ')'])
    >>> [(t.kind, t.text) for t in tokenize(r"5 \text{ miles per hour}")]
    [('number', '5'), ('unit', 'miles'), ('mark', '/'), ('unit', 'hour')]
    >>> [(t.kind, t.text) for t in tokenize(r"5 \text{ is wrong}")]
    [('number', '5'), ('text', '\\text{ is wrong}')]
    """
    return _Scanner(text, [], groups=groups, letters=letters).scan()


def _is_prose(word: str) -> bool:
    return (len(word) > 3 or word in SHORT_WORDS) and word not in NO_WORDS


class _Scanner:
    """A place in a text, and the tokens before it. ``level`` counts the texts around it: inside one (upright type) all
    words must be known."""

    def __init__(self, text: str, out: list[Token], *, groups: bool, letters: bool | None = False, level: int = 0):
        self.text = text
        self.out = out
        self.groups = groups
        self.letters = letters
        self.level = level
        self.at = self.depth = 0

    def scan(self) -> list[Token]:
        while self.at < len(self.text):
            if self.text[self.at].isspace():
                self.at += 1
            else:
                self.step()
                if len(self.out) > MAX_TOKENS:
                    raise TooLarge("too long")
        return self.out

    def step(self) -> None:
        text, at = self.text, self.at
        if "1" <= text[at] <= "9" and self.grouped():
            return
        match = _TOKEN.match(text, at)
        if match is None:  # a point is no token of its own: it could belong to a number or to an abbreviation
            self.full_stop()
            return
        kind, token = match.lastgroup or "", match.group()
        if kind == "number":
            # TeX takes one digit as an argument: \frac12 is 1/2, \binom52 is 10.
            token = token[0] if _is_argument(self.out) else token
            if len(token) > MAX_DIGITS:
                raise TooLarge("a number of too many digits")
        self.at += len(token)
        special = _SPECIAL.get(kind)
        if special is not None:
            special(self, token)
        else:
            self.put(kind, token)

    def grouped(self) -> bool:
        """Puts a number with commas between groups of digits, and says whether there is one here."""
        match = _GROUPED.match(self.text, self.at)
        # Outside of brackets 1,234 is one number; in (1,234) the comma separates two coordinates. But no coordinate
        # is written 000, so that 1,000 is one number there too.
        if match and ((self.groups and not self.depth) or _ZERO_GROUP.search(match.group())):
            self.at = match.end()
            self.put("number", match.group().replace(",", ""))
            return True
        if (self.depth or not self.groups) and _UNCLEAR.match(self.text, self.at):
            raise Malformed("commas that may stand between numbers or between digits")
        return False

    def put(self, kind: str, token: str) -> None:
        self.out.append(Token(kind, token))

    def full_stop(self) -> None:
        """Goes over a point that belongs to what stands before it: ft., and any in upright type."""
        if self.text[self.at] != "." or not (self.level or (self.out and self.out[-1].kind == "unit")):
            raise Malformed(f"{self.text[self.at]!r} has no meaning here")
        self.at += 1

    def mark(self, token: str) -> None:
        self.depth += (token in _OPEN) - (token in _CLOSE)
        self.put("mark", token)

    def brace(self, token: str) -> None:
        self.depth += (token in _OPEN) - (token in _CLOSE)
        self.put("unit" if token in _UNIT_COMMANDS else "brace", token)

    def command(self, token: str) -> None:
        self.put("unit" if token in _UNIT_COMMANDS else "command", token)

    def clock(self, token: str) -> None:
        self.put("unit", f"{token[0].lower()}m")

    def word(self, token: str) -> None:
        """Puts a word as what it is: a joiner, a part of a quantity, another word behind a value, or letters."""
        # Both decide whether a word is a unit: 5 kN has one, 5ms has none.
        behind = is_value(self.out)
        spaced = self.text[self.at - len(token) - 1 : self.at - len(token)].isspace()
        if token in _JOINERS:
            self.put("command", _JOINERS[token])
        elif self.quantity(token, behind, spaced):
            return
        elif token == "of" and self.level and (whole := _WHOLE.match(self.text, self.at)) and units.is_part(whole[1]):
            self.at = whole.start(1)
        elif self.level:
            self.upright(token)
        elif behind and spaced and _is_prose(token):
            self.put("text", f"\\text{{{token}}}")
        else:
            self.put("word", token)

    def upright(self, token: str) -> None:
        """Puts a function's name, or a letter of a formula; any other word makes the text around it prose."""
        if token in FUNCTIONS:
            self.put("command", f"\\{token}")
        elif (len(token) == 1 and _FORMULA.search(self.text)) or token.lower() == "infinity":
            self.put("word", token)
        else:
            raise _Prose

    def quantity(self, token: str, behind: bool, spaced: bool) -> bool:
        """Puts the tokens of a word that belongs to a quantity, and says whether it does."""
        low = token.lower()
        last = self.out[-1].kind if self.out else ""
        # From the narrowest reading to the widest: "square" behind a unit is a power and "per" a division, although
        # both could also begin a unit.
        if last in ("number", "repeating") and low in _MULTIPLES:
            self.out += [
                Token("mark", "*"),
                Token("number", "10"),
                Token("mark", "^"),
                Token("number", _MULTIPLES[low]),
            ]
        elif last == "unit" and low in units.POWERS_BEHIND:
            self.out += [Token("mark", "^"), Token("number", units.POWERS_BEHIND[low])]
        elif self.divides(low, last, behind):
            self.put("mark", "/")
        elif last == "unit" and self.out[-1].text in _DEGREES and token in _SCALES:
            self.put("unit", _SCALES[token])
        elif token in units.PHRASES and (behind or self.level):
            _Scanner(units.PHRASES[token], self.out, groups=False, level=self.level + 1).scan()
        elif self.is_unit(token, behind, spaced):
            self.put("unit", token)
        else:
            return False
        return True

    def divides(self, low: str, last: str, behind: bool) -> bool:
        r"""Whether a word stands for a division: miles per hour, dollars a day, 5\text{ per day}."""
        if last == "unit":
            return low in ("per", "a", "an")
        return low == "per" and bool(self.level) and behind

    def is_unit(self, token: str, behind: bool, spaced: bool) -> bool:
        r"""Whether a word is a unit here: 5\text{ m}, 5cm, 5 kN; but not in m x, 5m, 5ms, sec x."""
        if not units.is_part(token) or not (behind or (self.level and len(token) > 1) or self.at_long_word(token)):
            return False
        if token in FUNCTIONS:  # sec
            return behind and not _ARGUMENT.match(self.text, self.at)
        if self.level or self.letters or (len(token) > 2 and token not in units.UPRIGHT):
            return True
        if token in units.UPRIGHT:
            return False
        if self.letters is None or token in units.BARE:
            return self.letters is not None
        return spaced if len(token) > 1 else [t.kind for t in self.out[-2:]] == ["unit", "mark"]  # km/h

    def at_long_word(self, token: str) -> bool:
        """Whether a word cannot be letters although a variable stands before it: 2k miles."""
        return len(token) > 3 and len(self.out) > 1 and self.out[-1].kind == "word" and len(self.out[-1].text) == 1

    def in_text(self, token: str) -> None:
        r"""Puts the tokens of ``\text{…}``, or all of it as one where it is prose."""
        if self.level >= MAX_TEXT:
            raise TooLarge("texts in texts")
        before = len(self.out)
        # Into the same list: a unit in the text must see the value before it.
        inner = _Scanner(token[len("\\text{") : -1], self.out, groups=self.groups, level=self.level + 1)
        try:
            inner.scan()
        except (_Prose, Malformed):
            # One word that is no unit makes all of it prose: what was read before that word does not count.
            del self.out[before:]
            self.put("text", token)


_SPECIAL = {
    "mark": _Scanner.mark,
    "brace": _Scanner.brace,
    "command": _Scanner.command,
    "clock": _Scanner.clock,
    "word": _Scanner.word,
    "text": _Scanner.in_text,
}


def is_value(out: list[Token]) -> bool:
    r"""Whether the tokens end in a value, so that a unit may follow: 5, x^2), \frac{1}{2}, and also 5/, 5\frac{."""
    # "\frac{m" or "3/m": an opening or a sign between value and word leaves the word behind the value.
    i = len(out) - 1
    while i >= 0 and out[i].text in ("{", "\\frac", "/", "*"):
        i -= 1
    return i >= 0 and (out[i].kind in _VALUES or out[i].text in _VALUE_ENDS)


_OF_TWO = ("\\frac", "\\binom")
"""Commands of two arguments."""


def _is_argument(out: list[Token]) -> bool:
    """Whether TeX would take one digit only: the arguments of \\frac and \\binom without braces."""
    if not out:
        return False
    if out[-1].text in _OF_TWO:
        return True
    return _second_of_fraction(out)


def _second_of_fraction(out: list[Token]) -> bool:
    """Whether the next token is the second argument of a ``\\frac`` or ``\\binom`` whose first was a single digit or a
    group."""
    if len(out) >= 2 and out[-2].text in _OF_TWO and out[-1].kind == "number" and len(out[-1].text) == 1:
        return True
    if out[-1].text != "}":
        return False
    depth = 0
    # Only so far back: a look through all tokens for each of them would take quadratic time.
    for i in range(len(out) - 1, max(-1, len(out) - 200), -1):
        depth += {"}": 1, "{": -1}.get(out[i].text, 0)
        if depth == 0:
            return i > 0 and out[i - 1].text in _OF_TWO
    return False
