"""`omnistage chat`: questions are typed, answers are shown and heard while they are made, and either can be broken off."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.keys import Keys
from rich.markup import escape

from omnistage.cli.connect import connected
from omnistage.cli.figures import brief_figures, figures, folded
from omnistage.cli.folders import state_folder
from omnistage.cli.following import follow
from omnistage.cli.notices import Notices
from omnistage.cli.report import tell
from omnistage.cli.screen import Spoken, screen_for
from omnistage.cli.talk import LINES, OFF, OTHERS, SETTINGS, TEXTS, WORDS, Talk, change, help_lines, is_command, unknown
from omnistage.cli.where import Where
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.beside import beside
from omnistage.client.errors import BadRequestError, OmniError, PlayerLostError, RequestError
from omnistage.client.events import AudioChunk, Done, Event, TextDelta
from omnistage.client.listing import Pipeline
from omnistage.client.loudspeaker import Loudspeaker, find_loudspeaker, is_silenced
from omnistage.client.player import Player
from omnistage.client.request import Options
from omnistage.client.sound_file import write_sound

STOPPING = (Keys.ControlM, Keys.ControlJ, Keys.ControlC)
"""Keys that break an answer off."""

TOO_LONG = "thinker.messages"
"""Field of a request whose conversation no longer fits into the model's context."""


@dataclass(frozen=True, slots=True)
class Chat:
    """pipeline: empty for the router's own. timeout_s: for each answer. has_sound: it is asked for. is_played: where something plays."""

    talk: Talk
    pipeline: str
    timeout_s: float
    has_sound: bool
    is_played: bool


async def run(chat: Chat, where: Where, verbose: bool) -> None:
    """Until the end of the input. An answer that fails is told, and the next question may be asked; so is a lost private stack. Raises
    typer.Exit(1) at the end where the lines came from a pipe and one of them failed."""
    loudspeaker = await asyncio.to_thread(find_loudspeaker) if chat.is_played else None
    async with connected(where, chat.timeout_s, verbose) as omni, AsyncExitStack() as stack:
        notices = Notices()
        if is_typed() and chat.is_played and loudspeaker is None and not is_silenced():
            notices.say("[dim]no loudspeaker here: answers are shown; /save F.wav keeps the sound of one[/]")
        session = Session(chat, omni, loudspeaker, notices, verbose)
        questions = _typed(session) if is_typed() else _read()
        try:
            async with aclosing(questions):
                # A terminal's Ctrl-C is for the answer, whenever it comes; from a pipe it ends the chat.
                stack.enter_context(_interrupting(session.interrupt) if is_typed() else nullcontext())
                async for line in questions:
                    await session.take(line)
                    if not is_typed():
                        await session.hear_out()  # Nobody is there to choose between this answer and the next.
                    if session.is_over:
                        break
            if session.has_failed and not is_typed():
                raise typer.Exit(1)
        finally:
            session.silence()


