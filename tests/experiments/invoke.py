"""The command line inside a test."""

from click.testing import Result
from typer.testing import CliRunner

from experiments.__main__ import app


def invoke(*words: object) -> Result:
    """What the command line does with these words."""
    return CliRunner().invoke(app, [str(word) for word in words])
