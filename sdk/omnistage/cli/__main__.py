"""The `omnistage` command, also run as `python -m omnistage.cli`. It handles interrupts and missing packages before anything else."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # Ctrl-C during the import of `signal` would give a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import gc
import io
import os
import sys
from typing import TYPE_CHECKING

from omnistage.cli import interrupt

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line of this process; ends in SystemExit with the exit code."""
    interrupt.exit_at_once()
    _open_standard_streams()
    if sys.argv[1:] in (["--version"], ["-V"]):  # Handled without importing all commands, because scripts ask for it often.
        from importlib.metadata import version

        print(f"omnistage {version('omnistage')}")
        return
    # The command itself reports a router that ends during a call; gRPC must not report it too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    gc.disable()  # Imported objects stay to the end, and searching them for garbage takes a fifth of the time of a short command.
    try:
        from omnistage.cli.main import app

        gc.freeze()
        gc.enable()
        raise SystemExit(_run(app))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "omnistage":
            raise
        sys.stderr.write(f"error: the command needs the package {package}, which is not installed\n")
        # `client.private_stack` has this text too, but may not be importable: the missing package may be one that the client needs.
        sys.stderr.write("hint: `make wheels` in a clone, then pip install --find-links dist 'omnistage[cli,convert,models]'\n")
        raise SystemExit(1) from None
    finally:
        interrupt.ignore_to_the_end()


def _run(app: typer.Typer) -> int:
    """Run the app and return the exit code. An error of the command line is printed in lines that fit the terminal."""
    from typer import Abort
    from typer._click.exceptions import ClickException

    from omnistage.cli.options import fit_lines

    try:
        return app(prog_name="omnistage", standalone_mode=False) or 0
    except ClickException as error:
        text = io.StringIO()
        error.show(text)
        columns = os.get_terminal_size(2).columns if os.isatty(2) else sys.maxsize
        sys.stderr.write(fit_lines(text.getvalue(), columns))
        return error.exit_code
    except Abort:
        sys.stderr.write("Aborted!\n")
        return 1


def _open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that the caller closed. Otherwise a file that is opened later would get such a stream's
    number, and the output.

    Characters that a terminal cannot show become question marks, and control characters are shown as escapes.
    """
    from omnistage.host.terminal import guard_standard_streams  # Imported only now that Ctrl-C is handled.

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    guard_standard_streams()


if __name__ == "__main__":
    main()
