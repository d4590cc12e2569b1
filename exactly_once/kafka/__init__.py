"""Kafka, as far as it is asked outside a consumer's loop: topics, logs, and what settings are forced or refused."""

from __future__ import annotations
