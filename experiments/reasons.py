"""What is said on the terminal in one line: why something failed, and what is refused."""

from typing import NoReturn

import typer


def first_line(reason: BaseException) -> str:
    """Its message's first line, or its type's name if it has no message."""
    return (str(reason).splitlines() or [type(reason).__name__])[0]


def last_line(reason: BaseException) -> str:
    """Its message's last line, or its type's name; what comes from another process ends with what it said there."""
    return (str(reason).splitlines() or [type(reason).__name__])[-1]


def refuse(message: str) -> NoReturn:
    """Ends the command with one line: an option or argument, what it got and what is accepted."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
