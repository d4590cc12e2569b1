"""Tests that need no Kafka broker."""
