-- The ledger: for every partition of a consumer group the first offset that was not applied yet.
CREATE TABLE {schema}.ledger (
    group_id       text        NOT NULL,
    topic          text        NOT NULL,
    partition      int         NOT NULL,
    cluster_id     text,
    topic_id       text,
    next_offset    bigint      CHECK (next_offset >= 0),
    leader_epoch   int,
    owner_epoch    bigint      NOT NULL DEFAULT 0,
    owner_token    uuid,
    owner_kind     text        CHECK (owner_kind IN ('consumer', 'spark')),
    owner_instance uuid,
    owner_name     text,
    application    text,
    halted         text,
    acquired_at    timestamptz,
    moved_at       timestamptz,
    advanced_at    timestamptz,
    generation     bigint      NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, topic, partition, generation)
) WITH (fillfactor = 20);

COMMENT ON COLUMN {schema}.ledger.generation IS
    'there is one row of each partition. It is replaced by the next generation now and then, because dead versions of a row '
    'are reached by its key for as long as anybody holds a snapshot that is older than they are';

COMMENT ON COLUMN {schema}.ledger.next_offset IS 'first offset not yet applied; null until the start was chosen';
COMMENT ON COLUMN {schema}.ledger.owner_token IS 'drawn by the owner at each acquisition; null when released';
COMMENT ON COLUMN {schema}.ledger.application IS 'which program applies the messages, or did so the last time';
COMMENT ON COLUMN {schema}.ledger.moved_at IS 'when the offset was set otherwise than by applying messages';
COMMENT ON COLUMN {schema}.ledger.halted IS 'why nobody may acquire the partition until an operator resets it';

-- Every change of an offset that was not an advance.
CREATE TABLE {schema}.audit (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor          text        NOT NULL DEFAULT session_user,
    action         text        NOT NULL,
    reason         text        NOT NULL,
    group_id       text        NOT NULL,
    topic          text        NOT NULL,
    partition      int         NOT NULL,
    old_offset     bigint,
    new_offset     bigint,
    old_topic_id   text,
    new_topic_id   text,
    old_cluster_id text,
    new_cluster_id text
);

-- Locks the row of a partition, whatever its generation. A row that a rotation has replaced while it was waited for is none,
-- and the new one is not seen by the statement that waited; by the next one it is, because each statement in a volatile
-- function has a snapshot of its own. So "missing" is said only by a statement that has waited for nobody.
CREATE FUNCTION {schema}.lock_row(my_group text, my_topic text, my_partition int)
RETURNS SETOF {schema}.ledger LANGUAGE plpgsql AS $lock$
DECLARE
    tries int := 0;
BEGIN
    LOOP
        RETURN QUERY
        SELECT l.* FROM {schema}.ledger l
        WHERE l.group_id = my_group AND l.topic = my_topic AND l.partition = my_partition
        ORDER BY l.generation DESC
        LIMIT 1
        FOR UPDATE;
        EXIT WHEN FOUND;
        PERFORM FROM {schema}.ledger l
        WHERE l.group_id = my_group AND l.topic = my_topic AND l.partition = my_partition;
        EXIT WHEN NOT FOUND;
        -- A rotation comes between two tries, and none as often: a row that can only be read would be looked for for ever.
        tries := tries + 1;
        IF tries = 100 THEN
            RAISE EXCEPTION 'the row of %[%] of group % can be read but not locked: a policy of row-level security?',
                my_topic, my_partition, my_group USING ERRCODE = 'insufficient_privilege';
        END IF;
    END LOOP;
END
$lock$;

