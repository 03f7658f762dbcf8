"""How a request and the pipeline's defaults become the params of the stages, and the part of a trace context that goes on to them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.run import messages
from omnistage.router.answer import MAX_TRACESTATE, trace_metadata
from omnistage.router.pipeline import PipelineFile, load_pipeline
from omnistage.router.request import validate
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import StageError, bad_request
from omnistage.wire.limits import COUNTS

FILE = {
    "name": "speaker",
    "description": "For these tests.",
    "inputs": ["text"],
    "outputs": ["text", "audio"],
    "stages": [
        {"kind": "thinker", "family": "toy"},
        {"kind": "talker", "family": "toy", "takes": ["text"]},
        {"kind": "code2wav", "family": "toy", "takes": ["codes"]},
    ],
    "defaults": {
        "thinker": {
            "max_tokens": 96,
            "stop": ["END"],
            "sampling": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
        },
        "talker": {"voice": "anna", "speed": 1.25, "sampling": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}},
    },
}
PIPELINES = {"speaker": PipelineFile.model_validate(FILE), "other": PipelineFile.model_validate({**FILE, "name": "other", "defaults": {}})}


def thinker(**fields: object) -> stage_pb2.ThinkerParams:
    asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=messages("hi"), **fields))  # type: ignore[arg-type]
    return validate(asked, PIPELINES).params["thinker"].thinker


def test_what_the_client_leaves_out_is_the_pipelines():
    params = thinker()
    assert (params.max_tokens, list(params.stop)) == (96, ["END"])
    assert params.sampling == PIPELINES["speaker"].default_params()["thinker"].thinker.sampling
    assert [part.text for part in params.messages[0].parts] == ["hi"]


def test_what_the_client_says_wins():
    assert thinker(max_tokens=7).max_tokens == 7
    asked = omni_pb2.GenerateRequest(talker=stage_pb2.TalkerParams(voice="ben"))
    talker = validate(asked, PIPELINES).params["talker"].talker
    assert (talker.voice, talker.speed) == ("ben", 1.25)


def test_a_client_that_says_how_to_draw_says_it_whole():
    """0 is greedy and cannot be told from absent: a given Sampling takes the place of the default, but for optional fields left absent."""
    greedy = thinker(sampling=stage_pb2.Sampling()).sampling
    assert (greedy.temperature, greedy.top_k) == (0, 0)
    assert greedy.top_p == pytest.approx(0.9) and greedy.repetition_penalty == pytest.approx(1.1)
    warm = thinker(sampling=stage_pb2.Sampling(temperature=1.5, top_p=1.0, repetition_penalty=1.0)).sampling
    assert (warm.temperature, warm.top_k, warm.top_p, warm.repetition_penalty) == (1.5, 0, 1.0, 1.0)


def test_so_of_a_talker_too():
    asked = omni_pb2.GenerateRequest(talker=stage_pb2.TalkerParams(sampling=stage_pb2.Sampling()))
    greedy = validate(asked, PIPELINES).params["talker"].talker
    assert (greedy.sampling.temperature, greedy.sampling.top_k, greedy.voice) == (0, 0, "anna")
    assert greedy.sampling.top_p == pytest.approx(0.8) and greedy.sampling.repetition_penalty == pytest.approx(1.05)


def test_a_list_of_the_client_takes_the_place_of_the_pipelines():
    """As many stops as a request may have are not too many because the pipeline has one, too."""
    stops = [f"stop {n}" for n in range(COUNTS["ThinkerParams.stop"])]
    assert list(thinker(stop=stops).stop) == stops


def test_a_constraint_of_the_client_takes_the_place_of_the_pipelines():
    """Another form, or an empty one for free text; a choice is not added to the pipeline's."""
    default = stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["yes", "no"]))
    file = {**FILE, "defaults": {"thinker": {"constraint": {"choice": {"texts": ["yes", "no"]}}}}}
    pipelines = {"speaker": PipelineFile.model_validate(file)}

    def constraint(given: stage_pb2.Constraint | None = None) -> stage_pb2.Constraint:
        asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=messages("hi"), constraint=given))
        return validate(asked, pipelines).params["thinker"].thinker.constraint

    assert constraint() == default
    maybe = stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["maybe"]))
    for given in (maybe, stage_pb2.Constraint(regex="a+"), stage_pb2.Constraint()):
        assert constraint(given) == given


def test_defaults_are_not_changed_by_requests():
    thinker(max_tokens=7, sampling=stage_pb2.Sampling(temperature=2))
    assert thinker().max_tokens == 96 and thinker().sampling.temperature == pytest.approx(0.7)


def test_outputs_and_model_default_to_the_pipelines():
    valid = validate(omni_pb2.GenerateRequest(), PIPELINES)
    assert valid.pipeline.name == "speaker" and valid.outputs == {"text", "audio"}
    assert validate(omni_pb2.GenerateRequest(model="other", outputs=["text"]), PIPELINES).outputs == {"text"}


