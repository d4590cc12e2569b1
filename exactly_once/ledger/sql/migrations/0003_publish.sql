-- The publish side: who sends, the keys that were sent, chains.

-- A life of a sending process. The process draws its id: after a failover that has lost the row, the next number of a
-- sequence would be another owner's, whose keys this one would settle.
CREATE TABLE {schema}.publish_owner (
    id               bigint      PRIMARY KEY,
    name             text        NOT NULL,
    transactional_id text,
    positions        jsonb       NOT NULL DEFAULT '{{}}',
    lease_until      timestamptz NOT NULL,
    started_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at         timestamptz
) WITH (fillfactor = 50);
CREATE INDEX publish_owner_living ON {schema}.publish_owner (name) WHERE ended_at IS NULL;

COMMENT ON COLUMN {schema}.publish_owner.positions IS 'by scope: where the topic ended before its first reservation';
COMMENT ON COLUMN {schema}.publish_owner.ended_at IS 'released or fenced: nothing may be reserved or settled under it';

-- What keys are kept apart by: mostly one per topic.
CREATE TABLE {schema}.publish_scope (
    id               int         GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name             text        NOT NULL UNIQUE
);

-- Returns the number of a scope, made at its first use. No process keeps it: after a failover that has lost the row, the
-- number may be another scope's, and its new keys would be taken for seen ones.
CREATE FUNCTION {schema}.publish_scope_number(my_name text) RETURNS int LANGUAGE plpgsql AS $scope$
DECLARE
    number int;
BEGIN
    LOOP
        SELECT s.id INTO number FROM {schema}.publish_scope s WHERE s.name = my_name;
        EXIT WHEN FOUND;
        INSERT INTO {schema}.publish_scope (name) VALUES (my_name) ON CONFLICT (name) DO NOTHING;
    END LOOP;
    RETURN number;
END
$scope$;

-- One row. Everybody who touches keys reads it first, and so waits while it is turned.
CREATE TABLE {schema}.publish_window (
    only_row         boolean     PRIMARY KEY DEFAULT true CHECK (only_row),
    generation       bigint      NOT NULL DEFAULT 0,
    turned_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    seconds          float8,
    map_version      int         NOT NULL DEFAULT 0,
    map_digest       bytea
);
INSERT INTO {schema}.publish_window DEFAULT VALUES;

-- The keys in two generations: the older one is emptied as a whole and becomes the younger one.
-- A unique key cannot span the two, so whoever inserts into one looks into the other.
CREATE TABLE {schema}.publish_key (
    slot             smallint    NOT NULL,
    scope            int         NOT NULL,
    key              bytea       NOT NULL,
    -- c: confirmed, f: in flight, t: in flight again after an attempt that may be in the log, u: unknown
    state            "char"      NOT NULL,
    owner            bigint      NOT NULL,
    PRIMARY KEY (slot, scope, key)
) PARTITION BY LIST (slot);
CREATE TABLE {schema}.publish_key_0 PARTITION OF {schema}.publish_key FOR VALUES IN (0) WITH (fillfactor = 60);
CREATE TABLE {schema}.publish_key_1 PARTITION OF {schema}.publish_key FOR VALUES IN (1) WITH (fillfactor = 60);

-- Reserves keys, which must be sorted and all different; returns those that are not new: their place, what they are,
-- and who holds them. A key that is unknown is handed to the caller. One with a map of shards says its version.
CREATE FUNCTION {schema}.publish_reserve(my_scope int, keys bytea[], me bigint, my_map int)
RETURNS TABLE (place bigint, found_state "char", holder bigint) LANGUAGE plpgsql AS $reserve$
#variable_conflict use_variable
DECLARE
    young smallint;
    inserted bigint;
    latest int;
