"""What a consumer measures and reports of itself, and the systems that take it: Prometheus, probes over HTTP."""

from __future__ import annotations
