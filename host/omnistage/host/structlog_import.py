"""The first import of structlog, without rich.

structlog imports rich if it is installed, for tracebacks in colour that no log of ours has. That takes a fifth of the start of a server.
"""

from __future__ import annotations

import sys
from importlib import import_module


def import_structlog() -> None:
    """Import structlog without rich. Code that needs rich can import it afterwards. Ends the process with a message if structlog is not
    installed."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # None makes an import of rich fail.
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
