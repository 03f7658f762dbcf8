"""The requests of a benchmark, each with its number and its options. Their prompts are built-in sentences, the lines of a file, or random
words."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import typer

from omnistage.cli.options import MAX_SEED
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import RequestError
from omnistage.client.events import Event
from omnistage.client.options import Options

QUESTIONS = (
    "Why does ice float on water?",
    "How does a letter find its way across the world?",
    "What makes a good cup of tea?",
    "Tell me how a bridge carries its own weight.",
    "Why do cats purr?",
    "What is the difference between weather and climate?",
    "Explain to a child what a shadow is.",
    "How would you pack for three days in the mountains?",
    "What does a conductor do that an orchestra could not do alone?",
    "Why do some trees keep their leaves in winter?",
    "Describe a harbour early in the morning.",
    "How does a lock keep out whoever has no key?",
    "What are three uses for an old newspaper?",
    "Why is the night sky dark?",
    "How do I keep a houseplant alive?",
    "Tell me a short story about a lighthouse.",
    "What happens to a stone in a river over a thousand years?",
    "How does soap clean hands?",
    "Why do we have different time zones?",
    "What should I look at when I buy a used bicycle?",
    "Explain how a sundial works.",
    "What would a day without electricity be like?",
    "How do bakers get holes into bread?",
    "Why does a spinning top stay up?",
    "Give me two reasons to learn another language.",
    "How do ants find the shortest way to food?",
    "What is a good way to begin a speech?",
    "Why does metal feel colder than wood?",
    "Describe the sound of rain on a tin roof.",
    "How could a small town get rid of its traffic?",
)

WORDS = (
    *("the", "a", "of", "and", "to", "in", "is", "it", "that", "for", "on", "with", "as", "was", "at", "by", "an", "be", "this", "from"),
    *("or", "have", "not", "are", "but", "had", "his", "they", "she", "which", "you", "one", "we", "all", "her", "would", "there", "their"),
    *("will", "when", "who", "him", "been", "has", "more", "if", "no", "out", "do", "so", "can", "what", "up", "said", "about", "other"),
    *("into", "than", "its", "time", "only", "could", "new", "them", "man", "some", "these", "then", "two", "first", "may", "any", "like"),
    *("now", "my", "such", "make", "over", "our", "even", "most", "me", "state", "after", "also", "made", "many", "did", "must", "before"),
    *("back", "see", "through", "way", "where", "get", "much", "go", "well", "your", "know", "should", "down", "work", "year", "because"),
)
"""Short and frequent words: one token each in most vocabularies."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Whole numbers from `low` to `high`, both included; `draw` gives each with the same chance."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @classmethod
    def parse(cls, option: str, text: str | None, maximum: int) -> NumberRange | None:
        """The range in a text such as 100, or 100-900; its numbers must be from 1 to `maximum`. option: for errors. Raises BadParameter."""
        if text is None:
            return None
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text)
        low_text, high_text = match.groups() if match else ("0", "")  # The 0 is refused below.
        low, high = int(low_text), int(high_text or low_text)
        if not 1 <= low <= high <= maximum:
            raise typer.BadParameter(f"{option} {text}: give a number from 1 to {maximum}, or two such as 100-900")
        return cls(low, high)

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class Questions:
    """All requests of a run, numbered from 0 through all levels and warm-ups. The same number has the same request.

    options: for every request. seed: of the request with number 0; each later request has the next seed. prompts: requests use them in
    order, and after the last one the first. words: instead of them, prompts of so many random words of `WORDS`; few of them begin alike, so
    a server's cache does not shorten the work. tokens: the range from which the exact number of tokens of each answer is drawn; None: the
    model decides when to end. source: where the prompts come from, for people.
    """

    task: Literal["ask", "say", "draw"]
    options: Options
    seed: int = 0
    prompts: Sequence[str] = QUESTIONS
    words: NumberRange | None = None
    tokens: NumberRange | None = None
    source: str = "built-in prompts"

    @property
    def description(self) -> str:
        """A description of the prompts, for people."""
        return f"{len(self.prompts)} {self.source}" if self.words is None else f"prompts of {self.words} random words"

    def seed_of(self, number: int) -> int:
        """The seed of the request with this number."""
        return (self.seed + number) % (MAX_SEED + 1)

    def at(self, number: int) -> tuple[str, Options]:
        """The prompt and the options of the request with this number."""
        rng = np.random.default_rng([self.seed, number])
        listed = self.prompts[number % len(self.prompts)]
        prompt = listed if self.words is None else " ".join(rng.choice(WORDS, self.words.draw(rng)))
        options = Options(**{**self.options, "seed": self.seed_of(number)})
        if self.tokens is not None:
            tokens = self.tokens.draw(rng)
            options |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return prompt, options

    def stream(self, omni: AsyncOmni, number: int) -> AsyncGenerator[Event, None]:
        """Send the request with this number; returns the events of its answer."""
        streams: Mapping[str, Callable[..., AsyncGenerator[Event, None]]]
        streams = {"ask": omni.stream, "say": omni.stream_say, "draw": omni.stream_draw}
        prompt, options = self.at(number)
        return streams[self.task](prompt, **options)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: one on each line, empty lines left out. Raises RequestError for a file that has no prompt or cannot be
    read."""
    if path.suffix.lower() == ".jsonl":
        raise RequestError(f"--prompts {path}: prompts are lines of plain text, no JSON", hint=f"`jq -r .prompt {path}` makes them.")
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompts {path}: this is no text in UTF-8", hint="Give a prompt a line.") from error
    except OSError as error:
        raise RequestError(f"--prompts {path}: cannot be read: {error.strerror or error}") from error
    if not prompts:
        raise RequestError(f"--prompts {path}: there is no prompt in it", hint="Give a prompt a line.")
    return prompts
