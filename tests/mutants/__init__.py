"""Mutants of the source: each defence is taken away once, by a patch of one file; the tests named for it must fail."""
