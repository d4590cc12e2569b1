"""Connections as another role than the one that the tests' servers are made with."""

from __future__ import annotations

import re

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo


def as_role(conninfo: str, role: str) -> str:
    """Return how a role connects, which is given the password of the one in ``conninfo``; a URI stays one."""
    if password := conninfo_to_dict(conninfo).get("password"):
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), password))
    if "://" not in conninfo:
        return make_conninfo(conninfo, user=role)
    return re.sub(r"://[^:@/]*", f"://{role}", conninfo, count=1)
