"""Commands that errors name, as a shell and the parser of options take them."""

from __future__ import annotations

import subprocess

import pytest

from exactly_once._model import Partition
from exactly_once.cli import reset
from exactly_once.cli.problems import CommandParser
from exactly_once.ledger.commands import reset_command


@pytest.mark.parametrize("group_id", ["g", "-g", "--execute", "it's $HOME", "Ä\n", "a\t'b\\n\x1b"])
@pytest.mark.parametrize("topic", ["t", "-t", "--to-earliest", "-1"])
def test_whatever_a_group_and_a_topic_are_called_the_command_is_about_them(group_id: str, topic: str) -> None:
    parser = CommandParser()
    reset.add_parser(parser.add_subparsers(parser_class=CommandParser))
    named = reset_command(group_id, "-Odd Schema", Partition(topic, 3)).removesuffix("N") + "7"
    assert named.isprintable()  # whoever shows it would leave out the rest
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {named}"], capture_output=True, text=True, check=True).stdout
    found = parser.parse_args(words.split("\0")[1:-1])
    assert (found.group_id, found.topic, found.partition, found.schema) == (group_id, topic, [3], "-Odd Schema")
