"""The demo: payments applied by workers that are killed and frozen, once with the library and once without.

The parts, in the order in which they meet: :mod:`.payments` (what happens), :mod:`.worker` and its two
loops (who does it), :mod:`.nemesis` (what goes wrong), :mod:`.trial` (all of it together),
:mod:`.checker` (what is true afterwards), :mod:`.display` (what you see).
"""
