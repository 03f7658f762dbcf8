"""The `omnistage` command and its subcommands. Every start imports the modules with their options; the work is in others, imported when it
runs."""

from __future__ import annotations

from typing import Annotated

import typer

from omnistage.cli.bench.command import bench
from omnistage.cli.make.ask import ask, chat, say
from omnistage.cli.make.draw import draw, film, sound
from omnistage.cli.options import Attaching, Command, CommandGroup, examples, show_version
from omnistage.cli.show.commands import fetch_default, list_models, make_tiny, pipelines, protos, pull, status, voices
from omnistage.cli.stack.launch import VARIABLE_PREFIX, Configured, serve, stop

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


app.command(
    cls=Attaching,
    epilog=examples(
        'omnistage ask "What is a kite?" --out kite.wav',
        "omnistage ask - --text-only < question.txt",
        'omnistage ask "What is this?" --image cat.jpg --pipeline DIR',
        "arecord -f cd | omnistage ask --audio - --pipeline DIR",
        'omnistage ask "Is a kite a toy?" --choice yes --choice no --json',
    ),
)(ask)
app.command(
    cls=Command,
    epilog=examples("omnistage chat", "omnistage chat --continue --speed 1.2", 'omnistage chat --system "Answer in one sentence."'),
)(chat)
app.command(
    cls=Command,
    epilog=examples(
        'omnistage say "Good morning." --speed 0.9',
        "omnistage say - --out speech.opus --captions speech.srt < speech.txt",
        'omnistage say "Hello." --out - | aplay',
    ),
)(say)
app.command(
    cls=Command,
    epilog=examples(
        'omnistage draw "a red heart on blue"',
        'omnistage draw "a hill" --out hill.png --size 512x512 --pipeline DIR',
    ),
)(draw)
app.command(
    cls=Command,
    epilog=examples(
        'omnistage film "a hill in the rain" --out hill.webm --pipeline DIR',
        'omnistage film "it rains" --image hill.png --out rain.mp4 --pipeline DIR',
    ),
)(film)
app.command(
    cls=Command,
    epilog=examples(
        'omnistage sound "rain on a roof" --out rain.flac --pipeline DIR',
        'omnistage sound "a bell" --out - --pipeline DIR | aplay',
    ),
)(sound)
app.command(
    cls=Configured,
    # Otherwise the settings of the app apply, which lack these.
    context_settings={"auto_envvar_prefix": VARIABLE_PREFIX, "help_option_names": ["-h", "--help"]},
    epilog=examples(
        "omnistage serve",
        "omnistage serve --replicas talker=2 --log-dir logs",
        "omnistage serve --detach --metrics 127.0.0.1:9464",
        "omnistage serve Qwen/Qwen2.5-Omni-3B --device cuda:0",
        "omnistage serve --config stack.yaml --print-config",
    ),
)(serve)
app.command(cls=Command, epilog=examples("omnistage stop", "omnistage stop 50050 --now", "omnistage stop --all"))(stop)
app.command(cls=Command, epilog=examples("omnistage pipelines", "omnistage pipelines --address host:50050 --json"))(pipelines)
app.command("models", cls=Command, hidden=True)(pipelines)
app.command(cls=Command, epilog=examples("omnistage status", "watch omnistage status --address host:50050"))(status)
app.command(cls=Command, epilog=examples("omnistage voices", "omnistage voices --address host:50050 --json"))(voices)
app.command("list", cls=Command, epilog=examples("omnistage list", "omnistage list --json"))(list_models)
app.command(cls=Command, epilog=examples("omnistage pull Qwen/Qwen2.5-Omni-3B"))(pull)
app.command("fetch-default", cls=Command, epilog=examples("omnistage fetch-default"))(fetch_default)
app.command(
    "make-tiny",
    cls=Command,
    epilog=examples("omnistage make-tiny qwen2.5-omni tiny-omni", "omnistage make-tiny z-image z --size small"),
)(make_tiny)
app.command(cls=Command, epilog=examples("omnistage protos protos", "omnistage protos protos --errors"))(protos)
app.command(
    cls=Command,
    epilog=examples(
        "omnistage bench",
        "omnistage bench --address host:50050 -c 1,16,64 --out f.json",
        "omnistage bench --rate 0.5,1,2 --seconds 60 --slo ttft=0.5,ttfa=1,rtf=0.5",
    ),
)(bench)
