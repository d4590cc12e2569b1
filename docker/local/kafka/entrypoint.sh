#!/usr/bin/env bash
# Turn KAFKA_* variables into properties as the official image does, format the log directory once, become the broker.
set -euo pipefail

java=(/opt/java/bin/java -cp '/opt/kafka/libs/*' -Dorg.slf4j.simpleLogger.defaultLogLevel=warn
    -Dorg.slf4j.simpleLogger.showDateTime=true)
properties=/etc/kafka/server.properties

# KAFKA_A_B is a.b, a double underscore is an underscore, a triple one a dash.
while IFS='=' read -r -d '' name value; do
    case $name in
    KAFKA_HEAP_OPTS | KAFKA_JVM_PERFORMANCE_OPTS | KAFKA_OPTS | KAFKA_LOG4J_OPTS) continue ;;
    KAFKA_*) ;;
    *) continue ;;
    esac
    key=${name#KAFKA_}
    key=${key//___/-}
    key=${key//__/%}
    key=${key//_/.}
    key=${key//%/_}
    printf '%s=%s\n' "${key,,}" "${value//$'\n'/\\n}"
done < <(env -0) >$properties
grep -q '^log\.dirs=' $properties || echo 'log.dirs=/tmp/kraft-combined-logs' >>$properties

"${java[@]}" -XX:TieredStopAtLevel=1 -XX:+UseSerialGC kafka.tools.StorageTool format --ignore-formatted \
    -t "${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}" -c $properties
# shellcheck disable=SC2086  # options are words
exec "${java[@]}" ${KAFKA_HEAP_OPTS:--Xmx1g} ${KAFKA_JVM_PERFORMANCE_OPTS:--XX:+UseG1GC} ${KAFKA_OPTS:-} \
    kafka.Kafka $properties
