"""The demo: payments applied by workers that are killed and frozen, once with the library and once without.

The parts, in the order in which they meet: :mod:`.payments` (what happens), :mod:`.worker` and :mod:`.loops`
(who does it), :mod:`.crew` (the workers as their parent sees them), :mod:`.trial` (all of it, and what goes wrong),
:mod:`.result` and :mod:`.display` (what you see). :mod:`.journal` is the oracle of the tests and the soak.
"""
