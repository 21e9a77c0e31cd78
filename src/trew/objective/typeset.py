"""Equations as text -> LaTeX, for notebooks."""

from __future__ import annotations

import re

GREEK = {
    name: f"\\{name}"
    for name in ("alpha", "beta", "gamma", "delta", "eta", "kappa", "lambda", "mu", "phi", "pi", "sigma", "tau")
} | {"lam": "\\lambda", "inf": "\\infty"}
OPERATORS = {"exp", "log", "min", "max", "clip", "clamp", "mean", "std", "sign", "sqrt", "sech"}
SYMBOLS = {"<=": "\\le ", ">=": "\\ge ", "<-": "\\leftarrow ", "*": "\\cdot ", "±": "\\pm ", "#": "\\#", "%": "\\%",
           "&": "\\&", "prod": "\\prod ", "sum": "\\sum "}  # fmt: skip
TOKEN = re.compile(r"[_^]\([^()]*\)|[_^]-?\w+|[A-Za-z]+(?:'[a-z]+)?|\d[\d.e]*(?:e-?\d+)?|<=|>=|<-|\s+|.")


def typeset(equation: str) -> str:
    r"""``Objective.equation``'s lines as one LaTeX display: what is computed, then each choice by its axis.

    >>> print(typeset("C_t = w(r_t, A_t) r_t\n  ratio      r_t = pi(y_t) / pi_old(y_t)"))
    $$\begin{aligned}
    & C_{t} = w(r_{t}, A_{t}) r_{t} \\
    \text{ratio}\quad & r_{t} = \pi (y_{t}) / \pi _{\text{old}}(y_{t})
    \end{aligned}$$
    """
    rows = []
    for line in equation.splitlines():
        axis, said = (line[2:12].strip(), line[13:]) if line.startswith("  ") else ("", line)
        said = f"\\text{{{_plain(said)}}}" if axis == "note" else formula(said)
        rows.append(f"\\text{{{axis}}}\\quad & {said}" if axis else f"& {said}")
    return "$$\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}$$"


def formula(text: str) -> str:
    r"""One formula; words of several letters that are no symbol stay words.

    >>> formula("0 if A < 0 and sum_(s >= t) kl_s > 2")
    '0\\ \\text{if}\\ A < 0\\ \\text{and}\\ \\sum _{s \\ge  t}\\ \\text{kl}_{s} > 2'
    """
    tokens = TOKEN.findall(text)
    out = ""
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if token.isspace():
            beside_word = _is_word(before) or _is_word(after)
            out += "\\qquad " if len(token) > 2 else "\\ " if beside_word else " "
        elif token[0] in "_^" and len(token) > 1:
            out += f"{token[0]}{{{_index(token[1:])}}}"
        else:
            out += _symbol(token)
    return out


def _is_word(token: str) -> bool:
    known = token in GREEK or token in SYMBOLS or token in OPERATORS
    return token[:1].isalpha() and len(token) > 1 and not known


def _index(text: str) -> str:
    """What stands in a sub- or superscript; two letters are two indices."""
    if text.startswith("("):
        return formula(text[1:-1])
    return text if len(text) == 2 and text not in GREEK else formula(text)


def _symbol(token: str) -> str:
    """A token that stands by itself."""
    if _is_word(token):
        return f"\\text{{{token}}}"
    if token in OPERATORS:
        return f"\\operatorname{{{token}}}"
    return f"{GREEK[token]} " if token in GREEK else SYMBOLS.get(token, token)


def _plain(text: str) -> str:
    """Text whose underscores are no subscripts."""
    return text.replace("_", " ").replace("#", "number of ").replace("%", " percent")
