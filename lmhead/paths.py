"""Paths that a user gives, by a variable or on the command line."""

from __future__ import annotations

from pathlib import Path


def path(text: str) -> Path:
    """The path, with a leading ~ or ~user expanded, which the shell does not do inside VAR='~/x' or
    --save=~/x.  ValueError where that user's home is not known: a folder named "~" is never meant.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text!r}: {error}") from error
