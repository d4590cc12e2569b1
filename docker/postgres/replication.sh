#!/usr/bin/env bash
# Run once when the primary's database is made: let a standby in.
set -euo pipefail
echo "host replication all all ${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" >>"$PGDATA/pg_hba.conf"
