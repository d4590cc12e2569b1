"""The protocol under a seeded scheduler of faults: the real consumer, a simulated Kafka and Postgres."""
