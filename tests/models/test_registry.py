"""The table of families: what it knows without torch, which checkpoints it recognises, and how a model that cannot be loaded is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lengths
from helpers.speech import rows_of
from omnistage.models import registry
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.family import Family, Mark, ModelEntry, OptionsReader
from omnistage.models.options import LoadOptions
from omnistage.models.registry import FAMILIES, UnknownCheckpoint, UnknownFamily, families, has_default, load, missing_packages, recognise
from omnistage.models.reports import LoadError
from omnistage.models.smol.talker import load_talker

ALONE = ModelEntry("nowhere:Nothing")
FAMILIES_OF_MANY_FORMS: Mapping[str, Family] = {
    **FAMILIES,
    "speaker": Family(models={"thinker": ALONE}, marks=((Mark("config.json", "architectures", ("SpeakerModel", "OldSpeakerModel")),),)),
    "painter": Family(
        models={"diffusion": ALONE},
        marks=((Mark("model_index.json", "_class_name", ("PainterPipeline",)),), (Mark("config.json", "model_type", ("painter",)),)),
    ),
    "twin": Family(models={"diffusion": ALONE}, marks=((Mark("model_index.json", "_class_name", ("PainterPipeline", "TwinPipeline")),),)),
}
"""Those that there are, and three of the forms that checkpoints have elsewhere."""
FAMILY_NAMES = "smol, qwen2_5_omni, qwen3_omni, diffusers, speaker, painter, twin"
"""All that have checkpoints."""


def checkpoint(folder: Path, files: Mapping[str, object]) -> Path:
    for name, values in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    return folder


SMOL = {
    "thinker/config.json": {"model_type": "qwen2_5_omni_thinker"},
    "talker/config.json": {"model_type": "hibari-talker"},
    "code2wav/config.json": {"model_type": "hibari-code2wav"},
}


@pytest.mark.parametrize(
    ("files", "family"),
    [
        (SMOL, "smol"),
        ({"config.json": {"architectures": ["Other", "OldSpeakerModel"]}}, "speaker"),
        ({"config.json": {"architectures": "SpeakerModel"}}, "speaker"),
        ({"config.json": {"model_type": "painter"}}, "painter"),
        ({"model_index.json": {"_class_name": "SomePipeline"}}, "diffusers"),
        ({"model_index.json": {"_class_name": "TwinPipeline"}}, "twin"),
        ({"model_index.json": {"_class_name": "TwinPipeline"}, "config.json": {"model_type": "unet"}}, "twin"),
    ],
)
def test_a_checkpoint_says_of_which_family_it_is(tmp_path: Path, files: Mapping[str, object], family: str) -> None:
    assert recognise(checkpoint(tmp_path, files), FAMILIES_OF_MANY_FORMS) == family


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, f"of no family that there is ({FAMILY_NAMES}): it has neither config.json nor model_index.json"),
        (
            {"config.json": {"model_type": "m", "architectures": ["L"]}},
            "config.json has model_type 'm', config.json has architectures ['L']",
        ),
        ({"config.json": {"x": 1}, "model_index.json": {"y": 1}}, "config.json does not say what it is of, model_index.json does not say"),
        ({"thinker/config.json": {"model_type": "qwen2_5_omni_thinker"}}, "of no family"),
        ({"model_index.json": {"_class_name": "PainterPipeline"}}, "could be a checkpoint of painter or twin: name the family"),
    ],
    ids=["empty", "unknown", "silent", "a part of one", "ambiguous"],
)
def test_a_folder_of_no_family_or_of_several_is_told_as_it_is(tmp_path: Path, files: Mapping[str, object], told: str) -> None:
    with pytest.raises(UnknownCheckpoint) as raised:
        recognise(checkpoint(tmp_path, files), FAMILIES_OF_MANY_FORMS)
    assert told in str(raised.value) and str(tmp_path) in str(raised.value)


def test_a_folder_that_is_none_and_a_config_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnknownCheckpoint, match="it is not a folder"):
        recognise(tmp_path / "nothing")
    (tmp_path / "talker").mkdir()
    (tmp_path / "thinker").mkdir()
    (tmp_path / "thinker" / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"thinker/config\.json is not JSON"):
        recognise(tmp_path)


def test_the_default_model_is_recognised(default_model: Path) -> None:
    assert recognise(default_model) == "smol"


def test_every_entry_names_what_is_there() -> None:
    for name, family in FAMILIES.items():
        for kind, entry in family.models.items():
            assert callable(registry._loader(name, kind))
            if entry.options:
                assert callable(cast(type[OptionsReader], registry._import_name(entry.options)).from_settings)
        if family.default:
            assert callable(registry._import_name(family.default))


@pytest.mark.parametrize("kind", ["talker", "code2wav"])
def test_an_option_of_another_kind_is_refused(kind: str) -> None:
    registry.check("toy-omni", "thinker", LoadOptions(family={"microphone": True, "length": 3}))
    with pytest.raises(LoadError, match=r"unknown options \['microphone'\] of the talker and the code2wav of toy-omni; known are \["):
        registry.check("toy-omni", kind, LoadOptions(family={"microphone": True, "length": 3}))


def test_what_the_table_tells_of_a_family() -> None:
    assert (has_default("smol"), has_default("toy")) == (True, False)
    assert missing_packages("smol") == missing_packages("toy") == []
    with pytest.raises(UnknownFamily, match="no diffusion named 'smol'; there are diffusers, toy"):
        load("smol", "diffusion", LoadOptions())


# Families of other packages -------------------------------------------------------------------------------------------------------------


Bring = Callable[..., None]
MARKED = """
from omnistage.models.family import Family, Mark, ModelEntry
TOY = ModelEntry("omnistage.models.toy.stages:load_thinker")
FAMILY = Family({{"thinker": TOY}}, marks=((Mark("config.json", "model_type", ("{name}",)),),))
"""


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bring:
    """Installs a package that names families, with the code of its module, if it has one."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(entries: str, code: str = "", package: str = "bringing") -> None:
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[omnistage.families]\n{entries}\n")
        if code:
            (tmp_path / f"{package}.py").write_text(code)

    return install


