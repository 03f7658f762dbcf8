"""The first import of structlog, without rich.

structlog imports rich wherever it is installed, for tracebacks in colour that no log of ours has: a fifth of the start of a server.
"""

from __future__ import annotations

import sys
from importlib import import_module


def import_structlog() -> None:
    """Import structlog. Code that needs rich can import it afterwards. Ends the process with a line if structlog is not installed."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # As Python has it for what cannot be imported.
    try:
        import_module("structlog")
    except ModuleNotFoundError as error:
        if error.name != "structlog":
            raise
        sys.exit(
            "error: servers need packages that are not installed: `make wheels` in a clone, then "
            "pip install --find-links dist 'omnistage[server]', for stages 'omnistage[models]'"
        )
    finally:
        del sys.modules["rich"]
