r"""Step two: one spelling for what may be written in many ways, without changing what it says.

Text goes in and text comes out: Unicode becomes LaTeX, commands with the same meaning become one command, and what only
sets type (spacing, ``$…$``, ``\left``, bold) is taken out. Units and words stay: they are read with everything else.
"""

from __future__ import annotations

import re
import unicodedata

MAX_ANSWER = 2000  # characters; a longer answer is none

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "×": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∙": r"\cdot ",
    "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt",
    "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\R ", "→": r"\to ", "…": r"\ldots ", "′": "'", "“": '"', "”": '"',
    "‘": "'", "’": "'", "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ",
    "₹": r"\rupee ", "¢": r"\cent ", "℃": r"\degree C", "℉": r"\degree F",
    "，": ", ", "、": ", ", "；": "; ", "（": "(", "）": ")",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ",
    "ρ": r"\rho ", "σ": r"\sigma ", "φ": r"\phi ", "ϕ": r"\phi ", "ω": r"\omega ", "∠": r"\angle ", "。": ".",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
}  # fmt: skip
_SUPERSCRIPTS: dict[str, str] = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺⁽⁾ⁿⁱ", "0123456789-+()ni", strict=True))
_SUBSCRIPTS: dict[str, str] = dict(zip("₀₁₂₃₄₅₆₇₈₉₋₊ₐᵢⱼₖₘₙₓ", "0123456789-+aijkmnx", strict=True))
_RAISED, _LOWERED = (re.compile(f"[{''.join(signs)}]+") for signs in (_SUPERSCRIPTS, _SUBSCRIPTS))
_PLAIN = str.maketrans(_SUPERSCRIPTS | _SUBSCRIPTS)
# The invisible characters of pages and word processors: spaces of no width, a byte order mark, an applied function.
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\u2061\ufeff]")
# A fraction sign, with the digit of a mixed number before it: 1½.
_VULGAR = re.compile(r"(\d?)([¼-¾⅐-⅞])")

