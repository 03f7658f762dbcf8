"""Checkpoints by their name at a hub: what is fetched, what is found again, and what is told where it cannot be had."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.http_servers import BLOCK
from helpers.hub_server import FETCHING, File, HubServer, fetched, fetching, hub_server
from helpers.mounts import run_on_mount
from helpers.waiting import until
from omnistage.models.fetch.hub import HubName, hub_name

CONFIG = File(b'{"model_type": "words"}')
SMALL = {
    "config.json": CONFIG,
    "tokenizer.json": File(b'{"version": "1.0"}'),
    "merges.txt": File(b"a b"),
    "chat_template.jinja": File(b"{{ messages }}"),
    "preprocessor_config.json": File(b"{}"),
    "talker/config.json": File(b'{"model_type": "spoken"}'),
    "spk_dict.pt": File(b"speakers"),
}
UNWANTED = {
    "README.md": File(b"# Words"),
    ".gitattributes": File(b"*.bin"),
    "pytorch_model.bin": File(b"a pickle"),
    "training_args.pt": File(b"a pickle"),
    "model.onnx": File(b"graph"),
    "modeling_words.py": File(b"raise SystemExit"),
}
SHARDS = {"weight_map": {"a": "diffusion_pytorch_model-1.safetensors", "b": "diffusion_pytorch_model-2.safetensors"}}
PARTS = {**dict.fromkeys(("transformer", "text_encoder", "tokenizer"), ("library", "Class")), "safety": [None, None]}
DRAWING = {
    "model_index.json": File(json.dumps({"_class_name": "DrawingPipeline", **PARTS}).encode()),
    "transformer/diffusion_pytorch_model.safetensors.index.json": File(json.dumps(SHARDS).encode()),
} | {
    path: File(path.encode())
    for path in (
        *("scheduler/scheduler_config.json", "text_encoder/config.json", "text_encoder/model.safetensors"),
        *("tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer/spiece.model", "tokenizer/chat_template.jinja"),
        *("transformer/config.json", *(f"transformer/{shard}" for shard in SHARDS["weight_map"].values())),
    )
}
"""A checkpoint in the layout of diffusers: nothing but the list of its parts is at its top."""

UNWANTED_PARTS = {
    path: File(path.encode())
    for path in (
        *("README.md", "transformer/diffusion_pytorch_model.bin", "transformer/diffusion_pytorch_model.fp16.onnx"),
        *("text_encoder/modeling_encoder.py", "examples/cat.png"),
    )
}
PART = 10 * BLOCK
"""The bytes that huggingface_hub writes at once: nothing else is left of a file that was cut."""

LARGE = random.Random(1).randbytes(PART + 2 * BLOCK)
CUT = PART + BLOCK

BROKEN = {f"{path}, {named}": (path, named) for path in ("model.safetensors", "tokenizer.json") for named in ("by branch", "by commit")}
"""A file of a checkpoint that is asked for by its branch or by a commit."""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


def words(weights: bytes = b"weights") -> dict[str, File]:
    return {**SMALL, **UNWANTED, "model.safetensors": File(weights)}


def files_of(folder: str | Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def wanted(files: dict[str, File]) -> dict[str, bytes]:
    return {path: file.data for path, file in files.items() if path not in UNWANTED}


def fetched_on_mount(hub: HubServer, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[dict[str, Any]]:
    """As `fetched`, with a cache on a disk of 4 MiB."""
    for name, value in hub.environment(Path("/dev/shm/home")).items():
        monkeypatch.setenv(name, value)
    return [json.loads(line) for line in run_on_mount("4m", FETCHING, arguments=names).splitlines()]


def ranges(hub: HubServer) -> list[str]:
    """Those that the storage was asked for, of the weights."""
    return [asked.range for asked in hub.asked if (asked.host, asked.what) == ("storage", "model.safetensors")]


def partials(home: Path) -> list[int]:
    """Sizes of the files that were begun. Folders may come and go meanwhile."""
    begun = [Path(folder) / name for folder, _, names in os.walk(home) for name in names if name.endswith(".incomplete")]
    sizes = []
    for path in begun:
        with suppress(FileNotFoundError):  # It has its name by now.
            sizes.append(path.stat().st_size)
    return sizes


# Names ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-Omni-3B", HubName("Qwen/Qwen2.5-Omni-3B", "main")),
        ("a/b@v1.0", HubName("a/b", "v1.0")),
        ("a/b@refs/pr/4", HubName("a/b", "refs/pr/4")),
        *[(text, None) for text in ("smol", "a/b/c", "/a/b", "./a", "../a", "a/", "a/b@", "a/b@../x")],
        *[(text, None) for text in ("a/b..c", "a/b--c", "a b/c", "a/b.git")],
    ],
)
def test_what_looks_like_a_name(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name


# Fetching -------------------------------------------------------------------------------------------------------------------------------


def test_what_is_wanted_comes_once_and_weights_come_last(hub: HubServer, tmp_path: Path) -> None:
    files = words()
    commit = hub.add("org/words", files)
    (first,) = fetched(hub.environment(tmp_path), "org/words")
    assert first["commit"] == commit and first["folder"].endswith(f"/models--org--words/snapshots/{commit}")
    assert files_of(first["folder"]) == wanted(files)
    assert first["had_weights"] == [False], "the family was to be recognised before the weights were fetched"
    (plan,) = first["plans"]
    total = sum(map(len, wanted(files).values()))
    assert (plan["name"], plan["commit"], plan["size"], plan["missing"]) == ("org/words@main", commit, total, total)
    assert plan["cache"] == str(tmp_path / "hub") and plan["free"] > total
    assert sorted(set(hub.fetched())) == sorted(wanted(files)) and set(hub.fetched()[-2:]) == {"model.safetensors"}
    assert {asked.what for asked in hub.asked if asked.what.startswith("api ")} == {"api info", "api tree"}, (
        "nothing else was told or asked"
    )
    assert not any("torch" in asked.agent for asked in hub.asked)
    hub.asked.clear()
    by_branch, by_commit = fetched(hub.environment(tmp_path), "org/words", f"org/words@{commit}")
    assert by_branch["folder"] == by_commit["folder"] == first["folder"]
    assert [plan["missing"] for said in (by_branch, by_commit) for plan in said["plans"]] == [0, 0]
    assert [asked.what for asked in hub.asked] == ["api info"], "for the branch; a commit means the same for ever"


def test_a_revision_is_pinned(hub: HubServer, tmp_path: Path) -> None:
    old = hub.add("org/words", words(b"old"))
    (first,) = fetched(hub.environment(tmp_path), "org/words")
    new = hub.add("org/words", words(b"new"))
    hub.repositories["org/words"].refs["v1"] = old
    hub.asked.clear()
    second, tag, pinned = fetched(hub.environment(tmp_path), "org/words", "org/words@v1", f"org/words@{new}")
    assert (first["commit"], second["commit"], tag["commit"], pinned["commit"]) == (old, new, old, new)
    contents = [files_of(said["folder"])["model.safetensors"] for said in (first, second, tag, pinned)]
    assert contents == [b"old", b"new", b"old", b"new"]
    assert set(hub.fetched()) == {"model.safetensors"}, "what the commits have in common was there"


def test_tokens_are_shown_to_the_hub_and_to_nobody_else(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/gated", words(), gate="of-a-friend")
    hub.add("org/private", words(), token="of-a-friend")
    refused = fetched(hub.environment(tmp_path), "org/gated", "org/private")
    assert [said["error"] for said in refused] == ["AccessRefused", "UnknownName"]
    assert refused[0]["text"].startswith("org/gated is gated: ask for access on its page, and give a token")
    assert refused[1]["text"] == "the hub has no org/private, or shows it to nobody without the right token in HF_TOKEN"
    hub.asked.clear()
    answers = fetched({**hub.environment(tmp_path), "HF_TOKEN": "of-a-friend"}, "org/gated", "org/private")
    assert [answer["had_weights"] for answer in answers] == [[False], [False]]
    assert {(asked.host, asked.token) for asked in hub.asked} == {("hub", "of-a-friend"), ("storage", "")}


def test_a_file_that_is_cut_goes_on_where_it_stopped(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/words", words(LARGE))
    hub.cut["model.safetensors"] = CUT
    (said,) = fetched(hub.environment(tmp_path), "org/words")
    assert files_of(said["folder"])["model.safetensors"] == LARGE
    assert ranges(hub) == ["", f"bytes={PART}-"]


async def test_who_comes_later_waits_and_goes_on_with_what_a_killed_one_had(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/words", words(LARGE))
    hub.stall["model.safetensors"] = CUT
    environment = hub.environment(tmp_path)
    with fetching(environment, "org/words") as killed:
        await until(lambda: partials(tmp_path) == [PART])
        with fetching(environment, "org/words") as later:
            await until(lambda: [asked.what for asked in hub.asked].count("api info") == 2)
            killed.kill()
            out, _ = later.communicate(timeout=60)
    assert files_of(json.loads(out)["folder"])["model.safetensors"] == LARGE
    assert (ranges(hub), partials(tmp_path)) == (["", f"bytes={PART}-"], [])


def test_other_bytes_than_the_hub_has_are_not_kept(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/words", words())
    hub.damaged.add("model.safetensors")
    (said,) = fetched(hub.environment(tmp_path), "org/words")
    assert said["error"] == "HubError" and "came with other bytes than the hub says" in said["text"]
    hub.damaged.clear()
    (said,) = fetched(hub.environment(tmp_path), "org/words")
    assert files_of(said["folder"]) == wanted(words())


@lengths.one_or_all("where", BROKEN)
@lengths.drawn_cells(2, "change", ["cut short", "grown", "unlinked and cut short", "gone behind its link"])
def test_what_is_broken_in_the_cache_is_fetched_anew(hub: HubServer, tmp_path: Path, where: str, change: str, seed: int) -> None:
    path, named = BROKEN[lengths.draw(where, BROKEN, seed)]
    files = words(LARGE)
    name = "org/words" if named == "by branch" else f"org/words@{hub.add('org/words', files)}"
    hub.add("org/words", files)
    (first,) = fetched(hub.environment(tmp_path), name)
    linked = Path(first["folder"]) / path
    blob, right = linked.resolve(), linked.read_bytes()
    assert linked.is_symlink()
    if change == "unlinked and cut short":
        linked.unlink()
    if change == "gone behind its link":
        blob.unlink()
    else:
        blob.write_bytes(right + b"more" if change == "grown" else right[:-1])
    hub.asked.clear()
    (again,) = fetched(hub.environment(tmp_path), name)
    (plan,) = again["plans"]
    assert plan["missing"] == len(right)
    assert files_of(again["folder"]) == wanted(files)
    assert set(hub.fetched()) == {path}, "all else was whole"


def test_what_is_broken_in_the_cache_is_not_served_without_a_hub(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/words", words())
    (first,) = fetched(hub.environment(tmp_path), "org/words")
    with (Path(first["folder"]) / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    (offline,) = fetched({**hub.environment(tmp_path), "HF_HUB_OFFLINE": "1"}, "org/words")
    assert offline["error"] == "HubUnreachable"


def test_a_file_that_is_never_as_long_as_the_hub_says_is_told(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/words", words() | {"merges.txt": File(b"a b", told_size=4)})
    (said,) = fetched(hub.environment(tmp_path), "org/words")
    assert said["error"] == "HubError" and said["text"].startswith("merges.txt of org/words@main is not 4 bytes long, as the hub says")


# Names that cannot be had ---------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_had_is_told_in_one_line(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/words", words())
    hub.add("org/pickled", {"config.json": CONFIG, "pytorch_model.bin": File(b"a pickle")})
    hub.add("org/huge", {"config.json": CONFIG, "model.safetensors": File(b"few", told_size=1 << 60)})
    told = {
        "org/none": ("UnknownName", "the hub has no org/none, or shows it to nobody without the right token"),
        "org/words@v2": ("UnknownName", "org/words has no revision 'v2': give a branch, a tag or a whole commit of it"),
        f"org/words@{'0' * 40}": ("UnknownName", f"org/words has no revision '{'0' * 40}'"),
        "org/pickled": ("NoWeights", "org/pickled@main has no weights as safetensors, and no others are read"),
        "org/huge": ("DiskFull", f"org/huge@main: 1073741824 GiB are to be fetched, and {tmp_path}/hub has "),
    }
    for name, said in zip(told, fetched(hub.environment(tmp_path), *told), strict=True):
        error, text = told[name]
        assert said["error"] == error and said["text"].startswith(text), said
        assert "\n" not in said["text"]
    assert hub.fetched() == [] and not (tmp_path / "hub").exists()


def test_a_disk_that_is_too_small_is_told_before_and_one_that_fills_is_told_then(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a byte fills a page of the disk."""
    hub.add("org/words", words(LARGE))
    small = {f"{number}/config.json": File(b"[%d]" % number) for number in range(32)}
    hub.add("org/larger", {**small, "model.safetensors": File(LARGE[: 4 * BLOCK - 16 * resource.getpagesize()])})
    before, then = fetched_on_mount(hub, monkeypatch, "org/words", "org/larger")
    assert before["error"] == then["error"] == "DiskFull"
    assert before["text"].startswith("org/words@main: 12 MiB are to be fetched, and /dev/shm/home/hub has 4 MiB free: make room, or set")
    assert then["text"].startswith("the disk of /dev/shm/home/hub is full: make room, or set HF_HOME")
    assert "merges.txt" not in hub.fetched()


