"""Addresses: web addresses, mail, files, names of accounts and topics."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import Form, alternatives, form, table
from omnistage.models.smol.spoken.numbers import amount, bare, digits, letters

_TOP = alternatives(
    table("com org net edu gov mil io ai dev app co uk de fr jp eu us ca au info me tv ly gg xyz tech cloud int ch nl it es se")
)
_SPELLED = frozenset(
    table("txt md py js ts html htm css xml csv tsv pdf png jpg jpeg mp3 mp4 wav ogg gz tgz bz2 xz rs cpp hpp rb php sh yml exe dll")
)
_READ = frozenset(
    table(
        "git json yaml toml tar zip doc docx xls xlsx ppt pptx log ini cfg conf bat java go c h svg gif bmp flac jsonl lock env sql bin iso"
    )
)
_SPELLED |= frozenset(table("docx xls xlsx ppt pptx cfg sql svg bmp c h ipynb db so"))
_EXTENSION = alternatives(_SPELLED | _READ)
_SIGNS = {
    ".": "dot",
    "/": "slash",
    "\\": "backslash",
    "-": "dash",
    "_": "underscore",
    "@": "at",
    ":": "colon",
    "~": "tilde",
    "+": "plus",
    "#": "hash",
    "?": "question mark",
    "=": "equals",
    "&": "and",
    "%": "percent",
    "*": "star",
    "$": "dollar",
    ",": "comma",
    "'": "",
    "(": "",
    ")": "",
    "!": "",
    ";": "",
}
_PIECES = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿ]+|\d+|.")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def spell(text: str) -> str:
    """A name of a machine, a file or an account in words, every sign by its name."""
    words = []
    pieces = _PIECES.findall(text)
    for place, piece in enumerate(pieces):
        if piece.isdecimal():
            words.append(digits(piece) if len(piece) > 4 else bare(piece))
        elif piece in _SIGNS:
            words.append(_SIGNS[piece])
        elif place and pieces[place - 1] == "." and piece.lower() in _SPELLED:
            words.append(letters(piece))
        else:
            words.append(_CAMEL.sub(" ", piece) if piece.isalpha() else "")
    return " ".join(word for word in words if word)


def _web(match: re.Match[str]) -> str:
    """The host, port and path of a web address, without the query after a question mark and the fragment after a hash.

    The user's name is left out too: a password may follow it."""
    words = spell(re.sub(r"(?i)^www\.", "", match["host"]))
    if match["port"]:
        words += f" port {amount(match['port'])}"
    path = match["path"] or ""
    return words if path == "/" else f"{words} {spell(path)}".rstrip()


def _text(match: re.Match[str]) -> str:
    return spell(match.group())


def _glob(match: re.Match[str]) -> str | None:
    """A pattern of file names in words: *.log, **/*.py. None if the stars are something else."""
    return spell(match.group()) if re.search(r"\*\.\w|\*/", match.group()) else None


def _handle(match: re.Match[str]) -> str:
    return f"at {spell(match['name'])}"


def _hashtag(match: re.Match[str]) -> str:
    return f"hashtag {spell(match['name'])}"


def _snake(match: re.Match[str]) -> str:
    return spell(match.group()).replace(" underscore", "")


_END = r"(?=[.,;:!?)\"'”*]*(?:\s|\x00|$))"
_HOST = r"[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}"
_PORT = r"(?::(?P<port>\d{1,5}))?"
_PATH = r"(?P<path>(?:/[^\s?#\"”<>]{0,200}?)?)(?P<query>[?#][^\s\"”<>]{0,400}?)?"
_LABELS = r"(?:[A-Za-z0-9][\w-]{0,62}\.){1,8}"
_NAME = r"[\w.+@*-]{1,80}"
ADDRESSES: tuple[Form, ...] = (
    form(
        rf"(?i:(?:https?|ftp|wss?|ssh|postgres(?:ql)?|redis|mongodb|amqp)://(?:[^\s/@?#\"”<>]{{0,200}}@)?|(?=www\.\w))(?P<host>{_HOST}){_PORT}{_PATH}{_END}",
        _web,
    ),
    form(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,6}:(?=[\w~/])[\w.~/+-]{1,200}(?<![.])", _text),
    form(r"(?:mailto:)?(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}", _text),
    form(rf"(?<![\w.@-])(?P<host>{_LABELS}(?:{_TOP})|localhost(?=[:/])){_PORT}(?![\w-]|\.\w){_PATH}{_END}", _web),
    form(rf"(?<![\w.@/-])[A-Za-z0-9_][\w-]{{0,63}}(?:\.[\w-]{{1,20}}){{0,3}}\.(?:{_EXTENSION})(?![\w-])", _text),
    form(r"(?<![\w.@-])(?:Node|Vue|Next|Nuxt|React|Express|Three|D3|Backbone|Ember|Alpine)\.(?:js|JS)\b", _text),
)
"""Forms that begin with a letter or a digit."""
PATHS: tuple[Form, ...] = (
    form(r"(?<!\w)[A-Za-z]:[\\/](?!/)(?:[\w.+@ -]{1,80}[\\/]){0,20}(?:[\w.+@-]{1,80}(?<![.-]))?", _text),
    form(r"(?<!\w)\\\\[\w.-]{1,80}(?:\\[\w.+@-]{1,80}){1,20}", _text),
    form(rf"(?<![\w.)/!])(?:~|\.{{1,2}})?(?:/{_NAME}){{1,24}}(?<![.,])/?(?![\w])", _text),
    form(r"(?<![\w.)/])(?:~|\.{1,2})/(?![\w/])", _text),
    form(rf"(?<![\w.)/])[A-Za-z_][\w.-]{{0,60}}(?:/{_NAME}){{1,24}}\.(?:{_EXTENSION})(?![\w-])", _text),
    form(r"(?<![\w.)/*])\*{1,2}(?:/[\w.*-]{1,80}){0,8}\.?[\w-]{0,20}(?<=[\w*])(?<!^\*)(?=[,;:)\"'”.!?]*(?:\s|$))", _glob),
    form(
        r"(?<![\w.)/])\.(?:env|git\w{0,12}|bash\w{1,8}|zsh\w{1,8}|vimrc|npmrc|profile|ssh|venv|editorconfig|dockerignore)(?![\w-])", _text
    ),
    form(r"(?<![\w.&])@(?P<name>[A-Za-z_]\w{0,40}(?:\.\w{1,40})?)", _handle),
    form(r"(?<![\w&])#(?![A-Z]{1,3}-\d)(?P<name>[A-Za-z_]\w{0,80}|\d{1,4}[A-Z]\w{1,80})", _hashtag),
)
SNAKES: tuple[Form, ...] = (form(r"(?<!\w)_{0,2}[A-Za-z][A-Za-z0-9]{0,40}(?:_[A-Za-z0-9]{1,40}){1,12}_{0,2}(?!\w)", _snake),)
