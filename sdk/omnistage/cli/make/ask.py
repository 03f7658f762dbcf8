"""`omnistage ask`, `say` and `chat`: their options. The work is in `make.speak` and `chat.chatting`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from omnistage.cli.make.typed_fields import GROUPS
from omnistage.cli.options import (
    ATTACHED,
    DEFAULT_TIMEOUT_S,
    Address,
    ApiKey,
    Attached,
    Background,
    MaxRetries,
    PipelineName,
    Timeout,
    Verbose,
    with_call,
    with_fields,
)
from omnistage.cli.report import errors_reported

if TYPE_CHECKING:
    from omnistage.client.request import Options


TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="The words; - reads them from standard input.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="F", help="Write the sound to this file: .wav, .flac, .ogg, .opus or .mp3; - is standard output."),
]
Play = Annotated[
    bool | None,
    typer.Option("--play/--no-play", help="Whether the sound is heard while it is made; default: on a terminal, without --out and --json."),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="The text is Markdown: its marks are not read.")]
TextOnly = Annotated[bool, typer.Option("--text-only", help="Ask for no sound.")]
Timeline = Annotated[Path | None, typer.Option(metavar="F.png", help="Draw when each stage worked and what was heard.")]
Captions = Annotated[Path | None, typer.Option(metavar="F", help="Write when which words are spoken to this file: .srt or .vtt.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before the question, such as how to answer.")]
Images = Annotated[
    list[str] | None, typer.Option("--image", metavar="F", help="A picture: PNG, JPEG ..., or - for standard input. Repeatable.")
]
Audios = Annotated[list[str] | None, typer.Option("--audio", metavar="F", help="A sound: WAV, FLAC, MP3 ..., or -. Repeatable.")]
Videos = Annotated[list[str] | None, typer.Option("--video", metavar="F", help="A film: MP4, WebM ..., or -. Repeatable.")]
VideoSound = Annotated[bool, typer.Option("--video-sound", help="Films are heard too; one without sound is refused with it.")]
JsonSchema = Annotated[Path | None, typer.Option("--json-schema", metavar="FILE", help="The text is JSON that keeps to this schema.")]

SPOKEN_AND_TOLD = ("text", "audio", "alignment")
"""Outputs to ask for if captions are wanted."""


@with_fields(*dict.fromkeys((*GROUPS["text"], *GROUPS["speech"])))
@with_call()
def ask(
    context: typer.Context,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The words; - reads them from standard input.")] = None,
    images: Images = None,
    audios: Audios = None,
    videos: Videos = None,
    video_sound: VideoSound = False,
    background: Background = None,
    system: System = None,
    out: Out = None,
    play: Play = None,
    text_only: TextOnly = False,
    timeline: Timeline = None,
    captions: Captions = None,
    json_schema: JsonSchema = None,
    **fields: Any,
) -> None:
    """Ask a question and get the answer, spoken.

    Also about pictures, sounds and films; spoken where the pipeline has a voice. Media stand before the words, in the order given. Where
    only pipelines that draw can be meant, it is drawn; `omnistage draw` keeps the picture. A model's thoughts before its answer are dim
    on a terminal, and in no pipe and no sound.
    """
    if text_only and (out is not None or captions is not None or play):
        raise typer.BadParameter("--out, --captions and --play need sound; leave --text-only out")
    if text_only and any(fields[name] is not None for name in GROUPS["speech"] if name != "seed"):
        raise typer.BadParameter(
            "--voice, --speed, --profile, --max-frames, --sample-rate and --encoding are those of sound; leave --text-only out"
        )
    if video_sound and not videos:
        raise typer.BadParameter("--video-sound is for films; give one with --video")
    if background and not images and not videos:
        raise typer.BadParameter("--background is for pictures and films; give one with --image or --video")
    attached = [Attached(kind, path, video_sound and kind == "video") for kind, path in context.meta[ATTACHED]]
    _check_standard_input(text, *(one.path for one in attached))
    if text is None and not attached:
        raise typer.BadParameter("give the words of the question, or what to ask about: --image, --audio, --video")
    if sum((json_schema is not None, fields["regex"] is not None, bool(fields["choice"]))) > 1:
        raise typer.BadParameter("a text keeps to one of --json-schema, --regex and --choice only")
    check_play(play, out, fields["json"])
    from omnistage.cli.make.orders import carry_out
    from omnistage.cli.make.speak import Question

    options = options_of(context, json_schema=None)  # `Question` reads that file.
    if text_only:
        options["outputs"] = ["text"]
    elif captions is not None:
        options["outputs"] = SPOKEN_AND_TOLD
    elif out is not None:
        options["outputs"] = ["text", "audio"]
    question = Question(
        text or "",
        verbatim=False,
        out=out,
        timeline=timeline,
        as_json=fields["json"],
        options=options,
        system=system,
        attached=attached,
        schema=json_schema,
        captions=captions,
        play=False if text_only else play,
    )
    carry_out(question, context)


@with_fields(*GROUPS["speech"])
@with_call()
def say(
    context: typer.Context,
    text: TextArgument,
    out: Out = None,
    play: Play = None,
    markdown: Markdown = False,
    timeline: Timeline = None,
    captions: Captions = None,
    **fields: Any,
) -> None:
    """Speak exactly this text."""
    check_play(play, out, fields["json"])
    from omnistage.cli.make.orders import carry_out
    from omnistage.cli.make.speak import Question

    options = options_of(context, markdown=markdown or None)
    if captions is not None:
        options["outputs"] = SPOKEN_AND_TOLD
    as_json = fields["json"]
    question = Question(text, verbatim=True, out=out, timeline=timeline, as_json=as_json, options=options, captions=captions, play=play)
    carry_out(question, context)


def _check_standard_input(*values: str | None) -> None:
    """Raises BadParameter if more than one of these values is -, standard input."""
    if values.count("-") > 1:
        raise typer.BadParameter("standard input is one thing: only one of TEXT, --image, --audio and --video can be -")


def check_play(play: bool | None, out: Path | None, as_json: bool) -> None:
    """Raises BadParameter if --out is - and --json or --play is given too."""
    if out is not None and str(out) == "-":
        if as_json:
            raise typer.BadParameter("--out - and --json both want standard output; give --out the name of a file")
        if play:
            raise typer.BadParameter("--out - is for the program that reads it; leave --play out")


def options_of(context: typer.Context, **values: object) -> Options:
    """The options of the client that were typed. A parameter of a command is such an option if it has the name of one. values: by name,
    values to send in place of those that were typed; None: the option is left out."""
    from omnistage.client.options import OPTIONS

    params = {name: value for name, value in context.params.items() if name in OPTIONS and name != "pipeline"}
    return cast("Options", {name: value for name, value in {**params, **values}.items() if value not in (None, ())})


NoPlay = Annotated[bool, typer.Option("--no-play", help="Ask for the sound, for /save, but do not play it.")]
GoOn = Annotated[bool, typer.Option("--continue", "-c", help="Go on with the last conversation.")]


@with_fields("voice", "speed", "seed", "max_tokens")
def chat(
    address: Address = None,
    api_key: ApiKey = None,
    system: System = None,
    pipeline: PipelineName = "",
    go_on: GoOn = False,
    text_only: TextOnly = False,
    no_play: NoPlay = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
    **fields: object,
) -> None:
    """Talk: ask, hear the answer while it is made, ask on.

    Enter or Ctrl-C stops an answer, Ctrl-D ends the conversation. /help shows what else can be typed.
    """
    from omnistage.cli.chat.chatting import Chat, run
    from omnistage.cli.chat.talk import Talk, TalkSettings
    from omnistage.cli.report import Interruptible
    from omnistage.cli.targets import Need, target_for

    with errors_reported(verbose):
        settings = cast("TalkSettings", {name: value for name, value in {**fields, "system": system}.items() if value is not None})
        talk = Talk.last(settings) if go_on else Talk(settings)
        need = Need(["text"], ["text"] if text_only else [], "thinker")
        target = target_for(need, address, pipeline, api_key)
        order = Chat(talk, target.pipeline, timeout, max_retries, has_sound=not text_only, is_played=not (text_only or no_play))
        Interruptible().run(lambda work: run(order, target, verbose))
