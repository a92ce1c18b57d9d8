"""What commands say on the terminal: progress, tables of at most 100 columns, refusals of one line."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

WIDTH = 100  # columns that every table fits
_EVERY = 10.0  # seconds between lines of progress where there is no terminal
Item = TypeVar("Item")


def make_console() -> Console:
    """A console at least WIDTH columns wide, so that no table is cut where output is piped or the window is narrow."""
    return Console(width=max(WIDTH, Console().width))


def make_empty_table(*headers: str, title: str | None = None) -> Table:
    """In the form of every table here: one line below the headers, no frame."""
    return Table(*headers, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")


def track(items: Iterable[Item], console: Console, describe: Callable[[Item], str] = str) -> Iterator[Item]:
    """The items, with a progress bar; where there is no terminal, with a line before the first and every 10 seconds."""
    items, is_due = list(items), make_timer()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(items))
        for number, item in enumerate(items):
            progress.update(task, completed=number, description=describe(item))
            if not console.is_terminal and is_due():
                console.print(f"{number + 1} of {len(items)}: {describe(item)}", markup=False)
            yield item
        progress.update(task, completed=len(items))


def make_timer() -> Callable[[], bool]:
    """What is true at its first call, and then once in 10 seconds: for lines of progress where there is no terminal."""
    due = 0.0

    def is_due() -> bool:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return False
        due = now + _EVERY
        return True

    return is_due


@contextmanager
def leave_out(console: Console, what: str, reason: type[Exception] = Exception) -> Iterator[None]:
    """Says that `what` is left out, and why, if this is raised within: it costs none of the other measurements."""
    try:
        yield
    except reason as error:
        console.print(f"{what} is left out: {first_line(error)}", style="yellow", markup=False)


def first_line(reason: BaseException) -> str:
    """The first line of its message, or the name of its type if it has no message."""
    return (str(reason).splitlines() or [type(reason).__name__])[0]


@contextmanager
def refuse_errors(prefix: str = "", *also: type[Exception]) -> Iterator[None]:
    """Refuses what is raised within for what came from outside: settings, files, packages; also: exceptions besides."""
    try:
        yield
    except (ImportError, OSError, ValueError, *also) as reason:
        refuse(f"{prefix}{reason}")


def refuse(message: str) -> NoReturn:
    """Ends the command with exit status 2 and one line: the option, what it got and what is accepted."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
