"""TeX becomes MathML when the site is built, so that browsers need neither a script nor a font for it."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves in a page: \(…\) in a span, \[…\] in a block.
_PLACES = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)
# Commands that the converter does not know, in others that it does.
_KNOWN = {
    r"\begin{aligned}": r"\begin{align*}",
    r"\end{aligned}": r"\end{align*}",
    r"\arg": r"\mathrm{arg}\,",
}
# Letters of a font need braces for the converter.
_FONT = re.compile(r"\\(mathcal|mathbf|mathrm|mathbb) ([A-Za-z])(?![A-Za-z])")
# ∼, ⪯ and ⪰, which the converter takes for letters: operators have space around them.
_RELATIONS = {
    "<mi>&#x0007E;</mi>": "<mo>&#x0223C;</mo>",
    "<mi>&#x02AAF;</mi>": "<mo>&#x02AAF;</mo>",
    "<mi>&#x02AB0;</mi>": "<mo>&#x02AB0;</mo>",
}
# What MathML Core left out of MathML: bold italic letters are characters of their own in Unicode.
_BOLD = re.compile(r'<mi mathvariant="bold-italic">&#x([0-9A-F]+);</mi>')


def render(page: str) -> str:
    """Return a page with MathML in place of TeX.

    Raises:
        ValueError: if a formula has a command that the converter does not know; shows the formula.
    """
    return _PLACES.sub(lambda place: mathml(html.unescape(place[3]), block=place[2] == "["), page)


def mathml(tex: str, *, block: bool) -> str:
    """Convert one formula."""
    known = tex
    for command, other in _KNOWN.items():
        known = re.sub(re.escape(command) + r"(?![a-zA-Z])", lambda _, other=other: other, known)
    known = _FONT.sub(r"\\\1{\2}", known)
    converted = convert(known.strip(), display="block" if block else "inline")
    for name, operator in _RELATIONS.items():
        converted = converted.replace(name, operator)
    unknown = re.findall(r"<m[ion]>(\\[A-Za-z]+|&)</m[ion]>", converted)
    if unknown:
        raise ValueError(f"{' '.join(unknown)}: not known to the converter of formulas, in {tex!r}")
    converted = _BOLD.sub(lambda letter: f"<mi>{_bold(int(letter[1], 16))}</mi>", converted)
    return f'<div class="formula" tabindex="0">{converted}</div>' if block else converted


def _bold(letter: int) -> str:
    """Return a small Greek letter in bold italics; others as they are."""
    return chr(letter - 0x3B1 + 0x1D736) if 0x3B1 <= letter <= 0x3C9 else chr(letter)
