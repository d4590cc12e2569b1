"""The Spark sink, in a real Spark on a real topic."""
