r"""Step two: one spelling for what may be written in many ways, without changing what it says.

Text goes in and text comes out: Unicode becomes LaTeX, commands with the same meaning become one command, and what does
not matter by policy (spacing, ``$``, ``%``, units, ``\left``, text beside a number) is taken out.
"""

from __future__ import annotations

import re
import unicodedata

MAX_ANSWER = 2000  # characters; a longer answer is none

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt",
    "°": r"^\circ ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\R ", "→": r"\to ", "…": r"\ldots ", "′": "'", "“": '"', "”": '"',
    "‘": "'", "’": "'", "€": "", "£": "", "¥": "", "₹": "", "，": ", ", "、": ", ", "；": "; ", "（": "(", "）": ")",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ",
    "ρ": r"\rho ", "σ": r"\sigma ", "φ": r"\phi ", "ϕ": r"\phi ", "ω": r"\omega ", "∠": r"\angle ", "。": ".",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "ⁿ": "^n ",
}  # fmt: skip
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_VULGAR = re.compile(r"(\d?)([¼-¾⅐-⅞])")

_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\\\s*\[[^\]\n]{0,20}\]", r"\\\\"),  # row spacing in matrices
        (r"(?<=\d)(?:\\,|\\ |\\;|\{,\}|,\\!|\\!,|\\!|~)\s*(?=\d{3}(?!\d))", ""),  # digit groups
        (r"(?<=\d),(?:\\[,; ])(?=\d{3}(?!\d))", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\s*\.?"
         r"(?=\s*(?:\\[{}|]|[()\[\]|/<>]|\\[lr](?:floor|ceil|brace|vert|angle)|[^.]|$))", " "),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|noindent|par|quad|qquad)(?![A-Za-z])", " "),
        (r"\\(?:thinspace|medspace|enspace|negthinspace)(?![A-Za-z])", " "),
        (r"\\(?:hspace|vspace|phantom|hphantom|vphantom|label|tag)\*?\{[^{}]*\}", " "),
        (r"(?<!\\)\\[!,;:> ]|~", " "),
        (r"\\(?:boxed|fbox)\s*\{", "{"),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"(?<!\\)\\[$%#]|[$%]", ""),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\operatorname\*?\s*\{([A-Za-z]+)\}", r"\\\1 "),
        (r"\\(?:math(?:rm|sf)|text(?:rm|bf|it|tt|sf|normal|up)?|mbox|hbox|emph|underline)\s*\{", r"\\text{"),
        (r"\\mathbb\s*\{?\s*([RNZQC])\s*\}?", r"\\\1 "),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathcal|vec|mathop|ensuremath)\s*(?=\{)", ""),
        (r"\\(?:rm|bf|it|mathit|mathrm)(?![A-Za-z])", " "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?:s)?(?![A-Za-z])|(?<=\d)\s*\\circ(?![A-Za-z])", r"\\degree "),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:neq|ne|not\s*=)(?![A-Za-z])|!=|\\not=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:langle|lparen)(?![A-Za-z])", "("),
        (r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\*\*", "^"),
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:simeq|thickapprox|cong|doteq|approx)(?![A-Za-z])", r"\\approx "),
        (r"\\(?:dots|cdots|ldots|dotsc)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"\\var(theta|phi|epsilon|rho|sigma)(?![A-Za-z])", r"\\\1"),
        (r"\\begin\{(?:[pbB]|small)?matrix\}|\\(?:begin\{array\})\s*(?:\{[^{}]*\})?", r"\\begin{matrix}"),
        (r"\\end\{(?:[pbB]|small)?matrix\}|\\end\{array\}", r"\\end{matrix}"),
        (r"\\(?:bot|perp)(?![A-Za-z])", r"\\perp "),
    ]
]  # fmt: skip

