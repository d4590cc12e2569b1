"""Credentials that expire, on Google Cloud: IAM for Cloud SQL. Needs google-auth."""

from __future__ import annotations

import os
from typing import Any

import google.auth
import psycopg
from google.auth.transport.requests import Request

DATABASE = os.environ["BANK_DATABASE"]


def connect() -> psycopg.Connection[Any]:
    """Open a connection with the access token of this moment as the password."""
    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/sqlservice.login"])
    credentials.refresh(Request())
    return psycopg.connect(DATABASE, password=credentials.token, connect_timeout=10, prepare_threshold=None)
