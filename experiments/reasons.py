"""What an exception says, for a line on the terminal."""


def first_line(reason: BaseException) -> str:
    """Its message's first line, or its type's name if it has no message."""
    return (str(reason).splitlines() or [type(reason).__name__])[0]
