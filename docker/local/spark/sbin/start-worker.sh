#!/usr/bin/env bash
# Spark's own script of this name, with SPARK_NO_DAEMONIZE, in short; the package lacks it.
exec "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.worker.Worker "$@"
