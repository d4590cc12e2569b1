"""Polls and their votes."""
