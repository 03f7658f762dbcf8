"""Written forms in words: a table of the forms, and the rules that hold for any text. A form reads the same wherever it stands: in quotes
and brackets, before marks, beside others; and no mark joins two numbers."""

from __future__ import annotations

import random
import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hibari.g2p import G2P
from hypothesis import given
from hypothesis import strategies as st

from helpers import lengths
from omnistage.models.smol.phrase import PhraseCutter
from omnistage.models.smol.spoken.abbreviations import KINDS, PARTS, RULER_TITLES, RULERS
from omnistage.models.smol.spoken.notations import Notations
from omnistage.models.smol.spoken.numbers import ONES, TENS, cardinal, ordinal
from omnistage.models.smol.spoken.reader import NAMES, is_open, read_aloud, read_phrase
from omnistage.models.smol.spoken.rules import Rule, read_rules


def read_forms(table: str) -> list[tuple[str, ...]]:
    """Pairs of what is written and the words it becomes."""
    lines = (Path(__file__).parent / table).read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines if not line.startswith("# ")]


FORMS = read_forms("written_forms.tsv")
WRITTEN = [written for written, _ in FORMS]
NUMBERS = frozenset((*ONES, *TENS, *(ordinal(number) for number in range(20)), "hundred", "thousand", "million", "zeroth"))


def words_of(text: str) -> str:
    """The words alone: small letters, no punctuation; letters that are read one by one stand apart."""
    return words_in(read_aloud(text).text)


