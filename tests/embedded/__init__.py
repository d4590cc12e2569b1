"""Tests of the embedded servers, against the servers themselves."""

from __future__ import annotations
