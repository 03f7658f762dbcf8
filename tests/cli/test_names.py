"""Names of pipelines: what is typed before a pipeline or a checkpoint, and what people call a checkpoint."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from helpers import lengths
from helpers.command import omnistage
from helpers.processes import ProcessFamily
from helpers.randomness import SEED
from helpers.serving import serving
from helpers.toy_pipeline import toy_pipeline
from helpers.waiting import until
from omnistage.cli.stack.layout import by_stage
from omnistage.cli.stack.names import NamedPipeline, names_of, split_word, with_own_names
from omnistage.cli.stack.pipelines import Choice, _with_first_names, layout_of
from omnistage.client import Omni
from omnistage.client.connection import Pipeline
from omnistage.client.errors import BadRequestError, UnknownModelError
from omnistage.client.private_stack import StackPlan
from omnistage.models.toy import formulas
from omnistage.router.pipeline import find_called, load_pipeline


def names_in(*words: str, **settings: object) -> list[str]:
    return [one.name for one in layout_of(Choice(words, **settings)).pipelines]  # type: ignore[arg-type]


def test_a_typed_name_is_the_name_of_whatever_is_served(tmp_path: Path) -> None:
    file = toy_pipeline(tmp_path, "one")
    assert names_in("talk=toy", f"ask={file}", "toy-film") == ["talk", "ask", "toy-film"]
    layout = layout_of(Choice([file, f"two={file}"], replicas=by_stage(["thinker=2", "two/thinker=3"], "--replicas")))
    assert [(one.name, one.stages[0].replicas) for one in layout.pipelines] == [("one", 2), ("two", 3)]
    words = layout.router_arguments([])
    assert words[words.index("--pipeline") + 1] == f"one={file},two={file}"


@pytest.mark.parametrize("word", ["Film=toy", "-a=toy", "=toy", "film=", "模=toy", f"{'a' * 65}=toy", "my film=toy"])
def test_what_is_no_name_is_refused_with_one_that_is(word: str) -> None:
    with pytest.raises(BadRequestError, match=r"a name has 1 to 64 of a-z 0-9 \. _ - and begins") as refused:
        names_in(word)
    suggested = re.findall(r"such as (.*)$", refused.value.fields[0].description)[0]
    assert split_word(suggested)[0], "and it is one"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            ["a=toy", "a=toy-film"],
            BadRequestError,
            "PIPELINE: there are two pipelines a: leave one out, or give it another name, such as a-2=",
        ),
        (["a=no/such", "a=toy"], BadRequestError, "there are two pipelines a: "),  # Told before anything is fetched.
        (["toy", "toy"], BadRequestError, "there are two pipelines toy: leave one out, or give it another name, such as toy-2=toy"),
        (["film=/none/such"], UnknownModelError, "no folder /none/such, and no pipeline or model of this name"),
        (["film=none"], UnknownModelError, "no pipeline 'none', and no folder or model of this name"),
        (["./none=such"], UnknownModelError, "no folder ./none=such, and no pipeline or model of this name"),
    ],
)
def test_what_cannot_be_served_under_a_name_is_told(words: Sequence[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        names_in(*words)


def test_an_existing_path_is_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert [split_word(word) for word in ("a=b", "a=c", "a=a=b", "./a=b")] == [("", "a=b"), ("a", "c"), ("a", "a=b"), ("", "./a=b")]


def checkpoints(*names: str, family: str = "diffusers") -> list[NamedPipeline]:
    """Checkpoints of one family, for which no name was typed."""
    return [NamedPipeline(family, Path("/m") / name, family, names_of(name, Path("/m") / name), may_change=True) for name in names]


def test_checkpoints_of_one_family_are_called_by_their_own_names() -> None:
    """One alone keeps the family's name, and so does what was typed or is a file."""
    one, file = checkpoints("Wan 2.2"), NamedPipeline("diffusers", None, "diffusers")
    assert [one.name for one in with_own_names(one)] == ["diffusers"]
    three = checkpoints("Wan 2.2", "stable_audio", "模型")
    assert [one.name for one in with_own_names(three)] == ["wan-2.2", "stable_audio", "diffusers"]
    assert [one.name for one in with_own_names([file, *one])] == ["diffusers", "wan-2.2"]
    with pytest.raises(BadRequestError, match=r"there are two pipelines wan-2\.2: .* such as wan-2\.2-2=/m/wan:2\.2"):
        with_own_names(checkpoints("Wan 2.2", "wan:2.2"))


def test_a_checkpoint_has_the_names_of_its_folder_and_of_the_hub(tmp_path: Path) -> None:
    """A path gives its last part alone, and that only if a terminal and the contract can show it."""
    snapshot = tmp_path / "models--Qwen--Qwen2.5-Omni-7B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    link = tmp_path / "q25"
    link.symlink_to(snapshot)
    assert names_of("Qwen/Qwen2.5-Omni-7B", snapshot) == ("Qwen/Qwen2.5-Omni-7B", "Qwen2.5-Omni-7B")
    assert names_of("Qwen/Qwen2.5-Omni-7B@main", snapshot) == ("Qwen/Qwen2.5-Omni-7B", "Qwen2.5-Omni-7B", "Qwen/Qwen2.5-Omni-7B@main")
    assert names_of(str(link), link) == ("q25", "Qwen2.5-Omni-7B")
    assert names_of("/secret/place/wan", Path("/secret/place/wan")) == ("wan",)
    for name in ("a\nb", "a\udc80b", "\x1b[1m", "a" * 257):
        assert names_of(f"/m/{name}", Path("/m") / name) == ()
    assert names_of("..", tmp_path / "..") == (tmp_path.parent.name,)