class Session:
    """One conversation with one router."""

    def __init__(self, chat: Chat, omni: AsyncOmni, loudspeaker: Loudspeaker | None, notices: Notices, verbose: bool) -> None:
        self.is_over = False
        self.has_failed = False
        """Whether anything that was asked or typed was refused."""
        self.typed_ahead = ""
        """What was typed while an answer came."""
        self._chat = chat
        self._talk = chat.talk
        self._omni = omni
        self._loudspeaker = loudspeaker
        self._notices = notices
        self._verbose = verbose
        self._taking: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[tuple[Spoken, Done]] | None = None
        self._player: Player | None = None
        self._listening: asyncio.Task[None] | None = None
        self._sounds: list[AudioChunk] = []

    async def take(self, line: str) -> None:
        """A question, or a word for the program; `interrupt` breaks it off."""
        self.silence()
        if not (text := line.strip()):
            return
        self._taking = taking = asyncio.create_task(self._take(text))
        try:
            await asyncio.wait({taking})
        finally:
            self._taking = None
            taking.cancel()
        if not taking.cancelled():
            taking.result()

    def interrupt(self) -> None:
        """Break off what is being done: an answer, whose beginning stays; anything else; or what is still heard."""
        if self._answering is not None:
            self._answering.cancel()
        elif self._taking is not None:
            self._taking.cancel()
        else:
            self.silence()

    async def _take(self, text: str) -> None:
        try:
            if is_command(text):
                command, _, value = text.partition(" ")
                await self._obey(command, value.strip())
            else:
                await self._ask(text)
        except OmniError as error:
            self.has_failed = True
            tell(error, self._verbose)

    def silence(self) -> bool:
        """Stop what is heard; whether something was."""
        player, self._player = self._player, None
        if player is None:
            return False
        return player.stop().samples < player.heard.of

    async def hear_out(self) -> None:
        """Wait until the last answer is heard, where nobody can be asked what is next."""
        if self._listening is not None:
            await self._listening

    async def _ask(self, text: str) -> None:
        self._talk.ask(text)
        self._sounds = []
        said = _Said()
        try:
            while not await self._answer(said):
                if not self._talk.forget_oldest():
                    raise RequestError("this no longer fits into the model's context", hint="Ask something shorter; /new begins anew.")
                self._notices.say("[dim]the oldest turns no longer fit and are left out[/]")
        finally:
            self._talk.answered(said.text)
            self._keep()

    async def _answer(self, said: _Said) -> bool:
        """Show and play an answer until it ends or is broken off; False if the conversation is too long for the model."""
        events = _until_too_long(said.heard(self._omni.stream_chat(self._talk.conversation, **self._options)))
        self._player = Player(self._loudspeaker) if self._loudspeaker is not None else None
        ears: list[Callable[[AudioChunk], object]] = [self._sounds.append]
        if self._player is not None:
            ears.append(self._player.write)
        self._answering = answering = asyncio.create_task(follow(events, screen_for(as_json=False), keep_sound=False, ears=ears))
        try:
            with self._keys(self.interrupt):
                await asyncio.wait({answering})
        finally:
            self._answering = None
            answering.cancel()
        if answering.cancelled():
            self.silence()
            self._notices.say("[dim]stopped[/]")
            return True
        try:
            spoken, done = answering.result()
        except _TooLong:
            self.silence()
            return False
        except BaseException:
            self.silence()
            raise
        if done.finish_reason == "length":
            self._notices.say(f"[dim]cut at {spoken.tokens} tokens; /max-tokens N lets it say more[/]")
        told = figures(done) if self._verbose else brief_figures(done)
        for line in folded(told, self._notices.width if self._notices.is_terminal else None):
            self._notices.say(f"[dim]{escape(line)}[/]")
        if self._player is not None:
            # It says when it ends, and is waited for by nobody: the next question is typed meanwhile.
            self._listening = asyncio.create_task(_heard(self._player, self._notices))
        return True

    @property
    def _options(self) -> Options:
        options: Options = {**self._talk.options, "timeout_s": self._chat.timeout_s}
        if self._chat.pipeline:
            options["pipeline"] = self._chat.pipeline
        if not self._chat.has_sound:
            options["outputs"] = ["text"]
        return options

    @contextmanager
    def _keys(self, stop: Callable[[], object]) -> Iterator[None]:
        """Meanwhile Enter and Ctrl-C call `stop`; other keys are what is typed ahead."""
        if not is_typed():
            yield
            return
        keyboard = create_input()

        def pressed() -> None:
            for press in keyboard.read_keys():
                if press.key in STOPPING:
                    stop()
                elif len(press.key) == 1:
                    self.typed_ahead += press.key

        with keyboard.raw_mode(), keyboard.attach(pressed):
            yield

    async def _obey(self, command: str, value: str) -> None:
        if command in SETTINGS:
            if command == "/voice" and value not in ("", OFF):
                await self._check_voice(value)
            self._notices.say(f"[dim]{escape(change(self._talk.settings, command, value))}[/]")
            if command == "/voice" and not value:
                await self._tell_voices()
            return
        match command:
            case "/save":
                self._save(value)
            case "/new":
                self._talk.turns.clear()
                self._sounds = []
                self._notices.say("[dim]a new conversation[/]")
            case "/help":
                for line in help_lines():
                    self._notices.say(f"[dim]{escape(line)}[/]")
            case "/quit":
                self.is_over = True
            case _:
                raise unknown(command)

    async def _check_voice(self, name: str) -> None:
        """A voice that there is not would be refused with every question. Raises RequestError."""
        there = {voice for pipeline in await self._pipelines() for voice in pipeline.voices}
        if name not in there:
            hint = f"There are {', '.join(sorted(there))}." if there else "This router has no voices to choose from."
            raise RequestError(f"there is no voice {name!r}", hint=hint)

    async def _pipelines(self) -> list[Pipeline]:
        """Those that may answer."""
        pipelines = await self._omni.pipelines(timeout_s=self._chat.timeout_s)
        return [pipeline for pipeline in pipelines if self._chat.pipeline in ("", pipeline.name)]

    async def _tell_voices(self) -> None:
        for pipeline in await self._pipelines():
            if pipeline.voices:
                self._notices.say(f"[dim]{escape(pipeline.name)} has {escape(', '.join(pipeline.voices))}[/]")

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file", hint=f"Give {OTHERS['/save']}.")
        path = Path(name).expanduser()
        if path.suffix.lower() in TEXTS:
            self._talk.save_text(path)
        elif not self._sounds:
            raise RequestError("there is no sound to save", hint="Ask something first, without --text-only.")
        else:
            first = self._sounds[0]
            samples = np.concatenate([sound.samples for sound in self._sounds])
            try:
                write_sound(path, samples, first.sample_rate_hz, first.encoding)
            except OSError as error:
                raise RequestError(f"{path} cannot be written: {error.strerror}", hint="Give another place.") from None
        self._notices.say(f"[dim]wrote {escape(str(path))}[/]")

    def _keep(self) -> None:
        try:
            self._talk.keep()
        except OSError as error:
            self._notices.say(f"[yellow]the conversation cannot be kept: {escape(str(error))}[/]")


