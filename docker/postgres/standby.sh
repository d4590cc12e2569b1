#!/usr/bin/env bash
# Become a streaming standby of $PRIMARY: copy its data the first time, then follow it.
set -euo pipefail
export PGPASSWORD=${POSTGRES_PASSWORD:-}
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    source="host=$PRIMARY user=${POSTGRES_USER:-postgres} application_name=standby"
    pg_basebackup --dbname "$source" --pgdata "$PGDATA" --wal-method=stream --checkpoint=fast --write-recovery-conf
    chmod 0700 "$PGDATA"
fi
exec postgres -c listen_addresses='*' -c hot_standby=on
