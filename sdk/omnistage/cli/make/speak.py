"""The order of one spoken answer: asks for it, collects it, writes its files, and prints its figures. Captions have a few of its words at a
time, with the times at which they are spoken."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from omnistage.cli.make.figures import answer_facts, figures, print_object, remarks, sentence, tell
from omnistage.cli.make.files import SOUND_KINDS, OutputFile, write_chunks
from omnistage.cli.make.orders import MAX_TEXT_BYTES, TypedOrder, words
from omnistage.cli.make.screen import Keeping, Screen, Spoken, screen_for
from omnistage.cli.options import Attached
from omnistage.cli.stack.layout import Layout
from omnistage.cli.targets import Need
from omnistage.cli.timeline import draw
from omnistage.cli.wording import SHELL
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.conversation import Conversation
from omnistage.client.errors import BadRequestError, NotSpokenError, OmniError, RequestError
from omnistage.client.events import AudioChunk, Done, Event, SpokenWord
from omnistage.client.files import format_of
from omnistage.client.media import Medium
from omnistage.client.request import Options, for_conversation

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""Endings of the files that `omnistage draw` writes."""

LOOK_S = 5.0
"""Seconds that a router may take to list its pipelines after a refusal."""

DRAW = {
    "image": "It only draws: `omnistage draw PROMPT --out F.png`, with the same --pipeline and --address, keeps the picture.",
    "video": "It makes films: `omnistage film PROMPT --out F.webm`, with the same --pipeline and --address.",
    "audio": "It makes sound of a prompt: `omnistage sound PROMPT --out F.wav`, with the same --pipeline and --address.",
}
"""Hints for a user who asked a question of a pipeline that only draws, by its output; if it has several, the first of these counts."""

OTHERS = " One of films is for `omnistage film`, one of sound for `omnistage sound`."
"""Added to the hint about pictures if only the checkpoint of a pipeline says what it makes."""