STRANGE: dict[str, Mapping[str, object]] = {
    "absolute": {"rfilename": "/etc/merges.txt"},
    "above": {"rfilename": "../../merges.txt"},
    "through": {"rfilename": "a/../merges.txt"},
    "nul": {"rfilename": "a\0merges.txt"},
    "half-pair": {"rfilename": "\ud800merges.txt"},
    "number": {"rfilename": 5},
    "size-text": {"size": "3"},
    "size-negative": {"size": -3},
    "size-part": {"size": 3.5},
    "size-endless": {"size": 10**400},
    "blob-above": {"blobId": "../../refs/main"},
    "blob-number": {"blobId": 5},
    "hash-short": {"lfs": {"sha256": "0", "oid": "0", "size": 3, "pointerSize": 134}},
    "hash-none": {"lfs": {"size": 3}},
    "tree": {"path": 5},
    "sha-none": {"sha": None},
    "sha-absolute": {"sha": "/home/me"},
    "sha-above": {"sha": "../.."},
}
"""Facts that a hub tells of merges.txt, or of the repository."""


def test_a_list_that_cannot_be_is_no_hubs(hub: HubServer, tmp_path: Path) -> None:
    for name, told in STRANGE.items():
        hub.add(f"org/{name}", words())
        hub.repositories[f"org/{name}"].told = {"" if "sha" in told else "merges.txt": told}
    for name, said in zip(STRANGE, fetched(hub.environment(tmp_path), *(f"org/{name}" for name in STRANGE)), strict=True):
        assert said.get("error") == "HubUnreachable", (name, said)
        assert said["text"] == f"{hub.endpoint} does not answer as a hub does: check HF_ENDPOINT"
    assert hub.fetched() == []


