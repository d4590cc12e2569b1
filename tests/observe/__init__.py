"""What is seen of a running consumer: metrics, health, log records."""
