"""Of what kind each option is, as its annotation says, and which values it takes. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from math import isnan
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from exactly_once.errors import ConfigurationError

_SAID = {bool: "True or False", int: "a whole number", float: "a number", str: "a str", NoneType: "None"}


def check_kinds(
    takes: Callable[..., object], given: Mapping[str, object], said: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse an option of another kind than it is annotated with, where that is a class or several.

    A text for a number is what an environment variable gives; and the text "false" would count as true. ``said`` names
    the kinds of some options in other words; those refuse NaN by their ranges.

    :raises ConfigurationError: naming the option.
    """
    for name, kinds in _kinds(takes).items():
        if name not in given or name == "self":
            continue
        value = given[name]
        allowed = (*kinds, int) if float in kinds else kinds
        is_nan = isinstance(value, float) and isnan(value) and name not in said
        if is_nan or (isinstance(value, bool) and bool not in kinds) or not isinstance(value, allowed):
            what = said.get(name) or " or ".join(_SAID.get(kind, f"a {kind.__name__}") for kind in kinds)
            found = repr(value) if isinstance(value, str | float | int | None) else type(value).__name__
            raise ConfigurationError(f"{name}={found} must be {what}")


@cache  # the annotations are text, which takes longer to read than all else that the start of a consumer computes
def _kinds(takes: Callable[..., object]) -> dict[str, tuple[type, ...]]:
    """Return the classes of each option that is annotated with nothing else."""
    found = {}
    for name, hint in get_type_hints(takes).items():
        several: tuple[Any, ...] = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = tuple(get_origin(kind) or kind for kind in several)
        if all(isinstance(kind, type) for kind in kinds):
            found[name] = kinds
    return found


def check_choice(name: str, value: object, choices: Collection[object], *others: str) -> None:
    """Refuse a value that is none of those an option takes; ``others`` are named beside them, and checked elsewhere.

    :raises ConfigurationError: naming the option and its choices.
    """
    if value not in choices:
        raise ConfigurationError(
            f"{name}={value!r} is not possible; choose one of {', '.join(map(str, (*choices, *others)))}"
        )
