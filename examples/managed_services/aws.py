"""Credentials that expire, on AWS: IAM for RDS and Aurora, and for MSK.

Needs boto3 and aws-msk-iam-sasl-signer-python.
"""

from __future__ import annotations

import os
from typing import Any

import boto3
import psycopg
from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
from psycopg.conninfo import conninfo_to_dict

DATABASE = os.environ["BANK_DATABASE"]


def connect() -> psycopg.Connection[Any]:
    """Open a connection with a password of this moment; it is asked for at the start only."""
    where = conninfo_to_dict(DATABASE)
    token = boto3.client("rds").generate_db_auth_token(where["host"], int(where["port"]), where["user"])
    return psycopg.connect(DATABASE, password=token, connect_timeout=10, prepare_threshold=None)


def oauth_token(config: str) -> tuple[str, float]:
    """Return a token for MSK, and when it expires, in seconds."""
    token, expires_ms = MSKAuthTokenProvider.generate_auth_token(os.environ["AWS_REGION"])
    return token, expires_ms / 1000
