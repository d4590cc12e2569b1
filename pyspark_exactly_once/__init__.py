"""Spark's way to find a data source: a module called ``pyspark_*`` with a ``DefaultSource``, from Spark 4.0 on.

Spark imports all such modules at once. Where something that the data source needs is missing, this one has none, for
else no other data source would be found.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    from spark_sink import ExactlyOncePostgres as DefaultSource

__all__ = ["DefaultSource"]
