"""The `omnistage` command and its subcommands. Every start imports the modules with their options; the work is in others, imported when it
runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from omnistage.cli.bench.command import bench
from omnistage.cli.make.ask import ask, chat, say
from omnistage.cli.make.draw import draw, film, sound
from omnistage.cli.options import Attaching, Command, CommandGroup, examples, show_version
from omnistage.cli.show.commands import doctor, fetch_default, list_models, logs, make_tiny, pipelines, protos, pull, status, voices
from omnistage.cli.stack.launch import VARIABLE_PREFIX, Configured, launch, serve, stop

app = typer.Typer(
    cls=CommandGroup,
    help="Ask models that answer in text, sound, pictures and films, and serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Help in two columns, as wide as it gets: a table with a column for each part of an option leaves no room for words at 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        'omnistage ask "What is a kite?"   a stack for one call, or the one that runs',
        "omnistage serve --detach          a stack that stays",
        "omnistage chat                    talk to it",
    ),
)


@app.callback()
def _omnistage(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _add(
    function: Callable[..., None], *example_lines: str, name: str | None = None, kind: type[Command] = Command, **settings: Any
) -> None:
    """Add a command. example_lines: the end of its help. settings: of Typer."""
    app.command(name, cls=kind, epilog=examples(*example_lines), **settings)(function)


_add(
    ask,
    'omnistage ask "What is a kite?" --out kite.wav',
    "omnistage ask - --text-only < question.txt",
    'omnistage ask "What is this?" --image cat.jpg --pipeline DIR',
    "arecord -f cd | omnistage ask --audio - --pipeline DIR",
    'omnistage ask "Is a kite a toy?" --choice yes --choice no --json',
    kind=Attaching,
)
_add(chat, "omnistage chat", "omnistage chat --continue --speed 1.2", 'omnistage chat --system "Answer in one sentence."')
_add(
    say,
    'omnistage say "Good morning." --speed 0.9',
    "omnistage say - --out speech.opus --captions speech.srt < speech.txt",
    'omnistage say "Hello." --out - | aplay',
)
_add(draw, 'omnistage draw "a red heart on blue"', 'omnistage draw "a hill" --out hill.png --size 512x512 --pipeline DIR')
_add(
    film,
    'omnistage film "a hill in the rain" --out hill.webm --pipeline DIR',
    'omnistage film "it rains" --image hill.png --out rain.mp4 --pipeline DIR',
)
_add(
    sound,
    'omnistage sound "rain on a roof" --out rain.flac --pipeline DIR',
    'omnistage sound "a bell" --out - --pipeline DIR | aplay',
)
_add(
    serve,
    "omnistage serve",
    "omnistage serve --replicas talker=2 --log-dir logs",
    "omnistage serve --detach --metrics 127.0.0.1:9464",
    "omnistage serve Qwen/Qwen2.5-Omni-3B --device cuda:0",
    "omnistage serve --config stack.yaml --print-config",
    kind=Configured,
    # Otherwise the settings of the app apply, which lack these.
    context_settings={"auto_envvar_prefix": VARIABLE_PREFIX, "help_option_names": ["-h", "--help"]},
)
_add(stop, "omnistage stop", "omnistage stop 50050 --now", "omnistage stop --all")
_add(pipelines, "omnistage pipelines", "omnistage pipelines --address host:50050 --json")
app.command("models", cls=Command, hidden=True)(pipelines)
app.command("launch", cls=Command, hidden=True)(launch)
_add(status, "omnistage status", "watch omnistage status --address host:50050")
_add(doctor, "omnistage doctor", "omnistage doctor --address host:50050 --json")
_add(logs, "omnistage logs", "omnistage logs talker --follow", "omnistage logs --request ID", "omnistage logs router --since 10m --json")
_add(voices, "omnistage voices", "omnistage voices --address host:50050 --json")
_add(list_models, "omnistage list", "omnistage list --json", name="list")
_add(pull, "omnistage pull Qwen/Qwen2.5-Omni-3B")
_add(fetch_default, "omnistage fetch-default")
_add(make_tiny, "omnistage make-tiny qwen2.5-omni tiny-omni", "omnistage make-tiny z-image z --size small")
_add(protos, "omnistage protos protos", "omnistage protos protos --errors")
_add(
    bench,
    "omnistage bench",
    "omnistage bench --address host:50050 -c 1,16,64 --out f.json",
    "omnistage bench --rate 0.5,1,2 --seconds 60 --slo ttft=0.5,ttfa=1,rtf=0.5",
)
