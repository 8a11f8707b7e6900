"""The `stretto` command: finds the verb and turns errors into messages."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from stretto.errors import StrettoError

VERBS: Final = {
    "train": "train a task on your sequences or the embedded ones",
    "predict": "what a trained model makes of new data",
    "evaluate": "the metrics of a trained model",
    "export": "a model for use without Stretto: ONNX, a torch.export program, or one step in C",
    "inspect": "lengths, buckets and padding of a data set",
    "sweep": "many runs over seeds and settings, and a page that compares them",
    "report": "the HTML page of a run",
    "watch": "that page in a browser, refreshed while the run trains",
    "explain": "how a cell is compiled: what leaves the time loop, and what a time step costs",
    "bench": "how fast a cell or model is on this machine",
    "doctor": "what Stretto will use on this machine, and why",
}
USER_ERROR: Final = 2
INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0, or 2 for anything the user can fix."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else USER_ERROR
    if words[0] == "--version":
        print(f"stretto {importlib.metadata.version('stretto')}")
        return 0
    return report_errors(_run_verb, words)


def report_errors(command: Callable[[list[str]], int], words: list[str]) -> int:
    """The exit code of a command; what the user can fix is printed as a sentence."""
    try:
        return command(words)
    except StrettoError as error:
        return show_error(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `head` does.
        sys.stderr.close()
        return 0


def show_error(error: StrettoError) -> int:
    """Print what is wrong and how to fix it; returns the exit code."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return USER_ERROR


def _run_verb(words: list[str]) -> int:
    name, *rest = words
    if name not in VERBS:
        raise StrettoError(f"there is no verb {name!r}", fix=f"Choose one of {', '.join(VERBS)}.")
    run: Callable[[list[str]], int] = importlib.import_module(f"stretto.cli.{name}").run
    return run(rest)


def usage() -> str:
    """What `stretto --help` prints."""
    lines = ["usage: stretto VERB ...", "", "Recurrent networks that train fast.", ""]
    lines += [f"  {verb:<11}{summary}" for verb, summary in VERBS.items()]
    return "\n".join([*lines, "", "Run stretto VERB --help for its flags."])
