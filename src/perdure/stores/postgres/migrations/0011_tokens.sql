-- Access tokens of a service: never a secret, only its digest. What one may do is in its body.
CREATE TABLE token (
    digest text COLLATE "C" PRIMARY KEY,
    id     text COLLATE "C" NOT NULL UNIQUE,
    owner  text COLLATE "C",
    crc    bigint NOT NULL,
    body   bytea NOT NULL
);

CREATE INDEX token_by_owner ON token (owner) WHERE owner IS NOT NULL;