def words_in(said: str) -> str:
    """The words of what is said, as of `words_of`."""
    said = unicodedata.normalize("NFKC", said).lower()
    said = re.sub(r"\b(?:[a-z]\.){2,}|\b[a-z]\.(?=[a-z])", lambda match: match.group().replace(".", " "), said)
    return " ".join(re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", said))


def test_the_table_is_large() -> None:
    assert len(FORMS) == len(set(WRITTEN)) > 1000


def words_said(text: str) -> str:
    """The words of a text as they are spoken: cut into phrases that are read one by one."""
    cutter = PhraseCutter(plain=True)
    return words_in(" ".join(read_phrase(phrase.text).text for phrase in [*cutter.feed(text), *cutter.flush()]))


def test_every_written_form_is_spoken_in_the_words_of_the_table() -> None:
    """Though a text is cut into phrases before it is read."""
    assert [(written, words_said(written)) for written, _ in FORMS] == FORMS
    assert words_said('He said, "I want it, the screen at 55", and left.') == "he said i want it the screen at fifty five and left"


def test_each_row_of_the_rules_is_needed_by_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that no form of the two tables needs is a claim without a proof, or stands behind a row that reads all that it would read."""
    rows_read, words = set[str](), Rule.words

    def count(rule: Rule, found: re.Match[str]) -> str | None:
        said = words(rule, found)
        if said is not None:
            rows_read.add(rule.row)
        return said

    monkeypatch.setattr(Rule, "words", count)
    forms = [*FORMS, *read_forms("rare_forms.tsv")]
    assert [(written, words_of(written)) for written, _ in forms] == forms
    rows = [rule.row for _, rule in read_rules("rules.tsv", NAMES)]
    assert [row for row in rows if row not in rows_read] == []
    assert len(rows) > 350


@pytest.mark.parametrize(
    ("before", "behind"), [("We saw ", ", and left."), ("It was written (", ")."), ("“", "”, they said."), ("So: ", "")]
)
def test_a_form_is_read_alike_wherever_it_stands(before: str, behind: str) -> None:
    """But for those that the table has at the beginning or the end of a text for that very reason."""
    other = []
    for written, words in FORMS:
        ends = written.endswith((".", "!", "…")) and not written.endswith(("St.", "p.m.", "a.m.")) and not words.endswith("factorial")
        inside = written.rstrip(".!…") if ends else written
        whole = " ".join(f"{words_of(before)} {words} {words_of(behind)}".split())
        if words_of(f"{before}{inside}{behind}") != whole:
            other.append(written)
    assert other == []


def test_a_phrase_may_end_where_no_form_is_open() -> None:
    """The text before such a place and the text behind it are read alike apart and together. Formulas are words before a text is cut."""
    for written in WRITTEN:
        notations = Notations()
        placed = [*notations.feed(f"They say {written} in the end"), *notations.flush()]
        words = "".join(character for character, _ in placed).split(" ")
        whole = words_of(" ".join(words))
        for number in range(1, len(words)):
            before, behind = " ".join(words[:number]), " ".join(words[number:])
            if not is_open(before) and before[-1] not in ",.;:!?":
                assert f"{words_of(before)} {words_of(behind)}".strip() == whole, (before, behind)


def test_prose_is_not_held_back() -> None:
    text = "Paris has many museums where people look at pictures they like when the weather outside turns bad again"
    assert not any(is_open(text[: match.start()]) for match in re.finditer(" ", text))


@lengths.rounds(3000, 200_000)
def test_a_word_with_a_capital_is_no_number(seed: int, rounds: int) -> None:
    """Behind a name, a title or a word that may count, with words of a large lexicon whose first letter is a Roman numeral's."""
    contexts = sorted(RULERS | RULER_TITLES | PARTS | KINDS)
    names = sorted(
        {word.capitalize() for word in G2P().lexicon.golds.d if word.isalpha() and len(word) > 1 and word[0] in "ivxlcdmIVXLCDM"}
    )
    draw = random.Random(seed)
    for _ in range(rounds):
        text = f"{draw.choice(contexts)} {draw.choice(names)}"
        assert read_aloud(f"{text} came.").text == f"{text} came."
    for context in contexts:
        for letter in "CDLM":
            assert read_aloud(f"{context} {letter} came.").text == f"{context} {letter} came."


@pytest.mark.parametrize("numeral", ["MIX", "CIVIL", "DC", "MD", "CD", "LCD", "MC", "DIM", "MILD", "VIVID", "IC", "XM", "VX", "IIII"])
def test_letters_that_are_a_word_or_a_name_are_no_number(numeral: str) -> None:
    for context in ("King", "Louis", "Chapter", "Type", "World War", "Part"):
        assert read_aloud(f"{context} {numeral} is").text == f"{context} {numeral} is"


def test_numbers_in_words() -> None:
    assert [cardinal(one) for one in (0, 13, 20, 99, 100, 101, 1000, 10**6 + 1)] == [
        *("zero", "thirteen", "twenty", "ninety nine", "one hundred", "one hundred one"),
        *("one thousand", "one million one"),
    ]
    assert [ordinal(one) for one in (1, 2, 3, 8, 12, 20, 21, 100, 1000)] == [
        *("first", "second", "third", "eighth", "twelfth", "twentieth", "twenty first", "one hundredth", "one thousandth"),
    ]


@pytest.mark.parametrize(
    "form", ["at 3am", "at 9 p.m", "see a.txt", "in the U.S", "on Main St", "use Node.js", "open src/main.py", "Smith Jr"]
)
@pytest.mark.parametrize("behind", [".", "?", "!", ",", ";", ":", '."', ".)", '".', ").", ". Then", ".” Then"])
def test_a_stop_that_a_form_ends_with_is_the_only_one(form: str, behind: str) -> None:
    assert ".." not in read_aloud(f"We met {form}{behind}").text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A "size 7" and a "size 8".', "a size seven and a size eight"),
        ('He said "8 1/2" x 11"."', "he said eight and one half inches by eleven inches"),
        ("'The wall is 6' tall', he said.", "the wall is six feet tall he said"),
        ('"The screen is 27"," he said.', "the screen is twenty seven inches he said"),
        ("In May 5 new shops opened.", "in may five new shops opened"),
        ("On May 5 new shops opened.", "on may fifth new shops opened"),
        ("the July 4 celebrations", "the july fourth celebrations"),
    ],
)
def test_what_a_number_means_is_seen_by_what_stands_beside_it(text: str, words: str) -> None:
    """A mark behind it is told from the end of a quotation; before a day one says "on", and "in May" has no day."""
    assert words_of(text) == words


