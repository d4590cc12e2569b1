CREATE TABLE card_account (id int PRIMARY KEY, balance bigint NOT NULL);
