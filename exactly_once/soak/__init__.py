"""The soak: groups of every kind apply the same messages for as long as asked, under faults drawn from a seed.

The parts: :mod:`.source` (what is published), :mod:`.order` and :mod:`.worker` (who applies it, and how),
:mod:`.nemesis` (what goes wrong), :mod:`.observer` (what is true while it runs),
:mod:`.run` (all of it together), :mod:`.verdict` (what is true afterwards).
"""
