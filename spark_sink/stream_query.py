"""Stream query: what Spark, on the driver, tells of the query that calls the sink, and whether its plan can be exact.

A batch comes with a session that is a copy and knows no queries. What all sessions share knows those that run.
pyspark has no public way to any of this; over Spark Connect there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import FrameError
from .options import Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The trait of operators with a state, since Spark 4.1 and before.
_STATEFUL = (
    "org.apache.spark.sql.execution.streaming.operators.stateful.StatefulOperator",
    "org.apache.spark.sql.execution.streaming.StatefulOperator",
)
# What operators that keep no row for later are called, also in the checkpoint: each comes in its message's batch.
_KEEP_KEYS = ("StreamingDeduplicate", "StreamingGlobalLimit", "dedupe", "globalLimit")
# The logical operators that make each row of one row, or move rows; all others may pick rows by looking at others.
# A function that gets an iterator or a table does what it likes: Spark does not show it.
_BY_ROW = frozenset(
    (
        *("CTERelationDef", "CollectMetrics", "DataFrameDropColumns", "EventTimeWatermark", "Expand", "Filter"),
        *("Generate", "Join", "LateralJoin", "MapInArrow", "MapInPandas", "Project", "PythonMapInArrow"),
        *("RebalancePartitions", "Repartition", "RepartitionByExpression", "ResolvedHint", "ScriptTransformation"),
        *("Sort", "Subquery", "SubqueryAlias", "Union", "UpdateEventTimeWatermarkColumn", "View", "Window"),
        *("WindowInPandas", "WithCTE", "WriteToMicroBatchDataSource", "WriteToMicroBatchDataSourceV1"),
    )
)
# A row of these comes from one of the inputs; a row of any other operator with two is made of both.
_ONE_OF_ITS_INPUTS = ("Union", "WithCTE")
_STREAM = -1  # among the numbers of RDDs: what a stream's source reads


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """A query that runs: Spark's own object of it."""

    query_id: str
    """The id that the checkpoint keeps."""
    run_id: str
    """The id of this start of the query."""
    _execution: Any
    _gateway: Any

    @property
    def is_active(self) -> bool:
        """Whether it still runs; one of a JVM that is gone does not."""
        return _answered(self._execution.isActive) is True

    def checkpoint(self) -> str:
        """Return where its checkpoint is."""
        return str(self._execution.resolvedCheckpointRoot())

    def stateful(self) -> list[str]:
        """Return the names of its operators that have a state."""
        from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark brings it

        names = []
        for node in _nodes(self._execution.lastExecution().executedPlan()):
            answers = (_answered(partial(is_instance_of, self._gateway, node, name)) for name in _STATEFUL)
            if next((answer for answer in answers if answer is not None), True):
                names.append(_name(node).removesuffix("Exec"))
        return names

    def refuse_choosing(self, frame: DataFrame, stateful: list[str]) -> None:
        """Refuse, for ``transaction="partition"``, what may pick other rows when a batch comes again.

        Operators of the query and of the frame are looked at; behind ``rdd``, ``toPandas`` and the like none is seen.
        """
        batch = self._execution.lastExecution().toRdd().id()
        plans = self._execution.analyzedPlan(), frame._jdf.queryExecution().analyzed()  # noqa: SLF001
        choosing = stateful or [name for plan in plans for name in _choosing(plan, batch)]
        if choosing:
            raise FrameError(
                f"transaction='partition' needs rows that depend on their own message alone, and {', '.join(choosing)} "
                "may look at others: an attempt that is run again could pick other rows, when some are written "
                "already. Say transaction='batch'"
            )


def find(spark: SparkSession) -> StreamQuery | None:
    """Return the query that calls with a frame of this session; None outside of one, and over Spark Connect.

    Another thread of the user's function has no local properties; there the session tells, which is the query's own.
    """
    if not hasattr(spark, "_jsparkSession"):
        return None
    session, gateway = spark._jsparkSession, spark.sparkContext._gateway  # noqa: SLF001 - see above
    name = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    for each in session.sharedState().activeStreamingQueries().values():
        # Spark 3.5 does not tell whose session a query has.
        if str(each.id()) == name or session.equals(_answered(each.sparkSessionForStream)):
            return StreamQuery(str(each.id()), str(each.runId()), each, gateway)
    return None


def refuse_kept_rows(stateful: list[str], options: Options) -> None:
    """Refuse operators that keep rows for a later batch, under which offsets do not tell what was written."""
    kept = [name for name in stateful if not name.startswith(_KEEP_KEYS)]
    if kept and options.ledger == "offsets":
        raise FrameError(
            f"the query keeps rows in a state ({', '.join(kept)}: a join of streams, a window, an aggregation or "
            "the like): they come in a later batch than their message, when the ledger has its offset as written, and "
            "would be dropped. Say ledger='batch-id'"
        )


def _answered(ask: Callable[[], Any]) -> Any:
    """Return what the JVM answers; None where it is gone, or this Spark lacks what is asked for."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark brings it

    try:
        return ask()
    except Py4JError:
        return None


def _choosing(plan: Any, batch: int) -> list[str]:
    """Name the operators of an analyzed plan that may pick rows of the batch by looking at others of it.

    What is read of RDDs may be made of the batch, and counts; a join may have the same dimension twice, not the batch.
    """
    choosing: list[str] = []
    defined: dict[int, set[int]] = {}  # what common table expressions read, which come before what refers to them

    def read_by(node: Any) -> set[int]:
        name = _name(node)
        inputs = [read_by(each) for each in (*_items(node.children()), *_items(node.subqueries()))]
        if name == "LogicalRDD":
            return {node.rdd().id()}
        if name == "CTERelationRef":
            return defined[node.cteId()]
        if not inputs:
            return {_STREAM} if node.isStreaming() else set()
        read = set().union(*inputs)
        if name == "CTERelationDef":
            defined[node.id()] = read
        if (
            (name not in _BY_ROW and read)
            or (name not in _ONE_OF_ITS_INPUTS and sum(batch in each for each in inputs) > 1)
            or (
                name == "Filter"
                and (not node.deterministic() or any(_name(below).startswith("Window") for below in _nodes(node)))
            )
        ):
            choosing.append(name)
        return read

    read_by(plan)
    return choosing


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in _items(plan.children()):
        yield from _nodes(child)


def _items(sequence: Any) -> Iterator[Any]:
    """Give what a sequence of Scala holds."""
    return map(sequence.apply, range(sequence.size()))


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())