BEGIN
    SELECT w.generation % 2, w.map_version INTO young, latest FROM {schema}.publish_window w;
    IF my_map < latest THEN
        RAISE EXCEPTION 'the map of shards has version % by now; this process has %', latest, my_map
            USING ERRCODE = 'EO005';
    END IF;
    PERFORM FROM {schema}.publish_owner o WHERE o.id = me AND o.ended_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'owner % was fenced', me USING ERRCODE = 'EO003';
    END IF;
    INSERT INTO {schema}.publish_key (slot, scope, key, state, owner)
    SELECT young, my_scope, given.key, 'f', me
    FROM unnest(keys) AS given(key)
    WHERE NOT EXISTS (
        SELECT FROM {schema}.publish_key old
        WHERE old.slot = (1 - young)::smallint AND old.scope = my_scope AND old.key = given.key)
    ORDER BY given.key -- two owners of the same keys would wait for each other
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted = cardinality(keys) THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH known AS MATERIALIZED (
        SELECT given.place, given.key FROM unnest(keys) WITH ORDINALITY AS given(key, place)
        WHERE NOT EXISTS (
            SELECT FROM {schema}.publish_key mine
            WHERE mine.slot = young AND mine.scope = my_scope AND mine.key = given.key
              AND mine.xmin = pg_current_xact_id()::xid)),
    claimed AS (
        UPDATE {schema}.publish_key k SET state = 't', owner = me
        FROM known
        WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.key = known.key AND k.state = 'u'
        RETURNING known.place)
    SELECT known.place,
           CASE WHEN claimed.place IS NOT NULL THEN 'u'::"char" ELSE coalesce(k.state, 'f') END,
           CASE WHEN claimed.place IS NOT NULL THEN me ELSE k.owner END
    FROM known
    LEFT JOIN claimed ON claimed.place = known.place
    LEFT JOIN {schema}.publish_key k ON k.slot IN (0, 1) AND k.scope = my_scope AND k.key = known.key
    ORDER BY known.place;
END
$reserve$;

-- Confirms keys, whoever holds them: they are in the log. A key without a row gets one.
CREATE FUNCTION {schema}.publish_confirm(my_scope int, keys bytea[], me bigint)
RETURNS void LANGUAGE plpgsql AS $confirm$
DECLARE
    young smallint;
    confirmed bigint;
BEGIN
    SELECT w.generation % 2 INTO young FROM {schema}.publish_window w;
    UPDATE {schema}.publish_key k SET state = 'c'
    WHERE k.slot = young AND k.scope = my_scope AND k.key = ANY (keys);
    GET DIAGNOSTICS confirmed = ROW_COUNT;
    IF confirmed < cardinality(keys) THEN
        UPDATE {schema}.publish_key k SET state = 'c'
        WHERE k.slot = (1 - young)::smallint AND k.scope = my_scope AND k.key = ANY (keys);
        INSERT INTO {schema}.publish_key AS k (slot, scope, key, state, owner)
        SELECT young, my_scope, given.key, 'c', me
        FROM unnest(keys) AS given(key)
        WHERE NOT EXISTS (
            SELECT FROM {schema}.publish_key old
            WHERE old.slot IN (0, 1) AND old.scope = my_scope AND old.key = given.key)
        ORDER BY given.key
        ON CONFLICT (slot, scope, key) DO UPDATE SET state = 'c';
    END IF;
END
$confirm$;

-- Makes keys absent that surely are not in the log: those that the caller holds, where a second attempt leaves the doubt
-- about the first; or unknown ones, by somebody who has read the log.
CREATE FUNCTION {schema}.publish_release(my_scope int, keys bytea[], me bigint, is_held boolean)
RETURNS void LANGUAGE plpgsql AS $release$
BEGIN
    PERFORM FROM {schema}.publish_window;
    DELETE FROM {schema}.publish_key k
    WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.key = ANY (keys)
      AND CASE WHEN is_held THEN k.state = 'f' AND k.owner = me ELSE k.state = 'u' END;
    UPDATE {schema}.publish_key k SET state = 'u'
    WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.key = ANY (keys) AND k.state = 't' AND k.owner = me AND is_held;
END
$release$;

-- Makes keys unknown that the caller holds.
CREATE FUNCTION {schema}.publish_mark_unknown(my_scope int, keys bytea[], me bigint)
RETURNS void LANGUAGE plpgsql AS $mark$
BEGIN
    PERFORM FROM {schema}.publish_window;
    UPDATE {schema}.publish_key k SET state = 'u'
    WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.key = ANY (keys) AND k.state IN ('f', 't') AND k.owner = me;
END
$mark$;

-- Drops the older generation if the younger one is old enough; what a living owner has in flight stays. Keys that are
-- unknown leave as confirmed ones do, else they would be copied for ever. Owners leave when no key can name them any more:
-- theirs were copied for the last time before they ended. It runs as the owner of the schema, so that workers need not be
-- allowed to empty tables.
CREATE FUNCTION {schema}.publish_rotate() RETURNS int LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $rotate$
DECLARE
    before {schema}.publish_window;
    kept {schema}.publish_key[];
    turned int := 0;
