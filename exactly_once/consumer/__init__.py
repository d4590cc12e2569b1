"""The consumer: the loop, the partitions it owns, the unit that users are given, and what becomes of it.

A unit lives in three files. :mod:`.consumer` makes it: it has the maintenance done, fetches, and hands out a batch.
:mod:`.unit` is what a handler gets of it. :mod:`.commit` begins it, and commits, undoes or resolves it, as the table in
:mod:`.outcomes` says; the statements are those of :mod:`exactly_once.ledger.transaction`.
"""

from __future__ import annotations
