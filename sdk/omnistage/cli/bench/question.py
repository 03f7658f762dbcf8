"""Makes the requests of a load, each with its number and its options."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from omnistage.cli.bench.prompts import NumberRange, Prompts
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.events import Event
from omnistage.client.options import Options

Task = Literal["ask", "say", "draw"]

LAST_SEED = 2**64

_LENGTHS = 1
"""Added to a seed, so that the lengths of answers are drawn independently of the words."""


@dataclass(frozen=True, slots=True)
class BenchQuestion:
    """One request. number: counted from 0 through all levels and warm-ups. task: what to do with `text`."""

    number: int
    task: Task
    text: str
    options: Options

    @property
    def seed(self) -> int:
        return self.options["seed"]

    def stream(self, omni: AsyncOmni) -> AsyncGenerator[Event, None]:
        """The events of the answer."""
        match self.task:
            case "ask":
                return omni.stream(self.text, **self.options)
            case "say":
                return omni.stream_say(self.text, **self.options)
            case "draw":
                whatever_comes = cast("Options", {"outputs": (), **self.options})  # No output is named: the answer may also be a film.
                return omni.stream_draw(self.text, **whatever_comes)


@dataclass(frozen=True, slots=True)
class Questions:
    """All requests of a run. options: for every request. seed: of the request with number 0; each later request has the next seed. tokens:
    the range from which the exact number of tokens of each answer is drawn; None: the model decides when to end."""

    task: Task
    prompts: Prompts
    options: Options
    seed: int = 0
    tokens: NumberRange | None = None

    def at(self, number: int) -> BenchQuestion:
        """The request with this number."""
        prompt = self.prompts.at(number)
        options = cast("Options", {**self.options, "seed": (self.seed + number) % LAST_SEED})
        if prompt.max_tokens is not None and self.task == "ask":
            options["max_tokens"] = prompt.max_tokens
        if self.tokens is not None:
            count = self.tokens.draw(np.random.default_rng([self.seed, number, _LENGTHS]))
            options["max_tokens"] = options["min_tokens"] = count
            options["ignore_eos"] = True
        return BenchQuestion(number, self.task, prompt.text, options)
