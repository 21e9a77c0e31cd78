r"""Formulas, LaTeX or plain, as exact values (``algebra``). A descent with bounded depth; nothing is ever executed."""

from __future__ import annotations

import math
from fractions import Fraction

from ..numbers import read_digits
from . import algebra, functions, units
from .algebra import Value
from .not_exact import Malformed, NotExact, TooLarge, Undefined
from .tokens import FUNCTIONS, NAMES, SHORT_WORDS, Token, is_value

MAX_DEPTH = 40
MAX_FACTORIAL = 5000

_INFINITY = frozenset({"infinity", "inf", "oo", "infty"})


def value(tokens: list[Token], *, sign: int = 1) -> Value:
    r"""The value of a whole formula; ``sign`` says which of the two a ``\pm`` is. Raises NotExact.

    >>> from .tokens import tokenize
    >>> algebra.rational(value(tokenize(r"1\frac{4}{5} - \frac 12 + 2^{-1}")))
    Fraction(9, 5)
    """
    if sum(t.text == "\\pm" for t in tokens) > 1 and all(t.text != "\\mp" for t in tokens):
        raise NotExact("several signs \\pm, which may mean two values or four")
    parser = _Parser(tokens, sign)
    found = parser.sum()
    if parser.at < len(tokens):
        token = tokens[parser.at].text
        raise (Malformed if token in (")", "]", "}", "\\}", "&", "\\\\", "\\ldots", '"') else NotExact)(
            f"{token[:20]!r} is not expected there"
        )
    # It is a variable to the algebra, which would call ∞ - ∞ and 0 · ∞ nothing.
    if "∞" not in found.variables and any(t.text.lstrip("\\").lower() in _INFINITY for t in tokens):
        raise Undefined("infinity without a value")
    return found


def number_of(token: Token) -> Fraction:
    """The number that a token spells; repeating decimals exactly."""
    if token.kind == "repeating":
        head, _, tail = token.text.partition("\\")
        period = "".join(c for c in tail if c.isdigit())
        whole, _, decimals = head.partition(".")
        # 0.1(6) = 1/10 + 6/(9 · 10): the digits before the period, then the period over as many nines.
        fixed = Fraction(int((whole or "0") + decimals), 10 ** len(decimals))
        return fixed + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
    found = read_digits(token.text)
    if found is None:
        raise NotExact(f"{token.text[:40]!r} is no number")
    return found


