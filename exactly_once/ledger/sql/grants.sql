-- What a worker's role needs, and no more. Migrations run under the owner of the schema.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE ON {schema}.ledger TO {role};
GRANT SELECT, INSERT ON {schema}.audit TO {role};
GRANT SELECT, INSERT, UPDATE (moved_to) ON {schema}.dead_letter TO {role};
GRANT SELECT ON {schema}.version TO {role};
GRANT SELECT, INSERT, UPDATE ON {schema}.publish_owner, {schema}.publish_chain TO {role};
GRANT SELECT, INSERT ON {schema}.publish_scope TO {role};
GRANT SELECT, UPDATE ON {schema}.publish_window TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.publish_key TO {role};
GRANT SELECT, INSERT, UPDATE ON {schema}.spark_query, {schema}.spark_target TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.spark_run, {schema}.spark_stage TO {role};
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role};
GRANT SELECT ON {schema}.claim_window TO {role};