DOCS = Path(__file__).parents[2] / "docs"
PROSE = [
    *("J. R. R. Tolkien wrote it.", "E. B. White and C. S. Lewis", "Malcolm X spoke.", "George W. Bush won.", "Harry S. Truman"),
    *("vitamin C. I take vitamin D. And vitamin B.", "I. I said so.", "It is I. Do not fear.", "James' book and Charles' hat"),
    *("'Tis the season, y'all'd've known", "Don't, won't, she'd, they'll, I'm", "a) one", "Grade A. Plan B. Team C.", "IV. Results"),
    *("“Where are you?” - “Here,” he said - “and there.”", "He walked in - she left - and so on.", "rock 'n' roll"),
    *("a state-of-the-art idea", "Mary I know well.", "Charles I saw yesterday.", "Book I liked", "Volume I own", "in the part I liked"),
    *("No. I will not.", "No. I'm not.", "the art. I left.", "No. It is so.", "the sun. In May we go.", "We sat down. Mar and Jan came."),
    *("Go to bed. Ed came.", "May I come?", "Louis C.K. is here", "et al. said", "the D.C. area", "X marks the spot", "MIX and LIVID"),
    *("“C” is a letter", "I, Claudius", "Dec and Ant", "Shall I compare thee to a summer's day?"),
    *("O Captain! my Captain! our fearful trip is done,", "the ref. Max said", "Go to it! I did!"),
]


