#!/usr/bin/env bash
# Is the broker ready: does it answer a request for metadata, and does its answer name at least one live broker?
# Asking in bytes costs nothing; Kafka's own tools start a JVM each time.
set -euo pipefail

exec 3<>"/dev/tcp/127.0.0.1/${1:-19092}"
# 20 bytes follow: Metadata (3), version 1, correlation 0, client id "ready", no topics.
printf '\x00\x00\x00\x13\x00\x03\x00\x01\x00\x00\x00\x00\x00\x05ready\x00\x00\x00\x00' >&3
# Length, correlation, then the number of brokers that are not fenced.
brokers=$(head -c 12 <&3 | tail -c 4 | od -An -tu1 | tr -d ' ')
[ "$brokers" != "0000" ] && [ -n "$brokers" ]