@dataclass
class Question(TypedOrder):
    """A question, or a text to speak. text: its words; - (standard input) until `check` reads it. verbatim: speak the text instead of
    answering. timeline, captions: files to write. system: the instructions before the conversation. attached: media that come before the
    text. schema: a file with a JSON schema. parts: the same media, once `check` has read them. files: the opened files, by their options.
    answer: what has come."""

    text: str
    verbatim: bool
    out: Path | None
    timeline: Path | None
    as_json: bool
    options: Options
    system: str | None = None
    attached: Sequence[Attached] = ()
    schema: Path | None = None
    captions: Path | None = None
    play: bool | None = None
    parts: Sequence[Medium] = ()
    files: dict[str, OutputFile] = field(default_factory=dict)
    answer: Spoken = field(default_factory=Spoken)

    @property
    def conversation(self) -> Conversation:
        """The turns to send: the system text, if there is one, and the question."""
        text = [{"type": "text", "text": self.text}] if self.text else []
        turn = {"role": "user", "content": [*self.parts, *text]}
        return [turn] if self.system is None else [{"role": "system", "content": self.system}, turn]

    def check(self) -> None:
        with ExitStack() as tried:
            self.open_files(tried)
        if self.out is not None and not self.is_sound_piped:
            format_of(self.out).check(self.options.get("sample_rate_hz", 0), self.options.get("encoding", "pcm16"))
        if self.schema is not None:
            self.options["json_schema"] = _read_schema(self.schema)
        if self.text or not self.attached:  # Media need no words.
            self.text = words(self.text)
        self.parts = [one.read() for one in self.attached]
        if not self.verbatim:
            for_conversation(self.conversation, self.options).complete()

    @property
    def need(self) -> Need:
        inputs = ["text", *dict.fromkeys(one.kind for one in self.attached)]
        return Need(inputs, self.options.get("outputs", ["audio"] if self.verbatim else ()), "thinker")

    def inability(self, layout: Layout) -> RequestError:
        only_draws = layout.only_draws and not self.verbatim
        hint = DRAW["image"] + OTHERS if only_draws else "Give another --pipeline, or none for the default."
        return RequestError(f"{layout.names} does not {'speak a text' if self.verbatim else 'answer'}", hint=hint)

    def open_files(self, files: ExitStack) -> None:
        if self.out is not None and self.out.suffix.lower() in PICTURES and not self.verbatim:
            raise RequestError(f"--out {self.out}: ask writes sound", hint=f"A picture: `omnistage draw PROMPT --out {self.out}`.")
        places = {
            "--out": (None if self.is_sound_piped else self.out, SOUND_KINDS),
            "--timeline": (self.timeline, {".png": "PNG"}),
            "--captions": (self.captions, CAPTION_KINDS),
        }
        for option, (path, kinds) in places.items():
            if path is not None:
                self.files[option] = files.enter_context(OutputFile(path, option, kinds))
        self.answer.keeps_sound = "--out" in self.files

    def ask(self, omni: AsyncOmni, options: Options) -> AsyncGenerator[Event, None]:
        return omni.stream_say(self.text, **options) if self.verbatim else omni.stream_chat(self.conversation, **options)

    @property
    def screen(self) -> Screen:
        screen = screen_for(self.as_json, self.is_sound_piped)
        return Keeping(screen) if self.files else screen

    @asynccontextmanager
    async def refusals(self, omni: AsyncOmni, pipeline: str) -> AsyncIterator[None]:
        try:
            yield
        except RequestError as error:
            refusal = self._outputs_refusal(error) or error
            if not self.verbatim and (output := await _drawn_output(omni, pipeline)):
                refusal.hint = DRAW[output]
            if refusal is error:
                raise
            raise refusal from error

    def _outputs_refusal(self, error: RequestError) -> RequestError | None:
        """A refusal of outputs in other words: it names the option that asked for them (--out or --text-only, or --captions for the
        alignment) in place of the protos' names. None for any other refusal."""
        if not isinstance(error, BadRequestError) or [violation.field for violation in error.fields] != ["outputs"]:
            return None
        text = SHELL.message(error.message.partition(": ")[2])  # Before it stands the name of the field.
        if not self.options.get("outputs"):
            return RequestError(text)
        option, hint = "--out", "Leave --out out for the text alone."
        if self.out is None and self.captions is None:
            option, hint = "--text-only", "Leave --text-only out."
        elif self.captions is not None and "'alignment'" in error.message:
            option, hint = "--captions", "Leave --captions out, or ask a pipeline that gives alignment: `omnistage pipelines`."
        return RequestError(f"{option}: {text}", hint=hint)

    def take(self, event: Event) -> None:
        self.answer.take(event)
        if isinstance(event, AudioChunk):
            self.hearing.write(event)

    def finish(self, done: Done) -> None:
        try:
            # Files first: if the reader of the printed lines is gone, printing raises.
            self._write_files(done)
        finally:
            if not self.as_json:
                tell(*self._remarks(done))
        if self.as_json:
            print_object(answer_facts(self.answer, done), done, {"unspoken": done.unspoken, "unspoken_words": done.unspoken_words})
        elif self.files:
            tell(f"wrote {', '.join(str(file.path) for file in self.files.values())}")
        if self.is_sound_piped and not self.answer.audio_s:
            raise NotSpokenError(f"nothing of the answer could be spoken by {done.pipeline}: there is no sound")

    def _write_files(self, done: Done) -> None:
        """Write the files that were typed. Raises NotSpokenError if there is no sound, or no word, to write."""
        answer = self.answer
        sound, timeline, captions_file = (self.files.get(option) for option in ("--out", "--timeline", "--captions"))
        if sound is not None and answer.sounds:
            sound.write(partial(write_chunks, answer.sounds, kind=sound.path.suffix))
        if timeline is not None:
            timeline.write(lambda path: draw(path, done, answer.text or self.text))
        if captions_file is not None and answer.words:
            captions_file.write(partial(write_captions, answer.words, kind=captions_file.path.suffix.lower()))
        for file, content in ((sound, answer.sounds), (captions_file, answer.words)):
            if file is not None and not content:
                raise NotSpokenError(f"nothing of the answer could be spoken by {done.pipeline}: {file.path} was not written")

    def _remarks(self, done: Done) -> Iterator[str]:
        """Yields lines for people about the answer: lost servers, why a part is missing, and figures."""
        for failover in done.failovers:
            yield sentence(failover, done.timing)
        if not self.verbatim:
            yield from done.end_notes("--max-tokens N")
        if count := self.answer.pictures:
            pictures = "a picture" if count == 1 else f"{count} pictures"
            yield f"{done.pipeline} drew {pictures} of this; omnistage draw PROMPT --out F.png keeps what it draws"
        yield figures(done)
        yield from remarks(done)
        if self.hearing.lacks_loudspeaker and self.is_to_be_heard:
            keeps = "--out F.wav keeps the sound" if self.out is None else f"open {self.out}"
            yield f"no loudspeaker here; {keeps}"


