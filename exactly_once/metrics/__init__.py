"""What a consumer measures and says of itself, and the systems that take it: Prometheus, probes over HTTP."""

from __future__ import annotations
