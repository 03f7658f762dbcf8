"""Carries out one spoken answer: asks for it, shows it while it comes, writes its files, and prints its figures. Captions have a few of
its words at a time, with the times at which they are spoken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from omnistage.cli.make.figures import as_json, cut_note, figures, remarks, sentence, tell
from omnistage.cli.make.files import OutputFile
from omnistage.cli.make.listening import Listening, listening
from omnistage.cli.make.orders import MAX_TEXT_BYTES, HeardOrder, words
from omnistage.cli.make.screen import Keeping, Spoken, follow, screen_for
from omnistage.cli.options import Attached
from omnistage.cli.report import Interruptible
from omnistage.cli.stack.layout import Layout
from omnistage.cli.targets import Need, Where, connect_client
from omnistage.cli.timeline import draw
from omnistage.cli.wording import SHELL
from omnistage.client.answer import write_sound
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.conversation import Conversation
from omnistage.client.errors import BadRequestError, NotSpokenError, OmniError, RequestError
from omnistage.client.events import Done, SpokenWord
from omnistage.client.files import FORMATS, format_of
from omnistage.client.media import Medium
from omnistage.client.request import Options, for_conversation, time_limit_s

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


@dataclass(frozen=True, slots=True)
class Question(HeardOrder):
    """A question, or a text to speak. text: its words; - (standard input) until `checked` reads it. verbatim: speak the text instead of
    answering. timeline, captions: files to write. system: the instructions before the conversation. attached: media that come before the
    text. parts: the same media, once `checked` has read them. schema: a file with a JSON schema, which `checked` reads."""

    text: str
    verbatim: bool
    out: Path | None
    timeline: Path | None
    as_json: bool
    options: Options
    system: str | None = None
    attached: Sequence[Attached] = ()
    parts: Sequence[Medium] = ()
    schema: Path | None = None
    captions: Path | None = None
    play: bool | None = None

    @property
    def need(self) -> Need:
        inputs = ["text", *dict.fromkeys(one.kind for one in self.attached)]
        return Need(inputs, self.options.get("outputs", ["audio"] if self.verbatim else ()), "thinker")

    @property
    def conversation(self) -> Conversation:
        """The turns to send: the system text, if there is one, and the question."""
        text = [{"type": "text", "text": self.text}] if self.text else []
        turn = {"role": "user", "content": [*self.parts, *text]}
        return [turn] if self.system is None else [{"role": "system", "content": self.system}, turn]

    def checked(self) -> Question:
        with ExitStack() as tried:
            _open_files(self, tried)
        if self.out is not None and not self.is_sound_piped:
            format_of(self.out).check(self.options.get("sample_rate_hz", 0), self.options.get("encoding", "pcm16"))
        options = self.options if self.schema is None else Options(**self.options, json_schema=_read_schema(self.schema))
        text = words(self.text) if self.text or not self.attached else ""  # Media need no words.
        question = replace(self, text=text, parts=[one.read() for one in self.attached], options=options, schema=None)
        if not self.verbatim:
            for_conversation(question.conversation, options).complete()
        return question


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


async def speak(work: Interruptible, question: Question, target: Where, verbose: bool) -> None:
    """Ask a question, show the answer while it comes, write the files, print the figures; a private stack ends after that.

    Text, or the JSON object, goes to stdout and everything else to stderr.
    """
    if isinstance(target.at, Layout) and "thinker" not in target.at.kinds:
        draws = "diffusion" in target.at.kinds and not question.verbatim
        hint = DRAW["image"] + OTHERS if draws else "Give another --pipeline, or none for the default."
        raise RequestError(f"{target.at.names} does not {'speak a text' if question.verbatim else 'answer'}", hint=hint)
    with ExitStack() as files:
        # Opened before anything is started or asked: an answer that cannot be kept would be lost.
        out = _open_files(question, files)
        hearing = await listening(question, files)
        async with connect_client(target, time_limit_s(question.options), verbose, is_quiet=question.as_json) as omni:
            screen = screen_for(question.as_json, question.is_sound_piped)
            keeping = Keeping(screen) if any((out.sound, out.picture, out.captions)) else None
            options = target.options(question.options)
            events = omni.stream_say(question.text, **options) if question.verbatim else omni.stream_chat(question.conversation, **options)
            try:
                with _refusals(question):
                    answer, done = await follow(events, keeping or screen, keep_sound=out.sound is not None, ears=[hearing.write])
            except RequestError as error:
                if not question.verbatim and (output := await _drawn_output(omni, target.pipeline)):
                    error.hint = DRAW[output]
                raise
            work.complete()
            try:
                # Files first: if the reader of the printed lines is gone, printing raises.
                file_names = _write(question, out, answer, done)
            finally:
                if not question.as_json:
                    tell(*_remarks(question, answer, done, hearing))
            if question.as_json:
                print(as_json(answer, done), flush=True)
            elif file_names:
                tell(f"wrote {', '.join(file_names)}")
            if question.is_sound_piped and not answer.audio_s:
                raise NotSpokenError(f"nothing of the answer could be spoken by {done.pipeline}: there is no sound")
            await hearing.finish(work)
            if keeping is not None and keeping.failure is not None:
                raise keeping.failure


def _remarks(question: Question, answer: Spoken, done: Done, hearing: Listening) -> Iterator[str]:
    """Yields lines for people about an answer: lost servers, why a part is missing, and figures."""
    for failover in done.failovers:
        yield sentence(failover, done.timing)
    if not question.verbatim:
        yield from cut_note(answer, done, "--max-tokens")
    if answer.pictures:
        pictures = "a picture" if answer.pictures == 1 else f"{answer.pictures} pictures"
        yield f"{done.pipeline} drew {pictures} of this; omnistage draw PROMPT --out F.png keeps what it draws"
    yield figures(done)
    yield from remarks(done)
    if hearing.lacks_loudspeaker and question.is_to_be_heard:
        yield "no loudspeaker here; --out F.wav keeps the sound"


async def _drawn_output(omni: AsyncOmni, pipeline: str) -> str:
    """The output that the asked pipelines draw, a key of DRAW. It is empty if one of them does more than draw, or if the router does not
    answer any more. pipeline: the one that was asked; empty: the router chose, so any may have been asked."""
    with suppress(OmniError):
        pipelines = [one for one in await omni.pipelines(timeout_s=LOOK_S) if pipeline in ("", one.name)]
        if all(one.only_draws for one in pipelines):
            outputs = {port for one in pipelines for port in one.outputs}
            return next((port for port in DRAW if port in outputs), "")
    return ""


@contextmanager
def _refusals(question: Question) -> Iterator[None]:
    """A context that rewords a refusal of outputs: it names the option that asked for them (--out or --text-only, or --captions for the
    alignment) in place of the protos' names."""
    try:
        yield
    except BadRequestError as error:
        if [violation.field for violation in error.fields] != ["outputs"]:
            raise
        text = SHELL.message(error.message.partition(": ")[2])  # Before it stands the name of the field.
        if not question.options.get("outputs"):
            raise RequestError(text) from error
        option, hint = "--out", "Leave --out out for the text alone."
        if question.out is None and question.captions is None:
            option, hint = "--text-only", "Leave --text-only out."
        elif question.captions is not None and "'alignment'" in error.message:
            option, hint = "--captions", "Leave --captions out, or ask a pipeline that gives alignment: `omnistage pipelines`."
        raise RequestError(f"{option}: {text}", hint=hint) from error


