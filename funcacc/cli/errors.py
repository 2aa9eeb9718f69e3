"""What the commands raise when they cannot go on: one line for the user, no traceback."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UsageError(Exception):
    """The command was asked for something that cannot be done; exit code 2."""


class RunError(Exception):
    """The command was started well and failed on the way; exit code 1."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, raised rather than printed."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong."""
        raise UsageError(message)
