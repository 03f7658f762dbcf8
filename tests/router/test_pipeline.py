"""Pipelines that do not fit are refused before the router is ready, with a text that names the place; YAML of strangers is read in its own
time, or refused in one line."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml

from helpers.chain import router_and_stages
from helpers.servers import CHAIN, CREDENTIALS, local_router, toy_logic
from omnistage.host.errors import StartError
from omnistage.router.pipeline import PipelineError, PipelineFile, check_pipeline, load_pipeline, shipped_pipelines, split_name
from omnistage.router.server import serve_router
from omnistage.router.settings import RouterSettings
from omnistage.router.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_NODES, BadYaml, read_yaml
from omnistage.v1 import stage_pb2, tensor_pb2


def stages(**takes: list[str]) -> list[dict[str, object]]:
    """The three stages; takes: of a kind, instead of the right ones."""
    ports = {"talker": ["hidden"], "code2wav": ["codes"], **takes}
    chain: list[dict[str, object]] = [{"kind": kind, "family": "toy", "takes": ports[kind]} for kind in ports]
    return [{"kind": "thinker", "family": "toy"}, *chain]


FILE: dict[str, object] = {
    "name": "mine",
    "description": "For these tests.",
    "inputs": ["text"],
    "outputs": ["text", "audio"],
    "stages": stages(),
}


def written(folder: Path, **changes: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}))
    return str(path)


@pytest.mark.parametrize("name", shipped_pipelines())
def test_every_shipped_pipeline_is_well_formed(name: str):
    assert load_pipeline(name).name == name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "My Pipeline"}, "name"),
        ({"outputs": []}, "outputs"),
        ({"stages": []}, "stages"),
        ({"stages": [{"kind": "singer", "family": "toy"}]}, "kind"),
        ({"stages": [{"kind": "thinker"}]}, "family"),
        ({"stages": [{"kind": "thinker", "family": "toy", "colour": "red"}]}, "colour"),
        ({"inputs": ["smell"]}, "inputs"),
        ({"surprise": 1}, "surprise"),
        ({"stages": stages(talker=[])}, "stage talker"),
        ({"stages": [{"kind": "thinker", "family": "toy", "takes": ["x"]}]}, "stage thinker"),
        ({"stages": [*stages(), {"kind": "talker", "family": "toy", "takes": ["audio"]}]}, "a kind may occur once"),
        ({"defaults": {"thinker": {"max_token": 3}}}, "defaults of thinker.*max_token"),
        ({"defaults": {"thinker": {"max_tokens": "many"}}}, "defaults of thinker.*max_tokens"),
        ({"defaults": {"singer": {}}}, "singer"),
        ({"on_request": ["audio", "codes"]}, "name audio twice"),
        ({"on_request": ["codes"], "may_give": ["codes"]}, "name codes twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, changes: dict[str, object], says: str):
    with pytest.raises(PipelineError, match=f"(?s)mine.yaml.*{says}"):
        load_pipeline(written(tmp_path, **changes))


def test_a_file_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(PipelineError, match=r"cannot read .*none\.yaml"):
        load_pipeline(str(tmp_path / "none.yaml"))
    with pytest.raises(PipelineError, match=r"no pipeline 'none'; there are .*toy"):
        load_pipeline("none")
    for data in (b"{", b"- 1", b"", b"!!python/object:os.system {}", b"\x00", b"\xff\xfe\xfa"):
        (tmp_path / "bad.yaml").write_bytes(data)
        with pytest.raises(PipelineError, match=r"bad\.yaml"):
            load_pipeline(str(tmp_path / "bad.yaml"))


def described(kind: str) -> stage_pb2.DescribeResponse:
    copy = stage_pb2.DescribeResponse()
    copy.CopyFrom(toy_logic(kind).description)
    return copy


def pipeline_with(**changes: object) -> PipelineFile:
    return PipelineFile.model_validate({**FILE, **changes})


def check(pipeline: PipelineFile | None = None, **changed: stage_pb2.DescribeResponse) -> None:
    check_pipeline(pipeline or pipeline_with(), {kind: changed.get(kind) or described(kind) for kind in CHAIN})


def test_a_server_of_another_kind():
    with pytest.raises(PipelineError, match="given as talker is of another kind"):
        check(talker=described("code2wav"))


def test_a_port_that_the_stage_before_does_not_have():
    with pytest.raises(PipelineError, match=r"talker needs the ports \['hidden'\], the file gives it \['text'\]"):
        check(pipeline_with(stages=stages(talker=["text"])))
    thinker = described("thinker")
    del thinker.produces[1]
    with pytest.raises(PipelineError, match="thinker has no output 'hidden' for talker"):
        check(thinker=thinker)


@pytest.mark.parametrize(
    ("kind", "port", "field", "value", "edge"),
    [
        ("thinker", 1, "width", 64, r"thinker\.hidden > talker\.hidden: width is 64 and must be 32"),
        ("thinker", 1, "payload", stage_pb2.PAYLOAD_CODES, r"thinker\.hidden > talker\.hidden: payload"),
        ("thinker", 1, "element_type", tensor_pb2.ELEMENT_TYPE_INT32, r"thinker\.hidden > talker\.hidden: element_type"),
        ("talker", 0, "rate_millihertz", 12_500, r"talker\.codes > code2wav\.codes: rate_millihertz is 12500 and must be 400000"),
        ("talker", 0, "width", 16, r"talker\.codes > code2wav\.codes: width is 16 and must be 4"),
    ],
)
def test_an_edge_whose_ends_differ(kind: str, port: int, field: str, value: int, edge: str):
    changed = described(kind)
    setattr(changed.produces[port], field, value)
    with pytest.raises(PipelineError, match=edge):
        check(None, **{kind: changed})


def test_the_toy_chain_fits_and_floating_types_may_differ() -> None:
    """The stage that takes the rows converts them."""
    check()
    thinker = described("thinker")
    thinker.produces[1].element_type = tensor_pb2.ELEMENT_TYPE_BFLOAT16
    check(None, thinker=thinker)


def test_two_stages_with_a_port_of_one_name():
    talker = described("talker")
    talker.produces.add(name="text", payload=stage_pb2.PAYLOAD_TEXT)
    with pytest.raises(PipelineError, match="port 'text' is produced by thinker and by talker"):
        check(talker=talker)


def test_an_output_that_nobody_makes():
    with pytest.raises(PipelineError, match="no stage produces the output 'video'"):
        check(pipeline_with(outputs=["text", "video"]))
    with pytest.raises(PipelineError, match="no stage produces the output 'alignment'"):
        check(pipeline_with(on_request=["alignment"]))


def test_what_a_pipeline_may_give_it_gives_where_a_stage_has_it():
    pipeline = pipeline_with(on_request=["hidden"], may_give=["codes", "latents"])
    check(pipeline)
    assert (pipeline.offered, pipeline.could_give) == (("text", "audio", "hidden"), ("hidden", "codes", "latents"))
    settled = pipeline.settled({kind: described(kind) for kind in CHAIN})
    assert (settled.outputs, settled.on_request, settled.may_give) == (("text", "audio"), ("hidden", "codes"), ())
    assert settled.offered == ("text", "audio", "hidden", "codes")
    assert (pipeline.unsure_outputs, settled.unsure_outputs) == (("codes", "latents"), ())
    assert (pipeline.names, settled.names) == ((), (described("thinker").model,))


def test_outputs_that_vary_are_those_that_a_stage_has():
    pipeline = pipeline_with(outputs=["text", "video", "audio"], outputs_vary=True)
    check(pipeline)
    assert pipeline.unsettled.outputs == pipeline.unsure_outputs == ("text", "video", "audio")
    assert pipeline.settled({kind: described(kind) for kind in CHAIN}).outputs == ("text", "audio")
    with pytest.raises(PipelineError, match="no stage produces the output 'video'"):
        check(pipeline_with(outputs=["video"], outputs_vary=True))


def test_a_first_stage_that_needs_input():
    """Media and sound are what a client can stream."""
    thinker = described("thinker")
    thinker.accepts.add(name="audio_in", payload=stage_pb2.PAYLOAD_AUDIO)
    thinker.accepts.add(name="media0", payload=stage_pb2.PAYLOAD_MEDIA)
    check(thinker=thinker)
    thinker.accepts.add(name="rows", payload=stage_pb2.PAYLOAD_TENSOR)
    with pytest.raises(PipelineError, match=r"mine: the first stage, thinker, has input ports \(rows\); a client streams media and sound"):
        check(thinker=thinker)


@pytest.mark.parametrize(
    ("options", "edge"),
    [
        ({"talker": {"width": 64}}, r"edge thinker\.hidden > talker\.hidden: width is 32 and must be 64"),
        ({"code2wav": {"samples_per_frame": 100}}, r"edge talker\.codes > code2wav\.codes: rate_millihertz is 400000 and must be 240000"),
        ({"thinker": {"stamp": True}}, r"edge thinker\.hidden > talker\.hidden: width is 36 and must be 32"),
    ],
)
async def test_a_router_does_not_start_on_stages_that_do_not_fit(options: dict[str, dict[str, object]], edge: str):
    with pytest.raises(StartError, match=edge):
        async with router_and_stages(toy_logic(kind, options.get(kind)) for kind in CHAIN):
            pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline": "toy,toy"}, "there are two pipelines toy; give one another name, --pipeline NAME=toy"),
        ({"pipeline": "a=toy,a=toy-film"}, "there are two pipelines a; give one another name, --pipeline NAME=toy-film"),
        ({"pipeline": "A=toy"}, "no pipeline 'A=toy'; there are "),
        ({"pipeline": "a="}, "no pipeline 'a='; there are "),
        ({"pipeline": "a=toy", "names": {"toy": ["b"]}}, "--names: there is no pipeline toy; there are a"),
    ],
)
async def test_a_router_refuses_names_that_mean_nothing_or_two(settings: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=re.escape(message)):
        await serve_router(RouterSettings(**settings), CREDENTIALS)  # type: ignore[arg-type]


def test_an_existing_path_is_a_file_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a=b.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert [split_name(text) for text in ("a=b.yaml", "a=c.yaml", "b=a=b.yaml", "./a=c.yaml", "toy")] == [
        ("", "a=b.yaml"),
        ("a", "c.yaml"),
        ("b", "a=b.yaml"),
        ("", "./a=c.yaml"),
        ("", "toy"),
    ]


async def test_a_router_does_not_start_without_an_address_for_every_stage():
    with pytest.raises(StartError, match="no address for the talker of toy; give --stages talker=HOST:PORT"):
        async with local_router({"thinker": "127.0.0.1:1"}):
            pass


async def test_a_file_that_says_it_takes_what_its_first_stage_does_not():
    with pytest.raises(PipelineError, match="takes image, its first stage takes text"):
        check(pipeline_with(inputs=["text", "image"]))
    thinker = described("thinker")
    thinker.ClearField("inputs")  # As an older stage says it: nothing, which is text.
    check(thinker=thinker)


# YAML -----------------------------------------------------------------------------------------------------------------------------------


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