-- Puts rows of the next generation in the place of rows that the transaction has just advanced. It runs as the owner of the
-- schema, so that workers need not be allowed to delete rows.
CREATE FUNCTION {schema}.rotate(unit_group text, topics text[], partitions int[], generations bigint[])
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $rotate$
    WITH gone AS (
        DELETE FROM {schema}.ledger l USING unnest(topics, partitions, generations) AS a(topic, partition, generation)
        WHERE l.group_id = unit_group AND l.topic = a.topic AND l.partition = a.partition
          AND l.generation = a.generation
        RETURNING l.*)
    INSERT INTO {schema}.ledger (
        group_id, topic, partition, generation, cluster_id, topic_id, next_offset, leader_epoch, owner_epoch, owner_token,
        owner_kind, owner_instance, owner_name, application, halted, acquired_at, moved_at, advanced_at)
    SELECT g.group_id, g.topic, g.partition, g.generation + 1, g.cluster_id, g.topic_id, g.next_offset, g.leader_epoch,
           g.owner_epoch, g.owner_token, g.owner_kind, g.owner_instance, g.owner_name, g.application, g.halted,
           g.acquired_at, g.moved_at, g.advanced_at
    FROM gone g
$rotate$;

-- Moves the offsets of one unit of work, all or none, inside the transaction of its effects.
-- The count is checked here and not by the client, so that COMMIT may share the round trip.
CREATE FUNCTION {schema}.advance(
    unit_xid xid8, unit_group text, topics text[], partitions int[], generations bigint[], tokens uuid[],
    epochs bigint[], topic_ids text[], expected bigint[], next_offsets bigint[], leader_epochs int[], rotates boolean
) RETURNS void LANGUAGE plpgsql AS $advance$
DECLARE
    moved bigint;
BEGIN
    IF pg_current_xact_id() <> unit_xid THEN
        RAISE EXCEPTION 'the transaction of this unit of work has ended' USING ERRCODE = 'EO002';
    END IF;
    IF cardinality(partitions) = 1 THEN
        -- The usual case, and 80 microseconds cheaper than the one below.
        UPDATE {schema}.ledger l
        SET next_offset = next_offsets[1], leader_epoch = leader_epochs[1], advanced_at = clock_timestamp()
        WHERE l.group_id = unit_group AND l.topic = topics[1] AND l.partition = partitions[1]
          AND l.generation = generations[1]
          AND l.owner_token = tokens[1]
          AND l.owner_epoch = epochs[1]
          AND l.topic_id IS NOT DISTINCT FROM topic_ids[1]
          AND l.next_offset = expected[1];
        GET DIAGNOSTICS moved = ROW_COUNT;
    ELSE
        WITH held AS (
            SELECT l.topic, l.partition, l.generation, a.next_offset, a.leader_epoch
            FROM unnest(topics, partitions, generations, tokens, epochs, topic_ids, expected, next_offsets,
                        leader_epochs)
                 AS a(topic, partition, generation, token, epoch, topic_id, expected, next_offset, leader_epoch)
            JOIN {schema}.ledger l
              ON l.group_id = unit_group AND l.topic = a.topic AND l.partition = a.partition
             AND l.generation = a.generation
            WHERE l.owner_token = a.token
              AND l.owner_epoch = a.epoch
              AND l.topic_id IS NOT DISTINCT FROM a.topic_id
              AND l.next_offset = a.expected
            ORDER BY l.topic, l.partition
            FOR UPDATE OF l)
        UPDATE {schema}.ledger l
        SET next_offset = held.next_offset, leader_epoch = held.leader_epoch, advanced_at = clock_timestamp()
        FROM held
        WHERE l.group_id = unit_group AND l.topic = held.topic AND l.partition = held.partition
          AND l.generation = held.generation;
        GET DIAGNOSTICS moved = ROW_COUNT;
    END IF;
    IF moved <> cardinality(partitions) THEN
        RAISE EXCEPTION 'advanced % of % partitions', moved, cardinality(partitions)
            USING ERRCODE = 'EO001';
    END IF;
    IF rotates THEN
        PERFORM {schema}.rotate(unit_group, topics, partitions, generations);
    END IF;
END
$advance$;

CREATE INDEX audit_registered ON {schema}.audit (group_id, topic) WHERE action IN ('register', 'forget');

-- One row: what is installed, and the oldest schema version a release must know to work with it.
CREATE TABLE {schema}.version (
    only_row       boolean     PRIMARY KEY DEFAULT true CHECK (only_row),
    version        int         NOT NULL,
    oldest_reader  int         NOT NULL,
    ledger_id      uuid        NOT NULL DEFAULT gen_random_uuid(),
    migrated_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO {schema}.version (version, oldest_reader) VALUES (1, 1);
