"""Tests of the publish side."""