# In front of an interval, and an end of it: of ]a, b[ the brackets would close what is around it.
_BEFORE, _BOUND = r"(^\s*|\\(?:in|cup|cap)\s*|\bor\s*\}?\s*)", r"((?:[^][(){},;]|\{[^{}]*\})+)"
# Applied one after the other: each sees what those before it have made.
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Space: between rows and digits, around brackets, between signs.
        (r"\\\\\s*\[[^\]\n]{0,20}\]", r"\\\\"),  # row spacing in matrices
        (r"(?<=\d)(?:\\,|\\ |\\;|\{,\}|,\\!|\\!,|\\!|~)\s*(?=\d{3}(?!\d))", ""),  # digit groups
        (r"(?<=\d),(?:\\[,; ])(?=\d{3}(?!\d))", ""),
        (r"(?<=\d)'(?=\d{3}(?!\d))", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\s*\.?"
         r"(?=\s*(?:\\[{}|]|[()\[\]|/<>]|\\[lr](?:floor|ceil|brace|vert|angle)|[^.]|$))", " "),
        (r"\\q?quad\s*(?=[A-Za-z](?:_\{?\w+\}?)?\s*=)", ", "),  # x = 1 \quad y = 2
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|noindent|par|quad|qquad)(?![A-Za-z])", " "),
        (r"\\(?:thinspace|medspace|enspace|negthinspace)(?![A-Za-z])", " "),
        (r"\\(?:hspace|vspace|phantom|hphantom|vphantom|label|tag)\*?\{[^{}]*\}", " "),
        (r"(?<!\\)\\[!,;:> ]|~", " "),
        # What only sets type: boxes, colours, delimiters of formulas.
        (r"\\(?:boxed|fbox)\s*\{", "{"),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"(?<!\\)\\#", ""),
        (r"(?<!\\)%", r"\\%"),
        (r"(?<!\\)\\[()\[\]]", " "),
        # Variants of one command.
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\operatorname\*?\s*\{([A-Za-z]{2,})\}", r"\\\1 "),
        (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*(?=\{)", r"\1\\unit"),
        # Upright type, from which units and words are read, and other fonts.
        (r"\\(?:math(?:rm|sf|up)|text(?:rm|bf|it|tt|sf|normal|up)?|[mh]box|emph|underline|operatorname|unit|si)\s*\{",
         r"\\text{"),
        # Functions under their other names, which math-verify does not know.
        (r"\\(?:(arc)?tg(?![A-Za-z])|text\{\s*(arc)?tg\s*\})", r"\\\1\2tan "),
        (r"\\(?:(arc)?co?tg(?![A-Za-z])|text\{\s*(arc)?co?tg\s*\})", r"\\\1\2cot "),
        (r"\\(?:cosec(?![A-Za-z])|text\{\s*cosec\s*\})", r"\\csc "),
        (r"\{\s*\\(?:rm|sf|tt|it|bf)(?![A-Za-z])", r"\\text{"),
        (r"\\text\{\s*(i|e|d[r-z]?|\\?pi)\s*\}", r" \1 "),  # upright letters are what they mean
        (r"\\mathbb\s*\{?\s*([RNZQC])\s*\}?", r"\\\1 "),
        (r"\\mathbb\s*\{\s*([PE])\s*\}", r" \1 "),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathcal|vec|mathop|ensuremath)\s*(?=\{)", ""),
        (r"\\(?:rm|bf|it|mathit|mathrm)(?![A-Za-z])", " "),
        # Degrees and relations.
        (r"\^\s*\{\s*\\circ\s*\}|(?:\^|(?<=\d))\s*\\circ(?![A-Za-z])|\\(?:text)?degrees?(?![A-Za-z])", r"\\degree "),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"(?<![\w.])(\d+!?)!=", r"\1! ="),  # 5!=120 is about a factorial, as no number is said to differ from another
        (r"\\(?:neq|ne|not\s*=)(?![A-Za-z])|!=|\\not=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        # Brackets.
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:langle|lparen)(?![A-Za-z])", "("),
        (r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (rf"{_BEFORE}\]{_BOUND}([,;]){_BOUND}\[", r"\1(\2\3\4)"),
        (rf"{_BEFORE}\]{_BOUND}([,;]){_BOUND}\]", r"\1(\2\3\4]"),
        (rf"{_BEFORE}\[{_BOUND}([,;]){_BOUND}\[", r"\1[\2\3\4)"),
        # Operators and other signs.
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"(?<=\d)\s*(?:\\text\{\s*[xX]\s*\}|[xX])\s*(?=10\s*\^[\s{+-]*\d)", "*"),  # 1.5 x 10^3, not 2x10^x
        (r"\{:\}", ":"),
        (r"\{\}(?=\s*\\degree)", ""),
        (r"(?<![A-Za-z])U\.?S\.?\s*(?=\\\$|dollars?)", ""),
        (r"(?<![A-Za-z])per cent(?![A-Za-z])", "percent"),
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

# "The final answer is", in upright type too.
_LEADING = re.compile(
    r"^\s*(\\text\{\s*)?(?:(?:the|our|final|correct)\s+)*(?:answer|result|solution)s?\s*(?:is|are|:|=)+\s*:?(\s*\})?",
    re.I,
)
# An option before its value, (A) -5, A) 5, A. $5 or \mathbf{(A)} 5: none of these is a product or a difference.
_OPTION = re.compile(
    r"^\s*(?:\{\s*\(([A-J])\)\s*\}|\(([A-J])\)\s*[:.]?|([A-J])\)|([A-J])\.(?=\s))\s*"
    r"(?=-?(?:\d|\.\d|\\(?:frac|sqrt|pi|\$)))"
)
_SYSTEM = re.compile(
    r"\s*(?:\\begin\{cases\}(.*)\\end\{cases\}"
    r"|\\left\s*\\\{\s*\\begin\{(array|aligned)\}(?:\{[^{}]*\})?(.*)\\end\{\2\}\s*\\right\s*\.)\s*",
    re.DOTALL,
)
_DELIMITER = re.compile(r"(?<!\\)\$")
_PRICE = re.compile(r"(?<!\\)\$(?=\s*[-+]?\.?\d)")


def normalise(text: str) -> str:
    r"""One spelling of an answer. Idempotent on what it returns; at most MAX_ANSWER characters are expected.

    >>> normalise(r"$\dfrac{1}{2}$ \mbox{ cm}^2."), normalise(r"10,\!080"), normalise("−5 %"), normalise("$5")
    ('\\frac{1}{2} \\text{ cm}^2', '10080', '-5 \\%', '\\$5')
    >>> normalise(r"\left( 3, \tfrac{\pi}{2} \right)"), normalise(r"3+4\mathrm{i}"), normalise(r"90^\circ")
    ('( 3, \\frac{\\pi}{2} )', '3+4 i', '90\\degree')
    """
    text = _ascii(text)
    stripped = text.strip()
    if len(stripped) > 4 and stripped[:2] == stripped[-2:] == "**":
        text = stripped[2:-2]
    elif len(stripped) > 2 and stripped[0] == stripped[-1] == '"':
        text = stripped[1:-1]
    if "$" in text:
        text = _dollars(text)
    text = _system(text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _LEADING.sub(lambda m: m[1] if m[1] and not m[2] else "", text)
    text = _OPTION.sub(lambda m: f"\\text{{({m[1] or m[2] or m[3] or m[4]})}} ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?:\s|\\\\|[.,;:/])+$", "", text)
    return re.sub(r"^(?:\s|[,;:]|\\\\)+", "", text)


def _system(text: str) -> str:
    r"""A system whose rows are equations, \begin{cases} x=1 \\ y=2 \end{cases}, as a list of them; other text as it is.

    >>> _system(r"\left\{\begin{array}{l} x=1, \\ y=2 \end{array}\right.")
    'x=1, y=2'
    """
    found = _SYSTEM.fullmatch(text)
    rows = [row.strip(" ,;.") for row in (found[1] or found[3] or "").split("\\\\")] if found else []
    rows = [row.replace("&", "") if found and found[2] == "aligned" else row for row in rows if row]
    # With an & a case is told from its condition, and a row without an = is no value.
    values = all(row.count("=") == 1 and "&" not in row and "\\begin" not in row for row in rows)
    return ", ".join(rows) if rows and values else text


def _dollars(text: str) -> str:
    """Takes out the dollars around formulas; one that is left over before a number is a price."""
    if len(_DELIMITER.findall(text)) % 2:
        text = _PRICE.sub(r"\\$", text)
    return _DELIMITER.sub("", text)


def _ascii(text: str) -> str:
    if text.isascii():
        return text.replace("\x00", " ")
    text = _VULGAR.sub(_vulgar, text)
    text = _INVISIBLE.sub("", text)
    # A run at once: of 2ⁿ⁻¹ the exponent is n - 1.
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_PLAIN)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m.group().translate(_PLAIN)}}}", text)
    text = re.sub("[\u00b5\u03bc](?=[mgsLlCFHT](?![A-Za-z]))", "u", text)  # micro-
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
