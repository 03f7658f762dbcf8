"""The `omnistage` command: what can be typed. Each command hands over to a module of its own, imported when it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from omnistage.cli.attached import ATTACHED, Attached, Attaching
from omnistage.cli.draw import draw
from omnistage.cli.layout import DEFAULT_ADDRESS, Layout
from omnistage.cli.options import Address, Json, PipelineName, Seed, Timeout, Verbose
from omnistage.cli.report import errors_reported
from omnistage.models.makers import MAKERS

if TYPE_CHECKING:
    from omnistage.cli.speak import Question
    from omnistage.client.request import Options

app = typer.Typer(
    help="Ask models that answer in text, sound and pictures, and serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="The words; - reads them from standard input.")]
Running = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help=f"A running router, or several with commas between; default: {DEFAULT_ADDRESS}.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="F", help="Write the sound to this file: .wav, .flac, .opus or .mp3.")]
SampleRate = Annotated[
    int | None, typer.Option("--sample-rate", min=1, max=2**32 - 1, metavar="HZ", help="Samples a second; default: the model's own.")
]
Encoding = Annotated[
    Literal["pcm16", "float32"] | None, typer.Option(help="In what form samples come, and stand in a .wav; default: pcm16.")
]
Voice = Annotated[str | None, typer.Option(metavar="NAME", help="Who speaks: `omnistage pipelines --address` tells whom there is.")]
Profile = Annotated[
    Literal["latency", "balanced", "quality", "offline"] | None,
    typer.Option(help="How soon sound is heard, against what it costs and how good it is; default: balanced."),
]
MaxFrames = Annotated[int | None, typer.Option("--max-frames", min=1, help="Longest speech, in frames; Qwen2.5-Omni has 50 a second.")]
TextOnly = Annotated[bool, typer.Option("--text-only", help="Ask for no sound.")]
Timeline = Annotated[Path | None, typer.Option(metavar="F.png", help="Draw when each stage worked and what was heard.")]
Captions = Annotated[Path | None, typer.Option(metavar="F", help="Write when which words are spoken to this file: .srt or .vtt.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before the question, such as how to answer.")]
Images = Annotated[list[str] | None, typer.Option("--image", metavar="F", help="A picture to ask about: PNG, JPEG ... Repeatable.")]
Audios = Annotated[list[str] | None, typer.Option("--audio", metavar="F", help="A sound: WAV, FLAC, MP3 ... Repeatable.")]
Videos = Annotated[list[str] | None, typer.Option("--video", metavar="F", help="A film: MP4, WebM ... Repeatable.")]
VideoSound = Annotated[bool, typer.Option(help="Films are heard too; one without sound is refused with it.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, max=32768, help="Longest answer, in tokens.")]
JsonSchema = Annotated[Path | None, typer.Option("--json-schema", metavar="FILE", help="The text is JSON that keeps to this schema.")]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", help="The whole text keeps to this regular expression.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The text is this, or that of another --choice.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 is greedy.")]


SIZES = tuple(dict.fromkeys(size for maker in MAKERS.values() for size in maker.sizes))
"""Of checkpoints that can be made."""

SPOKEN_AND_TOLD = ("text", "audio", "alignment")
"""Outputs of an answer with captions."""


@app.command(cls=Attaching)
def ask(
    context: typer.Context,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The words; - reads them from standard input.")] = None,
    images: Images = None,
    audios: Audios = None,
    videos: Videos = None,
    video_sound: VideoSound = False,
    system: System = None,
    address: Address = None,
    out: Out = None,
    voice: Voice = None,
    profile: Profile = None,
    max_frames: MaxFrames = None,
    sample_rate: SampleRate = None,
    encoding: Encoding = None,
    text_only: TextOnly = False,
    timeline: Timeline = None,
    captions: Captions = None,
    json: Json = False,
    seed: Seed = None,
    pipeline: PipelineName = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    timeout: Timeout = 120.0,
    verbose: Verbose = False,
) -> None:
    """Ask a question, also about pictures, sounds and films, and get the answer, spoken where the pipeline has a voice.

    Media stand before the words, in the order given.
    """
    if text_only and (out is not None or captions is not None):
        raise typer.BadParameter("--out and --captions need sound; leave --text-only out")
    sound = _sound(voice=voice, profile=profile, max_frames=max_frames, sample_rate_hz=sample_rate, encoding=encoding)
    if text_only and sound:
        raise typer.BadParameter("--voice, --profile, --max-frames, --sample-rate and --encoding are those of sound; leave --text-only out")
    if video_sound and not videos:
        raise typer.BadParameter("--video-sound is for films; give one with --video")
    attached = [Attached(kind, path, video_sound and kind == "video") for kind, path in context.meta[ATTACHED]]
    if text is None and not attached:
        raise typer.BadParameter("give the words of the question, or what to ask about: --image, --audio, --video")
    if sum((json_schema is not None, regex is not None, bool(choice))) > 1:
        raise typer.BadParameter("a text keeps to one of --json-schema, --regex and --choice only")
    from omnistage.cli.speak import Question

    options = _options(address, pipeline, seed, timeout, sound)
    if text_only:
        options["outputs"] = ["text"]
    elif captions is not None:
        options["outputs"] = SPOKEN_AND_TOLD
    elif out is not None:
        options["outputs"] = ["text", "audio"]
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if regex is not None:
        options["regex"] = regex
    if choice:
        options["choice"] = choice
    _speak(
        Question(text or "", False, out, timeline, json, options, system, attached, schema=json_schema, captions=captions),
        address,
        pipeline,
        verbose,
    )


@app.command()
def say(
    text: TextArgument,
    address: Address = None,
    out: Out = None,
    voice: Voice = None,
    profile: Profile = None,
    max_frames: MaxFrames = None,
    sample_rate: SampleRate = None,
    encoding: Encoding = None,
    timeline: Timeline = None,
    captions: Captions = None,
    json: Json = False,
    seed: Seed = None,
    pipeline: PipelineName = "",
    timeout: Timeout = 120.0,
    verbose: Verbose = False,
) -> None:
    """Speak exactly this text."""
    from omnistage.cli.speak import Question

    sound = _sound(voice=voice, profile=profile, max_frames=max_frames, sample_rate_hz=sample_rate, encoding=encoding)
    options = _options(address, pipeline, seed, timeout, sound)
    if captions is not None:
        options["outputs"] = SPOKEN_AND_TOLD
    _speak(Question(text, True, out, timeline, json, options, captions=captions), address, pipeline, verbose)


app.command()(draw)


def _sound(**typed: str | int | None) -> Options:
    """What was said of the sound, by name of the option of a call."""
    return cast("Options", {name: value for name, value in typed.items() if value is not None})


def _options(address: str | None, pipeline: str, seed: int | None, timeout: float, sound: Options) -> Options:
    """What both commands ask of a router. pipeline: the router that is started for a call has no other."""
    options = cast("Options", {"timeout_s": timeout, **sound})
    if seed is not None:
        options["seed"] = seed
    if address is not None and pipeline:
        options["pipeline"] = pipeline
    return options


def _speak(question: Question, address: str | None, pipeline: str, verbose: bool) -> None:
    from omnistage.cli.interruptible import Interruptible
    from omnistage.cli.speak import speak

    if address is None:
        import omnistage.cli.pipelines  # noqa: F401  now, while an interrupt still just ends the process

    with errors_reported(verbose):
        complete = question.checked()
        target = _target(address, pipeline, complete)
        Interruptible().run(lambda work: speak(work, complete, target, verbose))


def _target(address: str | None, pipeline: str, question: Question) -> str | Layout:
    """A running router, or what to start for this call."""
    if address is not None:
        return address
    from omnistage.cli.pipelines import layout_for

    return layout_for(pipeline, question.inputs, question.outputs)


@app.command()
def serve(
    pipeline: Annotated[
        str,
        typer.Argument(
            metavar="[PIPELINE]", help="Name or YAML file of the pipeline, or a checkpoint of which there is one; default: smol."
        ),
    ] = "",
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the model, or its name at a hub: OWNER/NAME[@REVISION]; default: the pipeline's own."),
    ] = None,
    device: Annotated[list[str] | None, typer.Option(metavar="STAGE=DEV", help="cpu, cuda:0 ...; a bare DEV is for all stages.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    replicas: Annotated[list[str] | None, typer.Option(metavar="STAGE=N", help="Processes of a stage.")] = None,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")] = DEFAULT_ADDRESS,
    metrics_address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Prometheus metrics of the router.")] = "127.0.0.1:0",
    threads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[STAGE=]N", help="Compute threads of a process. A bare value is for the stages that have a use for it, here and below."
        ),
    ] = None,
    max_batch_size: Annotated[list[str] | None, typer.Option(metavar="[STAGE=]N", help="Sequences in one step.")] = None,
    max_batch_tokens: Annotated[list[str] | None, typer.Option(metavar="[STAGE=]N", help="Rows in one step, prompts included.")] = None,
    kv_cache_bytes: Annotated[list[str] | None, typer.Option(metavar="[STAGE=]BYTES", help="Memory for keys and values.")] = None,
    enable_cache: Annotated[
        list[str] | None, typer.Option(metavar="[STAGE=]BOOL", help="Keep what prompts that begin alike have in common.")
    ] = None,
    tensor_parallel_size: Annotated[
        list[str] | None, typer.Option(metavar="[STAGE=]N", help="Processes of a machine, a GPU each, that a model is spread over.")
    ] = None,
    gpu_memory_utilization: Annotated[
        list[str] | None, typer.Option(metavar="[STAGE=]PART", help="Part of a GPU's memory that may be filled.")
    ] = None,
    memory_share: Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]PART", help="Part of a device's memory for each process; default: equal for all that are on it."),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=0, max=4096, help="Answers at once; 0: the servers' own limits.")] = 0,
    inline_limit: Annotated[int | None, typer.Option(min=0, help="Tensors of fewer bytes travel in the message.")] = None,
    stall_limit: Annotated[float | None, typer.Option(metavar="SECONDS", help="Cancel clients that read nothing for so long.")] = None,
    client_share: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, metavar="PART", help="Most of the places for one client; default: 0.75.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Time for running answers to finish at the end.")] = 5.0,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the servers' logs here.")] = None,
    verbose: Verbose = False,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    lifeline_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start a router and all stages of a pipeline on this machine, until Ctrl-C."""
    from omnistage.cli import serve as serving
    from omnistage.cli.layout import ServerOptions, by_stage, counts, flag
    from omnistage.cli.pipelines import Choice

    try:
        devices = by_stage(device or (), "--device")
        processes = counts(replicas or (), "--replicas")
        settings = {
            name: by_stage(words, flag(name))
            for name, words in (
                ("threads", threads),
                ("max_batch_size", max_batch_size),
                ("max_batch_tokens", max_batch_tokens),
                ("kv_cache_bytes", kv_cache_bytes),
                ("enable_cache", enable_cache),
                ("tensor_parallel_size", tensor_parallel_size),
                ("gpu_memory_utilization", gpu_memory_utilization),
                ("memory_share", memory_share),
            )
            if words
        }
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    servers = ServerOptions(
        address=address,
        metrics_address=metrics_address,
        max_sessions=max_sessions,
        inline_limit=inline_limit,
        stall_limit_s=stall_limit,
        client_share=client_share,
        grace_s=grace,
    )
    choice = Choice(pipeline, checkpoint, devices, processes, dtype, settings, servers)
    with errors_reported(verbose):
        serving.serve(choice, log_dir, verbose, ready_fd, lifeline_fd)