def test_what_is_given_on_request_is_given_to_who_names_it():
    pipelines = {"speaker": PipelineFile.model_validate({**FILE, "on_request": ["alignment"]}), "other": PIPELINES["other"]}
    assert validate(omni_pb2.GenerateRequest(), pipelines).outputs == {"text", "audio"}
    named = validate(omni_pb2.GenerateRequest(outputs=["audio", "alignment"]), pipelines)
    assert named.outputs == {"audio", "alignment"} and named.pipeline.name == "speaker"
    for asked, there in (("speaker", "text, audio, alignment, not 'codes'"), ("other", "text, audio, not 'alignment', 'codes'")):
        with pytest.raises(StageError, match=there) as refused:
            validate(omni_pb2.GenerateRequest(model=asked, outputs=["text", "alignment", "codes"]), pipelines)
        assert (refused.value.reason, refused.value.metadata) == ("BAD_REQUEST", {"field": "outputs"})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3_omni-text", {"outputs": ["audio"]}, "gives [^:]*: it has no Talker$"),
        ("qwen3_omni-codes", {"outputs": ["audio"]}, "gives [^:]*$"),
        ("toy-picture", {"outputs": ["audio"]}, "gives [^:]*$"),
        ("qwen2_5_omni", {"outputs": ["text", "audio", "alignment"]}, "qwen2_5_omni gives text, audio, not 'alignment'"),
        ("qwen3_omni-text", {"talker": {"voice": "ben"}}, "qwen3_omni-text has no Talker; "),
        ("toy-film", {"talker": {"voice": "ben"}}, "toy-film does not speak; "),
    ],
)
def test_what_a_pipeline_lacks_is_refused_with_the_reason_where_there_is_one(name: str, fields: dict[str, Any], message: str):
    """One that draws may give sound all the same."""
    with pytest.raises(StageError, match=message) as refused:
        validate(omni_pb2.GenerateRequest(**fields), {name: load_pipeline(name)})
    assert refused.value.reason == "BAD_REQUEST"
    assert "talker" in fields or refused.value.metadata["field"] == "outputs"


def test_a_stages_refusal_of_media_says_what_nothing_here_does():
    table = {name: load_pipeline(name) for name in ("toy", "toy-picture")}
    media = [stage_pb2.Part(media=stage_pb2.Media(media_type="image/png"))]
    question = omni_pb2.GenerateRequest(
        model="toy", thinker=stage_pb2.ThinkerParams(messages=[stage_pb2.Message(role="user", parts=media)])
    )
    for pipelines, fields in ((table, {"lack": "sees"}), ({**table, "toy-omni": load_pipeline("toy-omni")}, {})):
        valid = validate(question, pipelines)
        for field, extra in (("thinker.messages.parts.media", fields), ("thinker.max_tokens", {})):
            refusal = bad_request(field, "is bad")
            valid.add_lack(refusal)
            assert refusal.metadata == {"field": field, **extra}


def test_a_seed_is_kept_or_drawn():
    assert validate(omni_pb2.GenerateRequest(seed=0), PIPELINES).seed == 0
    assert validate(omni_pb2.GenerateRequest(seed=(1 << 64) - 1), PIPELINES).seed == (1 << 64) - 1
    assert len({validate(omni_pb2.GenerateRequest(), PIPELINES).seed for _ in range(10)}) == 10


@pytest.mark.parametrize("conversation_id", ["a", "A-z_0", "a" * 64, ""])
def test_good_ids(conversation_id: str):
    validate(omni_pb2.GenerateRequest(conversation_id=conversation_id), PIPELINES)


def test_what_a_client_holds_of_an_answer_is_passed_on_as_it_is():
    resume = stage_pb2.Resume(positions=[stage_pb2.Position(port=port, seq=2, first=5) for port in ("text", "audio")])
    asked = omni_pb2.GenerateRequest(seed=7, resume=resume, revisions=["1", "2", "3"], request_id="again")
    valid = validate(asked, PIPELINES)
    assert (valid.seed, valid.resume, list(valid.revisions), valid.request_id) == (7, resume, ["1", "2", "3"], "again")
    new = validate(omni_pb2.GenerateRequest(), PIPELINES)
    assert (new.resume, list(new.revisions), new.request_id) == (None, [], "")
    nothing_yet = omni_pb2.GenerateRequest(seed=7, resume=stage_pb2.Resume())
    assert validate(nothing_yet, PIPELINES).resume == stage_pb2.Resume()


def test_an_unknown_model_is_told_what_there_is():
    with pytest.raises(StageError, match=r"UNKNOWN_MODEL.*speaker, other"):
        validate(omni_pb2.GenerateRequest(model="../etc/passwd"), PIPELINES)


def test_text_that_is_given_is_no_markdown() -> None:
    """A Thinker may write Markdown; a client may say that its text is none, or that it is."""
    for verbatim, talker, plain in (
        ("5 * 3", stage_pb2.TalkerParams(), True),
        ("5 * 3", stage_pb2.TalkerParams(markdown=True), False),
        ("", stage_pb2.TalkerParams(), False),
        ("", stage_pb2.TalkerParams(plain=True), True),
    ):
        turns = [] if verbatim else messages("hi")
        asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=turns, verbatim=verbatim), talker=talker)
        assert validate(asked, PIPELINES).params["talker"].talker.plain == plain


# The trace context ----------------------------------------------------------------------------------------------------------------------


PARENT = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def test_a_well_formed_context_goes_on():
    state = ("tracestate", "a=b")
    assert trace_metadata([("authorization", "x"), PARENT, state]) == [PARENT, state]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([], id="none"),
        pytest.param([("traceparent", "00-" + "a" * 9000)], id="too long"),
        pytest.param([("traceparent", "hello"), ("tracestate", "a=b")], id="no trace"),
        pytest.param([PARENT, PARENT], id="two"),
    ],
)
def test_without_one_a_new_trace_begins(given: list[tuple[str, str]]):
    ((key, value),) = trace_metadata(given)
    assert key == "traceparent" and value != PARENT[1]
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", value)


@pytest.mark.parametrize("states", [["x" * (MAX_TRACESTATE + 1)], ["x" * 300, "y" * 300]])
def test_state_that_is_too_long_is_left_behind(states: list[str]):
    assert trace_metadata([PARENT, *(("tracestate", state) for state in states)]) == [PARENT]
