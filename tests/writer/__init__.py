"""Tests of the table writer."""
