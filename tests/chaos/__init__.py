"""Kills, zombies and mixed faults against worker processes."""
