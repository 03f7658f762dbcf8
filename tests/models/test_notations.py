"""Characters of HTML and formulas in LaTeX, in answers, in speech and in plain readings."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.test_spoken import words_of

from helpers import lengths
from omnistage.models.smol.phrase import PhraseCutter
from omnistage.models.smol.plain_text import PlainText
from omnistage.models.smol.spoken.characters import Quotation
from omnistage.models.smol.spoken.notations import Notations, spell_formula
from omnistage.models.smol.spoken.reader import read_aloud, read_phrase

FORMULAS = [
    (r"x_1 + x_{12} = 0", "x one plus x twelve equals zero"),
    (r"\frac{3}{4}", "three quarters"),
    (r"\frac{a+b}{c}", "a plus b, all over c"),
    (r"\frac{x}{\frac{1}{2}}", "x over one half"),
    (r"e^{i\pi} + 1 = 0", "e to the power of i pi plus one equals zero"),
    (r"2^{-3}", "two to the power of minus three"),
    (r"\sqrt{2} \approx 1.41", "the square root of two is approximately equal to one point four one"),
    (r"\sqrt[3]{27} = 3", "the cube root of twenty seven equals three"),
    (r"\int_0^\infty e^{-x} \, dx", "the integral from zero to infinity of e to the power of minus x d x"),
    (r"\prod_{k} k", "the product over k of k"),
    (r"\vec{F} = m \vec{a}", "vector F equals m vector a"),
    (r"\forall x \in \mathbb{R}: x^2 \geq 0", "for all x is in R: x squared is greater than or equal to zero"),
    (r"\text{Area} = \pi r^2", "Area equals pi r squared"),
    (r"f'(x) = 2x", "f prime (x) equals two x"),
    (r"n! \neq 0", "n factorial is not equal to zero"),
    (r"25\% \text{ of } 80", "twenty five percent of eighty"),
    (r"\begin{aligned} a &= 1 \\ b &= 2 \end{aligned}", "a equals one, b equals two"),
    (r"\left( \frac{x}{y} \right)^2", "(x over y) squared"),
    (r"\sin^2\theta + \cos^2\theta = 1", "sine squared theta plus cosine squared theta equals one"),
    (r"\unknowncommand{x}", "unknowncommand x"),
]
AROUND = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"))


def plain_of(text: str) -> str:
    """The text of an answer without its Markdown."""
    plain = PlainText()
    return "".join(character for character, _ in [*plain.feed(text), *plain.flush()])


def given_text(text: str) -> str:
    cutter = PhraseCutter(plain=True)
    return " ".join(phrase.text for phrase in [*cutter.feed(text), *cutter.flush()])


@pytest.mark.parametrize(("formula", "words"), FORMULAS)
def test_a_formula_is_read_in_words(formula: str, words: str) -> None:
    """In an answer, in a text that is spoken as it was given, and by itself; in all marks that models write around formulas."""
    assert spell_formula(formula) == words
    for opening, closing in AROUND:
        text = f"Thus {opening}{formula}{closing} holds."
        assert plain_of(text) == given_text(text) == f"Thus {words} holds."
        assert words_of(text) == words_of(f"Thus {words} holds.")


@pytest.mark.parametrize(
    "text",
    [
        *("It costs $5 and $10.", "$5-$10M and $5M-$10M", "echo $HOME/bin and $PATH", "$5/$6", "[not a link] \\[a note\\]", "US$5 (or $6)"),
        *("$x", "$", "$$", "\\", "AT&T and R&D", "&nosuch; &", "C:\\new\\(x86)\\file", "I have $5+$3=$8.", "$1 = €0.9 and £1 = $1.2"),
    ],
)
def test_what_is_no_formula_stays(text: str) -> None:
    assert given_text(text) == text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Tom &amp; Jerry", "Tom & Jerry"),
        ("don&#39;t &quot;go&quot;", 'don\'t "go"'),
        ("&lt;b&gt; is no tag", "<b> is no tag"),
        ("&#42;&#42;no emphasis&#42;&#42;", "**no emphasis**"),
        ("5&nbsp;km &mdash; it&rsquo;s &#x2019;", "5\u00a0km — it’s ’"),
        ("&amp;lt; stays as written", "&lt; stays as written"),
    ],
)
def test_characters_of_html_are_text(text: str, read: str) -> None:
    assert plain_of(text) == read
    assert read_phrase(given_text(text)).text == read_phrase(Quotation().read(read)).text


PIECES = [
    *("$", "$$", "\\(", "\\)", "\\[", "\\]", "x", "x^2", " = ", "\\frac{", "}", "{", "&amp;", "&", ";", " and ", "5", "\n", "*", "word"),
    *("\\text{a b}", "_1"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.randoms(use_true_random=False))
def test_a_text_reads_the_same_in_any_pieces(text: str, draw: random.Random) -> None:
    """And each character of it has a place, in their order."""
    whole = Notations()
    placed = [*whole.feed(text), *whole.flush()]
    one_by_one, cuts = Notations(), sorted(draw.choices(range(len(text) + 1), k=3))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert [placed for piece in pieces for placed in one_by_one.feed(piece)] + one_by_one.flush() == placed
    places = [place for _, place in placed]
    assert places == sorted(places) and (not places or (places[0] >= 0 and places[-1] < len(text)))
    reading = read_aloud(text)
    assert reading.borders[-1] == (max(len(text.split()), 1), len(reading.words))


def drawn_formula(draw: random.Random, depth: int) -> str:
    """A formula of commands, powers, fractions and roots within each other."""
    if depth == 0:
        return draw.choice(["x", "y_1", "12", r"\alpha", "n!", r"\infty", r"\text{the rest}", "2.5", "|z|"])
    one, other = (drawn_formula(draw, depth - 1) for _ in range(2))
    return draw.choice(
        [
            *(rf"\frac{{{one}}}{{{other}}}", rf"\sqrt{{{one}}}", rf"{one}^{{{other}}}", rf"{one} + {other}", rf"{one} \leq {other}"),
            *(rf"\left({one}\right) \cdot {other}", rf"\sum_{{i=1}}^{{{one}}} {other}", rf"\mathbf{{{one}}}_{{{other}}}"),
        ]
    )


@lengths.rounds(200, 5000)
def test_no_mark_of_a_formula_is_left(seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    for _ in range(rounds):
        formula = drawn_formula(draw, draw.randrange(1, 4))
        words = spell_formula(formula)
        assert not re.search(r"[\\{}$^_|&\d]", words), (formula, words)
        assert len(re.findall("twel[vf]", words)) == formula.count("12") and words.count("the rest") == formula.count("the rest")


HOSTILE = ["$", "$$", "\\(", "\\(\\", "\\[x=", "&", "&a", "$a+", "{", "\\frac{", "$\\a{b", "\\sqrt[", "^", "$$x^{", "$\\$", "\\(&", "$&a"]


@pytest.mark.parametrize("unit", [*HOSTILE, "$" + "\\frac" * 30, "$" + "\\a{b}" * 30, "$" + "\\text {x y} " * 12])
def test_time_is_linear_in_any_text(unit: str) -> None:
    """Otherwise this does not end within the time limit of a test."""
    text = (unit * 20_000)[:20_000]
    assert len(given_text(text)) <= 2 * len(text)
    spell_formula(text)


@pytest.mark.parametrize(
    ("text", "read"), [("2**10", "2**10"), ("2 ** 10", "2 ** 10"), ("[5](x)[6](y)", "5 6"), ("5[^1]6", "5 6"), ("1`2`3", "1 2 3")]
)
def test_marks_of_markdown_that_are_left_out_make_one_number_of_no_two(text: str, read: str) -> None:
    assert plain_of(text) == read
