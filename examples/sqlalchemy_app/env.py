"""Alembic's environment for these models, beside the ledger: ``migrations/env.py`` of a project."""

from __future__ import annotations

from alembic import context
from models import Base, engine


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Leave out the schema of the ledger, which `exactly-once migrate` makes and alters."""
    return not (kind == "schema" and name == "exactly_once")


with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_schemas=True,
        include_name=include_name,
    )
    with context.begin_transaction():
        context.run_migrations()
