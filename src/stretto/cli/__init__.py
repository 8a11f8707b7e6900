"""The `stretto` command, one file per verb, and what other commands share: flags, the console and error messages."""

from stretto.cli.flags import check_flags, choose, console_for, parse
from stretto.cli.main import report_errors, show_error

__all__ = ["check_flags", "choose", "console_for", "parse", "report_errors", "show_error"]
