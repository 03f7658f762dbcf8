"""A toy chain behind its router: text that a stop string cuts off is not spoken, stages tell facts to the client, a request for
text computes no rows. With credentials of TLS, which only tests have, it answers nobody who does not speak TLS."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
import structlog

from helpers.ask import ask, request
from helpers.chain import RouterAndStages, addresses_of, good, router_and_stages, toy_chain
from helpers.converse import ConverseStream
from helpers.link import ENDED, Context, bare_peer, listen, say, steady_beat
from helpers.models import CountingThinker
from helpers.servers import local_chain, local_router, omni_stub, toy_logic
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions
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
