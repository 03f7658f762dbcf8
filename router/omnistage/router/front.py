"""OmniService: the calls that clients make, and the pipelines that they ask for. At first only its file describes a pipeline, and once its
replicas answer, its stages do too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from functools import partial

import grpc
import grpc.aio
import structlog

from omnistage.host.places import Client, Places, Refused, Ticket
from omnistage.host.spans import Tracer
from omnistage.link.liveness import Channels
from omnistage.router.admission import REQUEST_LIMIT_S, STALLED_S, Admission, Place, Turns
from omnistage.router.answer import AnswerLimits, Generation, Write, incoming_trace, stall_error, trace_metadata
from omnistage.router.callers import Callers, client_text, request_of
from omnistage.router.conversation import ALL_REPLAY_BYTES, OF_THE_CALL, REPLAY_BYTES, ConverseCall, Intake, Listen
from omnistage.router.loading import Loading
from omnistage.router.pipeline import PipelineError, PipelineFile, check_pipeline
from omnistage.router.placement import Placement
from omnistage.router.request import ValidRequest, is_id, parse, validate
from omnistage.router.telemetry import Account, RouterMetrics
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.calls import let_go, within, write
from omnistage.wire.errors import CallerGone, StageError, abort, bad_request
from omnistage.wire.proto_values import KINDS

log = structlog.get_logger(__name__)


class ServedPipeline:
    """A pipeline with its replicas. pipeline: its inputs and outputs; until it is ready, all that it could have. descriptions: of its
    stages, by kind; empty until it is ready. misfit: why these stages cannot serve it; empty: no reason is known."""

    def __init__(self, pipeline: PipelineFile, placement: Placement) -> None:
        self.pipeline = pipeline.unsettled
        self.placement = placement
        self.descriptions: Mapping[str, stage_pb2.DescribeResponse] = {}
        self.misfit = ""
        self._file = pipeline

    @property
    def is_ready(self) -> bool:
        """Whether all stages have served at some time and fit the file. They may be lost now, which a request finds out when it asks
        them."""
        return bool(self.descriptions)

    @property
    def unsure_outputs(self) -> tuple[str, ...]:
        """The outputs of `pipeline` that it may turn out not to have, while no stage has described itself."""
        return () if self.is_ready else self._file.unsure_outputs

    def check_ready(self) -> None:
        """Raises STARTING, with the stages that the pipeline waits for, if the pipeline is not ready."""
        if self.is_ready:
            return
        name, missing = self.pipeline.name, self.placement.missing()
        message = f"{name} cannot be served by its stages as they are: {self.misfit}" if self.misfit else f"{name} is still starting"
        if missing:
            message += f": {'; '.join(missing)}"
        raise StageError("STARTING", f"{message}; try again", metadata={"pipeline": name})

    async def get_ready(self, misfits: Callable[[str], None]) -> None:
        """Wait until a replica of every stage serves and all of them fit the file. misfits: called with the reason why they do not fit,
        once for each new reason. After a misfit the replicas are checked again whenever one of them changes."""
        while True:
            changed = self.placement.changed
            descriptions = await self.placement.descriptions()
            try:
                check_pipeline(self._file, descriptions)
            except PipelineError as error:
                if str(error) != self.misfit:
                    self.misfit = str(error)
                    misfits(self.misfit)
                await changed.wait()
            else:
                break
        self.misfit = ""
        self.placement.pin(descriptions)
        self.pipeline, self.descriptions = self._file.settled(descriptions), descriptions


GenerateContext = grpc.aio.ServicerContext[bytes, omni_pb2.GenerateResponse]
ConverseContext = grpc.aio.ServicerContext[bytes, omni_pb2.ConverseResponse]
AnyContext = GenerateContext | ConverseContext
UnaryContext = grpc.aio.ServicerContext[object, object]

SERVICE = omni_pb2.DESCRIPTOR.services_by_name["OmniService"].full_name


class Front(omni_pb2_grpc.OmniServiceServicer):
    """Serves all pipelines that are ready, in the order of the configuration; the first is the default."""

    def __init__(
        self,
        served: Mapping[str, ServedPipeline],
        channels: Channels,
        admission: Admission,
        metrics: RouterMetrics,
        loading: Loading,
        *,
        stall_limit_s: float,
        session_limit_s: float,
        callers: Callers | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """served: all pipelines, by name. loading: loads them for requests. stall_limit_s: seconds that a client may leave its answer
        unread. session_limit_s: seconds that one answer may take, and that a conversation may wait for its next turn. callers: finds the
        client of a call. tracer: gets a span of every request; None: no spans."""
        self._served = served
        self._channels = channels
        self._admission = admission
        self._metrics = metrics
        self._loading = loading
        self._callers = callers or Callers()
        self._tracer = tracer or Tracer()
        self._stall_limit_s = stall_limit_s
        self._session_limit_s = session_limit_s
        self._turns = Turns()
        self._replays = Places(ALL_REPLAY_BYTES // REPLAY_BYTES)
        self._by_request: dict[Hashable, asyncio.Future[None]] = {}
        metrics.inflight.set_function(lambda: admission.running)
        metrics.waiting.set_function(lambda: admission.waiting)
        metrics.places.set_function(lambda: admission.limit)

    def register(self, server: grpc.aio.Server) -> None:
        """Add this service to a server. Generate and Converse get their requests as bytes: wire/limits.py makes messages of them in
        bounded time."""
        omni_pb2_grpc.add_OmniServiceServicer_to_server(self, server)
        generate: grpc.RpcMethodHandler[bytes, omni_pb2.GenerateResponse] = grpc.unary_stream_rpc_method_handler(
            self.Generate, None, omni_pb2.GenerateResponse.SerializeToString
        )
        converse: grpc.RpcMethodHandler[bytes, omni_pb2.ConverseResponse] = grpc.stream_stream_rpc_method_handler(
            self.Converse, None, omni_pb2.ConverseResponse.SerializeToString
        )
        # These handlers replace the generated ones.
        server.add_registered_method_handlers(SERVICE, {"Generate": generate, "Converse": converse})

    async def Generate(  # type: ignore[override]  # A coroutine that writes, which grpc.aio takes as well as a generator.
        self, data: bytes, context: GenerateContext
    ) -> None:
        """Answer one request. data: a GenerateRequest in bytes; see `register`."""
        structlog.contextvars.clear_contextvars()
        try:
            turn = partial(self._turns.turn, self._callers.client_of(context))
            await self._turn(partial(parse, data, turn), context, partial(write, context))
        except StageError as error:
            await abort(context, error)

    async def Converse(  # type: ignore[override]
        self, requests: object, context: ConverseContext
    ) -> None:
        """Answer the turns of one call, one after the other. If a turn fails, the stream carries the error and the next turn may come; an
        error in OF_THE_CALL, or after a write that was given up, ends the call."""
        structlog.contextvars.clear_contextvars()
        conversation = ConverseCall(context, partial(self._turns.turn, self._callers.client_of(context)))
        try:
            limit_s = REQUEST_LIMIT_S
            in_turn = False
            while (request := await self._next_turn(conversation, limit_s)) is not None:
                in_turn = True
                try:
                    await self._turn(partial(_as_read, request), context, conversation.write, conversation)
                except StageError as failure:
                    if failure.reason in OF_THE_CALL or conversation.is_cut:
                        raise
                    async with within(self._stall_limit_s, partial(stall_error, self._stall_limit_s)):
                        await conversation.fail(failure)
                in_turn = False
                del request  # The next one may come much later.
                limit_s = self._session_limit_s
        except StageError as error:
            if not in_turn:  # The error of a turn is in the turn's own log line.
                log.info("conversation.failed", client=client_text(self._callers.client_of(context)), **error.for_log())
            await conversation.discard()
            await abort(context, error)
        finally:
            conversation.close()

    async def _next_turn(self, conversation: ConverseCall, limit_s: float) -> omni_pb2.GenerateRequest | None:
        """The next turn of a client; None if the client wants no more turns. Raises StageError, such as DEADLINE after `limit_s` seconds
        without a turn, and DRAINING when this router drains."""
        draining = asyncio.create_task(self._admission.drains())
        asking = asyncio.create_task(conversation.next_turn())
        try:
            await asyncio.wait({draining, asking}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            if draining.done():
                draining.result()
            raise StageError("DEADLINE", f"no turn came for {limit_s:g} s")
        finally:
            let_go(draining, asking)
            # The error of a task refers to this frame, and the frame to the task: a cycle, which would stay in memory.
            del draining, asking

    async def _turn(
        self,
        read: Callable[[], Awaitable[omni_pb2.GenerateRequest]],
        context: AnyContext,
        write: Write,
        conversation: ConverseCall | None = None,
    ) -> None:
        """Answer one request, in a call of its own or in a conversation. read: returns the request. write: sends an event to the client.
        conversation: None for a call of its own. Raises StageError for every end but a good one."""
        structlog.contextvars.clear_contextvars()
        client = self._callers.client_of(context)
        span = self._tracer.begin("generate" if conversation is None else "turn", incoming_trace(_metadata(context)))
        if span.trace_id:
            structlog.contextvars.bind_contextvars(trace_id=span.trace_id)
        account = Account(client_text(client), span)
        begin_s, name, valid = time.monotonic(), "", None
        try:
            valid = self._valid(await read(), account)
            name = valid.pipeline.name
            account.asks(name, valid.request_id)
            if conversation is None and valid.ports:
                raise bad_request("thinker.messages.parts.port", "media are streamed by Converse only; send them in the message here")
            with self._loading.use(name):
                self._served[name].check_ready()
                account.waits()
                async with self._admission.place(client) as place:
                    account.placed(place)
                    await self._answer(valid, place, context, write, conversation, account)
            account.finish()
        except StageError as error:
            if valid is not None:
                valid.add_lack(error)
            account.failed(error)
            raise
        except CallerGone:
            raise
        except Exception as error:
            account.failed(None)
            log.exception("request.bug")
            raise StageError("", f"internal error of the router: {type(error).__name__}") from None
        finally:
            self._metrics.requests.labels(pipeline=name, reason=account.reason).inc()
            self._metrics.duration.labels(pipeline=name).observe(time.monotonic() - begin_s)
            account.close()

    def _valid(self, request: omni_pb2.GenerateRequest, account: Account) -> ValidRequest:
        """The checked request. The account notes the request's id even if the request is refused."""
        if is_id(request.request_id):
            account.asks("", request.request_id)
        return validate(request, self._pipelines())

    async def _answer(
        self, valid: ValidRequest, place: Place, context: AnyContext, write: Write, conversation: ConverseCall | None, account: Account
    ) -> None:
        """Run the answer to a checked request that has a place, and count it in the metrics. Raises StageError."""
        served = self._served[valid.pipeline.name]
        remaining = context.time_remaining()
        limit = self._session_limit_s if remaining is None else min(remaining, self._session_limit_s)
        replay = self._take_replay(place.ticket.client) if valid.ports else None
        intake = listen = None
        if conversation is not None:
            ports = [port for port in served.descriptions[valid.pipeline.stages[0].kind].accepts if port.name in valid.ports]
            intake = Intake(ports, conversation.grant, stall_s=self._stall_limit_s, replay_bytes=0 if replay is None else REPLAY_BYTES)
            listen = conversation.begin(intake)
        answer = Generation(
            valid,
            served.descriptions,
            served.placement,
            self._channels,
            write,
            AnswerLimits(time.monotonic() + limit, self._stall_limit_s),
            trace_metadata(account.span.metadata),
            place,
            account.tally,
            intake,
            None if conversation is None else conversation.room,
        )
        account.answers(answer.session_id)
        structlog.contextvars.bind_contextvars(session_id=answer.session_id)
        tally = account.tally
        try:
            await self._run(answer, place, request_of(context, valid.request_id) if valid.request_id else None, listen)
            if tally.sound_s:
                factor = (place.queued_s + tally.last_sound_s) / tally.sound_s
                self._metrics.real_time_factor.labels(pipeline=valid.pipeline.name).observe(factor)
        finally:
            if replay is not None:
                self._replays.leave(replay)
            self._metrics.count_answer(valid.pipeline.name, place.queued_s, tally.first, [loss.stage for loss in tally.losses])

    def _take_replay(self, client: Client) -> Ticket | None:
        """A ticket for REPLAY_BYTES, in which a turn keeps streamed input for a replay; None: there is no room, and the turn keeps none."""
        try:
            return self._replays.take(client)
        except Refused:
            return None

    async def _run(self, answer: Generation, place: Place, request: Hashable | None, listen: Listen | None) -> None:
        """Run an answer to its end. Raises StageError if the place is taken back, if the client sends the same request in a new call (as
        after a lost connection; the new call gets the answer), or if the client breaks the rules of a conversation.

        request: the identity of the request (admission.request_of); None: it has no id. listen: receives what the client sends during the
        turn; None: it is no conversation."""
        run = asyncio.create_task(answer.run())
        superseded = self._newest(request)
        waiting: set[asyncio.Future[None]] = {run, superseded, place.taken_back}
        listening = asyncio.create_task(listen()) if listen is not None else None
        try:
            if listening is not None:
                await asyncio.wait({listening, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done() and not run.done():
                    listening.result()  # Without an error: the client has half-closed or asked its next turn, and only waits now.
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                run.result()
            elif superseded.done():
                raise StageError("SUPERSEDED", "the request was asked again; the newer call has the answer")
            else:
                raise StageError("CLIENT_STALLED", f"the client read nothing for {STALLED_S:g} s, and another one waited for its place")
        finally:
            if self._by_request.get(request) is superseded:
                del self._by_request[request]
            superseded.cancel()
            let_go(run, listening)
            try:
                await asyncio.wait({run})
            finally:
                # The error of a task refers to this frame, and the frame to the task: a cycle, which would keep the request in memory.
                del run, listening, waiting

    def _newest(self, request: Hashable | None) -> asyncio.Future[None]:
        """A future that becomes done when a new call brings the same request. If an earlier call has brought it, that call's future becomes
        done now. request: None: it has no id, so the future stays open."""
        superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if request is not None:
            older = self._by_request.get(request)
            if older is not None and not older.done():
                older.set_result(None)
            self._by_request[request] = superseded
        return superseded

    async def ListModels(self, request: omni_pb2.ListModelsRequest, context: UnaryContext) -> omni_pb2.ListModelsResponse:
        response = omni_pb2.ListModelsResponse()
        for served in self._served.values():
            can_answer = served.is_ready and served.placement.is_complete
            (response.models if can_answer else response.starting).append(_model(served, self._served))
        return response

    async def ListReplicas(self, request: omni_pb2.ListReplicasRequest, context: UnaryContext) -> omni_pb2.ListReplicasResponse:
        response = omni_pb2.ListReplicasResponse()
        for served in self._served.values():
            served.placement.use()  # From now on the replicas report, so a caller that looks once more soon sees a fresh state.
            for replica in served.placement.all():
                described = replica.description or stage_pb2.DescribeResponse()
                response.replicas.add(
                    pipeline=served.pipeline.name,
                    kind=KINDS[replica.kind],
                    model=described.model,
                    address=replica.address,
                    pid=described.pid,
                    state=replica.state_for_people,
                    load=replica.load,
                    settings=described.settings,
                )
        return response

    def _pipelines(self) -> Mapping[str, PipelineFile]:
        return {name: served.pipeline for name, served in self._served.items()}


def _metadata(context: AnyContext) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in context.invocation_metadata() or ()]


async def _as_read(request: omni_pb2.GenerateRequest) -> omni_pb2.GenerateRequest:
    """The request itself, which a conversation has read and decoded already."""
    return request


def _model(served: ServedPipeline, own_names: Collection[str]) -> omni_pb2.Model:
    """A pipeline as ListModels shows it. own_names: of all pipelines; a further name that is one of them means another pipeline."""
    pipeline = served.pipeline
    return omni_pb2.Model(
        name=pipeline.name,
        stages=[KINDS[stage.kind] for stage in pipeline.stages],
        inputs=pipeline.inputs,
        outputs=pipeline.outputs,
        on_request=pipeline.on_request,
        unloaded=served.placement.is_unloaded,
        voices=dict.fromkeys(voice for description in served.descriptions.values() for voice in description.voices),  # The default first.
        description=pipeline.description.strip(),
        names=[name for name in pipeline.names if name.casefold() not in own_names],
        unsure_outputs=served.unsure_outputs,
    )
