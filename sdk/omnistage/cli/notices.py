"""Lines on stderr for whoever watches a stack. The stack does not depend on them."""

from __future__ import annotations

from contextlib import suppress

from omnistage.cli.console import Console


class Notices(Console):
    """Prints to stderr, one line a call, as long as the terminal, the pipe or the disk behind it takes them.

    A stack outlives the terminal that it was started from and the `head` that its output went to.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False, soft_wrap=True)

    def say(self, markup: str) -> None:
        """Print a line; it is lost where nobody can read it any more."""
        with suppress(OSError):
            self.print(markup)

    def tell(self, markup: str) -> None:
        """The same for a sentence: a terminal gets it in lines that are broken between words. What is to be copied is for `say`."""
        with suppress(OSError):
            self.print(markup, soft_wrap=not self.is_terminal)

    def on_broken_pipe(self) -> None:
        """By default rich ends the process."""
