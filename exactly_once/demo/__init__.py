"""The demo: payments applied by workers that are killed and frozen, once with the library and once without.

The parts, in the order in which they meet: :mod:`.payments` (what happens), :mod:`.worker` and :mod:`.loops`
(who does it), :mod:`.crew` (the workers as their parent sees them), :mod:`.nemesis` (what goes wrong),
:mod:`.trial` (all of it together), :mod:`.checker` (what is true afterwards), :mod:`.result` and
:mod:`.display` (what you see). :mod:`.journal` is the oracle of the tests and the soak.
"""
