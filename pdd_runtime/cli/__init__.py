"""The command `pdd-runtime`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a command. Errors are told as what, where, why and fix, never as a traceback."""
    from pdd_runtime.cli.app import app
    from pdd_runtime.cli.console import FAILED, Consoles, exit_code
    from pdd_runtime.errors import PddError

    try:
        app(prog_name="pdd-runtime")
    except PddError as error:
        Consoles().error(error)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # `pdd-runtime ps | head`: nobody reads on. Keep the interpreter from failing on its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(FAILED)
    except Exception as error:
        if os.environ.get("PDD_DEBUG"):
            raise
        unexpected = PddError(
            f"unexpected {type(error).__name__}: {error}",
            why="this is a fault of pdd-runtime",
            fix="set PDD_DEBUG=1 to see where it comes from, and report it",
        )
        Consoles().error(unexpected)
        sys.exit(FAILED)
