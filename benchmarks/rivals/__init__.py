"""What users would take instead, as the comparison of sinks starts it: each in a process of its own."""