def test_a_family_of_an_installed_package_is_found_and_ours_stay_ours(tmp_path: Path, bring: Bring) -> None:
    bring("brought = bringing:FAMILY\nsmol = bringing:FAMILY", MARKED.format(name="brought"))
    assert load("brought", "thinker", LoadOptions()).info.name == "toy-thinker"
    assert recognise(checkpoint(tmp_path, {"config.json": {"model_type": "brought"}})) == "brought"
    with pytest.raises(UnknownFamily, match="no talker named 'brought'; there are qwen2_5_omni, qwen3_omni, smol, "):
        load("brought", "talker", LoadOptions())
    with pytest.raises(UnknownFamily, match="no thinker named 'nobody'; there are brought, qwen2_5_omni, qwen3_omni, smol, "):
        load("nobody", "thinker", LoadOptions())
    assert has_default("smol")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("brought = not_there:FAMILY", "brought of the package bringing cannot be imported: .*No module named 'not_there'"),
        ("brought = json:FAMILY", "brought of the package bringing cannot be imported: .*FAMILY"),
        ("brought = json:dumps", "brought of the package bringing: json:dumps is no Family but a function"),
    ],
)
def test_a_package_that_does_not_have_what_it_says_is_named(bring: Bring, entry: str, said: str) -> None:
    bring(entry)
    with pytest.raises(LoadError, match=said):
        load("brought", "thinker", LoadOptions())
    assert load("toy", "thinker", LoadOptions()).info.name == "toy-thinker"


def test_a_package_that_cannot_be_imported_hinders_no_other_family(tmp_path: Path, bring: Bring) -> None:
    """Whatever its import raises; it is named where nobody knows a folder."""
    codes = {"raising": "raise RuntimeError('no such device')\n", "misspelt": "def\n", "sound": MARKED.format(name="sound")}
    for package, code in codes.items():
        bring(f"{package} = {package}:FAMILY", code, package)
    assert recognise(checkpoint(tmp_path / "one", {"config.json": {"model_type": "sound"}})) == "sound"
    assert recognise(checkpoint(tmp_path / "two", SMOL)) == "smol"
    assert {"sound", *FAMILIES} <= families().keys() and not {"raising", "misspelt"} & families().keys()
    with pytest.raises(UnknownFamily, match="no talker named 'sound'; there are qwen2_5_omni, qwen3_omni, smol, "):
        load("sound", "talker", LoadOptions())
    with pytest.raises(UnknownCheckpoint, match=r"misspelt of the package misspelt.*raising of the package raising.*no such device"):
        recognise(checkpoint(tmp_path / "three", {"config.json": {"model_type": "other"}}))
    with pytest.raises(LoadError, match="raising of the package raising cannot be imported"):
        load("raising", "thinker", LoadOptions())


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        ("omnistage.models.toy.stages:ToyThinker", "is a class"),
        ("omnistage.models.toy.stages:Thinker", "is not there"),
        ("omnistage.models.toy.stages:REVISION", "is no function"),
    ],
)
def test_an_entry_that_names_no_function_is_told(bring: Bring, loader: str, what: str) -> None:
    """As one that names a class with `loaded`, which was how it was said before."""
    code = f"from omnistage.models.family import Family, ModelEntry\nFAMILY = Family({{'thinker': ModelEntry('{loader}')}})\n"
    module = f"entry_that_{what.replace(' ', '_')}"
    bring(f"brought = {module}:FAMILY", code, module)
    with pytest.raises(LoadError) as raised:
        load("brought", "thinker", LoadOptions())
    told = f"the thinker of brought is loaded by {loader}, which {what}: name a function of (folder, options) that returns the model, "
    assert str(raised.value) == told + "as docs/models.md says"


