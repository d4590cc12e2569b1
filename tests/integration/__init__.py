"""The library against a real Kafka and a real Postgres."""
