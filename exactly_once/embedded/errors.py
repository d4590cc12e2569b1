"""Errors of the embedded servers, and the import that raises one of them.

EmbeddedError
├── OptionError (also ValueError)
├── MissingExtra (also ImportError)
├── DownloadError
└── StartError
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EmbeddedError(Exception):
    """Report that an embedded server could not do what was asked."""


class OptionError(EmbeddedError, ValueError):
    """Refuse an option of a server when it is constructed."""


class MissingExtra(EmbeddedError, ImportError):
    """Say which extra brings the package that is not installed."""


class DownloadError(EmbeddedError):
    """Report that Kafka's jars could not be fetched."""


class StartError(EmbeddedError):
    """Report that a server did not come up, with the tail of its log."""


def check_texts(what: str, given: Mapping[Any, Any]) -> None:
    """Raise `OptionError` unless all names and values are text: 1 and True are written in more than one way."""
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise OptionError(f"{what} must map str to str, not {name!r} to {value!r}")


def package_directory(package: str) -> Path:
    """Find where *package* of the ``embedded`` extra is installed.

    Raises `MissingExtra` if it is not. Nothing is imported: some of these packages then touch the file
    system.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(f"the package {package} is not installed; run: pip install 'kafka-exactly-once[embedded]'")
    return Path(spec.submodule_search_locations[0])
