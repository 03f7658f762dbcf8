"""YAML of strangers is read in its own time, or refused in one line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from omnistage.router.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_NODES, BadYaml, read_yaml


def read(tmp_path: Path, text: str) -> object:
    (tmp_path / "a.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    return read_yaml(tmp_path / "a.yaml")


def bomb(form: str, levels: int) -> str:
    return "\n".join(["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, levels))])


BAD = {
    "a bomb of aliases": (bomb("[{}]", 9), "line 2: aliases (*NAME) are not taken; write the value out"),
    "a bomb of merges": (bomb("{{<<: [{}]}}", 9), "line 2: aliases (*NAME) are not taken"),
    "itself": ("&a\nname: *a", "aliases (*NAME) are not taken"),
    "deep lists": ("a: " + "[" * 100_000, f"values are nested in more than {MAX_DEPTH} others"),
    "deep mappings": ("".join(" " * n + "a:\n" for n in range(500)), "values are nested in more than"),
    "a day that there is not": ("a: 2020-99-99", "month must be in 1..12"),
    "an hour that there is not": ("a: 2020-01-01 99:00:00", "hour must be in 0..23"),
    "a number of many digits": ("a: " + "9" * 100_000, f"line 1: this number has more than {MAX_DIGITS} characters"),
    "a number in base 16": ("a: 0x" + "f" * 100_000, "this number has more than"),
    "a number in base 60": ("a: " + "1:" * 100_000 + "1", "this number has more than"),
    "a tag of Python": ("!!python/object/apply:os.system [ls]", "line 1: tags (!NAME) are not taken"),
    "a tag that does not fit": ("a: 1\nb: !!bool x", "line 2: tags (!NAME) are not taken"),
    "a tag of an empty number": ("a: !!int ''", "tags (!NAME) are not taken"),
    "many keys": ("".join(f"k{number}: 1\n" for number in range(MAX_NODES)), f"these are more than {MAX_NODES} values"),
    "many empty lists": ("[" + "[]," * MAX_NODES + "]", "line 1: these are more than"),
    "no character": ("a: \x00", "special characters are not allowed"),
    "no UTF-8": ("a: \udcff", "no text in UTF-8"),
    "much": ("a: " + "x" * MAX_BYTES, "more than 256 KiB"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=[*BAD])
def test_what_is_no_yaml_of_ours_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadYaml) as refused:
        read(tmp_path, text)
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300


def any_value(chance: random.Random, depth: int = 0) -> object:
    match chance.choice(["text", "number", "truth", "none"] + ["list", "mapping"] * (depth < 5)):
        case "text":
            return "".join(chance.choices("ab :#-[]{}'\"\\n%é日", k=chance.randrange(12)))
        case "number":
            return chance.choice([chance.randint(-(10**9), 10**9), chance.uniform(-1, 1)])
        case "truth":
            return chance.random() < 0.5
        case "list":
            return [any_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case "mapping":
            return {f"k{number}": any_value(chance, depth + 1) for number in range(chance.randrange(4))}
    return None


def test_all_else_is_read_as_yaml_reads_it(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        text = yaml.safe_dump(any_value(chance), allow_unicode=True, default_flow_style=chance.choice([True, False, None]))
        assert read(tmp_path, text) == yaml.safe_load(text)
