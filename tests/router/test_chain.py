"""Chains behind their router: toys, whose text that a stop string cuts off is not spoken; and a whole omni chain that is asked with
pictures, sounds and films."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
import structlog

from helpers.ask import WholeAnswer, ask, refused, request
from helpers.chain import RouterAndStages, addresses_of, good, router_and_stages, toy_chain
from helpers.converse import ConverseStream
from helpers.disturbed import DisturbanceStep, ask_through, audio_chunks
from helpers.families import PICTURE, SEEN, looked_at
from helpers.link import ENDED, Context, bare_peer, listen, say, steady_beat
from helpers.models import CountingThinker
from helpers.run import messages
from helpers.servers import CHAIN, family_logic, local_chain, local_router, omni_stub, toy_logic
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png
from omnistage.models.toy.film import FILM, SIDE, STEPS
from omnistage.models.toy.stages import ToyOptions
from omnistage.router.pipeline import load_pipeline
from omnistage.stage.logic import SessionTiming
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.channel import Credentials, Options

PROMPT = "And then?"


@pytest.mark.parametrize("said", [1, 2, 11, 23])
async def test_sound_ends_with_the_text_that_a_stop_string_ended(stack: RouterAndStages, seed: int, said: int):
    words = [formulas.word(formulas.token(seed, PROMPT, n)) for n in range(formulas.NATURAL_LENGTH)]
    answer = await ask(stack.stub, request(PROMPT, seed, thinker={"stop": [words[said], "never said"]}))
    answer.check_whole()
    assert answer.text() == "".join(words[:said])
    assert answer.usage is not None and answer.usage.finish_reason == chunk_pb2.FINISH_REASON_STOP
    np.testing.assert_array_equal(answer.samples(), formulas.audio(seed, PROMPT, said)[:, 0] * 32768)


async def test_text_that_might_have_been_a_stop_string_is_spoken_when_it_is_none(stack: RouterAndStages, seed: int):
    words = "".join(formulas.word(formulas.token(seed, PROMPT, n)) for n in range(formulas.NATURAL_LENGTH))
    answer = await ask(stack.stub, request(PROMPT, seed, thinker={"stop": [words[-9:] + "x", words[3:30] + "x"]}))
    answer.check_toy(seed, PROMPT)


COUNTED = "omnistage_stage_unspoken_characters_total"


async def test_what_is_not_spoken_is_told_to_the_client_and_counted_for_all_others() -> None:
    """Also of text that nobody asked for, and of an answer in a conversation; logs and metrics have no word of it."""
    with structlog.testing.capture_logs() as lines:
        async with router_and_stages(toy_chain({"mute_every": 5})) as stack:
            answer = await ask(stack.stub, request("hello", 3))
            answer.check_unspoken(5)
            unheard = await ask(stack.stub, request("hello", 3, outputs=["audio"]))
            verbatim = await ask(stack.stub, request("", 3, thinker={"messages": [], "verbatim": "one two three"}))
            verbatim.check_whole()
            assert verbatim.text() == "one two three "
            conversation = ConverseStream(stack.stub)
            (await conversation.turn(request("hello", 3))).check_unspoken(5)
            await conversation.end()
            assert answer.usage is not None and unheard.usage is not None
            assert unheard.usage.stages[1].unspoken == answer.usage.stages[1].unspoken > 0
            count = stack.stages["talker"].registry.get_sample_value(COUNTED, {"stage": "talker", "model": "toy-talker"})
            ended = [line for line in lines if line["event"] == "answer.done"]
            assert count == sum(line["unspoken"] for line in ended) > 0
            assert [line["unspoken"] for line in ended[:2]] == [answer.usage.stages[1].unspoken] * 2
            for usage in (answer.usage, unheard.usage):
                assert [(report.HasField("drew"), report.drew) for report in usage.stages] == [(True, True), (True, False), (True, False)]
    words = {formulas.word(token).strip() for token in answer.tokens()[::5]}
    assert not [word for word in words if f"{word}'" in repr(lines) or f"{word} " in repr(lines)]


def test_what_is_told_has_a_bound() -> None:
    timing = SessionTiming()
    for number in range(9):
        timing.note(f"{number}" * 300)
        timing.note(f"{number}" * 300)
    assert timing.notes == [f"{number}" * 200 for number in range(4)]
    for run in ("你好", "😀" * 61, "世界", "x" * 1000):
        timing.not_spoken([run])
    assert timing.unspoken == 2 + 61 + 2 + 1000
    assert timing.unspoken_runs == ["你好", "😀" * 61, "世"]


async def test_a_request_for_text_computes_and_ships_no_row(seed: int):
    model = CountingThinker(ToyOptions())
    async with router_and_stages(toy_chain(None, ThinkerStage(model))) as stack:
        answer = await ask(stack.stub, request("Only read.", seed, outputs=["text"]))
        answer.check_toy(seed, "Only read.")
        assert answer.usage is not None
        assert [dict(report.output_items) for report in answer.usage.stages] == [{"text": 24, "hidden": 0}]
        assert model.computed == 0
        (await ask(stack.stub, request("And listen.", seed))).check_toy(seed, "And listen.")
        assert model.computed == 24


async def test_a_client_has_one_name_at_the_stages_and_another_client_another():
    model = CountingThinker(ToyOptions())
    async with router_and_stages(toy_chain(None, ThinkerStage(model))) as stack:
        for key in ("", "secret", "", "secret", "other"):
            await ask(stack.stub, request("Who?", 1, outputs=["text"]), metadata=[("x-api-key", key)] * bool(key))
        plain, one, plain_again, one_again, other = model.clients
        assert plain == plain_again and one == one_again and len({plain, one, other}) == 3
        assert all(re.fullmatch(r"[0-9a-f]{16}/[0-9a-f]{16}", name) for name in model.clients)


async def test_an_older_thinker_that_sends_rows_all_the_same_is_heard_to_the_end():
    """It knows no unwanted ports and waits for credit for each of them; the rows are dropped."""
    rows = 100
    description = toy_logic("thinker").description
    credits: dict[str, int] = {}

    async def older(opened: stage_pb2.Open, context: Context) -> None:
        await say(context, stage_pb2.RunResponse(opened=stage_pb2.Opened(revisions=[description.revision])))
        credits.update({credit.port: credit.total for credit in opened.credits})
        tensor = {"element_type": 1, "shape": [1, 1], "inline": {"data": b"\0\0\0\0", "total_bytes": 4}}
        for n in range(rows):
            while credits["hidden"] <= n:
                message = await context.read()
                assert isinstance(message, bytes)
                credit = stage_pb2.RunRequest.FromString(message).credit
                credits[credit.port] = credit.total
            chunk = chunk_pb2.Chunk(port="hidden", seq=n, first=n, count=1, last=n == rows - 1, tensor=tensor)
            await say(context, stage_pb2.RunResponse(chunk=chunk))
        text = chunk_pb2.TextChunk(text="done", token_ids=[1], finish_reason=chunk_pb2.FINISH_REASON_STOP)
        await say(context, stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="text", count=1, last=True, text=text)), ENDED)
        await listen(context)

    async with (
        bare_peer(older, steady_beat, description) as thinker,
        local_chain() as stages,
        local_router({**addresses_of(stages), "thinker": thinker}) as router,
        omni_stub(router.address) as stub,
    ):
        answer = await ask(stub, request("Only read.", 1, outputs=["text"]))
        assert answer.text() == "done" and list(answer.chunks) == ["text"]
        assert credits["hidden"] >= rows


CERTIFIED = "stack.test"


class Encrypted(Credentials):
    """With one certificate for all, which is its own authority."""

    def __init__(self, folder: Path) -> None:
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        names = ["-subj", f"/CN={CERTIFIED}", "-addext", f"subjectAltName=DNS:{CERTIFIED}"]
        subprocess.run([*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60)
        self._server = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        self._client = grpc.ssl_channel_credentials(certificate.read_bytes())

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, self._client, options=[*options, ("grpc.ssl_target_name_override", CERTIFIED)])

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_secure_port(address, self._server)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command, which makes the certificate, is not installed")
async def test_every_connection_and_every_port_of_a_stack_is_made_by_its_credentials(tmp_path: Path) -> None:
    encrypted = Encrypted(tmp_path)
    async with local_chain(credentials=encrypted) as stages, local_router(addresses_of(stages), credentials=encrypted) as router:
        async with omni_stub(router.address, encrypted) as stub:
            (await ask(stub, good())).check_toy(5, "good")
        for address in (router.address, stages["thinker"].address):
            async with omni_stub(address) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


ARENA = {"arena_bytes": 256 << 20}
FRAMES, SECONDS = 24, 0.5


def house(replicas: Mapping[str, int] | None = None, **options: object) -> AbstractAsyncContextManager[RouterAndStages]:
    """toy-omni behind a router, with an arena each."""
    kinds = [kind for kind in CHAIN for _ in range((replicas or {}).get(kind, 1))]
    return router_and_stages([family_logic("toy-omni", kind, options) for kind in kinds], load_pipeline("toy-omni"), stage=ARENA)


def film_makers(count: int = 1, **options: object) -> AbstractAsyncContextManager[RouterAndStages]:
    return router_and_stages([family_logic("toy-film", "diffusion", options) for _ in range(count)], load_pipeline("toy-film"))


def question(given: list[stage_pb2.Message], seed: int) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=seed, thinker=stage_pb2.ThinkerParams(messages=given))


def check(answer: WholeAnswer, seen: tuple[formulas.Seen, ...], seed: int) -> None:
    answer.check_whole()
    items = formulas.items(seen)
    tokens = [formulas.omni_token(seed, items, n) for n in range(formulas.NATURAL_LENGTH)]
    assert answer.text() == "".join(map(formulas.word, tokens))
    expected = formulas.samples(formulas.omni_frames(items, tokens))[:, 0] * 32768
    np.testing.assert_array_equal(answer.samples(), expected)


async def test_it_speaks_from_what_it_sees_and_hears(seed: int):
    async with house() as stack:
        check(await ask(stack.stub, question(looked_at(), seed)), SEEN, seed)


async def test_prompt_rows_of_megabytes_go_down_in_pieces(seed: int):
    """65,536 patches: a mebibyte of rows and two of places, and not one chunk above a mebibyte."""
    pixels = (np.add.outer(np.arange(512), 7 * np.arange(512)) % 256).astype(np.uint8)
    media = stage_pb2.Media(data=png(pixels), media_type="image/png")
    given = [stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media), stage_pb2.Part(text="?")])]
    async with house() as stack:
        answer = await ask(stack.stub, question(given, seed))
        check(answer, ("u", pixels, "?"), seed)
        assert answer.usage is not None
        rows = 256 * 256 + 2
        assert {port: n for port, n in answer.usage.stages[1].input_items.items() if port != "hidden"} == {"prompt": rows, "places": rows}


@pytest.mark.parametrize("lost", CHAIN)
async def test_a_stage_that_is_lost_in_mid_speech_leaves_no_gap(lost: str, seed: int):
    async with house({lost: 2}, interval_s=0.15) as stack:
        strike = DisturbanceStep(audio_chunks(3), lambda: stack.end_busy(lost))
        answer = await ask_through(stack.stub, question(looked_at(), seed), strike)
        check(answer, SEEN, seed)
        assert [stage_pb2.StageKind.Name(failover.kind).lower() for failover in answer.failovers] == [f"stage_kind_{lost}"]


async def test_a_picture_that_cannot_be_read_is_refused_in_words_and_the_next_one_is_seen(seed: int):
    async with house() as stack:
        media = stage_pb2.Media(data=png(PICTURE)[:50], media_type="image/png")
        bad = await refused(stack.stub, question([stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media)])], seed))
        assert (bad.reason, bad.fields) == ("BAD_REQUEST", ["thinker.messages.parts.media"])
        assert "PNG" in bad.message
        film = stage_pb2.Media(data=b"x", media_type="video/mp4")
        bad = await refused(stack.stub, question([stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=film)])], seed))
        assert "takes text, image and audio, not 'video/mp4'" in bad.message
        check(await ask(stack.stub, question(looked_at(), seed)), SEEN, seed)
        check(await ask(stack.stub, question(messages("Only words."), seed)), ("u", "Only words."), seed)


# Films ---------------------------------------------------------------------------------------------------------------------------------


def film(seed: int, **fields: object) -> omni_pb2.GenerateRequest:
    asked = {"prompt": "a walk", "negative_prompt": "rain", "guidance_scale": 3, "frames": FRAMES, "duration_s": SECONDS, **fields}
    return omni_pb2.GenerateRequest(seed=seed, diffusion=stage_pb2.DiffusionParams(**asked))  # type: ignore[arg-type]


def check_film(answer: WholeAnswer, seed: int) -> None:
    answer.check_whole()
    steer = formulas.steer("a walk", "rain", 3)
    places = (np.arange(FRAMES), np.arange(SIDE), np.arange(SIDE))
    expected = formulas.latent_after(formulas.noise(seed, *places), steer, STEPS).astype(np.uint8)
    clips = [chunk.video for chunk in answer.of("video") if chunk.HasField("video")]
    assert {clip.media_type for clip in clips} == {FILM}
    assert b"".join(clip.data for clip in clips) == expected.tobytes()
    assert sum(chunk.count for chunk in answer.of("video")) == FRAMES
    sound = formulas.film_sound(seed, steer, 0, round(SECONDS * formulas.SAMPLE_RATE_HZ))[:, 0] * 32768
    np.testing.assert_array_equal(answer.samples(), sound)


async def test_a_film_with_previews_and_sound(seed: int):
    async with film_makers() as stack:
        answer = await ask(stack.stub, film(seed, previews=3))
        check_film(answer, seed)
        previews = [chunk for chunk in answer.of("image") if chunk.image.HasField("preview_step")]
        assert [chunk.image.preview_step for chunk in previews] == [2, 4, 6] and not any(chunk.count for chunk in previews)
        bad = await refused(stack.stub, film(seed, layers=2))
        assert (bad.reason, bad.fields) == ("BAD_REQUEST", ["diffusion.frames"])
        only_sound = await ask(stack.stub, omni_pb2.GenerateRequest(outputs=["audio"], seed=seed, diffusion=film(seed).diffusion))
        assert list(only_sound.chunks) == ["audio"]
        np.testing.assert_array_equal(only_sound.samples(), answer.samples())
        assert only_sound.usage is not None and dict(only_sound.usage.stages[0].output_items)["video"] == 0


async def test_a_film_maker_that_is_lost_in_mid_film_leaves_no_gap(seed: int):
    async with film_makers(2, interval_s=0.06, max_chunk=1) as stack:
        strike = DisturbanceStep(lambda heard: len(heard.of("video")) >= 5, lambda: stack.end_busy("diffusion"))
        answer = await ask_through(stack.stub, film(seed), strike)
        check_film(answer, seed)
        assert len(answer.failovers) == 1


def steps_shown(answer: WholeAnswer) -> list[int]:
    return [chunk.progress.done for chunk in answer.of("progress") if chunk.HasField("progress")]


async def test_a_drawing_that_is_lost_between_steps_goes_on_with_all_that_its_sampler_remembers(seed: int):
    """At another part of the model than it began with, from the middle of its steps."""
    hill = stage_pb2.DiffusionParams(prompt="a hill", width=24, height=16, steps=20, results=2)
    asked = omni_pb2.GenerateRequest(seed=seed, diffusion=hill)
    async with film_makers(2, interval_s=0.05, experts=2, multistep=True) as stack:
        strike = DisturbanceStep(lambda heard: 12 in steps_shown(heard), lambda: stack.end_busy("diffusion"))
        answer = await ask_through(stack.stub, asked, strike)
        assert len(answer.failovers) == 1
        shown = steps_shown(answer)
        assert all(step > 10 for step in shown[shown.index(12) :]), "it began anew"
        whole = await ask(stack.stub, asked)
        pictures, expected = ([chunk.image.data for chunk in made.of("image") if chunk.count] for made in (answer, whole))
        assert len(pictures) == 2 and pictures == expected
