"""Turns equations from text into LaTeX, for notebooks."""

from __future__ import annotations

import re

GREEK = {
    name: f"\\{name}"
    for name in (
        "alpha",
        "beta",
        "gamma",
        "delta",
        "eta",
        "kappa",
        "lambda",
        "mu",
        "omega",
        "phi",
        "pi",
        "sigma",
        "tau",
    )
} | {"lam": "\\lambda", "inf": "\\infty"}
OPERATORS = {"exp", "log", "min", "max", "clip", "clamp", "mean", "std", "sign", "sqrt", "sech"}
SYMBOLS = {"<=": "\\le ", ">=": "\\ge ", "<-": "\\leftarrow ", "*": "\\cdot ", "±": "\\pm ", "#": "\\#", "%": "\\%",
           "&": "\\&", "prod": "\\prod ", "sum": "\\sum "}  # fmt: skip
# Scripts, words (group's is one), numbers, signs of two characters, blanks, any other character: tried in this order.
TOKEN = re.compile(r"[_^]\([^()]*\)|[_^]-?\w+|[A-Za-z]+(?:'[a-z]+)?|\d[\d.e]*(?:e-?\d+)?|<=|>=|<-|\s+|.")


def typeset(equation: str) -> str:
    r"""The lines of ``Objective.equation`` as one LaTeX display: the coefficient, then each component by its axis.

    >>> print(typeset("C_t = w(r_t, A_t) r_t\n  ratio      r_t = pi(y_t) / pi_old(y_t)"))
    $$\begin{aligned}
    & C_{t} = w(r_{t}, A_{t}) r_{t} \\
    \text{ratio}\quad & r_{t} = \pi (y_{t}) / \pi _{\text{old}}(y_{t})
    \end{aligned}$$
    """
    rows = " \\\\\n".join(_row(line) for line in equation.splitlines())
    return "$$\\begin{aligned}\n" + rows + "\n\\end{aligned}$$"


def _row(line: str) -> str:
    """One aligned row; an indented line is an axis, padded to 10 characters, and its formula."""
    if not line.startswith("  "):
        return f"& {formula(line)}"
    axis, text = line[2:12].strip(), line[13:]
    said = f"\\text{{{_plain(text)}}}" if axis == "note" else formula(text)
    return f"\\text{{{axis}}}\\quad & {said}"


def formula(text: str) -> str:
    r"""One formula in LaTeX; words of several letters that are not symbols are set as text.

    >>> formula("0 if A < 0 and sum_(s >= t) kl_s > 2")
    '0\\ \\text{if}\\ A < 0\\ \\text{and}\\ \\sum _{s \\ge  t}\\ \\text{kl}_{s} > 2'
    """
    tokens = TOKEN.findall(text)
    out = ""
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if token.isspace():
            out += _space(token, beside_word=_is_word(before) or _is_word(after))
        elif token[0] in "_^" and len(token) > 1:
            out += f"{token[0]}{{{_index(token[1:])}}}"
        else:
            out += _symbol(token)
    return out


def _space(token: str, *, beside_word: bool) -> str:
    """Three or more blanks separate notes; a blank next to a word is written out, since LaTeX ignores blanks."""
    if len(token) > 2:
        return "\\qquad "
    return "\\ " if beside_word else " "


def _is_word(token: str) -> bool:
    known = token in GREEK or token in SYMBOLS or token in OPERATORS
    return token[:1].isalpha() and len(token) > 1 and not known


def _index(text: str) -> str:
    """A sub- or superscript; two letters are two indices."""
    if text.startswith("("):
        return formula(text[1:-1])
    return text if len(text) == 2 and text not in GREEK else formula(text)


def _symbol(token: str) -> str:
    """A token on the line, neither space nor script."""
    if _is_word(token):
        return f"\\text{{{token}}}"
    if token in OPERATORS:
        return f"\\operatorname{{{token}}}"
    return f"{GREEK[token]} " if token in GREEK else SYMBOLS.get(token, token)


def _plain(text: str) -> str:
    """Text with words instead of the characters that LaTeX reserves."""
    return text.replace("_", " ").replace("#", "number of ").replace("%", " percent")