_UNITS = r"""
    in degrees? radians? rads? cents? dollars? usd eur euros? pounds? bucks? units? square sq cubic cu
    inch(?:es)? feet foot ft yards? yd miles? mi mph meters? metres? kilometers? kilometres? centimeters?
    centimetres? millimeters? millimetres? cm mm km kg mg lbs? oz ounces? grams? kilograms? tons? tonnes?
    liters? litres? ml gallons? quarts? pints? cups? seconds? secs? minutes? mins? hours? hrs? hr days? weeks?
    months? years? yrs? kph kmh newtons? joules? watts? volts? percent per hertz people persons? students?
    ways? times items? points? marbles? apples? books? children boys? girls? coins? cards? balls? sides?
    integers? numbers? solutions? pieces? tiles? cubes? blocks? questions? problems? games? votes? trees?
    cars? eggs? cookies? oranges? pages? steps? triangles? squares? rectangles? pairs? values? terms? digits?
    bottles? tickets? toys? pencils? pens? stickers? clips? am pm p\.m\. a\.m\.
"""
_UNIT = rf"(?:{'|'.join(_UNITS.split())})\b\.?"
_LETTER_UNIT = r"(?:h|s|m|g|hr|sec|min|h)\b"
_BARE_UNIT = re.compile(
    rf"(?<=[\d}})\]eia!])(\s*)(?:{_UNIT}|\\degree(?:\s*[CF]\b)?)(?:\s*(?:/|per|of|a|\*|\s)?\s*(?:{_UNIT}|{_LETTER_UNIT}))*(?:\s*\^\s*\{{?\d\}}?)?",
    re.IGNORECASE,
)
_FRACTION_UNIT = re.compile(
    r"\\frac\s*\{\s*\\text\{[^{}]*\}(?:\^\{?\d\}?)?\s*\}\s*\{\s*\\text\{[^{}]*\}(?:\^\{?\d\}?)?\s*\}"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}(\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?")
_BOUNDS = re.compile(
    r"\b(?:not?|least|most|more|less|fewer|than|between|from|never|neither|either|except|about|approximately|roughly)\b",
    re.I,
)
_JOINERS = {"or": r"\or ", "and": r"\and ", ",": ", ", ", or": r"\or ", ", and": r"\and ", "and/or": r"\or "}
_MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LEADING = re.compile(
    r"^\s*(?:\\text\{\s*)?(?:(?:the|our|final|correct)\s+)*(?:answer|result|solution)s?\s*(?:is|are|:|=)+\s*:?(?:\s*\})?",
    re.I,
)
_NOUN = re.compile(r"(?<=\d)\s+(?:[a-z]{4,20})(?:\s+[a-z]{2,20}){0,2}\s*$")


def normalise(text: str) -> str:
    r"""One spelling of an answer. Idempotent on what it returns; at most MAX_ANSWER characters are expected.

    >>> normalise(r"$\dfrac{1}{2}$ \text{ cm}^2."), normalise(r"10,\!080"), normalise("−5 %"), normalise("5 km/h")
    ('\\frac{1}{2}', '10080', '-5', '5')
    >>> normalise(r"\left( 3, \tfrac{\pi}{2} \right)"), normalise(r"x=1 \text{ or } x=2"), normalise(r"90^\circ")
    ('( 3, \\frac{\\pi}{2} )', 'x=1 \\or x=2', '90')
    """
    text = _ascii(text)
    stripped = text.strip()
    if len(stripped) > 4 and stripped[:2] == stripped[-2:] == "**":
        text = stripped[2:-2]
    elif len(stripped) > 2 and stripped[0] == stripped[-1] == '"':
        text = stripped[1:-1]
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _LEADING.sub("", text)
    text = _FRACTION_UNIT.sub(" ", text)
    whole = _TEXT.fullmatch(text.strip().rstrip(".,;: "))
    if whole and not whole.group(2) and not _is_mathematics(whole.group(1)):
        return f"\\text{{{whole.group(1).strip()}}}"  # words as a whole answer stay as they are
    text = whole.group(1) if whole and not whole.group(2) else _TEXT.sub(_beside, text)
    text = _words(text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?:\s|\\\\|[.,;:/])+$", "", text)
    return re.sub(r"^(?:\s|[,;:]|\\\\)+", "", text)


def _ascii(text: str) -> str:
    if text.isascii():
        return text.replace("\x00", " ")
    text = _VULGAR.sub(_vulgar, text)
    text = re.sub("[⁻]?[⁰¹²³⁴-⁹]+", lambda m: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, m.group())) + "}", text)
    text = re.sub("[₀-₉]+", lambda m: "_{" + "".join(map(_SUBSCRIPTS.__getitem__, m.group())) + "}", text)
    text = re.sub("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))", "", text)
    out = []
    for char in text:
        if char.isascii():
            out.append(char)
        elif char in _UNICODE:
            out.append(_UNICODE[char])
        elif unicodedata.category(char) == "Nd":
            out.append(str(unicodedata.digit(char)))
        else:
            plain = unicodedata.normalize("NFKC", char)
            out.append(plain if plain != char and plain.isascii() else " " if char.isspace() else char)
    return "".join(out).replace("\x00", " ")


