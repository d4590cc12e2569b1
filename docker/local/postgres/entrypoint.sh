#!/usr/bin/env bash
# The entrypoint of the official Postgres image in short: make the database once, run the scripts, become the server.
set -euo pipefail

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA"
    chown -R postgres "$PGDATA"
    exec setpriv --reuid=postgres --regid=postgres --init-groups bash "$0" "$@"
fi

user=${POSTGRES_USER:-postgres}
database=${POSTGRES_DB:-$user}
method=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}

make_database() {
    if [ -z "${POSTGRES_PASSWORD:-}" ] && [ "$method" != trust ]; then
        echo "POSTGRES_PASSWORD is needed, or POSTGRES_HOST_AUTH_METHOD=trust" >&2
        exit 1
    fi
    local password=()
    if [ -n "${POSTGRES_PASSWORD:-}" ]; then password=(--pwfile=/dev/stdin); fi
    # shellcheck disable=SC2086  # arguments are words
    printf '%s\n' "${POSTGRES_PASSWORD:-}" |
        initdb --username="$user" --auth-local=trust "${password[@]}" ${POSTGRES_INITDB_ARGS:-} >/dev/null
    echo "host all all all $method" >>"$PGDATA/pg_hba.conf"
    # Nobody comes in over TCP before the scripts are through.
    pg_ctl --wait start -o "-c listen_addresses=''" >/dev/null
    if [ "$database" != postgres ]; then psql -qX -U "$user" -d postgres -c "CREATE DATABASE \"$database\""; fi
    local script
    for script in /docker-entrypoint-initdb.d/*; do
        case $script in
        *.sh) bash "$script" ;;
        *.sql) psql -qX -v ON_ERROR_STOP=1 -U "$user" -d "$database" -f "$script" ;;
        esac
    done
    pg_ctl --wait stop -m fast >/dev/null
}

if [ "${1:-postgres}" = postgres ]; then
    [ -s "$PGDATA/PG_VERSION" ] || make_database
    shift || true
    exec postgres -c listen_addresses='*' "$@"
fi
exec "$@"
