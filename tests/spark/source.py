"""Queries that write a scene's topic into the journal by the data source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spark_sink
from tests.spark.scene import JOURNAL, Scene
from tests.support.spark import run_out

if TYPE_CHECKING:  # Spark 3.5 has no data sources, and imports this file for its other tests
    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import DataSource


def write_stream(
    scene: Scene,
    frame: DataFrame | None = None,
    *,
    source: type[DataSource] | None = None,
    output: str = "append",
    per_trigger: int | None = None,
    **options: str,
) -> Any:
    """Run a query until it has read what is there and return it; its error is raised."""
    scene.spark.dataSource.register(source or spark_sink.ExactlyOncePostgres)
    limit = {} if per_trigger is None else {"maxOffsetsPerTrigger": str(per_trigger)}
    frame = scene.stream(lambda topic: topic, **limit) if frame is None else frame
    writer = frame.writeStream.format("exactly_once_postgres").outputMode(output)
    given = chosen(scene, **{"checkpointLocation": str(scene.checkpoint)} | options)
    writer = writer.options(**{name: value for name, value in given.items() if value})
    return run_out(writer)


def chosen(scene: Scene, **options: str) -> dict[str, str]:
    """The options of the scene's table and group."""
    return {"conninfo": scene.conninfo, "table": JOURNAL, "groupId": scene.topic, **options}
