"""Spark's way to find a data source: a module called ``pyspark_*`` with a ``DefaultSource``, here from Spark 4.2 on.

Spark imports all such modules at once. Where something that the data source needs is missing, this one has none, for
else no other data source would be found.
"""

from __future__ import annotations

import contextlib

import pyspark

# Earlier ones find it, too, but refuse to `register` what they have found, which programs for any version do.
if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2):
    with contextlib.suppress(ImportError):
        from spark_sink import ExactlyOncePostgres as DefaultSource

__all__ = ["DefaultSource"]
