"""What a path means that a user wrote: in a config, an option or the environment."""

import os
from pathlib import Path

from minigen.errors import MinigenError


def expand(path: str) -> str:
    """Return a path with ``~`` and ``~user`` as the home folder, which a shell does not always do.

    Raises MinigenError where there is no home; a name that only begins with ``~`` stays as it is.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if path.split("/")[0] == "~" and (expanded == path or not home_is_known()):
        raise MinigenError(f"{path}: ~ is not known here, for want of HOME: give the whole path")
    return expanded


def home_is_known() -> bool:
    """Return whether the user has a home folder: HOME is set, or the system knows one."""
    try:
        return Path.home().is_absolute() and os.environ.get("HOME") != ""
    except RuntimeError:
        return False