@pytest.mark.parametrize("path", ["model.safetensors", "tokenizer.json"])
def test_no_more_is_written_than_the_hub_has_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The bytes that come at once, which are PART at most, are held and not written."""
    hub.add("org/words", words() | {path: File(LARGE, told_size=BLOCK)})
    (said,) = fetched_on_mount(hub, monkeypatch, "org/words")
    assert said["error"] == "HubError" and ": the hub sends more than the 1 MiB that it told: try again later" in said["text"]


Cached = tuple[HubServer, Path, str, str]
"""A hub, the home of a cache that has all of org/words, and its commit and folder there."""


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    home = tmp_path_factory.mktemp("home")
    with hub_server() as hub:
        commit = hub.add("org/words", words())
        (said,) = fetched(hub.environment(home), "org/words")
        yield hub, home, commit, said["folder"]


@pytest.mark.parametrize("why", ["closed", "offline", "nonsense", "deep", "drips", "down"])
def test_without_a_hub_the_cache_is_used_and_told(cached: Cached, free_port: int, why: str) -> None:
    hub, home, commit, folder = cached
    environment = hub.environment(home)
    if why == "closed":
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port}"
    elif why == "offline":
        environment["HF_HUB_OFFLINE"] = "1"
    pages = {"nonsense": b"<html>Please log in</html>", "deep": b"[" * 100_000, "drips": b" " * 100_000}
    hub.page, hub.drips, hub.status = pages.get(why), why == "drips", 503 if why == "down" else 0
    names = ("org/words", f"org/words@{commit}", "org/other")
    branch, pinned, other = fetched(environment, *names, list_limit_s=2.0 if why == "drips" else None)
    assert branch["folder"] == pinned["folder"] == folder
    assert [plan["is_unasked"] for said in (branch, pinned) for plan in said["plans"]] == [why != "offline", False]
    assert other["error"] == "HubUnreachable" and "\n" not in other["text"]
    assert {
        "closed": f"the hub at {environment['HF_ENDPOINT']} is not reached, and the cache has not all of org/other@main: check the network",
        "offline": f"org/other@main is not in the cache {home}/hub, and HF_HUB_OFFLINE forbids to fetch it: unset it once",
        "nonsense": f"{hub.endpoint} does not answer as a hub does: check HF_ENDPOINT",
        "deep": f"{hub.endpoint} does not answer as a hub does: check HF_ENDPOINT",
        "drips": f"{hub.endpoint} has not told its files after 2 s: try again later",
        "down": "the hub answers with status 503 for org/other@main: try again later",
    }[why] in other["text"]


def test_a_part_of_a_checkpoint_is_none(cached: Cached, tmp_path: Path) -> None:
    """A file that is missing, as the library's list has it, and without that list as the index of the shards has it."""
    hub, home, commit, _ = cached
    shutil.copytree(home, tmp_path / "home", symlinks=True)
    (store,) = (tmp_path / "home" / "hub").glob("models--*")
    folder = store / "snapshots" / commit
    offline = {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    (folder / "tokenizer.json").unlink()
    assert [said.get("error") for said in fetched(offline, "org/words", f"org/words@{commit}")] == ["HubUnreachable"] * 2
    shutil.rmtree(store / "trees")
    assert fetched(offline, "org/words")[0]["folder"] == str(folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fetched(offline, "org/words")[0]["error"] == "HubUnreachable"


# Folders in folders ---------------------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_drawing_model_are_fetched_and_found_again(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/draws", {**DRAWING, **UNWANTED_PARTS})
    environment = hub.environment(tmp_path)
    (said,) = fetched(environment, "org/draws")
    assert files_of(said["folder"]) == {path: file.data for path, file in DRAWING.items()}
    assert set(hub.fetched()) == set(DRAWING)
    assert said["folder"].endswith(f"/snapshots/{commit}")
    hub.asked.clear()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert [again["folder"] for again in fetched(offline, "org/draws", f"org/draws@{commit}")] == [said["folder"]] * 2
    assert hub.asked == []


@lengths.drawn_cells(1, "lost", ["transformer/diffusion_pytorch_model-2.safetensors", "text_encoder", "tokenizer"])
def test_a_drawing_model_without_a_part_is_none(hub: HubServer, tmp_path: Path, lost: str) -> None:
    """Without the library's list of files, which only programs of our time leave: by the indices in the folders and the list of parts."""
    hub.add("org/draws", DRAWING)
    environment = hub.environment(tmp_path)
    (said,) = fetched(environment, "org/draws")
    for store in (tmp_path / "hub").glob("models--*"):
        shutil.rmtree(store / "trees")
    offline, place = {**environment, "HF_HUB_OFFLINE": "1"}, Path(said["folder"]) / lost
    assert fetched(offline, "org/draws")[0]["folder"] == said["folder"]
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert fetched(offline, "org/draws")[0]["error"] == "HubUnreachable"
