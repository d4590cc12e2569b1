"""The soak: groups of every kind apply the same messages for as long as asked, under faults drawn from a seed.

The parts: :mod:`.source` (what is published), :mod:`.worker` (who applies it, and how), :mod:`.observer` (what is true
while it runs), :mod:`.run` (all of it together, and what goes wrong), :mod:`.verdict` (what is true afterwards).
"""
