"""`omnistage chat`: the user types questions; answers are shown and played while they are made, and can be stopped meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import typer
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.input import create_input
from prompt_toolkit.keys import Keys
from rich.markup import escape
from rich.text import Text

from omnistage.cli.chat.lines import MentionedFile, block, find_files, find_named_file, is_typed, read, read_typed
from omnistage.cli.chat.talk import (
    ENDS,
    OFF,
    OTHERS,
    SETTINGS,
    TEXTS,
    TOO_LONG,
    WORDS,
    Talk,
    change,
    help_lines,
    is_command,
    is_of_setting,
    place_of,
    turn_text,
    unknown,
)
from omnistage.cli.console import Notices
from omnistage.cli.make.figures import figures, remarks
from omnistage.cli.make.figures import tell as tell_figures
from omnistage.cli.make.files import write_chunks
from omnistage.cli.make.screen import Spoken, follow, screen_for
from omnistage.cli.places import explain
from omnistage.cli.report import tell
from omnistage.cli.targets import Where, connect_client
from omnistage.cli.wording import CHAT
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Pipeline
from omnistage.client.errors import BadRequestError, OmniError, PlayerLostError, RequestError
from omnistage.client.events import AudioChunk, Done, Event
from omnistage.client.loudspeaker import Loudspeaker, find_loudspeaker, is_silenced
from omnistage.client.player import Player
from omnistage.client.request import Options
from omnistage.client.wording import did_you_mean
from omnistage.models.requests import those_there_are

STOPPING = (Keys.ControlM, Keys.ControlJ, Keys.ControlC)
"""Keys that stop an answer: Enter and Ctrl-C."""

MAX_MESSAGE_FILES = 16
"""The largest number of files that one message may carry."""

REMEMBERED = 4
"""How many turns of an old conversation are shown when it goes on."""


@dataclass(frozen=True, slots=True)
class Chat:
    """The settings of one chat. talk: its conversation. pipeline: the pipeline to ask; empty: the router chooses. timeout_s: time limit of
    each answer. max_retries: how often a refused question is asked again; None: the client's default. has_sound: ask for speech. is_played:
    play the speech, if a loudspeaker is found."""

    talk: Talk
    pipeline: str
    timeout_s: float
    max_retries: int | None
    has_sound: bool
    is_played: bool


async def run(chat: Chat, target: Where, verbose: bool) -> None:
    """Hold the conversation until the input or the user ends it. The error of an answer, or of a lost private stack, is printed, and the
    next question may be asked. Raises typer.Exit(1) at the end if the questions came from a pipe and one of them failed."""
    loudspeaker = await asyncio.to_thread(find_loudspeaker) if chat.is_played else None
    async with connect_client(target, chat.timeout_s, verbose) as omni, AsyncExitStack() as stack:
        notices = Notices()
        if is_typed() and chat.is_played and loudspeaker is None and not is_silenced():
            notices.tell("[dim]no loudspeaker here: answers are shown; /save F.wav keeps the sound of one[/]")
        session = ChatSession(chat, omni, loudspeaker, notices, verbose)
        questions = read_typed(session.take_ahead, session.silence) if is_typed() else read()
        if is_typed():
            session.remember()
        try:
            async with aclosing(questions):
                # On a terminal Ctrl-C stops only an answer or its sound. If the questions come from a pipe, it ends the chat.
                stack.enter_context(_interrupting(session.interrupt) if is_typed() else nullcontext())
                async for line in questions:
                    await session.take(line)
                    if not is_typed():
                        await session.hear_out()  # Otherwise the next question of the pipe would cut the sound off.
                    if session.is_over:
                        break
            if session.has_failed and not is_typed():
                raise typer.Exit(1)
        finally:
            session.silence()


class ChatSession:
    """One conversation with one router: obeys commands, asks questions, shows answers. loudspeaker: None: answers are not played."""

    def __init__(self, chat: Chat, omni: AsyncOmni, loudspeaker: Loudspeaker | None, notices: Notices, verbose: bool) -> None:
        self.is_over = False
        self.has_failed = False
        """Whether any question or command was refused."""
        self.typed_ahead = ""
        """Text that the user typed while an answer came."""
        self._chat = chat
        self._talk = chat.talk
        self._omni = omni
        self._loudspeaker = loudspeaker
        self._notices = notices
        self._verbose = verbose
        self._handling: asyncio.Task[None] | None = None  # handles a typed line
        self._answering: asyncio.Task[Done] | None = None
        self._player: Player | None = None
        self._listening: asyncio.Task[None] | None = None
        self._answer = Spoken()  # the last one
        self._pipeline = chat.pipeline
        """The pipeline that answers; empty: the router chooses."""
        self._attached: list[MentionedFile] = []
        """Files that are sent with the next message."""

    def remember(self) -> None:
        """Show the last turns of a conversation that is continued; show nothing of a new one."""
        turns = self._talk.turns
        if turns:
            self._notices.tell("[dim]going on with the last conversation; /new begins anew[/]")
        for turn in turns[-REMEMBERED:]:
            line = Text(f"{'> ' if turn['role'] == 'user' else '  '}{' '.join(turn_text(turn).split())}")
            line.truncate(max(self._notices.width - 1, 1), overflow="ellipsis")
            self._notices.tell(f"[dim]{escape(line.plain)}[/]")

    def take_ahead(self) -> str:
        """Return the text that was typed while an answer came, and clear it."""
        text, self.typed_ahead = self.typed_ahead, ""
        return text

    async def take(self, line: str) -> None:
        """Stop the sound, and handle a typed line: a question, or a command of the chat. An empty line asks about the attached files, if
        there are any. `interrupt` ends this early."""
        self.silence()
        if not (text := line.strip()) and not self._attached:
            return
        self._handling = handling = asyncio.create_task(self._handle(text))
        try:
            await asyncio.wait({handling})
        finally:
            self._handling = None
            handling.cancel()
        if not handling.cancelled():
            handling.result()

    def interrupt(self) -> None:
        """Stop the answer that comes, and keep its text so far; or else the command that runs, or else the sound that is still playing."""
        if self._answering is not None:
            self._answering.cancel()
        elif self._handling is not None:
            self._handling.cancel()
        else:
            self.silence()

    async def _handle(self, text: str) -> None:
        try:
            await self._obey_or_ask(text)
        except OmniError as error:
            self._print_failure(error)
            self._print_attached()

    def _print_failure(self, error: OmniError) -> None:
        self.has_failed = True
        tell(error, self._verbose, CHAT)

    async def _obey_or_ask(self, text: str) -> None:
        """Handle a message by its form: a block and plain text are questions, a path attaches files, and a slash begins a command."""
        if (words := block(text)) is not None:
            if words or self._attached:
                await self._ask(words)
            return
        command, value = [*text.split(maxsplit=1), "", ""][:2]  # Empty texts stand for words that are not there.
        if command not in WORDS:
            files, rest = await asyncio.to_thread(find_files, text)
            if files:
                await self._attach(files, rest)
                return
        if is_command(command):
            await self._obey(command, value)
        else:
            await self._ask(text)

    def silence(self) -> bool:
        """Stop the sound; returns whether any was still playing."""
        player, self._player = self._player, None
        if player is None:
            return False
        return player.stop().samples < player.heard.of  # Fewer samples were heard than came.

    async def hear_out(self) -> None:
        """Wait until the last answer has been played."""
        if self._listening is not None:
            await self._listening

    async def _ask(self, text: str) -> None:
        """Ask a question, with the attached files, and store the conversation. If a question with files is refused, the refusal is printed
        and the files are dropped; other errors are raised."""
        for name in self._talk.forget_gone():
            self._notices.tell(f"[dim]{escape(name)} is gone, and no longer part of the conversation[/]")
        self._talk.ask(text, [one.part for one in self._attached])
        answer = self._answer = Spoken(keeps_sound=True)
        try:
            while not await self._hear_or_forget(answer):
                pass
        except RequestError as error:
            if not self._attached or answer.text:
                raise
            bad_files = [bad for bad in getattr(error, "fields", ()) if place_of(bad.field) != (None, None)]
            self._print_failure(RequestError(bad_files[0].description) if bad_files else error)
            self._drop_refused(error, text)
        finally:
            self._talk.answered(answer.text)
            if answer.text:
                self._attached = []
            self._store()
        if not answer.text:
            self._print_attached()

    async def _hear_or_forget(self, answer: Spoken) -> bool:
        """Ask, and return True when the answer has ended. Return False if this shortened the conversation, so that the question must be
        asked again: it left out the oldest turns, which no longer fit, or earlier files, which the router refuses. answer: collects what
        comes."""
        try:
            await self._hear(answer)
            return True
        except BadRequestError as error:
            if [bad.field for bad in error.fields] in TOO_LONG:
                if not self._talk.forget_oldest():
                    hint = "Ask something shorter; /new begins anew."
                    raise RequestError("this no longer fits into the model's context", hint=hint) from None
                self._notices.tell("[dim]the oldest turns no longer fit and are left out[/]")
                return False
            # An answer that has begun is not asked for again.
            removed = [] if answer.text else [(self._talk.leave_out(bad.field), bad.description) for bad in error.fields]
            if not any(name for name, _ in removed):
                raise
            for name, reason in removed:
                if name:
                    self._notices.tell(f"[dim]{escape(name)} is no longer part of the conversation ({escape(reason)})[/]")
            return False

    def _drop_refused(self, error: RequestError, words: str) -> None:
        """Drop attached files after a refusal: the files that it names, or all if it names none. If it is about a setting, keep all.
        words: the question, which is printed for the user to repeat."""
        if is_of_setting(error):
            return
        places = [place_of(bad.field) for bad in getattr(error, "fields", ())]
        parts = {part for _, part in places if part is not None}
        # The attached files are the first parts of the question, in the same order.
        dropped = [file for part, file in enumerate(self._attached) if not parts or part in parts]
        self._attached = [file for file in self._attached if file not in dropped]
        question = f"; the question was: {words}" if words else ""
        self._notices.tell(f"[dim]left out: {escape(', '.join(map(str, dropped)))}{escape(question)}[/]")

    async def _hear(self, answer: Spoken) -> None:
        """Ask, and show and play the answer until it ends or is stopped. answer: collects what comes."""
        events = self._omni.stream_chat(self._talk.conversation, **self._options)
        player = self._player = Player(self._loudspeaker) if self._loudspeaker is not None else None

        def take(event: Event) -> None:
            answer.take(event)
            if player is not None and isinstance(event, AudioChunk):
                player.write(event)

        self._answering = answering = asyncio.create_task(follow(events, screen_for(as_json=False), take))
        try:
            with self._stop_keys(self.interrupt):
                await asyncio.wait({answering})
        finally:
            self._answering = None
            answering.cancel()
        if answering.cancelled():
            self.silence()
            self._notices.tell("[dim]stopped[/]")
            return
        try:
            done = answering.result()
        except BaseException:
            self.silence()
            raise
        for line in done.end_notes("/max-tokens N"):
            self._notices.tell(f"[dim]{line}[/]")
        tell_figures(figures(done, is_brief=not self._verbose), *remarks(done))
        if self._player is not None:
            # No `await` here, so the sound plays on while the user types the next question.
            self._listening = asyncio.create_task(_play_to_end(self._player, self._notices))

    @property
    def _options(self) -> Options:
        """The options to send with a question."""
        options: Options = {**self._talk.options, "timeout_s": self._chat.timeout_s}
        if self._pipeline:
            options["pipeline"] = self._pipeline
        if not self._chat.has_sound:
            options["outputs"] = ["text"]
        if self._chat.max_retries is not None:
            options["max_retries"] = self._chat.max_retries
        return options

    @contextmanager
    def _stop_keys(self, stop: Callable[[], object]) -> Iterator[None]:
        """A context in which Enter and Ctrl-C call `stop`, and other keys go to `typed_ahead`. With lines of a pipe it does nothing."""
        if not is_typed():
            yield
            return
        keyboard = create_input()

        def pressed() -> None:
            for press in keyboard.read_keys():
                if press.key in STOPPING:
                    stop()
                elif len(press.key) == 1:  # A character; other keys have longer names.
                    self.typed_ahead += press.key

        with keyboard.raw_mode(), keyboard.attach(pressed):
            yield

    async def _obey(self, command: str, value: str) -> None:
        """Obey a command. command: with its slash. value: the text after it. Raises RequestError."""
        if command in SETTINGS:
            if command == "/voice" and value not in ("", OFF):
                await self._check_voice(value)
            self._notices.tell(f"[dim]{escape(change(self._talk.settings, command, value))}[/]")
            if command == "/voice" and not value:
                await self._print_voices()
            return
        match command:
            case "/save":
                self._save(value)
            case "/new":
                self._talk.turns.clear()
                self._answer, self._attached = Spoken(), []
                self._notices.tell("[dim]a new conversation[/]")
            case "/help":
                for line in help_lines(self._notices.width if self._notices.is_terminal else None):
                    self._notices.say(f"[dim]{escape(line)}[/]")
            case "/image" | "/audio" | "/video":
                await self._obey_file_command(command.removeprefix("/"), value)
            case "/pipeline" | "/model":
                await self._choose(value)
            case _ if command in ENDS:
                self.is_over = True
            case _:
                raise unknown(command)

    async def _check_voice(self, name: str) -> None:
        """Raises RequestError for a voice that no pipeline has: every later question would be refused."""
        voices = {voice for pipeline in await self._pipelines_named(self._pipeline) for voice in pipeline.voices}
        if name.lower() not in map(str.lower, voices):
            voices_told = those_there_are(sorted(voices))
            raise RequestError(f"there is no voice {name!r}", hint=f"{voices_told[0].upper()}{voices_told[1:]}.")

    async def _pipelines_named(self, name: str) -> list[Pipeline]:
        """The pipelines that answer questions and have this name; all that answer if it is empty. Raises RequestError if there are none."""
        pipelines = await self._omni.pipelines(timeout_s=self._chat.timeout_s)
        answering = [one for one in pipelines if not one.only_draws]
        if matches := Pipeline.find_called(name, answering) if name else answering:
            return matches
        names = [one.name for one in answering]
        if not names:
            raise RequestError("no pipeline of this router answers", hint="`omnistage draw` asks those that draw.")
        exists = Pipeline.find_called(name, pipelines)
        guess = did_you_mean(name, [*names, *(name for one in answering for name in one.names)])
        text = f"{name} only draws" if exists else f"there is no pipeline {name}{guess}"
        able = f"{', '.join(names)} {'answers' if len(names) == 1 else 'answer'} here"
        raise RequestError(text, hint=f"{able}: /pipeline {names[0]}, or /pipeline {OFF} to leave it to the router.")

    async def _choose(self, name: str) -> None:
        """Set the pipeline that answers from now on. name: off: the router chooses; empty: only list pipelines. Raises RequestError."""
        if not name:
            for one in await self._omni.pipelines(timeout_s=self._chat.timeout_s):
                mark = " (now)" if one in Pipeline.find_called(self._pipeline, [one]) else ""
                about = "only draws" if one.only_draws else f"takes {', '.join(one.inputs)}, gives {', '.join(one.outputs)}"
                names = ", ".join((one.name, *one.names))
                self._notices.tell(f"[dim]{escape(f'{names}: {about}{mark}')}[/]")
            return
        if name != OFF:
            pipeline, *others = await self._pipelines_named(name)
            if others:
                own_names = " and ".join(one.name for one in (pipeline, *others))
                raise RequestError(f"{name} is another name of {own_names}", hint=f"Name one: /pipeline {pipeline.name}.")
            name = pipeline.name
        self._pipeline = "" if name == OFF else name
        self._notices.tell(f"[dim]pipeline: {escape(self._pipeline or 'as the router chooses')}[/]")

    async def _obey_file_command(self, kind: str, value: str) -> None:
        """Obey /image, /audio or /video. kind: the command without its slash. value: a path and perhaps words; `off`: drop the attached
        files of this kind; empty: print all attached files. Raises RequestError."""
        if value == OFF:
            self._attached = [one for one in self._attached if one.kind != kind]
            if not self._print_attached():
                self._notices.tell("[dim]nothing goes with the next message[/]")
            return
        if value:
            file, words = await asyncio.to_thread(find_named_file, kind, value)
            await self._attach([file], words)
            return
        if not self._print_attached():
            self._notices.tell(f"[dim]nothing goes with the next message; /{kind} F gives a file[/]")

    async def _attach(self, files: Sequence[MentionedFile], words: str) -> None:
        """Attach files, and ask at once if there are words. Raises RequestError for a kind of file that no pipeline here takes."""
        pipelines = await self._pipelines_named(self._pipeline)
        for kind in dict.fromkeys(one.kind for one in files):
            if not any(kind in pipeline.inputs for pipeline in pipelines):
                inputs = "; ".join(f"{one.name} takes {', '.join(one.inputs)}" for one in pipelines)
                able = [one.name for one in await self._pipelines_named("") if kind in one.inputs]
                raise RequestError(f"{inputs}, not {kind}", hint=f"/pipeline {able[0]} takes it." if able else "")
        if len(self._attached) + len(files) > MAX_MESSAGE_FILES:
            raise RequestError(f"more than {MAX_MESSAGE_FILES} files go with one message", hint="Ask with those that are there first.")
        self._attached += files
        if words:
            await self._ask(words)
        else:
            self._print_attached()

    def _print_attached(self) -> bool:
        """Print the files that are sent with the next message; returns whether there are any."""
        if self._attached:
            drop = " and ".join(f"/{kind} {OFF}" for kind in dict.fromkeys(one.kind for one in self._attached))
            files = ", ".join(map(str, self._attached))
            self._notices.tell(f"[dim]with the next message: {escape(files)}; {drop} leaves it out[/]")
        return bool(self._attached)

    async def _print_voices(self) -> None:
        """Print the voices of each pipeline that may answer."""
        for pipeline in await self._pipelines_named(self._pipeline):
            if pipeline.voices:
                self._notices.tell(f"[dim]{escape(pipeline.name)} has {escape(', '.join(pipeline.voices))}[/]")

    def _save(self, name: str) -> None:
        """Write this file: the words of the conversation (.txt, .md, .json), or else the sound of the last answer. Raises RequestError."""
        if not name:
            raise RequestError("/save needs the name of a file", hint=f"Give {OTHERS['/save']}.")
        path = Path(name).expanduser()
        if path.suffix.lower() in TEXTS:
            self._talk.save_text(path)
        elif not self._answer.sounds:
            raise RequestError("there is no sound to save", hint="Ask something first, without --text-only.")
        else:
            try:
                write_chunks(self._answer.sounds, path)
            except OSError as error:
                raise RequestError(f"{path} cannot be written: {error.strerror}", hint="Give another place.") from None
        self._notices.tell(f"[dim]wrote {escape(str(path))}[/]")

    def _store(self) -> None:
        """Store the conversation for --continue; an error is only printed."""
        try:
            self._talk.keep()
        except OSError as error:
            self._notices.tell(f"[yellow]the conversation cannot be kept: {escape(explain(error))}[/]")


async def _play_to_end(player: Player, notices: Notices) -> None:
    """Wait until the player has played everything; if it is lost, print why."""
    try:
        await player.afinish()
    except PlayerLostError as error:
        message = error.message
        # Then prints go above the line that is being typed, if there is one.
        await run_in_terminal(lambda: notices.tell(f"[yellow]{escape(message)}[/]"))


@contextmanager
def _interrupting(interrupt: Callable[[], object]) -> Iterator[None]:
    """A context in which SIGINT calls `interrupt` on the event loop, and has no other effect."""
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGINT, lambda number, frame: loop.call_soon_threadsafe(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
