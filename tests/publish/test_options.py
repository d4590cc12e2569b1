"""Options of the producers: what type checkers are told is what the checked dataclasses take."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest

from exactly_once import ConfigurationError
from exactly_once.publish import options


@pytest.mark.parametrize(
    ("keywords", "checked"),
    [(options.PublishKeywords, options.PublishOptions), (options.DedupKeywords, options.DedupOptions)],
)
def test_keywords_are_the_options(keywords: type, checked: type[options.PublishOptions]) -> None:
    hints = get_type_hints(checked)
    assert get_type_hints(keywords) == {option.name: hints[option.name] for option in fields(checked)}


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="recovr= is no option; there are producer_name, owner, "):
        options.PublishOptions.of({"recovr": False})


def test_an_empty_name_is_refused() -> None:
    """As of an environment variable that is not set: each life would have a name of its own."""
    with pytest.raises(ConfigurationError, match="empty"):
        options.DedupOptions(producer_name="")