BEGIN
    SELECT * INTO before FROM {schema}.publish_window w
    WHERE w.turned_at + w.seconds * interval '1 second' <= clock_timestamp();
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    LOCK TABLE {schema}.publish_window IN ACCESS EXCLUSIVE MODE;
    LOOP
        SELECT * INTO before FROM {schema}.publish_window w
        WHERE w.turned_at + w.seconds * interval '1 second' <= clock_timestamp();
        EXIT WHEN NOT FOUND OR turned = 2;
        SELECT array_agg(k) INTO kept FROM {schema}.publish_key k
        JOIN {schema}.publish_owner o ON o.id = k.owner AND o.ended_at IS NULL
        WHERE k.slot = (before.generation + 1) % 2 AND k.state IN ('f', 't');
        IF before.generation % 2 = 0 THEN
            TRUNCATE {schema}.publish_key_1;
        ELSE
            TRUNCATE {schema}.publish_key_0;
        END IF;
        INSERT INTO {schema}.publish_key SELECT * FROM unnest(kept);
        turned := turned + 1;
        UPDATE {schema}.publish_window w
        SET generation = w.generation + 1,
            turned_at = CASE WHEN turned = 1 AND w.turned_at + 2 * w.seconds * interval '1 second' <= clock_timestamp()
                             THEN w.turned_at + w.seconds * interval '1 second' ELSE clock_timestamp() END;
    END LOOP;
    DELETE FROM {schema}.publish_owner o USING {schema}.publish_window w
    WHERE o.ended_at < clock_timestamp() - 3 * w.seconds * interval '1 second'
      AND NOT EXISTS (SELECT FROM {schema}.publish_key k WHERE k.slot IN (0, 1) AND k.owner = o.id);
    RETURN turned;
END
$rotate$;

-- Agrees on the version of a map of shards. It waits until every reservation under the old one has ended, and those that
-- come after it read the new one. It runs as the owner of the schema, so that workers need not be allowed to lock tables.
CREATE FUNCTION {schema}.publish_map(my_map int, digest bytea)
RETURNS TABLE (map_version int, map_digest bytea) LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $map$
BEGIN
    LOCK TABLE {schema}.publish_window IN ACCESS EXCLUSIVE MODE;
    UPDATE {schema}.publish_window w SET map_version = my_map, map_digest = digest WHERE w.map_version < my_map;
    RETURN QUERY SELECT w.map_version, w.map_digest FROM {schema}.publish_window w;
END
$map$;

-- Settles what a fenced owner has left in a scope: what was found in the log is confirmed; the rest is absent where
-- nothing of it can arrive any more, else unknown.
CREATE FUNCTION {schema}.publish_take_over(my_scope int, dead bigint, log_keys bytea[], is_sure boolean)
RETURNS TABLE (confirmed bigint, released bigint, unknown bigint) LANGUAGE plpgsql AS $take_over$
BEGIN
    PERFORM FROM {schema}.publish_window;
    PERFORM FROM {schema}.publish_owner o WHERE o.id = dead AND o.ended_at IS NOT NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'owner % lives', dead USING ERRCODE = 'EO004';
    END IF;
    UPDATE {schema}.publish_key k SET state = 'c'
    WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.owner = dead AND k.state <> 'c' AND k.key = ANY (log_keys);
    GET DIAGNOSTICS confirmed = ROW_COUNT;
    released := 0;
    IF is_sure THEN
        DELETE FROM {schema}.publish_key k
        WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.owner = dead AND k.state = 'f';
        GET DIAGNOSTICS released = ROW_COUNT;
    END IF;
    UPDATE {schema}.publish_key k SET state = 'u'
    WHERE k.slot IN (0, 1) AND k.scope = my_scope AND k.owner = dead AND k.state IN ('f', 't');
    GET DIAGNOSTICS unknown = ROW_COUNT;
    RETURN NEXT;
END
$take_over$;

-- Chains of ints without holes: what was seen of each, in one row.
CREATE TABLE {schema}.publish_chain (
    chain            text           PRIMARY KEY,
    seen             int8multirange NOT NULL DEFAULT '{{}}'
) WITH (fillfactor = 50);

UPDATE {schema}.version SET version = 3, migrated_at = clock_timestamp();