@app.command()
@app.command("models", hidden=True)
def pipelines(address: Running = None, json: Json = False, timeout: Timeout = 120.0, verbose: Verbose = False) -> None:
    """List what can be asked, or served where nothing runs. Starts nothing."""
    from omnistage.cli.show import show_pipelines

    with errors_reported(verbose):
        asyncio.run(show_pipelines(address, json, timeout, verbose))


@app.command()
def status(address: Running = None, json: Json = False, timeout: Timeout = 120.0, verbose: Verbose = False) -> None:
    """Show the stage servers and how they are. Starts nothing."""
    from omnistage.cli.show import show_status

    with errors_reported(verbose):
        asyncio.run(show_status(address, json, timeout, verbose))


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME[@REVISION]", help="Of a model at the hub; default revision: main.")],
    verbose: Verbose = False,
) -> None:
    """Fetch a model by its name into the cache, as `serve` does; an interrupted fetch goes on."""
    from omnistage.cli.fetch import pull as fetch_named

    with errors_reported(verbose):
        print(fetch_named(name))


@app.command("fetch-default")
def fetch_default(verbose: Verbose = False) -> None:
    """Download and convert the default model, once; later calls find it in the cache."""
    from omnistage.cli.fetch import fetch

    with errors_reported(verbose):
        print(fetch())


@app.command("make-tiny")
def make_tiny(
    architecture: Annotated[str, typer.Argument(metavar="ARCHITECTURE", help=f"One of {', '.join(MAKERS)}.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or not there.")],
    size: Annotated[str, typer.Option(help=f"{', '.join(SIZES)}, as far as there is one of this.")] = "tiny",
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same files.")] = 0,
    tokenizer: Annotated[str, typer.Option(help="built: some hundred tokens; qwen: all of Qwen2.5's, downloaded once.")] = "built",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; default: the size's own.")] = "",
    verbose: Verbose = False,
) -> None:
    """Make a checkpoint with random weights in the layout of a published one: for tests and trials."""
    from omnistage.cli.make import make
    from omnistage.models.makers import Order

    with errors_reported(verbose):
        make(architecture, directory, Order(size, seed, tokenizer, dtype))
        print(directory)
