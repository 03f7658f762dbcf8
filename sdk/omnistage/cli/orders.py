"""Orders: the typed arguments of `ask`, `say`, `draw`, `film` and `sound`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar

from omnistage.cli.interruptible import Interruptible
from omnistage.cli.report import errors_reported
from omnistage.cli.targets import Need, target_for
from omnistage.cli.where import Where
from omnistage.client.request import Options


class TypedOrder(ABC):
    """The typed arguments of one command. options: for the call of the client. as_json: print one JSON object. need: the abilities that a
    stack must have; read it only from the result of `checked`."""

    __slots__ = ()
    options: Options
    as_json: bool

    @property
    @abstractmethod
    def need(self) -> Need: ...

    @abstractmethod
    def checked(self) -> Self:
        """The order with its words and media read, also from standard input. Raises RequestError for an impossible order, before anything
        is fetched, started or asked."""


class HeardOrder(TypedOrder):
    """An order whose result is sound. out: the file of the sound; -: standard output; None: no file. play: whether to play it while it
    comes; None: only if a person sits at a terminal."""

    __slots__ = ()
    out: Path | None
    play: bool | None

    @property
    def is_sound_piped(self) -> bool:
        """Whether standard output is for the sound."""
        return self.out is not None and str(self.out) == "-"

    @property
    def is_to_be_heard(self) -> bool:
        """Whether to play the sound while it comes."""
        if self.play is not None:
            return self.play
        return self.out is None and not self.as_json and sys.stderr.isatty() and "audio" in self.options.get("outputs", ("audio",))


T = TypeVar("T", bound=TypedOrder)


def carry_out(
    order: T,
    make: Callable[[Interruptible, T, Where, bool], Awaitable[None]],
    address: str | None,
    pipeline: str,
    api_key: str | None,
    verbose: bool,
    devices: Mapping[str, str] | None = None,
) -> None:
    """Check an order, and run `make`, which carries it out, until it is done or interrupted. The other arguments: as in `target_for`."""
    with errors_reported(verbose):
        complete = order.checked()
        target = target_for(complete.need, address, pipeline, api_key, devices=devices, is_quiet=complete.as_json)
        Interruptible().run(lambda work: make(work, complete, target, verbose))