def prose() -> list[str]:
    """Sentences of the documentation that have no digit, no sign, no name of a file and no unit."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=[-*|#])", text):
            found += re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split()))
    plain = re.compile(r"[A-Za-z ,.;:!?'\"()-]*[a-z][A-Za-z ,.;:!?'\"()-]*")
    return [one for one in found if plain.fullmatch(one) and not re.search(r"\w\.\w|\b(?:[KMG]iB|MB|GB)\b", one)]


def test_prose_stays_as_it_is() -> None:
    assert len(prose()) > 500
    for text in (*PROSE, *prose()):
        assert re.findall(r"[^\W\d_]+", unicodedata.normalize("NFKC", read_aloud(text).text)) == re.findall(r"[^\W\d_]+", text)


SIGNS = ["", *" ,.:-–−/x×+=%°$€()'\"^*²½é😀"]
WORDS = [
    *("a", "the", "km", "pm", "King", "No.", "zip", "on", "March", "IV", "version", "v", "hello", "St.", "I", "US", "bn", "m/s²", "C:\\"),
    "@",
]
PIECES = st.one_of(st.sampled_from(SIGNS), st.sampled_from(WORDS), st.sampled_from(WRITTEN), st.integers(0, 99999).map(str))
TEXTS = st.lists(PIECES, max_size=12).map("".join) | st.lists(PIECES, max_size=12).map(" ".join)


@given(TEXTS)
def test_any_text_of_forms_is_read_without_a_digit_or_a_sign_left(text: str) -> None:
    reading = read_aloud(text)
    assert not re.search(r"[\d%°$€£×÷±−=+<>^@²½]", reading.text)
    assert reading.borders[0] == (0, 0)
    assert reading.borders[-1] == (max(len(text.split()), 1), len(reading.words))
    assert list(reading.borders) == sorted(set(reading.borders)) or len(text.split()) != len(set(reading.borders))


@given(TEXTS, st.randoms(use_true_random=False))
def test_no_digit_vanishes(text: str, draw: random.Random) -> None:
    """With another digit in its place the text is read otherwise.

    The query of a web address, and the place in its page, are not read at all."""
    places = [match.start() for match in re.finditer("[1-9]", text)]
    if not places or re.search(r"\?|/\S*#", text):
        return
    place = draw.choice(places)
    other = draw.choice([digit for digit in "123456789" if digit != text[place]])
    assert read_aloud(text).text != read_aloud(text[:place] + other + text[place + 1 :]).text


@given(st.text(alphabet="abcdefghijklmnopqrstuvwyzABCEFGHJKNOPQRSTUWYZ .,;:!?'\"()-—", max_size=200))
def test_no_number_appears(text: str) -> None:
    written = re.findall("[a-z]+", text.lower())
    assert [word for word in re.findall("[a-z]+", read_aloud(text).text.lower()) if word in NUMBERS and word not in written] == []


@pytest.mark.parametrize(
    ("text", "unspoken"),
    [
        ("Hello 😀 there 世界.", ("😀", "世界")),
        ("Αθήνα and α", ("Αθήνα",)),
        ("5 ≤ 6 · 7 → 8, “yes” – all… café, №5 ™ ½", ()),
        ("a ⠿ b ᚠ", ("⠿", "ᚠ")),
        ("हिन्दी text", ("हिन्दी",)),
        ("Hello there, “you” – all… café.", ()),
        ("The sign says 你好 to everyone, Привет.", ("你好", "Привет")),
        ("I ❤️ you 👩‍👩‍👧 all", ("❤️", "👩‍👩‍👧")),
        ("• one ■ two \u200b ｀", ("•", "■")),
    ],
)
def test_what_has_no_words_is_told(text: str, unspoken: tuple[str, ...]) -> None:
    assert read_aloud(text).unspoken == unspoken


HOSTILE = (
    *("word ", "1", "7 ", "1,", "1.", "1/", "1-", "-", "a.", "a@", "/a", "\\a", "C:\\", "x^", "$1", "(", "'", '"', "1'", "1°", "²", "½"),
    *("I", "IV ", "a_", "#a", "@a", "1:1:", "+1 (2", "2**", "1e", "0x", "a&", "漢", "αβγ", "1 000 ", "1x", "http://a", "a.com/", "~/"),
    *("No. ", "|1", "|x|", "n!", '5" ', "v1.1-", "1.1-a.", "a:1::", "::", "*.", "*/", "$(1", "(1) ", "1 % ", "1. ", "of (", "221B Baker "),
    *("³√", "f/", "C:/", "C:/a/", "0049 ", "001 11 ", "1:", "1:50,000", "(i) ", "(i", "XIXth", "1,1-", "1.x", "-x + ", "http://a@"),
    *("http://a:", "5ft", "$1M-", "1~", "abcdef12-", "$", "$a+", "\\(", "&a", "{", "\\frac{", "'a ", '"1', "--", "1--", "`1", "1″", "1′"),
    *("”", "≈ ", "= 1", "$$x^", "Mon-", "March ", "1 1/2", "€1.234,", "1st", "v1.", "km/", "A ", "f(", "AA:", "3x-", "…", "\u200b"),
    "e\u0301",
)


DRAWN = 2


@lengths.some_or_all("unit", HOSTILE, DRAWN)
def test_time_is_linear_in_any_text(unit: str) -> None:
    """Otherwise this does not end within the time limit of a test."""
    unit = lengths.draw_of(unit, HOSTILE, DRAWN, "hostile texts")
    text = (unit * 60_000)[:60_000]
    assert read_aloud(text).borders[-1][0] == max(len(text.split()), 1)


NOT_HEARD = frozenset(("Cc", "Cf", "Cs", "Zs", "Zl", "Zp", "Mn", "Mc", "Me", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"))
"""Kinds of characters that are spaces, punctuation, or parts of others."""
LIKE_PUNCTUATION = "`\u1fef｀´\u1ffdʼʹ\u0374|｜∶"
"""Those of the remaining characters that are written for an apostrophe, a prime, a colon or a pause."""


def test_every_letter_number_and_symbol_is_spoken_or_told() -> None:
    """Alone: a word or a place in unspoken."""
    characters = map(chr, (*range(0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x10000), *range(0x1D400, 0x1FB00)))
    meant = [one for one in characters if unicodedata.category(one) not in NOT_HEARD]
    silent = [one for one in meant if not (reading := read_aloud(f"a {one} b")).unspoken and len(re.findall(r"\w+", reading.text)) == 2]
    assert [one for one in silent if one not in LIKE_PUNCTUATION] == []


@pytest.mark.parametrize("text", ["a *** b", "a >>> b", "f***", "a • b", "a ◦ b", "a ⁂ b", "a === b", "⟨x⟩", "a ▪ b"])
def test_marks_in_a_text_are_told(text: str) -> None:
    assert read_aloud(text).unspoken


# Places ---------------------------------------------------------------------------------------------------------------------------------


QUOTES = [(pair[0], pair[1]) for pair in ("''", '""', "‘’", "“”", "«»", "„“", "‹›", "「」", "()", "[]", "{}")]
PLACES = (
    *(("", mark) for mark in (",", ";", ":", ".", "!", "?", "…", "?!", ")", "]", " –", " — so", ", and so on")),
    *(("Well, ", ", he said."), ("It says: ", "; and more."), ("Then — ", " — again."), ("I know ", ""), ("> ", ""), ("* ", "")),
)
OWN_PLACE = frozenset(("(only 5!)",))
"""Forms that another exclamation mark makes a formula of."""
LISTED = frozenset(("Part I", "James I and Charles I", "Book I liked"))
"""Forms of which "and" makes a list."""


@cache
def lexicon() -> G2P:
    return G2P()


def sounds_of(text: str) -> list[tuple[str, str]]:
    """Each token of the words with its phonemes."""
    g2p = lexicon()
    return [(token.text, token.phonemes or "") for token in g2p.phonemize_tokens(g2p.tokenize(read_aloud(text).text))]


def silent(sounds: list[tuple[str, str]]) -> list[str]:
    """Words without a sound."""
    return [token for token, phonemes in sounds if any(map(str.isalnum, token)) and not any(map(str.isalpha, phonemes))]


@lengths.rounds(300, len(FORMS))
def test_a_form_reads_the_same_in_quotes_and_brackets(seed: int, rounds: int) -> None:
    """By its words and by its phonemes, and no word is without a sound."""
    for written, words in random.Random(seed).sample(FORMS, rounds):
        plain = [phonemes for _, phonemes in sounds_of(written)]
        for opening, closing in QUOTES:
            quoted = f"{opening}{written}{closing}"
            sounds = sounds_of(quoted)
            assert words_of(quoted) == words, quoted
            assert read_aloud(quoted).unspoken == read_aloud(written).unspoken, quoted
            assert silent(sounds) == [], quoted
            if opening not in "([{":
                assert [phonemes for _, phonemes in sounds] == plain, quoted


@lengths.rounds(300, len(FORMS))
def test_a_form_reads_the_same_before_marks_and_within_sentences(seed: int, rounds: int) -> None:
    for written, words in random.Random(seed).sample(FORMS, rounds):
        for before, behind in PLACES:
            is_cut = bool(behind) and written.endswith((".", "!", "…", "?"))
            if not (is_cut or (behind.startswith("!") and written in OWN_PLACE) or ("and so" in behind and written in LISTED)):
                whole = " ".join(f"{words_of(before)} {words} {words_of(behind)}".split())
                assert words_of(f"{before}{written}{behind}") == whole, (before, written, behind)


@lengths.rounds(500, 5000)
def test_forms_drawn_in_quotes_beside_others(seed: int, rounds: int) -> None:
    """Two forms in one sentence, each in marks of its own: each keeps its words, and each word has a sound."""
    draw = random.Random(seed)
    for _ in range(rounds):
        (one, its_words), (other, other_words) = draw.sample([form for form in FORMS if not re.search(r"[\"'‘’“”′″.!?]", form[0])], 2)
        (first, last), (third, fourth) = draw.choice(QUOTES[2:]), draw.choice(QUOTES[2:])
        begin, end = draw.choice(("", "Here is ", "We read: ")), draw.choice((".", "?", " too."))
        between = draw.choice((" is beside ", ", then ", "; but "))
        text = f"{begin}{first}{one}{last}{between}{third}{other}{fourth}{end}"
        whole = f"{words_of(begin)} {its_words} {words_of(between)} {other_words} {words_of(end)}"
        assert words_of(text) == " ".join(whole.split()), text
        assert silent(sounds_of(text)) == [], text


CHARACTERS = map(chr, (*range(0x21, 0x3300), *range(0xFE00, 0x10000)))
MARKS = [mark for mark in CHARACTERS if (category := unicodedata.category(mark))[0] in "PSM" or category == "Cf"]
PAUSES = frozenset("!(),.:∶;?…|[]{}'\"")
"""Marks that are heard as a rest, or that are a part of a number or a time."""


@pytest.mark.parametrize(("first", "last"), [("5", "10"), ("1914", "1918"), ("3", "7")])
def test_no_mark_makes_one_number_of_two(first: str, last: str) -> None:
    """Each mark of Unicode between two numbers."""
    one = words_of(f"{first}{last}")
    assert len(MARKS) > 2000
    assert [mark for mark in MARKS if words_of(f"{first}{mark}{last}") == one] == []


def test_a_mark_between_two_numbers_is_said_told_or_a_rest() -> None:
    """Marks that are seen: not those of emoji, and none that only say how other characters join."""
    silent = []
    for mark in MARKS:
        reading = read_aloud(f"5{mark}10")
        is_plain = unicodedata.normalize("NFKC", mark) in PAUSES or unicodedata.category(mark) in ("Cf", "Ps", "Pe", "Pi", "Pf")
        rests = re.search(r"[,.;:!?…()—]", reading.text) is not None
        if words_of(f"5{mark}10") == "five ten" and not (reading.unspoken or rests or is_plain or mark in "\u20e3\ufe0e\ufe0f"):
            silent.append(mark)
    assert silent == []
