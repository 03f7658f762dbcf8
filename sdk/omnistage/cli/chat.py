"""`omnistage chat`: its options. The work is in `chatting`, which is imported when it runs."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from omnistage.cli.ask import MaxTokens, Speed, System, TextOnly, Voice
from omnistage.cli.options import DEFAULT_TIMEOUT_S, Address, ApiKey, MaxRetries, PipelineName, Seed, Timeout, Verbose
from omnistage.cli.report import errors_reported

Play = Annotated[bool, typer.Option("--no-play", help="Ask for the sound, for /save, but do not play it.")]
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
    no_play: Play = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Talk: ask, hear the answer while it is made, ask on.

    Enter or Ctrl-C stops an answer, Ctrl-D ends the conversation. /help shows what else can be typed.
    """
    from omnistage.cli.chatting import Chat, run
    from omnistage.cli.interruptible import Interruptible
    from omnistage.cli.talk import Talk, TalkSettings
    from omnistage.cli.targets import Need, target_for

    with errors_reported(verbose):
        option_values = {"voice": voice, "speed": speed, "seed": seed, "system": system, "max_tokens": max_tokens}
        settings = cast("TalkSettings", {name: value for name, value in option_values.items() if value is not None})
        talk = Talk.last(settings) if go_on else Talk(settings)
        need = Need(["text"], ["text"] if text_only else [], "thinker")
        target = target_for(need, address, pipeline, api_key)
        order = Chat(talk, target.pipeline, timeout, max_retries, has_sound=not text_only, is_played=not (text_only or no_play))
        Interruptible().run(lambda work: run(order, target, verbose))
