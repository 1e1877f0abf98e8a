"""Whether a directory is the user's own: nobody else can write to it, or exchange it or anything above it.

What lies in a run directory is run: its overlay stands on PYTHONPATH. So each directory on the way to it
must be in the hands of the user or of root. Where others may write too, as in ``/tmp``, the sticky bit must
keep them from what is not theirs.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from kvtrace.launch.errors import LaunchError

_MOST_LINKS = 40  # as the kernel


def require_private(path: Path, shown: str) -> None:
    """Refuse a directory that exists and that somebody else could write to or exchange.

    Args:
        path: absolute.
        shown: the path as a person knows it.

    Raises:
        LaunchError: one line that says which directory is open to whom, and what to do.
        OSError: it cannot be looked at.
    """
    why = _why_not(path)
    if why is not None:
        raise LaunchError(
            f"{shown} is not safe to record to",
            why,
            "what lies there is run with your rights, choose a directory that is yours alone with -o DIR",
        )


def _why_not(path: Path) -> str | None:
    """One phrase: who else could put something there; None where nobody could."""
    for folder, place in _way(path):
        state = os.lstat(folder)
        if not _trusted(state.st_uid):
            return f"{folder} belongs to {_user(state.st_uid)}"
        if not _open_to_others(state):
            continue
        if not state.st_mode & stat.S_ISVTX:
            return f"others can write to {folder} and exchange {place.name}"
        owner = os.lstat(place).st_uid
        if not _trusted(owner):
            return f"{place} belongs to {_user(owner)}"
    own = os.stat(path)
    if own.st_uid != os.geteuid():
        return f"{path} belongs to {_user(own.st_uid)}"
    return f"others can write to {path}" if _open_to_others(own) else None


def _way(path: Path) -> Iterator[tuple[Path, Path]]:
    """All that the kernel passes on its way to ``path``: each directory, with the entry that is looked up
    in it. No directory is a symbolic link; an entry may be one: then the way goes on to where it leads."""
    here, todo, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    while todo:
        part = todo.pop()
        if part == os.pardir:
            here = here.parent
            continue
        place = here / part
        yield here, place
        if not place.is_symlink():
            here = place
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(40, "Too many levels of symbolic links", str(path))
        target = Path(os.readlink(place))
        if target.is_absolute():
            here, target = Path(target.anchor), target.relative_to(target.anchor)
        todo.extend(reversed(target.parts))


def _open_to_others(state: os.stat_result) -> bool:
    """Whether somebody but owner and root may write. An access control list shows in the group's bits."""
    if state.st_mode & stat.S_IWOTH:
        return True
    return bool(state.st_mode & stat.S_IWGRP) and not _private_group(state.st_gid)


def _trusted(uid: int) -> bool:
    return uid in (os.geteuid(), _root())


@lru_cache(maxsize=1)
def _root() -> int:
    """Root's id as seen from here. A user namespace without a root of its own (Apptainer) shows what belongs
    to the machine's under the id that stands for all whom it does not know."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            if any(line.split()[0] == "0" for line in table):
                return 0
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as number:
            return int(number.read())
    except (OSError, ValueError, IndexError):
        return 0


@lru_cache(maxsize=64)
def _private_group(gid: int) -> bool:
    """Whether nobody but the user and root is in that group: usual where the umask lets the group write."""
    try:
        group = grp.getgrgid(gid)
        me = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    if me.pw_gid != gid or not set(group.gr_mem) <= {me.pw_name, "root"}:
        return False
    return all(user.pw_uid in (0, me.pw_uid) for user in pwd.getpwall() if user.pw_gid == gid)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
