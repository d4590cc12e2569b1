CREATE TABLE reading (sensor text NOT NULL, value int NOT NULL);
CREATE TABLE sensor (name text PRIMARY KEY, total bigint NOT NULL);
