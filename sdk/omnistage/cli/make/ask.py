"""`omnistage ask`, `say` and `chat`: their options. The work is in `make.speak` and `chat.chatting`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from omnistage.cli.options import (
    ATTACHED,
    DEFAULT_TIMEOUT_S,
    Address,
    ApiKey,
    Attached,
    Background,
    Json,
    MaxRetries,
    PipelineName,
    Seed,
    Timeout,
    Verbose,
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
SampleRate = Annotated[
    int | None, typer.Option("--sample-rate", min=1, max=2**32 - 1, metavar="HZ", help="Samples a second; default: the model's own.")
]
Encoding = Annotated[
    Literal["pcm16", "float32"] | None, typer.Option(help="In what form samples come, and stand in a .wav; default: pcm16.")
]
Voice = Annotated[str | None, typer.Option(metavar="NAME", help="Who speaks: `omnistage voices` tells whom there is.")]
Speed = Annotated[float | None, typer.Option(min=0.5, max=2.0, metavar="X", help="Of the speech; 1 is usual.")]
Profile = Annotated[
    Literal["latency", "balanced", "quality", "offline"] | None,
    typer.Option(help="How soon sound is heard, against what it costs and how good it is; default: balanced."),
]
MaxFrames = Annotated[
    int | None, typer.Option("--max-frames", min=1, metavar="N", help="Longest speech, in frames; Qwen2.5-Omni has 50 a second.")
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
MaxTokens = Annotated[int | None, typer.Option(min=1, max=32768, metavar="N", help="Longest answer, in tokens.")]
JsonSchema = Annotated[Path | None, typer.Option("--json-schema", metavar="FILE", help="The text is JSON that keeps to this schema.")]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", help="The whole text keeps to this regular expression.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The text is this, or that of another --choice.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, max=2.0, metavar="X", help="How freely words are drawn; 0 is greedy, and mostly the default."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=0.0, max=1.0, metavar="PART", help="Choose among the likeliest tokens that have so much of 1."),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The answer ends before this. Repeatable.")]

SPOKEN_AND_TOLD = ("text", "audio", "alignment")
"""Outputs to ask for if captions are wanted."""


def ask(
    context: typer.Context,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The words; - reads them from standard input.")] = None,
    images: Images = None,
    audios: Audios = None,
    videos: Videos = None,
    video_sound: VideoSound = False,
    background: Background = None,
    system: System = None,
    address: Address = None,
    api_key: ApiKey = None,
    out: Out = None,
    play: Play = None,
    voice: Voice = None,
    speed: Speed = None,
    profile: Profile = None,
    max_frames: MaxFrames = None,
    sample_rate_hz: SampleRate = None,
    encoding: Encoding = None,
    text_only: TextOnly = False,
    timeline: Timeline = None,
    captions: Captions = None,
    json: Json = False,
    seed: Seed = None,
    pipeline: PipelineName = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Ask a question and get the answer, spoken.

    Also about pictures, sounds and films; spoken where the pipeline has a voice. Media stand before the words, in the order given. Where
    only pipelines that draw can be meant, it is drawn; `omnistage draw` keeps the picture. A model's thoughts before its answer are dim
    on a terminal, and in no pipe and no sound.
    """
    if text_only and (out is not None or captions is not None or play):
        raise typer.BadParameter("--out, --captions and --play need sound; leave --text-only out")
    if text_only and any(value is not None for value in (voice, speed, profile, max_frames, sample_rate_hz, encoding)):
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
    if sum((json_schema is not None, regex is not None, bool(choice))) > 1:
        raise typer.BadParameter("a text keeps to one of --json-schema, --regex and --choice only")
    if top_p == 0:
        raise typer.BadParameter("--top-p is above 0; 1 is all tokens, --temperature 0 the likeliest alone")
    check_play(play, out, json)
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
        as_json=json,
        options=options,
        system=system,
        attached=attached,
        schema=json_schema,
        captions=captions,
        play=False if text_only else play,
    )
    carry_out(question, address, pipeline, api_key, verbose)


def say(
    context: typer.Context,
    text: TextArgument,
    address: Address = None,
    api_key: ApiKey = None,
    out: Out = None,
    play: Play = None,
    voice: Voice = None,
    speed: Speed = None,
    markdown: Markdown = False,
    profile: Profile = None,
    max_frames: MaxFrames = None,
    sample_rate_hz: SampleRate = None,
    encoding: Encoding = None,
    timeline: Timeline = None,
    captions: Captions = None,
    json: Json = False,
    seed: Seed = None,
    pipeline: PipelineName = "",
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Speak exactly this text."""
    check_play(play, out, json)
    from omnistage.cli.make.orders import carry_out
    from omnistage.cli.make.speak import Question

    options = options_of(context, markdown=markdown or None)
    if captions is not None:
        options["outputs"] = SPOKEN_AND_TOLD
    question = Question(text, verbatim=True, out=out, timeline=timeline, as_json=json, options=options, captions=captions, play=play)
    carry_out(question, address, pipeline, api_key, verbose)


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


def chat(
    address: Address = None,
    api_key: ApiKey = None,
    voice: Voice = None,
    speed: Speed = None,
    seed: Seed = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    pipeline: PipelineName = "",
    go_on: GoOn = False,
    text_only: TextOnly = False,
    no_play: NoPlay = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Talk: ask, hear the answer while it is made, ask on.

    Enter or Ctrl-C stops an answer, Ctrl-D ends the conversation. /help shows what else can be typed.
    """
    from omnistage.cli.chat.chatting import Chat, run
    from omnistage.cli.chat.talk import Talk, TalkSettings
    from omnistage.cli.report import Interruptible
    from omnistage.cli.targets import Need, target_for

    with errors_reported(verbose):
        option_values = {"voice": voice, "speed": speed, "seed": seed, "system": system, "max_tokens": max_tokens}
        settings = cast("TalkSettings", {name: value for name, value in option_values.items() if value is not None})
        talk = Talk.last(settings) if go_on else Talk(settings)
        need = Need(["text"], ["text"] if text_only else [], "thinker")
        target = target_for(need, address, pipeline, api_key)
        order = Chat(talk, target.pipeline, timeout, max_retries, has_sound=not text_only, is_played=not (text_only or no_play))
        Interruptible().run(lambda work: run(order, target, verbose))
