"""A subcommand of the ``hyper-parallel`` program, as core and plugins describe it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: what the user types after ``hyper-parallel``.
        help: one line for ``hyper-parallel --help``.
        run: called with the parsed arguments; returns the exit code.
        add_arguments: declares the command's arguments on its own argparse parser.
    """

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
