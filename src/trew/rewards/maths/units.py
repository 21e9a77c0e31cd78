r"""The units that are known: how each is written, and when two are the same.

Nothing is converted: 30 g is not 0.03 kg here, and an answer in another unit than the gold's is another answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from . import monomials
from .algebra import Value

Unit = tuple[tuple[str, Fraction], ...]
"""Names of units with their exponents, in order: ``(("hour", -1), ("mile", 1))``; empty for no unit."""

# Spellings of one unit with slashes between them, the name first. A plural with s need not be listed.
_PREFIXED = """
    meter/metre gram/gramme liter/litre second watt joule newton volt ampere/amp hertz pascal byte bit
    tesla coulomb farad henry/henries parsec electronvolt bar
"""
_SYMBOLS = {
    "meter": "m", "gram": "g", "liter": "L l", "second": "s", "watt": "W", "joule": "J", "newton": "N", "volt": "V",
    "ampere": "A", "hertz": "Hz", "pascal": "Pa",
}  # fmt: skip
_UPRIGHT_SYMBOLS = {"tesla": "T", "coulomb": "C", "farad": "F", "henry": "H", "parsec": "pc", "electronvolt": "eV"}
_PREFIXES = {
    "nano": "n", "micro": "u", "milli": "m", "centi": "c", "deci": "d", "hecto": "h", "kilo": "k", "mega": "M",
    "giga": "G",
}  # fmt: skip
UPRIGHT = frozenset(
    prefix + symbol for symbol in _UPRIGHT_SYMBOLS.values() for prefix in ("", "p", *_PREFIXES.values())
)
"""Symbols that are units in upright type only: kT, eV and pc are products of letters in more formulas than units."""
_MEASURES = r"""
    inch/inches/in foot/feet/ft yard/yd mile/mi acre hectare/ha ounce/oz lb stone ton/tonne gallon/gal quart/qt pint cup
    tablespoon/tbsp teaspoon/tsp gram/gm second/sec minute/min hour/hr/h day week/wk month year/yr decade
    century/centuries calorie/cal kilocalorie/kcal kWh horsepower/hp ohm mole/mol knot
    degree/deg/\degree celsius/Celsius fahrenheit/Fahrenheit kelvin/K radian/rad revolution/rev rotation turn
    erg dyne atmosphere/atm torr angstrom AU
    percent/pct/\% dollar/USD/buck/\$ cent/\cent/penny/pennies/pence euro/EUR/\euro pound GBP/\pounds nickel dime
    yen/JPY/\yen rupee/INR/\rupee peso franc yuan am/AM pm/PM noon midnight o'clock th/st/nd/rd unit
"""
_COUNTED = """
    time way item point piece pair set group term digit integer number value solution root factor divisor multiple prime
    side edge vertex/vertices face angle diagonal line segment circle triangle square rectangle polygon cube sphere
    tile block brick box/boxes row column page book card ball marble coin die/dice bead button sticker stamp token
    person/people man/men woman/women child/children boy girl kid student teacher friend player team member adult worker
    employee soldier customer passenger family/families voter vote guest senior junior freshman/freshmen
    apple orange banana pear peach/peaches grape lemon strawberry/strawberries cherry/cherries melon pumpkin egg
    cookie cake pie slice candy/candies cupcake muffin sandwich/sandwiches pizza bagel donut doughnut meal can bottle
    jar tree flower rose tulip plant leaf/leaves seed bush/bushes
    dog cat bird fish cow horse pig chicken duck sheep rabbit monkey frog bee ant animal
    car truck bus/buses bike bicycle train plane boat wheel seat ticket trip lap
    house room door window table chair desk shelf/shelves bag basket crate barrel bucket
    pencil pen eraser notebook shirt sock shoe hat toy doll clip paperclip game match/matches goal win question
    problem test lesson class/classes school letter word color choice combination arrangement permutation path
    outcome possibility/possibilities subset element function case step move round hand trial sample
    song album movie photo picture painting candle ribbon string rope stick
