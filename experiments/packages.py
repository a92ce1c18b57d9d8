"""Packages that not every run needs, imported when one does."""

from importlib import import_module
from types import ModuleType

from .terminal import first_line


def import_package(module: str, purpose: str, advice: str) -> ModuleType:
    """The module.

    Raises:
        ImportError: it cannot be imported, what it is for, and what to install or do instead.
    """
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # the second from a torchvision that was built for another torch
        package = module.partition(".")[0]
        raise ImportError(f"{package}, which {purpose}, cannot be imported ({first_line(error)}): {advice}",
                          name=package) from error