def test_settings_are_for_a_pipeline_by_each_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "Sa=a.safetensors").touch()
    one, two = checkpoints("Wan", "Sa")
    pipelines = [NamedPipeline("diffusers", one.folder, "film", one.names), NamedPipeline("diffusers", two.folder, "wan", two.names)]
    choice = Choice(
        devices={"": "cpu", "diffusion": "a", "WAN/diffusion": "b", "sa/diffusion": "c", "none/diffusion": "d", "film/diffusion": "e"},
        settings={"threads": {"SA/diffusion": "2"}},
        loras=["SA=a.safetensors=0.5", "film=b.safetensors", "c.safetensors", f"{tmp_path}/Sa=a.safetensors"],
    )
    renamed = _with_first_names(choice, pipelines)
    assert renamed.devices == {"": "cpu", "diffusion": "a", "wan/diffusion": "c", "none/diffusion": "d", "film/diffusion": "e"}, (
        "a further name is no other pipeline's own"
    )
    assert renamed.settings == {"threads": {"wan/diffusion": "2"}}
    assert renamed.loras == ["wan=a.safetensors=0.5", "film=b.safetensors", "c.safetensors", f"{tmp_path}/Sa=a.safetensors"]


def test_the_client_means_by_a_name_what_the_router_means() -> None:
    rng = random.Random(SEED)
    words = ("a", "B", "b", "c", "A/b", "x", "ß", "SS")
    toy = load_pipeline("toy")
    for _ in range(300):
        names = [[*dict.fromkeys(rng.choices(words, k=rng.randint(0, 3)))] for _ in range(3)]
        files = [toy.model_copy(update={"name": name}).with_names(others) for name, others in zip("abc", names, strict=True)]
        listed = [Pipeline(one.name, (), (), (), (), "", names=one.names) for one in files]
        for word in words:
            matches = [one.name for one in find_called(word, files)]
            assert [one.name for one in Pipeline.find_called(word, listed)] == matches


def test_names_are_a_setting_like_any_other(tmp_path: Path) -> None:
    """In a file and a variable, of the command and of the client."""

    def printed(*words: str, **variables: str) -> object:
        done = omnistage("serve", *words, "--print-config", variables=variables)
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)["pipeline"]

    folder, file = tmp_path / "a b", tmp_path / "stack.yaml"
    folder.mkdir()
    words = [f"film={folder}", "talk=toy"]
    file.write_text(yaml.safe_dump({"pipeline": {"film": str(folder), "talk": "toy"}}))
    assert printed("--config", str(file)) == printed(*words) == words
    assert printed(OMNISTAGE_SERVE_PIPELINE=f"film={folder}") == f"film={folder}", "a path with a space is one word"
    assert printed(OMNISTAGE_SERVE_PIPELINE=f"'film={folder}' talk=toy") == words
    for pipeline in ({"film": str(folder), "talk": "toy"}, words):
        assert StackPlan({"pipeline": pipeline}).order["pipelines"] == tuple(words)
    assert StackPlan({"pipeline": "film=toy"}).order["pipelines"] == ("film=toy",)
    with pytest.raises(BadRequestError, match=r"must be text, or a list of texts, or a dict by name, such as \{'film': 'DIR'\}"):
        StackPlan({"pipeline": {"film": 7}})  # type: ignore[dict-item]


def test_a_stack_is_asked_by_names(family: ProcessFamily) -> None:
    with serving(family, "talk=toy", "art=toy-picture") as server, Omni(address=server.address()) as omni:
        assert server.report("serving ") == "art"
        asyncio.run(until(lambda: omni.pipelines()[-1].state == "ready"))  # The router has asked the stage for its name then.
        expected = formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        for name in ("talk", "Talk", "toy-thinker"):
            answer = omni.generate("Hi", seed=1, pipeline=name)
            assert (answer.text, answer.pipeline) == (expected, "talk")
        assert len(omni.draw("a kite", pipeline="TOY-diffusion").pictures) == 1
        with pytest.raises(
            UnknownModelError, match=r"this router has talk \(toy-thinker\), art \(toy-diffusion\); did you mean toy-thinker\?"
        ):
            omni.generate("Hi", pipeline="toy-thinkr")
        listed = omnistage("pipelines", "--address", omni.address)
        assert [word for word in ("talk", "toy-thinker", "art", "toy-diffusion") if word not in listed.stdout] == []


@lengths.long_form("cli/test_names.py::test_a_stack_is_asked_by_names", unkept="a private stack starts what is asked by a further name")
def test_a_private_stack_is_asked_by_names(family: ProcessFamily) -> None:
    with Omni(pipeline={"art": "toy-picture", "talk": "toy"}) as omni:
        assert len(omni.draw("a kite").pictures) == 1
        assert omni.generate("Hi", pipeline="TALK").text
    assert family.wait_ended() == []
