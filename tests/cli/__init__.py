"""The operator's commands, against real servers."""
