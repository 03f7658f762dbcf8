"""The names that a family of your own imports, as docs/models.md uses them. A name stays here when our own modules change.

A name is loaded when it is asked for, so that those of the entry of a family (Family, ModelEntry, Mark) load no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnistage.engine.adapter import DecoderSpec as DecoderSpec
    from omnistage.engine.adapter import Head as Head
    from omnistage.engine.adapter import Hidden as Hidden
    from omnistage.engine.adapter import TokenHead as TokenHead
    from omnistage.engine.decoder import DecoderParts as DecoderParts
    from omnistage.engine.decoder import PackedDecoder as PackedDecoder
    from omnistage.engine.detokenizer import Detokenizer as Detokenizer
    from omnistage.engine.engine import Engine as Engine
    from omnistage.engine.request import Prompt as Prompt
    from omnistage.engine.request import SequenceRequest as SequenceRequest
    from omnistage.engine.results import fixed_results as fixed_results
    from omnistage.engine.scheduler import SchedulerLimits as SchedulerLimits
    from omnistage.models.checkpoint.files import BadCheckpoint as BadCheckpoint
    from omnistage.models.checkpoint.files import Config as Config
    from omnistage.models.checkpoint.files import read_config as read_config
    from omnistage.models.checkpoint.revision import compute_on_thread as compute_on_thread
    from omnistage.models.checkpoint.revision import revision as revision
    from omnistage.models.checkpoint.weights import Weights as Weights
    from omnistage.models.conversation import Media as Media
    from omnistage.models.conversation import Streamed as Streamed
    from omnistage.models.conversation import TextConstraint as TextConstraint
    from omnistage.models.conversation import Turn as Turn
    from omnistage.models.devices import dtype_of as dtype_of
    from omnistage.models.encoders.thinker import MediaThinker as MediaThinker
    from omnistage.models.family import Family as Family
    from omnistage.models.family import Mark as Mark
    from omnistage.models.family import ModelEntry as ModelEntry
    from omnistage.models.interface import Activity as Activity
    from omnistage.models.interface import Alignment as Alignment
    from omnistage.models.interface import BadRequest as BadRequest
    from omnistage.models.interface import Clip as Clip
    from omnistage.models.interface import Code2WavModel as Code2WavModel
    from omnistage.models.interface import Content as Content
    from omnistage.models.interface import DiffusionModel as DiffusionModel
    from omnistage.models.interface import DrawRequest as DrawRequest
    from omnistage.models.interface import ElementType as ElementType
    from omnistage.models.interface import EncodedPicture as EncodedPicture
    from omnistage.models.interface import Failed as Failed
    from omnistage.models.interface import FinishReason as FinishReason
    from omnistage.models.interface import Frames as Frames
    from omnistage.models.interface import Full as Full
    from omnistage.models.interface import Load as Load
    from omnistage.models.interface import ModelInfo as ModelInfo
    from omnistage.models.interface import Note as Note
    from omnistage.models.interface import Piece as Piece
    from omnistage.models.interface import PortSpec as PortSpec
    from omnistage.models.interface import Preview as Preview
    from omnistage.models.interface import PromptRead as PromptRead
    from omnistage.models.interface import Sampling as Sampling
    from omnistage.models.interface import Sound as Sound
    from omnistage.models.interface import SpeechRequest as SpeechRequest
    from omnistage.models.interface import SpokenWord as SpokenWord
    from omnistage.models.interface import StepsDone as StepsDone
    from omnistage.models.interface import TalkerModel as TalkerModel
    from omnistage.models.interface import TensorRows as TensorRows
    from omnistage.models.interface import TextPiece as TextPiece
    from omnistage.models.interface import TextRequest as TextRequest
    from omnistage.models.interface import ThinkerModel as ThinkerModel
    from omnistage.models.interface import Unspoken as Unspoken
    from omnistage.models.interface import Wanted as Wanted
    from omnistage.models.interface import WaveRequest as WaveRequest
    from omnistage.models.media.spool import MEDIA_PORTS as MEDIA_PORTS
    from omnistage.models.media.spool import Spool as Spool
    from omnistage.models.options import LoadOptions as LoadOptions
    from omnistage.models.options import validate_options as validate_options
    from omnistage.models.options import with_resumed as with_resumed
    from omnistage.models.reports import LoadError as LoadError
    from omnistage.models.requests import check_constraint as check_constraint
    from omnistage.models.requests import check_medium as check_medium
    from omnistage.models.requests import check_parts as check_parts
    from omnistage.models.requests import check_place as check_place
    from omnistage.models.requests import refuse_unfit as refuse_unfit
    from omnistage.models.text.answer import AnswerAssembler as AnswerAssembler
    from omnistage.models.text.answer import answer_pieces as answer_pieces
    from omnistage.models.text.chat import TextTokenizer as TextTokenizer
    from omnistage.models.text.constraint import Constraints as Constraints
    from omnistage.models.text.constraint import refuse_dead_ends as refuse_dead_ends
    from omnistage.models.text.grammar import FORMS as FORMS
    from omnistage.models.text.thinker import EngineThinker as EngineThinker
    from omnistage.models.worker import Worker as Worker
    from omnistage.models.worker import make_ahead as make_ahead

_NAMES: Mapping[str, tuple[str, ...]] = {
    "omnistage.engine.adapter": ("DecoderSpec", "Head", "Hidden", "TokenHead"),
    "omnistage.engine.decoder": ("DecoderParts", "PackedDecoder"),
    "omnistage.engine.detokenizer": ("Detokenizer",),
    "omnistage.engine.engine": ("Engine",),
    "omnistage.engine.request": ("Prompt", "SequenceRequest"),
    "omnistage.engine.results": ("fixed_results",),
    "omnistage.engine.scheduler": ("SchedulerLimits",),
    "omnistage.models.checkpoint.files": ("BadCheckpoint", "Config", "read_config"),
    "omnistage.models.checkpoint.revision": ("compute_on_thread", "revision"),
    "omnistage.models.checkpoint.weights": ("Weights",),
    "omnistage.models.conversation": ("Media", "Streamed", "TextConstraint", "Turn"),
    "omnistage.models.devices": ("dtype_of",),
    "omnistage.models.encoders.thinker": ("MediaThinker",),
    "omnistage.models.family": ("Family", "Mark", "ModelEntry"),
    "omnistage.models.interface": (
        "Activity",
        "Alignment",
        "BadRequest",
        "Clip",
        "Code2WavModel",
        "Content",
        "DiffusionModel",
        "DrawRequest",
        "ElementType",
        "EncodedPicture",
        "Failed",
        "FinishReason",
        "Frames",
        "Full",
        "Load",
        "ModelInfo",
        "Note",
        "Piece",
        "PortSpec",
        "Preview",
        "PromptRead",
        "Sampling",
        "Sound",
        "SpeechRequest",
        "SpokenWord",
        "StepsDone",
        "TalkerModel",
        "TensorRows",
        "TextPiece",
        "TextRequest",
        "ThinkerModel",
        "Unspoken",
        "Wanted",
        "WaveRequest",
    ),
    "omnistage.models.media.spool": ("MEDIA_PORTS", "Spool"),
    "omnistage.models.options": ("LoadOptions", "validate_options", "with_resumed"),
    "omnistage.models.reports": ("LoadError",),
    "omnistage.models.requests": ("check_constraint", "check_medium", "check_parts", "check_place", "refuse_unfit"),
    "omnistage.models.text.answer": ("AnswerAssembler", "answer_pieces"),
    "omnistage.models.text.chat": ("TextTokenizer",),
    "omnistage.models.text.constraint": ("Constraints", "refuse_dead_ends"),
    "omnistage.models.text.grammar": ("FORMS",),
    "omnistage.models.text.thinker": ("EngineThinker",),
    "omnistage.models.worker": ("Worker", "make_ahead"),
}
"""The module of ours -> its names that are offered here."""

_PLACES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