class _Parser:
    """A place in a list of tokens."""

    def __init__(self, tokens: list[Token], sign: int):
        self.tokens = tokens
        self.at = 0
        self.sign = sign
        self.depth = 0
        self.bars = 0
        self.arguments = 0  # of trigonometric functions, around this place: a degree is π/180 in there

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead].text if self.at + ahead < len(self.tokens) else ""

    def kind(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead].kind if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str = "") -> Token:
        if self.at >= len(self.tokens):
            raise Malformed("ends in the middle")
        token = self.tokens[self.at]
        if wanted and token.text != wanted:
            raise Malformed(f"{wanted!r} is missing before {token.text[:20]!r}")
        self.at += 1
        return token

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("nested too deeply")

    def sum(self) -> Value:
        total = self.product(self.signs())
        while self.peek() in ("+", "-", "\\pm", "\\mp") or self.at_another_quantity():
            together = self.at_another_quantity()
            total = algebra.add(total, self.product(self.signs()))
            # 3 hours 20 minutes stays in two units, but 3 m 2 m is no sum that anyone would write.
            if together and units.measured(total)[1]:
                raise Malformed("two numbers side by side")
        return total

    def at_another_quantity(self) -> bool:
        """Whether a number follows a unit, as in 3 hours 20 minutes: a sum, where the units differ."""
        return self.kind() in ("number", "repeating") and self.at > 0 and self.tokens[self.at - 1].kind == "unit"

    def signs(self) -> int:
        """Any + - ± ∓ in front, as one sign; ``--`` is refused, ``+ -`` is not."""
        sign, last = 1, ""
        while (token := self.peek()) in ("+", "-", "\\pm", "\\mp"):
            if last and last == token:
                raise Malformed(f"{token * 2!r} has no meaning here")
            sign *= {"+": 1, "-": -1, "\\pm": self.sign, "\\mp": -self.sign}[token]
            last = token
            self.at += 1
        return sign

    def product(self, sign: int) -> Value:
        total = self.factor()
        while True:
            token = self.peek()
            if token == "*":
                self.at += 1
                total = algebra.multiply(total, self.signed_factor())
            elif token == "/":
                self.at += 1
                total = algebra.divide(total, self.signed_factor())
            elif self.begins_factor() and not self.at_another_quantity():
                # 2x is a product, but 2 3 is a mistake, and no 6.
                if self.kind() in ("number", "repeating") and not self.at_power():
                    raise Malformed("two numbers side by side")
                total = algebra.multiply(total, self.factor())
            else:
                return algebra.negative(total) if sign < 0 else total

    def at_power(self) -> bool:
        r"""Whether a number with a sign of its own to its right is a factor: n2^{n-1}, 2^{4}3^{2}, 5!5!; but not in
        7 2^3, x_1 2^3, nor the 2 in x2 and (x+1)2, where an index or exponent may be meant."""
        before = self.tokens[self.at - 1]
        ends = before.kind in ("word", "command") or before.text in (")", "}", "!")
        return ends and (self.peek(1) in ("^", "!") or before.text == "!")

    def signed_factor(self) -> Value:
        sign = self.signs()
        found = self.factor()
        return algebra.negative(found) if sign < 0 else found

    def begins_factor(self) -> bool:
        token, kind = self.peek(), self.kind()
        if kind in ("number", "repeating", "word", "unit", "text"):
            return True
        if kind == "command":
            return token[1:] in FUNCTIONS or token[1:] in NAMES or token in _STARTS
        # Within bars the next one closes them.
        return token in ("(", "[", "{", "\\{") or (token == "|" and not self.bars)

    def factor(self) -> Value:
        base = self.primary()
        while (token := self.peek()) in ("^", "!", "'"):
            if token == "'":
                raise NotExact("a derivative")
            self.at += 1
            if token == "!":
                double = self.peek() == "!"
                self.at += double
                base = _factorial(base, 1 + double)
            elif (length := self.ordinal()) > 0:
                self.at += length
                base = algebra.multiply(base, algebra.thing(("unit", "th")))
            else:
                base = functions.power(base, self.exponent())
        return base

    def ordinal(self) -> int:
        r"""How many tokens of a raised ending come next, as in 5^{\text{th}}."""
        at = 1 if self.peek() == "{" else 0
        found = self.kind(at) == "unit" and units.name(self.peek(at)) == "th"
        # Of letters without \\text only an ending that the number has: 2^{nd}, while 5^{nd} is a power.
        found = found or (self.kind(at) == "word" and self.peek(at) == _ending(self.tokens[self.at - 2]))
        return 1 + 2 * at if found and (not at or self.peek(2) == "}") else 0

    def exponent(self) -> Value:
        """``^{…}``, ``^(…)``, or one factor with its sign and its own exponents: 2^-3, 2^3^2."""
        self.deeper()
        sign = self.signs()
        base = self.group() if self.peek() == "{" else self.primary(single=True)
        # 2^3^2 is 2^(3^2): an exponent takes its own exponents.
        while self.peek() == "^":
            self.at += 1
            base = functions.power(base, self.exponent())
        self.depth -= 1
        return algebra.negative(base) if sign < 0 else base

    def group(self) -> Value:
        """``{…}`` or, as TeX reads it, one token."""
        if self.peek() != "{":
            # TeX takes one letter as an argument: \frac ab is a/b.
            token = self.peek()
            if self.kind() == "word" and len(token) > 1 and token not in FUNCTIONS and token not in (*NAMES, "pi"):
                first, rest = Token("word", token[0]), Token("word", token[1:])
                # The run of letters is cut in two: what is behind its first letter is read next.
                self.tokens = [*self.tokens[: self.at], first, rest, *self.tokens[self.at + 1 :]]
            return self.primary(single=True)
        self.take("{")
        found = self.sum()
        self.take("}")
        return found

    def primary(self, *, single: bool = False) -> Value:
        """A number, name, bracket, root, fraction or function; with ``single`` no mixed number."""
        self.deeper()
        found = self._primary(single)
        self.depth -= 1
        return found

    def _primary(self, single: bool) -> Value:
        token, kind = self.peek(), self.kind()
        if kind in ("number", "repeating"):
            return self.numeral(single)
        if kind == "word":
            return self.letters(single)
        if kind in ("unit", "text"):
            return self.unit() if kind == "unit" else self.words()
        if token in ("(", "[", "{", "\\{"):
            close = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}[self.take().text]
            # Inside brackets a bar opens an absolute value again, even if one is open outside.
            bars, self.bars = self.bars, 0
            found = self.sum()
            self.bars = bars
            self.take(close)
            return found
        if token == "|":
            return self.bars_around()
        if kind == "command":
            return self.command(token[1:])
        raise self.unexpected(token, kind)

    def bars_around(self) -> Value:
        self.at += 1
        self.bars += 1
        found = self.sum()
        self.bars -= 1
        self.take("|")
        return functions.absolute(found)

    def unexpected(self, token: str, kind: str) -> Malformed | NotExact:
        """An error for a token that begins no value: Malformed if none could stand here, else NotExact."""
        if not token or kind == "newline" or token in ("*", "/", "+", "-", "^", "_", "!", "}", ")", "]", "&", '"'):
            return Malformed(f"{token[:20]!r} is not expected there" if token else "ends in the middle")
        return NotExact(f"{token[:20]!r} is not expected there")

    def numeral(self, single: bool) -> Value:
        token = self.take()
        found = number_of(token)
        if self.peek() == "_":
            raise Malformed("a number with an index")
        whole = token.kind == "number" and token.text.isdigit()
        if whole and not single:
            found += self.mixed_number()
        return algebra.number(found)

    def mixed_number(self) -> Fraction:
        r"""The fraction of a mixed number that follows a whole one, ``1\frac{4}{5}`` or ``1 4/5``; else 0."""
        above, below, length = self.fraction_ahead()
        # the digits are bounded before they are made numbers
        proper = above.isdigit() and below.isdigit() and len(below) < 20 and 0 < int(above or 0) < int(below or 0)
        if not proper or self.peek(length) == "^":
            return Fraction(0)
        self.at += length
        return Fraction(int(above), int(below))

    def fraction_ahead(self) -> tuple[str, str, int]:
        r"""The two sides of the next fraction if they are single tokens, \frac{4}{5}, \frac45 or 4/5, and its length in
        tokens; empty sides if no such fraction follows."""
        if self.peek() == "\\frac":
            above, first = self.argument_ahead(1)
            below, second = self.argument_ahead(1 + first)
            return above, below, 1 + first + second
        slashed = self.kind() == "number" and self.peek(1) == "/" and self.kind(2) == "number"
        if not slashed or self.peek(3) in ("^", "/", "!"):  # 1 4/5^2, 1 4/5/6: who knows what is meant
            return "", "", 0
        return self.peek(), self.peek(2), 3

    def argument_ahead(self, ahead: int) -> tuple[str, int]:
        """The single token of an argument, in braces or without, and how many tokens the argument takes."""
        if self.peek(ahead) == "{" and self.peek(ahead + 2) == "}":
            return self.peek(ahead + 1), 3
        return self.peek(ahead), 1

    def unit(self) -> Value:
        r"""A unit, with a power in front (square inches), or with its amount where it is a currency: \$5."""
        # Whether it has an amount already: a currency without one may stand in front of it.
        behind = is_value(self.tokens[: self.at])
        word = self.take().text
        if self.kind() == "unit" and word.lower() in units.POWERS:
            return functions.power(self.unit(), algebra.number(units.POWERS[word.lower()]))
        name = units.name(word) or word.lower()
        if name == "degree" and self.peek() in ("celsius", "fahrenheit"):
            name = self.take().text
        elif name in units.ANGLES and self.arguments:
            # Inside sin(...) an angle is a number, in radians; elsewhere a degree stays a unit, which is not converted.
            turn = algebra.divide(algebra.thing(algebra.PI), algebra.number(180))
            return turn if name == "degree" else algebra.number(1)
        if not behind and name in units.CURRENCY:
            return self.currency(name)
        return algebra.thing(("unit", name))

    def currency(self, name: str) -> Value:
        """A currency with the amount that follows it, if any."""
        unit = algebra.thing(("unit", name))
        if not self.begins_factor() and self.peek() not in ("+", "-"):
            return unit
        amount = self.product(self.signs())
        return amount if units.measured(amount)[1] == ((name, 1),) else algebra.multiply(unit, amount)  # $5 dollars

    def words(self) -> Value:
        r"""Words next to a value are equal to themselves only; a single letter in upright type is a name."""
        text = " ".join(self.take().text[len("\\text{") : -1].split())
        return self.letter(text) if len(text) == 1 and text.isalpha() else algebra.thing(("words", text.casefold()))

    def letters(self, single: bool) -> Value:
        """A run of letters: a function, a constant, or single letters that are multiplied."""
        token = self.take()
        word = token.text
        if word in FUNCTIONS:
            return self.apply(word)
        if word in NAMES or word in ("pi", "Pi"):
            return self.named(word)
        if word.lower() in _INFINITY:
            return algebra.variable("∞")
        if len(word) > 1 and (len(word) > 3 or word.lower() in SHORT_WORDS):
            raise NotExact(f"the word {word[:20]!r}")
        total = algebra.number(1)
        for letter in word[:-1]:
            total = algebra.multiply(total, self.letter(letter))
        return algebra.multiply(total, self.last_letter(word))

    def last_letter(self, word: str) -> Value:
        """The last letter of a run, to which alone an exponent or index behind the run belongs."""
        # A copy: the caller's list stays as it is.
        self.tokens = [*self.tokens]
        self.tokens[self.at - 1] = Token("word", word[-1])
        final = self.named(word[-1])
        if self.peek() == "^" and len(word) > 1:
            self.at += 1
            final = functions.power(final, self.exponent())
        return final

    def letter(self, letter: str) -> Value:
        if letter == "i":
            return algebra.thing(algebra.I)
        if letter == "e":
            return algebra.thing(algebra.E)
        return algebra.variable(letter)

    def named(self, name: str) -> Value:
        """A name with its index, if it has one: x_1, a_{n+1}."""
        if self.peek() == "_":
            self.at += 1
            if self.peek() == "{":
                end, inside = self.at, []
                while self.peek() != "}":
                    inside.append(self.take().text)
                self.take("}")
                # The first of them is the opening brace.
                name = f"{name}_{''.join(inside[1:])}" if end < self.at else name
            else:
                name = f"{name}_{self.take().text}"
            return algebra.variable(name)
        if name in ("pi", "Pi"):
            return algebra.thing(algebra.PI)
        return self.letter(name) if len(name) == 1 else algebra.variable(name)

    def command(self, name: str) -> Value:
        if name in FUNCTIONS and name != "sqrt":
            self.at += 1
            return self.apply(name)
        if name in NAMES or name == "pi":
            self.at += 1
            return self.named(name)
        if name == "ldots":
            raise Malformed("dots are no formula")
        if name not in ("frac", "sqrt", "binom", "infty", "lfloor", "lceil"):
            raise NotExact(f"\\{name[:20]} is not computed here")
        self.at += 1
        return self.computed(name)

    def computed(self, name: str) -> Value:
        """The value of a command with its arguments, which follow."""
        if name == "frac":
            if self.at_derivative():
                raise NotExact("a derivative")
            above = self.group()
            return algebra.divide(above, self.group())
        if name == "sqrt":
            return self.root()
        if name == "binom":
            above = self.group()
            return functions.binomial(above, self.group())
        if name == "infty":
            return algebra.variable("∞")
        found = self.sum()
        self.take("\\rfloor" if name == "lfloor" else "\\rceil")
        return functions.rounded(found, "floor" if name == "lfloor" else "ceil")

    def at_derivative(self) -> bool:
        r"""Whether the two groups that come next are those of \frac{dy}{dx}."""
        texts = [self.peek(i) for i in range(9)]
        if texts[0] != "{" or not texts[1].startswith("d") or "}" not in texts[2:6]:
            return False
        close = texts.index("}", 2)
        d = texts[close + 2 : close + 3] or [""]
        return texts[close + 1] == "{" and d[0][:1] == "d" and (len(d[0]) == 2 or self.kind(close + 3) == "word")

    def root(self) -> Value:
        degree = 2
        if self.peek() == "[":
            self.take("[")
            found = algebra.rational(self.sum())
            self.take("]")
            if found is None or found.denominator != 1 or found < 1:
                raise NotExact("a root of an unusual degree")
            degree = int(found)
        return algebra.root(self.group(), degree)

    def apply(self, name: str) -> Value:
        r"""A function and what it is applied to: \sin x, \sin 2x, \sin^2 x, \log_2 8, sqrt(2)."""
        if name == "sqrt":
            return self.root()
        base = None
        if self.peek() == "_":
            self.at += 1
            base = self.group()
        exponent = None
        if self.peek() == "^":
            self.at += 1
            exponent = self.exponent()
            if algebra.rational(exponent) == -1:
                # sin^{-1} is arcsin, and no reciprocal.
                name, exponent = "arc" + name, None
        # Counted, as arguments may be nested: degrees within any of them are π/180.
        self.arguments += name in _OF_ANGLES
        argument = self.argument()
        self.arguments -= name in _OF_ANGLES
        found = functions.apply(name, argument, base)
        return found if exponent is None else functions.power(found, exponent)

    def argument(self) -> Value:
        """A bracket, or numbers, names and fractions side by side up to the next sign or function; with its angle."""
        if self.peek() in ("(", "[", "{", "|"):
            # \\ln(2)^2 is the square of \\ln 2, as math-verify reads it: what is behind the bracket is not its own.
            total = self.factor() if self.peek() == "|" else self.primary(single=True)
            return algebra.multiply(total, self.unit()) if self.at_angle() else total
        sign = self.signs()
        total = self.factor()
        while self.goes_on():
            if self.kind() in ("number", "repeating"):
                raise Malformed("two numbers side by side")
            total = algebra.multiply(total, self.factor())
        return algebra.negative(total) if sign < 0 else total

    def goes_on(self) -> bool:
        """Whether what comes next still belongs to an argument without brackets."""
        if self.kind() in ("unit", "text"):
            return self.at_angle()
        return self.begins_factor() and self.peek() not in ("(", "[", "|") and not self.at_function()

    def at_angle(self) -> bool:
        return self.arguments > 0 and self.kind() == "unit" and units.name(self.peek()) in units.ANGLES

    def at_function(self) -> bool:
        name = self.peek().lstrip("\\")
        return name in FUNCTIONS and name != "sqrt"


def _ending(token: Token) -> str:
    """The ending of the ordinal number of a whole number, 2nd or 12th; empty for another token."""
    if token.kind != "number" or not token.text.isdigit():
        return ""
    return "th" if token.text[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(token.text[-1], "th")


_STARTS = frozenset({"\\frac", "\\sqrt", "\\binom", "\\pi", "\\infty", "\\lfloor", "\\lceil"})


_OF_ANGLES = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})


def _factorial(base: Value, step: int) -> Value:
    """n!, or with a step of 2 the double factorial n!!, which is no factorial of a factorial: 5!! is 15."""
    n = algebra.rational(base)
    if n is None:
        return algebra.function("factorial" if step == 1 else "double factorial", base)
    if n.denominator != 1 or n < 0:
        raise NotExact("a factorial of no whole number")
    if n > MAX_FACTORIAL:
        raise TooLarge("a very large factorial")
    return algebra.number(math.prod(range(int(n), 0, -step)))
