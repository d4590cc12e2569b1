"""Sizing of a slot table: how many slots for how many messages and which loss, and back. No I/O.

With one way this is the formula of the original: P(lost after X further keys) = 1 - (1 - 1/N)^X. With w ways a key
is lost when w others fell into its bucket: P(Poisson(X * w / N) >= w).
"""

from __future__ import annotations

import math

from exactly_once.errors import ConfigurationError

WAYS = (1, 2, 4, 8, 16)


def slots_for(messages: int, loss_probability: float, ways: int = 1) -> int:
    """Return how many slots keep a key through ``messages`` further ones, but for ``loss_probability``."""
    _check(messages, ways)
    if not 0 < loss_probability < 1:
        raise ConfigurationError(f"loss_probability={loss_probability!r} must lie between 0 and 1")
    if ways == 1:
        return max(1, round(-1 / math.expm1(math.log1p(-loss_probability) / messages)))
    load = _load(loss_probability, ways)
    return math.ceil(messages / load) * ways


def loss_probability(messages: int, slots: int, ways: int = 1) -> float:
    """Return the probability that a key is lost after ``messages`` further ones."""
    _check(messages, ways)
    if slots < ways:
        raise ConfigurationError(f"slots={slots!r} must be at least ways={ways}")
    if ways == 1:
        return 1.0 if slots == 1 else -math.expm1(messages * math.log1p(-1 / slots))
    return _at_least(ways, messages * ways / slots)


def messages_for(slots: int, loss_probability: float, ways: int = 1) -> int:
    """Return how many further messages a key survives, but for ``loss_probability``."""
    _check(1, ways)
    if not 0 < loss_probability < 1:
        raise ConfigurationError(f"loss_probability={loss_probability!r} must lie between 0 and 1")
    if ways == 1:
        return round(math.log1p(-loss_probability) / math.log1p(-1 / slots)) if slots > 1 else 0
    return math.floor(_load(loss_probability, ways) * slots / ways)


def _load(probability: float, ways: int) -> float:
    """Find the mean number of keys per bucket at which ``ways`` or more come with this probability."""
    low, high = 0.0, 1.0
    while _at_least(ways, high) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_least(ways, middle) < probability else (low, middle)
    return high


def _at_least(count: int, mean: float) -> float:
    """P(Poisson(mean) >= count), without losing what is tiny."""
    if mean <= 0:
        return 0.0
    if mean > count:
        return max(0.0, 1.0 - sum(_poisson(n, mean) for n in range(count)))
    total, number = 0.0, count
    while (term := _poisson(number, mean)) > total * 1e-18:
        total += term
        number += 1
    return total


def _poisson(number: int, mean: float) -> float:
    return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))


def _check(messages: int, ways: int) -> None:
    if messages < 1:
        raise ConfigurationError(f"messages={messages!r} must be positive")
    if ways not in WAYS:
        raise ConfigurationError(f"ways={ways!r} is not possible; choose one of {', '.join(map(str, WAYS))}")