@dataclass(frozen=True, slots=True)
class _Files:
    """The opened files of a question; None for each that was not asked for."""

    sound: OutputFile | None
    picture: OutputFile | None
    captions: OutputFile | None


def _open_files(question: Question, files: ExitStack) -> _Files:
    """Open the files of a question until `files` ends. Raises RequestError."""

    def opened(path: Path | None, option: str, kinds: Mapping[str, str]) -> OutputFile | None:
        return None if path is None else files.enter_context(OutputFile(path, option, kinds))

    if question.out is not None and question.out.suffix.lower() in PICTURES and not question.verbatim:
        raise RequestError(f"--out {question.out}: ask writes sound", hint=f"A picture: `omnistage draw PROMPT --out {question.out}`.")
    sound = opened(None if question.is_sound_piped else question.out, "--out", {ending: form.name for ending, form in FORMATS.items()})
    picture = opened(question.timeline, "--timeline", {".png": "PNG"})
    return _Files(sound, picture, opened(question.captions, "--captions", CAPTION_KINDS))


def _write(question: Question, out: _Files, answer: Spoken, done: Done) -> list[str]:
    """Write the files that were asked for; returns their names. Raises NotSpokenError if there is no sound, or no word, to write."""
    file_names = []
    sound, picture, captions = out.sound, out.picture, out.captions
    if sound is not None and answer.sounds:
        sound.write(lambda path: save(answer, path, sound.path.suffix))
        file_names.append(str(sound.path))
    if picture is not None:
        picture.write(lambda path: draw(path, done, answer.text or question.text))
        file_names.append(str(picture.path))
    if captions is not None and answer.words:
        captions.write(lambda path: write_captions(answer.words, path, captions.path.suffix.lower()))
        file_names.append(str(captions.path))
    for file, content in ((sound, answer.sounds), (captions, answer.words)):
        if file is not None and not content:
            raise NotSpokenError(f"nothing of the answer could be spoken by {done.pipeline}: {file.path} was not written")
    return file_names


def save(answer: Spoken, path: Path, kind: str) -> None:
    """Write the sound of an answer to a file. kind: the ending that decides the format, such as .wav, whatever `path` ends in."""
    first = answer.sounds[0]
    write_sound(path, np.concatenate([sound.samples for sound in answer.sounds]), first.sample_rate_hz, first.encoding, kind)


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
