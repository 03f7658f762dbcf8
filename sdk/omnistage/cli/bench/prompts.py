"""The requests of a benchmark, each with its number and its options. Their prompts are built-in sentences, the lines of a file, or random
words."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np

from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import BadRequestError, RequestError
from omnistage.client.events import Event
from omnistage.client.options import Options

OPTION = "--prompts"

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

SCENES = (
    "a red kite above a green hill",
    "a lighthouse in a storm",
    "a bowl of oranges on a blue table",
    "a narrow street after rain",
    "a wooden boat on a still lake",
    "two cats on a window sill",
    "a snowy forest at dusk",
    "an old bicycle against a brick wall",
    "a field of sunflowers",
    "a teapot and two cups",
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

MAX_LINES = 1_000_000


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt. max_tokens: the largest number of tokens of its answer; None: the prompt does not limit it."""

    text: str
    max_tokens: int | None = None


class Prompts(Protocol):
    """The prompts of a benchmark: `at` returns the prompt for the request of this number, from 0."""

    @property
    def description(self) -> str:
        """A description of the prompts, for people."""

    def at(self, number: int) -> BenchPrompt: ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of prompts. Requests use them in order, and after the last one the first. source: where they come from, for people."""

    prompts: Sequence[BenchPrompt]
    source: str

    @property
    def description(self) -> str:
        return f"{len(self.prompts)} {self.source}"

    def at(self, number: int) -> BenchPrompt:
        return self.prompts[number % len(self.prompts)]


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Whole numbers from `low` to `high`, both included; `draw` gives each with the same chance."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class RandomWords:
    """Prompts of random words of `WORDS`. count: how many words a prompt has. A prompt depends only on the seed and the number of the
    request. Few prompts begin alike, so a server's cache does not shorten the work."""

    count: NumberRange
    seed: int

    @property
    def description(self) -> str:
        return f"prompts of {self.count} random words"

    def at(self, number: int) -> BenchPrompt:
        rng = np.random.default_rng([self.seed, number])
        return BenchPrompt(" ".join(WORDS[place] for place in rng.integers(len(WORDS), size=self.count.draw(rng))))


def built_in_prompts(*, to_draw: bool) -> Listed:
    """The built-in prompts: questions, or scenes if they are to be drawn."""
    return Listed([BenchPrompt(text) for text in (SCENES if to_draw else QUESTIONS)], "built-in prompts")


def of_file(path: Path) -> Listed:
    """The prompts of a file: one on each line, empty lines left out. In a file that ends in .jsonl a line is an object {"prompt": TEXT,
    "max_tokens": N}, whose second key is optional. Raises RequestError for a file that has no prompt or cannot be read, and for a line that
    is no prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{OPTION} {path}: this is no text in UTF-8", hint="Give a prompt a line.") from error
    except OSError as error:
        raise RequestError(f"{OPTION} {path}: cannot be read: {error.strerror or error}") from error
    read = _of_object if path.suffix.lower() == ".jsonl" else BenchPrompt
    prompts = [_read_numbered(path, number, line, read) for number, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(prompts) <= MAX_LINES:
        fault = f"it has {len(prompts)} prompts" if prompts else "there is no prompt in it"
        raise RequestError(f"{OPTION} {path}: {fault}", hint=f"Give a prompt a line, 1 to {MAX_LINES} of them.")
    return Listed(prompts, f"prompts of {path.name}")


def _read_numbered(path: Path, number: int, line: str, read: Any) -> BenchPrompt:
    """The prompt on a line. number: of the line, from 1. read: makes a prompt of the line. Raises RequestError that names the line."""
    try:
        prompt: BenchPrompt = read(line)
    except BadRequestError as error:
        hint = 'A line is such as {"prompt": "Why?", "max_tokens": 64}.'
        raise RequestError(f"{OPTION} {path}: line {number}: {error.message}", hint=hint) from error
    return prompt


def _of_object(line: str) -> BenchPrompt:
    """The prompt in a line of JSON. Raises BadRequestError."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRequestError.of("prompt", f"this is no JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(fields, Mapping) or not isinstance(fields.get("prompt"), str) or not fields["prompt"].strip():
        raise BadRequestError.of("prompt", "is to be a text that is not empty")
    max_tokens = fields.get("max_tokens")
    is_number = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)  # A bool is an int for Python.
    if max_tokens is not None and not (is_number and 1 <= max_tokens <= 32768):
        raise BadRequestError.of("max_tokens", f"is {max_tokens!r}; give a number from 1 to 32768, or leave it out")
    return BenchPrompt(fields["prompt"], max_tokens)


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
