"""What the tests stand on: faults, the oracle, servers, waiting. Only the worker imports the library."""