def test_two_packages_with_one_family_are_both_named(bring: Bring) -> None:
    for package in ("one", "other"):
        bring("brought = json:dumps", package=package)
    with pytest.raises(LoadError, match=r"brought is brought by (one|other) and by (one|other): uninstall one"):
        load("brought", "thinker", LoadOptions())


def test_a_family_with_weights_and_no_checkpoint_of_its_own_asks_for_one(bring: Bring) -> None:
    entry = "ModelEntry('omnistage.models.toy.stages:load_thinker', files=('config.json',))"
    code = f"from omnistage.models.family import Family, ModelEntry\nFAMILY = Family({{'thinker': {entry}}})\n"
    bring("brought = needing:FAMILY", code, "needing")
    with pytest.raises(LoadError, match="brought has no checkpoint of its own: give the folder of one"):
        load("brought", "thinker", LoadOptions())


# Models that cannot be loaded -----------------------------------------------------------------------------------------------------------

Change = Callable[[Path], object]


def config(section: str = "", /, **changes: object) -> Change:
    """Other values in config.json or a section of it; None takes one away."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        place = values[section] if section else values
        place.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del place[name]
        path.write_text(json.dumps(values))

    return change


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:1000])


def weights(**changes: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        values = {**load_file(path), **changes}
        path.unlink()
        save_file({name: value for name, value in values.items() if value is not None}, path)

    return change


def sharded(change_index: Callable[[dict[str, str]], object] = lambda index: None) -> Change:
    """The weights in two files with an index, which is changed then."""

    def change(folder: Path) -> None:
        values = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(values)
        index = {name: f"model-{1 + (place >= len(names) // 2)}-of-2.safetensors" for place, name in enumerate(names)}
        for shard in set(index.values()):
            save_file({name: values[name] for name in names if index[name] == shard}, folder / shard)
        change_index(index)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return change


def copied(default_model: Path, folder: Path, kind: str) -> Path:
    """A copy of one stage of the default model, in a folder of its own."""
    shutil.copytree(default_model / kind, folder / kind)
    return folder


BIAS, SPECTRUM = "m.text.attn.linear1.bias", "dec.3.pw1.weight"


@lengths.drawn_cells(
    10,
    ("kind", "change", "told"),
    [
        ("talker", lambda folder: (folder / "config.json").unlink(), "talker/config.json is missing: give the whole folder"),
        ("talker", lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a JSON object"),
        ("talker", lambda folder: (folder / "config.json").write_bytes(b"\xff{}"), "config.json is not JSON"),
        ("talker", config(model_type="llama"), "is a 'llama', not a 'hibari-talker'"),
        ("talker", config(heads=None), "config.json lacks 'heads'"),
        ("talker", config(heads="two"), "config.json: 'heads' is 'two', which is no int"),
        ("talker", config(embeddings=True), "config.json: 'embeddings' is 'True', which is no int"),
        ("talker", config(symbols=[]), "config.json lacks the object 'symbols'"),
        ("talker", config(symbols={"a": 0.5}), "config.json: 'a' of 'symbols' is '0.5', which is no int"),
        ("thinker", config(text_config=None), "config.json lacks the object 'text_config'"),
        ("thinker", config("text_config", rope_parameters={}), "config.json: text_config: rope_parameters lacks 'rope_theta'"),
        ("thinker", config("text_config", num_hidden_layers=31), "no weight 'layers.30."),
        ("thinker", weights(**{"model.norm.weight": None}), "no weight"),
        ("thinker", weights(**{"model.layers.0.extra.weight": torch.zeros(1)}), "does not"),
        ("talker", lambda folder: (folder / "model.safetensors").unlink(), "talker/model.safetensors is missing: give the whole folder"),
        ("talker", cut("model.safetensors"), "model.safetensors is damaged"),
        ("talker", weights(extra=torch.zeros(2)), "has 1 weights that this model does not, the first is extra"),
        ("talker", weights(**{BIAS: None}), f"lacks 1 weights, the first is {BIAS}"),
        ("talker", weights(**{BIAS: torch.zeros(2)}), f"{BIAS} is (2,), not (256,)"),
        ("talker", sharded(lambda index: index.update({BIAS: "../up"})), "names '../up', which is no file of its own folder"),
        ("talker", sharded(lambda index: index.update({BIAS: "model-0-of-2.safetensors"})), "model-0-of-2.safetensors is missing"),
        ("talker", sharded(lambda index: index.pop(BIAS)), f"does not fit model-1-of-2.safetensors: only one of them has {BIAS}"),
        ("talker", sharded(lambda index: index.update(more="model-2-of-2.safetensors")), "only one of them has more"),
        ("code2wav", cut("model.safetensors"), "model.safetensors is damaged"),
        ("code2wav", weights(**{SPECTRUM: None}), f"lacks 1 weights, the first is {SPECTRUM}"),
        ("code2wav", weights(**{SPECTRUM: torch.zeros(2)}), f"{SPECTRUM} is (2,), not "),
        ("code2wav", weights(**{"dec.9.pw1.weight": torch.zeros(2)}), "the first is dec.9.pw1.weight"),
        ("thinker", cut("tokenizer.json"), "thinker/tokenizer.json is damaged"),
    ],
)
def test_a_checkpoint_that_is_not_as_it_should_be(default_model: Path, tmp_path: Path, kind: str, change: Change, told: str) -> None:
    folder = copied(default_model, tmp_path, kind)
    change(folder / kind)
    with pytest.raises(LoadError) as raised:
        load("smol", kind, LoadOptions(path=folder))
    assert told in str(raised.value)
    assert str(tmp_path / kind) in str(raised.value), "it does not say which folder"


async def test_shards_are_the_same_model_as_one_file(default_model: Path, tmp_path: Path) -> None:
    folder = copied(default_model, tmp_path, "talker")
    sharded()(folder / "talker")
    assert len(list((folder / "talker").glob("*.safetensors"))) == 2
    rows = []
    for path in (folder, default_model):
        model = load_talker(path / "talker")
        rows.append(await rows_of(model, "Two halves are one whole."))
        await model.close()
    assert len(rows[0]) > 10
    np.testing.assert_array_equal(rows[0], rows[1])


LOAD = """
import sys
from pathlib import Path
from omnistage.models.reports import LoadError
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
try:
    load("smol", "talker", LoadOptions(path=Path(sys.argv[1]) if sys.argv[1] else None))