def _read_schema(path: Path) -> str:
    """The text of a file with a JSON schema. Raises RequestError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise RequestError(f"--json-schema {path}: this is more than {MAX_TEXT_BYTES >> 20} MiB, and no JSON schema")
        return data.decode()
    except OSError as error:
        raise RequestError(f"--json-schema {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"--json-schema {path}: this is no text in UTF-8, as a JSON schema is") from None


async def _drawn_output(omni: AsyncOmni, pipeline: str) -> str:
    """The output that the asked pipelines draw, a key of DRAW. It is empty if one of them does more than draw, or if the router does not
    answer any more. pipeline: the one that was asked; empty: the router chose, so any may have been asked."""
    with suppress(OmniError):
        pipelines = [one for one in await omni.pipelines(timeout_s=LOOK_S) if pipeline in ("", one.name)]
        if all(one.only_draws for one in pipelines):
            outputs = {port for one in pipelines for port in one.outputs}
            return next((port for port in DRAW if port in outputs), "")
    return ""


CAPTION_KINDS = {".srt": "SubRip", ".vtt": "WebVTT"}

MAX_CHARACTERS = 42
"""The most characters of one caption, as many as a line of subtitles has."""

LONGEST_PAUSE_S = 0.6
"""Longest pause between two words of one caption."""

ENDS = (".", "!", "?", "…", ":")


def write_captions(words: Sequence[SpokenWord], path: Path, kind: str) -> None:
    """Write the captions of an answer. kind: .srt or .vtt, which decides the format."""
    point, head = (",", "") if kind == ".srt" else (".", "WEBVTT\n\n")
    texts = (
        f"{number}\n{_time(caption[0].begin_s, point)} --> {_time(caption[-1].end_s, point)}\n{_line(caption, kind)}\n"
        for number, caption in enumerate(captions(words), 1)
    )
    path.write_text(head + "\n".join(texts), encoding="utf-8")


def captions(words: Sequence[SpokenWord]) -> Iterator[list[SpokenWord]]:
    """Yields the words of one caption after the other. A caption ends with a sentence, before a pause, or before it gets too long."""
    caption: list[SpokenWord] = []
    for word in words:
        if caption and (
            word.begin_s - caption[-1].end_s > LONGEST_PAUSE_S
            or caption[-1].text.rstrip("\"'”’)").endswith(ENDS)
            or len(_line([*caption, word], "")) > MAX_CHARACTERS
        ):
            yield caption
            caption = []
        caption.append(word)
    if caption:
        yield caption


def _line(caption: Sequence[SpokenWord], kind: str) -> str:
    """The text of a caption on one line; in WebVTT with escapes for characters that begin a tag or end the caption."""
    line = " ".join(" ".join(word.text.split()) for word in caption)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") if kind == ".vtt" else line


def _time(seconds: float, point: str) -> str:
    """A time as HH:MM:SS and milliseconds. point: stands before the milliseconds."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
