"""The old place of names of `omnistage.models.text.answer`, for one more version: import them from `omnistage.models.kit`."""

from omnistage.models.text.answer import AnswerAssembler as AnswerAssembler
from omnistage.models.text.answer import EngineEvent as EngineEvent
from omnistage.models.text.answer import EngineStream as EngineStream
from omnistage.models.text.answer import answer_pieces as answer_pieces
