-- What a worker's role needs, and no more. Migrations run under the owner of the schema.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE ON {schema}.ledger TO {role};
GRANT SELECT, INSERT ON {schema}.audit TO {role};
GRANT SELECT, INSERT ON {schema}.dead_letter TO {role};
GRANT SELECT ON {schema}.version TO {role};
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role};