except LoadError as error:
    print(error)
"""


def test_a_package_that_is_missing_is_named(default_model: Path) -> None:
    """In an interpreter of its own, in which the package cannot be imported."""
    program = f"import sys\nsys.modules['hibari'] = None\n{LOAD}"
    done = subprocess.run([sys.executable, "-c", program, ""], capture_output=True, text=True, check=True)
    advice = "`make wheels` in a clone, then pip install --find-links dist 'omnistage[models]'"
    assert done.stdout == f"the package hibari is missing, which smol needs: {advice}\n"


@pytest.mark.skipif(not torch.__version__.endswith("+cpu"), reason="torch here is a build for CUDA")
@pytest.mark.parametrize("kind", ["thinker", "code2wav"])
def test_a_device_that_torch_is_not_built_for_says_what_to_do(kind: str) -> None:
    told = r"device cuda:1: torch \S+\+cpu is a build for CPUs; `make setup DEVICE=cuda` installs one for CUDA"
    with pytest.raises(LoadError, match=told):
        load("smol", kind, LoadOptions(device="cuda:1"))


# Files of another user ---------------------------------------------------------------------------------------------------------------


def unreadable(path: Path | None = None, cache: Path | None = None) -> str:
    """The error of a program that loads a Talker, in a process which the rights of files bind, as they do not bind root."""
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    environment = {**os.environ, **({"OMNISTAGE_CACHE": str(cache)} if cache else {})}
    command = [*bound, sys.executable, "-c", LOAD, str(path or "")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@lengths.drawn_cells(1, "name", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_that_nobody_may_read_is_named(default_model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(default_model / "talker", tmp_path / "talker")
    file = tmp_path / "talker" / name
    file.chmod(0)
    assert unreadable(tmp_path) == f"{file} cannot be read: Permission denied\n"


def test_a_folder_of_the_cache_that_nobody_may_read_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0)
    said = unreadable(cache=cache)
    assert said.startswith(f"{cache}/smol-")
    assert said.endswith(" cannot be read or written: set OMNISTAGE_CACHE to a folder of yours\n")
    cache.chmod(0o700)
