"""Stream query: what Spark, on the driver, tells of the query that calls the sink, and whether its plan can be exact.

A batch comes with a session that is a copy and knows no queries. What all sessions share knows those that run.
pyspark has no public way to any of this; over Spark Connect there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import FrameError
from .options import Options
from .owners import Claim

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The trait of operators with a state, since Spark 4.1 and before.
_STATEFUL = (
    "org.apache.spark.sql.execution.streaming.operators.stateful.StatefulOperator",
    "org.apache.spark.sql.execution.streaming.StatefulOperator",
)
# How operators are called that keep no row for later: each comes in its message's batch, or never.
_KEEP_KEYS = ("StreamingDeduplicate", "StreamingGlobalLimit")
# How logical operators are called that pick rows by looking at others.
_CHOOSING = ("Aggregate", "Deduplicate", "Distinct", "GlobalLimit", "LocalLimit", "Offset", "Sample", "Tail")


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """A query that runs: Spark's own object of it."""

    _execution: Any
    _gateway: Any

    @property
    def query_id(self) -> str:
        """The id that the checkpoint keeps."""
        return str(self._execution.id())

    @property
    def run_id(self) -> str:
        """The id of this start of the query."""
        return str(self._execution.runId())

    @property
    def is_active(self) -> bool:
        """Whether it still runs."""
        return bool(self._execution.isActive())

    def is_of(self, session: Any) -> bool:
        """Tell whether it is this session's own query; Spark 3.5 does not say."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark brings it

        try:
            return bool(self._execution.sparkSessionForStream().equals(session))
        except Py4JError:
            return False

    def checkpoint(self) -> str:
        """Return where its checkpoint is."""
        return str(self._execution.resolvedCheckpointRoot())

    def stateful(self) -> list[str]:
        """Return the names of its operators that have a state."""
        plan = self._execution.lastExecution().executedPlan()
        return [_name(node).removesuffix("Exec") for node in _nodes(plan) if self._is_stateful(node)]

    def choosing(self, frame: DataFrame) -> list[str]:
        """Return the operators that may pick other rows when a batch comes again, of the query and of the frame.

        Behind ``rdd``, ``toPandas`` and the like nothing is seen.
        """
        plans = self._execution.analyzedPlan(), frame._jdf.queryExecution().analyzed()  # noqa: SLF001
        return [
            name
            for plan in plans
            for node in _nodes(plan)
            if (name := _name(node)).startswith(_CHOOSING)
            or (
                name == "Filter"
                and (not node.deterministic() or any(_name(below) == "Window" for below in _nodes(node)))
            )
        ]

    def _is_stateful(self, node: Any) -> bool:
        from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark brings it
        from py4j.protocol import Py4JError  # noqa: PLC0415

        for name in _STATEFUL:
            try:
                return bool(is_instance_of(self._gateway, node, name))
            except Py4JError:  # no such class in this Spark
                continue
        return True


def find(spark: SparkSession) -> StreamQuery | None:
    """Return the query that calls with a frame of this session; None outside of one, and over Spark Connect.

    Another thread of the user's function has no local properties; there the session tells, which is the query's own.
    """
    if not hasattr(spark, "_jsparkSession"):
        return None
    session, context = spark._jsparkSession, spark.sparkContext  # noqa: SLF001 - see above
    gateway = context._gateway  # noqa: SLF001
    running = [StreamQuery(each, gateway) for each in session.sharedState().activeStreamingQueries().values()]
    name = context.getLocalProperty("sql.streaming.queryId")
    return next((query for query in running if query.query_id == name or query.is_of(session)), None)


def check_plan(query: StreamQuery, frame: DataFrame, options: Options) -> list[str]:
    """Return the query's operators with a state; refuse those under which offsets do not tell what was written.

    :raises FrameError: naming the operators and what to do.
    """
    stateful = query.stateful()
    if options.ledger != "offsets":
        return stateful
    refuse_kept_rows([name for name in stateful if not name.startswith(_KEEP_KEYS)])
    if options.transaction == "partition" and (choosing := stateful or query.choosing(frame)):
        raise FrameError(
            f"transaction='partition' needs rows that depend on their own message alone, and {', '.join(choosing)} "
            "looks at others: an attempt that is run again could pick other rows, when some are written already. Say "
            "transaction='batch'"
        )
    return stateful


def refuse_kept_rows(operators: list[str]) -> None:
    """Refuse operators that keep rows for a later batch.

    :raises FrameError: naming them and what to do.
    """
    if operators:
        raise FrameError(
            f"the query keeps rows in a state ({', '.join(operators)}: a join of streams, a window, an aggregation or "
            "the like): they come in a later batch than their message, when the ledger has its offset as written, and "
            "would be dropped. Say ledger='batch-id'"
        )


def refuse_lost_state(known: Claim, operators: list[str], options: Options) -> None:
    """Refuse a new checkpoint behind operators with a state: what they knew of earlier rows is gone.

    :raises FrameError: naming them and what to do.
    """
    doubles = any(each.mode == "append" or each.add for each in options.targets)
    if operators and known.has_others and not known.is_known_query and doubles:
        raise FrameError(
            f"the query has a new checkpoint, and another query has written for group {options.group_id!r}: the state "
            f"of {', '.join(operators)} is gone, so rows that it would have dropped would be written again. Restore "
            "the checkpoint; or say mode='insert-ignore' or 'upsert' with a key, without add=; or empty the table and "
            "choose another group_id"
        )


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    children = plan.children()
    for number in range(children.size()):
        yield from _nodes(children.apply(number))


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())
