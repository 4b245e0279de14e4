"""Formulas of a Markdown text as MathML, which browsers draw themselves: no script, no fonts.

Notebooks draw ``$...$`` and ``$$...$$`` with a script; a book that must work without a network
would have to ship one with its fonts. MathML needs neither, can be searched and read aloud, and
takes the colour of the text around it.
"""

import re

from latex2mathml.converter import convert

#: Code is never mathematics; it is matched first, so that a dollar in it stays one.
_PIECES = re.compile(
    r"(?P<fence>^(?P<mark>`{3,}|~{3,}).*?^(?P=mark)[`~]*$)"
    r"|(?P<code>(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<comment><!--.*?-->)"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<!\\)\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)",
    re.MULTILINE | re.DOTALL,
)


class FormulaError(ValueError):
    """A formula that cannot be drawn."""


def with_mathml(markdown: str) -> str:
    """Return a Markdown text with every formula replaced by MathML.

    Raises:
        FormulaError: a formula is not valid TeX.
    """
    return _PIECES.sub(_replacement, markdown)


def _replacement(match: re.Match[str]) -> str:
    if match["block"]:
        return f'<span class="formula">{mathml(match["block"], "block")}</span>'
    if match["inline"]:
        return mathml(match["inline"], "inline")
    return match[0]


def mathml(formula: str, display: str = "inline") -> str:
    r"""Return one formula as MathML on one line.

    Args:
        formula: TeX, without dollars: ``\sqrt{2h}``.
        display: ``"inline"``, or ``"block"`` for a line of its own.

    Raises:
        FormulaError: `formula` is not valid TeX.
    """
    try:
        drawn = convert(formula.strip(), display=display)
    except Exception as error:  # the library has a dozen kinds
        raise FormulaError(f"the formula {formula!r} cannot be drawn: {error!r}") from error
    drawn = drawn.replace("\\_", "_")  # an escape that the library leaves in \text
    if "\\" in re.sub(r"&#[^;]+;", "", drawn):
        raise FormulaError(f"the formula {formula!r} has a command that is not known")
    return re.sub(r">([^<]+)<", lambda found: f">{_plain(found[1])}<", drawn.replace("\n", " "))


def _plain(text: str) -> str:
    """Write what Markdown would take for its own signs as character references."""
    return re.sub(r"[*_`~\[\]|!'\"-]", lambda sign: f"&#{ord(sign[0])};", text)
