"""What the tests stand on: faults, the oracle, servers, waiting. Nothing here imports the library."""