"""
PHRASES = {
    "mph": "mile per hour", "mps": "meter per second", "fps": "foot per second", "kph": "kilometer per hour",
    "kmph": "kilometer per hour", "kmh": "kilometer per hour", "psi": "pound per square inch",
    "rpm": "revolution per minute", "sqft": "square foot", "cc": "cubic centimeter",
}  # fmt: skip
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}  # in front of a unit
POWERS_BEHIND = {"squared": "2", "cubed": "3"}
_BARE = "in ft yd cm mm km kg mg lb oz ml mL am pm hr sq cu"
BARE = frozenset(_BARE.split())
"""Symbols of two letters that are units also right behind a number and without ``\\text``: 5cm, but not 5ms."""
CURRENCY = frozenset({"dollar", "euro", "GBP", "yen", "rupee"})
ANGLES = frozenset({"degree", "radian"})
CLOCK = frozenset({"am", "pm", "noon", "midnight"})
# Names that may mean one unit: a pound of mass or of money, a degree of an angle or of temperature.
_ALIKE = frozenset(
    frozenset(pair)
    for pair in (
        ("pound", "lb"),
        ("pound", "GBP"),
        ("degree", "celsius"),
        ("degree", "fahrenheit"),
        ("pm", "noon"),
        ("am", "midnight"),
    )
)


def _table() -> dict[str, str]:
    found: dict[str, str] = {}

    def enter(words: Sequence[str], name: str, prefix: str = "") -> None:
        for word in words:
            found.setdefault(prefix + word, name)
            if len(word) > 1 and word.isalpha() and word not in ("am", "pm", "th", "st", "nd", "rd"):
                found.setdefault(f"{prefix}{word}s", name)

    for spellings in f"{_MEASURES} {_PREFIXED} {_COUNTED}".split():
        words = spellings.split("/")
        enter(words, words[0])
    for spellings in _PREFIXED.split():
        words = spellings.split("/")
        symbols = _SYMBOLS.get(words[0], "").split()
        found |= dict.fromkeys(symbols, words[0])
        for long, short in _PREFIXES.items():
            enter(words, long + words[0], long)
            found |= {short + symbol: long + words[0] for symbol in symbols}
    for long, symbol in _UPRIGHT_SYMBOLS.items():
        for prefix, short in (("", ""), ("pico", "p"), *_PREFIXES.items()):
            found.setdefault(short + symbol, prefix + long)
    return found


_NAMES = _table()


def name(word: str) -> str | None:
    r"""The unit that is written as ``word``; None for another word. Symbols keep their case, longer words need not.

    >>> name("inches"), name("ft"), name("km"), name("Kilometres"), name("M"), name("dozen")
    ('inch', 'foot', 'kilometer', 'kilometer', None, None)
    """
    found = _NAMES.get(word)
    return _NAMES.get(word.lower()) if found is None and len(word) > 1 else found


def is_part(word: str) -> bool:
    """Whether ``word`` can stand in a unit: a unit, or a power in front of one."""
    return name(word) is not None or word.lower() in POWERS


def agree(a: Unit, b: Unit) -> bool:
    """Whether two answers can be in these units: in the same, or one of them in none.

    >>> inch, square = (("inch", Fraction(1)),), (("inch", Fraction(2)),)
    >>> agree(inch, inch), agree(inch, ()), agree(inch, square)
    (True, True, False)
    """
    # A missing unit is no error: most golds leave it out, or answers do where the problem names it.
    if not a or not b or a == b:
        return True
    return len(a) == len(b) and all(
        e == f and (u == v or frozenset((u, v)) in _ALIKE) for (u, e), (v, f) in zip(a, b, strict=True)
    )


def on_the_clock(unit: Unit) -> bool:
    """Whether it says a time of the day."""
    return any(word in CLOCK for word, _ in unit)


def measured(a: Value) -> tuple[Value, Unit]:
    """A value without the unit that it is in, and that unit, as names with exponents.

    Terms without a unit are taken to be in that of the others (90° - x). A value in several units at once stays as it
    is, and is equal to no value without them.

    >>> from trew.rewards.maths import algebra
    >>> measured(algebra.multiply(algebra.number(5), algebra.thing(("unit", "inch"), 2)))
    (Value(above={(): Fraction(5, 1)}, below={(): Fraction(1, 1)}), (('inch', Fraction(2, 1)),))
    """
    found = {_unit_in(mono) for mono in a.above} - {monomials.ONE}
    if len(found) != 1 or any(_unit_in(mono) for mono in a.below):
        return a, ()
    above: monomials.Terms = {}
    for mono, c in a.above.items():
        rest = tuple((g, e) for g, e in mono if g[0] != "unit")
        above[rest] = above.get(rest, Fraction(0)) + c
    return Value({mono: c for mono, c in above.items() if c}, a.below), found.pop()


def _unit_in(mono: monomials.Monomial) -> Unit:
    return tuple((g[1], e) for g, e in mono if g[0] == "unit")
