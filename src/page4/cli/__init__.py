"""The command line: `main` turns every error of page4 into one line on stderr and an exit code.

Exit codes: 0 pass, 1 verdict fail, 2 usage, 3 environment or input. Nothing here imports
torch; the verbs do when they run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from page4.errors import Page4Error

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `page4 ARGV` and return its exit code; the entry point of the `page4` command."""
    from page4.cli.app import ClickError, build, missing_command
    from page4.cli.unknown import explain

    arguments = list(sys.argv[1:] if argv is None else argv)
    command = build()
    try:
        if not arguments:
            raise missing_command()
        code = command.main(args=arguments, prog_name="page4", standalone_mode=False)
        sys.stdout.flush()
        # typer turns Ctrl-C into this code.
        return fail("interrupted", INTERRUPTED) if code == INTERRUPTED else int(code or 0)
    except ClickError as error:
        return fail(explain(error, command, arguments), error.exit_code)
    except Page4Error as error:
        return fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader went away (`page4 ... | head`), which is no failure; nothing may be flushed into its pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as error:
        return fail(f"{type(error).__name__}: {error}", Page4Error.exit_code)
    except Exception:
        # A fault of ours. Its traceback is the report; Python's own exit code 1 would read as a failed verdict.
        traceback.print_exc()
        return Page4Error.exit_code


def fail(text: str, code: int) -> int:
    """Print one line on stderr and return `code`."""
    one_line = " ".join(text.split())
    print(f"page4: error: {one_line}", file=sys.stderr)
    return code
