"""The config of a Qwen3-Omni checkpoint's Talker, from its config.json. Each voice is an item of the Talker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from omnistage.engine.parts import DecoderConfig, ExpertSizes
from omnistage.models.checkpoint.decoder import RopeConfig, attention_biases, decoder_sizes, expert_sizes, rope_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config, read_config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.qwen3_omni.config import SECTIONS
from omnistage.models.qwen3_omni.family import FAMILY, MODEL_TYPE
from omnistage.models.qwen3_omni.wave.config import wave_config
from omnistage.models.registry import check_said
from omnistage.models.speech.talker import AXES

MAX_GROUPS = 64
"""Largest number of codes of a frame, because each has weights of its own. The published number is 16."""

RESERVED = 1024
"""Number of items at the end of the Talker's items that are no codes; Transformers bans them, except the end."""


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Items of the Talker that are no codes. `eos` ends a speech; the others stand before its first frame."""

    bos: int
    eos: int
    pad: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class TextIds:
    """Token ids of the Thinker: bos: before the first token of an answer; eos: after its last token; pad: for nothing."""

    bos: int
    eos: int
    pad: int


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """The config of the code predictor. decoder: its items are the codes of all further codebooks, one codebook after the other. ids:
    number of ids of one codebook. biased: see `decoder_weights`."""

    decoder: DecoderConfig
    rope: RopeConfig
    ids: int
    biased: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    """The config of a Talker. decoder: has two item ids more than the checkpoint, `text_item` and `medium`, which are no codes. text: token
    ids for the rows that the Talker adds. codes: first codes are below this number. row_size: width of the rows that come from the Thinker.
    between: width between the two products that map such a row to the width of the decoder. biased: see `decoder_weights`. speakers: name
    of a voice -> its item. rate_hz: frames in a second."""

    decoder: DecoderConfig
    experts: ExpertSizes
    rope: RopeConfig
    biased: tuple[str, ...]
    predictor: PredictorConfig
    codec: CodecIds
    text: TextIds
    speakers: Mapping[str, int]
    codes: int
    row_size: int
    between: int
    rate_hz: float

    @property
    def groups(self) -> int:
        return self.decoder.codebooks

    @property
    def text_item(self) -> int:
        """The item of a row that is a token of text."""
        return self.decoder.vocab_size - 2

    @property
    def medium(self) -> int:
        """The item of a row of a picture, a film or sound."""
        return self.decoder.vocab_size - 1

    @property
    def silent(self) -> frozenset[int]:
        """Items that are neither codes nor the end, from which Code2Wav could make no sound."""
        return frozenset(range(self.codes, self.text_item)) - {self.codec.eos}


def read_talker_config(directory: Path) -> TalkerConfig:
    """Read the config of the checkpoint in a folder. Raises BadCheckpoint."""
    root_config = read_config(directory, MODEL_TYPE)
    check_said(root_config, FAMILY, "talker")
    config, wave = root_config.section("talker_config"), root_config.section("code2wav_config")
    check_plain(root_config, config)
    text, row_size = config.section("text_config"), config.size("thinker_hidden_size")
    if row_size != root_config.section("thinker_config").section("text_config").value("hidden_size", int):
        raise BadCheckpoint(f"{config.place}: 'thinker_hidden_size' is {row_size}, which is not that of the rows of the Thinker")
    decoder, predictor = decoder_sizes(text), _predictor(config, wave)
    codec = CodecIds(
        bos=config.value("codec_bos_id", int),
        eos=config.value("codec_eos_token_id", int),
        pad=config.value("codec_pad_id", int),
        nothink=config.value("codec_nothink_id", int),
        think_bos=config.value("codec_think_bos_id", int),
        think_eos=config.value("codec_think_eos_id", int),
    )
    talker = TalkerConfig(
        decoder=replace(
            decoder,
            vocab_size=decoder.vocab_size + 2,
            given_width=row_size,
            codebooks=config.size("num_code_groups", MAX_GROUPS),
            further_ids=predictor.ids,
        ),
        experts=expert_sizes(text, normalized=False, shared="shared_expert_intermediate_size"),
        rope=rope_of(text, axes=AXES, default_sections=SECTIONS),
        biased=attention_biases(text),
        predictor=predictor,
        codec=codec,
        text=TextIds(*(root_config.value(f"tts_{name}_token_id", int) for name in ("bos", "eos", "pad"))),
        speakers=config.table("speaker_id", int),
        codes=min(decoder.vocab_size - RESERVED, wave.size("codebook_size")),
        row_size=row_size,
        between=text.size("intermediate_size"),
        rate_hz=wave_config(wave).frame_rate_hz,
    )
    _check_together(config, talker)
    return talker


def _check_together(config: Config, talker: TalkerConfig) -> None:
    """Raises BadCheckpoint if values of the config do not fit each other."""
    if talker.codes < 1:
        raise BadCheckpoint(f"{config.place}: 'vocab_size' is {talker.text_item}, of which the last {RESERVED} are no codes: none is left")
    if not talker.speakers:
        raise BadCheckpoint(f"{config.place}: 'speaker_id' names no voice")
    codec, codes, text_item = talker.codec, talker.codes, talker.text_item
    special = (codec.bos, codec.eos, codec.pad, codec.nothink, codec.think_bos, codec.think_eos, *talker.speakers.values())
    for item in special:
        if not codes <= item < text_item:
            raise BadCheckpoint(f"{config.place}: item {item} is a code, or none: special items are {codes} to {text_item - 1}")
    inner = config.section("code_predictor_config")
    for name, value, expected in (
        ("num_code_groups", inner.value("num_code_groups", int), talker.groups),
        ("hidden_size", talker.predictor.decoder.hidden_size, talker.decoder.hidden_size),
    ):
        if value != expected:
            raise BadCheckpoint(f"{inner.place}: {name!r} is {value}, and that of the Talker is {expected}")


def _predictor(config: Config, wave: Config) -> PredictorConfig:
    """Read the config of the code predictor. wave: the section about Code2Wav, which must fit the predictor. Raises BadCheckpoint."""
    inner = config.section("code_predictor_config")
    groups, ids = inner.size("num_code_groups", MAX_GROUPS), inner.size("vocab_size")
    if groups < 2:
        raise BadCheckpoint(f"{inner.place}: 'num_code_groups' is {groups}: a frame has two codes at least")
    if (quantizers := wave.size("num_quantizers")) != groups:
        raise BadCheckpoint(f"{wave.place}: 'num_quantizers' is {quantizers}, and a frame of the Talker has {groups} codes")
    if (codebook_size := wave.size("codebook_size")) < ids:
        raise BadCheckpoint(f"{wave.place}: 'codebook_size' is {codebook_size}, and the Talker draws codes below {ids}")
    decoder = replace(decoder_sizes(inner), vocab_size=(groups - 1) * ids, context=groups)
    return PredictorConfig(decoder, rope_of(inner), ids, attention_biases(inner))


USUAL_VOICE = "ethan"
"""The default voice, as in Transformers' `generate`, if the checkpoint has it."""


def voices_in_order(speakers: Mapping[str, int]) -> dict[str, int]:
    """The items of the voices by name, the default voice first."""
    return {name: speakers[name] for name in sorted(speakers, key=lambda name: name.lower() != USUAL_VOICE)}
