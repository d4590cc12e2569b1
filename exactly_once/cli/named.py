"""Named: a function of the user's, written as ``package.module:function`` in a file or on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from .problems import CommandError, UsageError


class Named:
    """A function that is called by its name; a process of the sink's crew is given the name and loads it again.

    Raises `UsageError` when the name is none, or names nothing that can be called.
    """

    def __init__(self, option: str, name: str) -> None:
        self.option = option
        self.name = name
        module, _, function = name.partition(":")
        if not module or not function:
            raise UsageError(f"{option} {name}: write it as package.module:function")
        # As `python -m` does: what lies in the working directory can be named.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        try:
            found = getattr(importlib.import_module(module), function, None)
        except ModuleNotFoundError as error:
            raise UsageError(f"{option} {name}: {error}") from error
        except SystemExit as error:  # with 0 it would look as if everything was done
            raise UsageError(f"{option} {name}: {module} is a program, which ended when it was imported") from error
        if not callable(found):
            raise UsageError(f"{option} {name}: {module} has no function {function}")
        self._function: Callable[..., Any] = found  # not handed to another process, which loads its own

    def __repr__(self) -> str:
        return f"{self.option} {self.name}"

    def __reduce__(self) -> tuple[type[Named], tuple[str, str]]:
        return type(self), (self.option, self.name)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class NamedConnect(Named):
    """A function that opens connections to Postgres."""

    def __call__(self, *arguments: Any) -> psycopg.Connection[Any]:
        """Open one.

        :raises CommandError: when the function returns something else.
        """
        connection = super().__call__(*arguments)
        if isinstance(connection, psycopg.Connection):
            return connection
        raise CommandError(f"{self}: it must return a psycopg.Connection, and returned {type(connection).__name__}")