def _vulgar(match: re.Match[str]) -> str:
    value = unicodedata.normalize("NFKC", match.group(2))
    above, _, below = value.partition("\u2044")
    return f"{match.group(1)}\\frac{{{above}}}{{{below}}}"


def _is_mathematics(content: str) -> bool:
    r"""Whether the text in ``\text{…}`` is really a formula: a number, ``x = 5``."""
    if re.fullmatch(r"\s*[A-Z](?:\s*,\s*[A-Z])+\s*", content):  # several choices
        return True
    return bool(re.search(r"\d", content)) and not re.search(r"[A-Za-z]{3,}", content)


def _beside(match: re.Match[str]) -> str:
    content = " ".join(match.group(1).split())
    low = content.lower().strip()
    if low in _JOINERS:
        return f" {_JOINERS[low]}"
    if low in _MULTIPLES:
        return f"*10^{{{_MULTIPLES[low]}}}"
    if not low or low[-1] == ":" or low in (".", ";") or match.string[: match.start()].rstrip().endswith("/"):
        return " "
    if _is_mathematics(content):
        return f" {content} "
    if (
        _BOUNDS.search(low)
        or re.search(r"\b(?:or|and|if|for|when|where)\b", low)
        or match.string[match.end() :][:1] == "("
    ):
        return match.group()
    if len(low) == 1 and low.isalpha() and not re.search(r"\d\s*$", match.string[: match.start()]):
        return f" {content} "  # a letter in roman type is a name
    if re.match(r"\s*[=_]", match.string[match.end() :]):
        return match.group()  # a name: \text{area} = 5
    if not re.search(r"[0-9a-zA-Z)}\]]\s*$", match.string[: match.start()]):
        return match.group()  # words in front of something say what it is
    return " "


def _words(text: str) -> str:
    """Bare words: joiners, multiples, units behind a number."""
    if not re.search(r"[A-Za-z]{2}|\bm\b|\\degree", text):
        return text
    text = re.sub(r"(?<![\\A-Za-z])(or|and)(?![A-Za-z])", lambda m: f"\\{m.group(1)} ", text)
    text = re.sub(r",\s*(?=\\(?:or|and)\s)", " ", text)
    text = re.sub(
        r"(?<=\d)\s*(hundred|thousand|million|billion|trillion)\b",
        lambda m: f"*10^{{{_MULTIPLES[m.group(1)]}}}",
        text,
    )
    if _BOUNDS.search(re.sub(r"\\[A-Za-z]+", " ", text)):
        return text
    if not _in_function(text):
        text = _BARE_UNIT.sub(" ", text)
        text = text.replace("\\degree", " ")
    return _NOUN.sub(" ", text)


def _in_function(text: str) -> bool:
    """Whether a degree sign matters, because it stands in the argument of a function: sin 30°."""
    return "\\degree" in text and bool(re.search(r"(?:sin|cos|tan|cot|sec|csc)", text))
