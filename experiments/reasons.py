"""What an exception says, for a line on the terminal."""


def first_line(reason: BaseException) -> str:
    """Its message's first line, or its type's name if it has no message."""
    return (str(reason).splitlines() or [type(reason).__name__])[0]


def last_line(reason: BaseException) -> str:
    """Its message's last line, or its type's name; what comes from another process ends with what it said there."""
    return (str(reason).splitlines() or [type(reason).__name__])[-1]
