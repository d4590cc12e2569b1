"""Tests of kafka-exactly-once."""
