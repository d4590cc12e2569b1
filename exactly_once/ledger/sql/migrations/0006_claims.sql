-- Claims: keys of events that units of a group have met, in the transaction of their effects.

-- One row for each group that claims. Its keys are in two tables, made with the row: a group's window can be emptied without
-- touching another one's. The names are qualified and quoted, for statements that are put together.
CREATE TABLE {schema}.claim_window (
    group_id       text        PRIMARY KEY,
    number         int         NOT NULL GENERATED ALWAYS AS IDENTITY UNIQUE,
    younger        text,
    older          text,
    seconds        float8      CHECK (seconds > 0),
    turns          bigint      NOT NULL DEFAULT 0,
    turned_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON COLUMN {schema}.claim_window.seconds IS 'for how long a key is held at least; null is for ever';
COMMENT ON COLUMN {schema}.claim_window.turns IS 'how often the older table was emptied and became the younger one';

-- All that touches tables runs as the owner of the schema: workers need neither be allowed to make tables nor to empty them, and
-- a joined transaction of another role can claim.

-- Returns the window of a group; the first to ask makes it. Who comes at the same time waits for that transaction.
CREATE FUNCTION {schema}.claim_window_of(my_group text) RETURNS {schema}.claim_window LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $window$
DECLARE
    held {schema}.claim_window;
BEGIN
    SELECT * INTO held FROM {schema}.claim_window w WHERE w.group_id = my_group;
    IF FOUND THEN
        RETURN held;
    END IF;
    INSERT INTO {schema}.claim_window (group_id) VALUES (my_group) ON CONFLICT DO NOTHING RETURNING * INTO held;
    IF FOUND THEN
        SELECT format('%s.claimed_%s_0', t.typnamespace::regnamespace, held.number),
               format('%s.claimed_%s_1', t.typnamespace::regnamespace, held.number)
        INTO held.younger, held.older
        FROM pg_type t WHERE t.oid = pg_typeof(held);
        EXECUTE format('CREATE TABLE %s (key bytea PRIMARY KEY)', held.younger);
        EXECUTE format('CREATE TABLE %s (key bytea PRIMARY KEY)', held.older);
        UPDATE {schema}.claim_window w SET younger = held.younger, older = held.older WHERE w.group_id = my_group;
    ELSE
        SELECT * INTO held FROM {schema}.claim_window w WHERE w.group_id = my_group;
    END IF;
    RETURN held;
END
$window$;

-- Claims keys, all different, in the transaction that is open; returns the places of those that were claimed before, or null.
-- It waits for a transaction that has claimed one of them: claimed if that commits, free if not. Keys are taken in their order,
-- so two calls never wait for each other.
CREATE FUNCTION {schema}.claim(my_group text, keys bytea[]) RETURNS text LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $claim$
DECLARE
    held {schema}.claim_window;
    fresh bytea[];
BEGIN
    -- A unique key cannot span two tables, so no turn may come between this look into the older one and our COMMIT.
    PERFORM pg_advisory_xact_lock_shared(hashtext('exactly_once.claim'), hashtext(my_group));
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- One snapshot from the first statement on: fail (40001) if it is older than the last turn.
        PERFORM FROM {schema}.claim_window w WHERE w.group_id = my_group FOR SHARE;
    END IF;
    held := {schema}.claim_window_of(my_group);
    -- OFFSET 0 keeps it a look-up for each key: as a join it may read all of a table that has not been analysed.
    EXECUTE format($put$
        WITH fresh AS (
            INSERT INTO %s (key)
            SELECT given.key FROM unnest($1) AS given(key)
            WHERE NOT EXISTS (SELECT FROM %s AS old WHERE old.key = given.key OFFSET 0)
            ORDER BY given.key
            ON CONFLICT DO NOTHING
            RETURNING key)
        SELECT coalesce(array_agg(key), '{{}}') FROM fresh$put$, held.younger, held.older)
    INTO fresh USING keys;
    IF cardinality(fresh) = cardinality(keys) THEN
        RETURN NULL; -- the usual case, without a comparison
    END IF;
    RETURN (
        SELECT string_agg(given.place::text, ' ')
        FROM unnest(keys) WITH ORDINALITY AS given(key, place)
        WHERE NOT EXISTS (SELECT FROM unnest(fresh) AS f(key) WHERE f.key = given.key));
END
$claim$;

-- Sets for how long keys of a group are held at least; returns what it was before.
CREATE FUNCTION {schema}.claim_keep(my_group text, my_seconds float8) RETURNS float8 LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $keep$
DECLARE
    before float8 := ({schema}.claim_window_of(my_group)).seconds;
BEGIN
    UPDATE {schema}.claim_window w SET seconds = my_seconds
    WHERE w.group_id = my_group AND w.seconds IS DISTINCT FROM my_seconds;
    RETURN before;
END
$keep$;

-- Empties the older table of a group as a whole, and has it become the younger one, when the younger one is old enough; so a key
-- is held for one to two windows, and longer if nobody calls. Waits for the units that have claimed, and lets others wait:
-- the caller bounds that by a lock time-out. Returns the seconds to the next turn, or null for a window without an end.
CREATE FUNCTION {schema}.claim_turn(my_group text) RETURNS float8 LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $turn$
DECLARE
    held {schema}.claim_window;
    to_go float8;
BEGIN
    SELECT * INTO held FROM {schema}.claim_window w WHERE w.group_id = my_group;
    to_go := held.seconds - extract(epoch FROM clock_timestamp() - held.turned_at);
    IF to_go > 0 OR held.seconds IS NULL THEN
        RETURN to_go;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('exactly_once.claim'), hashtext(my_group));
    SELECT * INTO held FROM {schema}.claim_window w WHERE w.group_id = my_group;
    to_go := held.seconds - extract(epoch FROM clock_timestamp() - held.turned_at);
    IF to_go > 0 THEN
        RETURN to_go;
    END IF;
    EXECUTE format('TRUNCATE %s', held.older);
    UPDATE {schema}.claim_window w
    SET younger = held.older, older = held.younger, turns = w.turns + 1, turned_at = clock_timestamp()
    WHERE w.group_id = my_group;
    RETURN held.seconds;
END
$turn$;

UPDATE {schema}.version SET version = 6, migrated_at = clock_timestamp();