async def _heard(player: Player, notices: Notices) -> None:
    try:
        await player.afinish()
    except PlayerLostError as error:
        message = error.message
        # Above the line that is being typed, if one is.
        await run_in_terminal(lambda: notices.say(f"[yellow]{escape(message)}[/]"))


class _Said:
    """The text of an answer as far as it came, also of one that is broken off."""

    def __init__(self) -> None:
        self.text = ""

    async def heard(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    self.text += event.text
                yield event


class _TooLong(Exception):
    """The conversation no longer fits."""


async def _until_too_long(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except BadRequestError as error:
        if [violation.field for violation in error.fields] == [TOO_LONG]:
            raise _TooLong from error
        raise


@contextmanager
def _interrupting(interrupt: Callable[[], object]) -> Iterator[None]:
    """Meanwhile SIGINT calls this on the event loop, and nothing else."""
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGINT, lambda number, frame: loop.call_soon_threadsafe(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _typed(session: Session) -> AsyncGenerator[str, None]:
    """What a person types, a line at a time. Ctrl-C first silences the answer that is still heard, then clears the line."""
    try:
        lines = state_folder() / LINES
        lines.touch(mode=0o600)
        lines.chmod(0o600)
        history: FileHistory | InMemoryHistory = _Lines(str(lines))
    except OSError:
        history = InMemoryHistory()
    prompt: PromptSession[str] = PromptSession(
        history=history, completer=WordCompleter(list(WORDS), sentence=True), complete_while_typing=False
    )
    while True:
        ahead, session.typed_ahead = session.typed_ahead, ""
        try:
            yield await prompt.prompt_async("> ", default=ahead, handle_sigint=False)
        except KeyboardInterrupt:
            if not session.silence():
                Notices().say("[dim]Ctrl-D or /quit ends[/]")
        except EOFError:
            return


async def _read() -> AsyncGenerator[str, None]:
    """The lines of a pipe or a file. Its thread is left alone where the chat is over before the pipe is, and holds nothing of Python's: a
    thread in `sys.stdin` could not."""
    rest = b""
    while piece := await beside(lambda: os.read(0, 65536), "omnistage-chat-lines"):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def is_typed() -> bool:
    """Whether a person types, and no pipe or file is read."""
    return os.isatty(0)


class _Lines(FileHistory):
    """What was typed, as far as there is room for it."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)
