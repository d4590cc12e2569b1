/* Ownership and commit of one partition: what no schedule of crashes, cuts, rebalances and failovers may break.
 *
 * Each step names the function that it stands for. A step that is one statement of SQL is atomic; between any two
 * steps every other process may run for as long as it likes, so a frozen worker needs no action of its own.
 *
 * Bounds: WORKERS members, MESSAGES in the log, FAULTS lost connections and crashes, REBALANCES, FAILOVERS.
 * -DMUTANT=n takes out one guard each; tests/model/test_model.py expects every one of them to be found.
 */
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef MESSAGES
#define MESSAGES 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef REBALANCES
#define REBALANCES 2
#endif
#ifndef FAILOVERS
#define FAILOVERS 1
#endif
#ifndef MUTANT
#define MUTANT 0
#endif
#define NO_TOKEN 1 /* the advance does not compare the token */
#define NO_OFFSET 2 /* the advance does not compare the offset */
#define RESOLVE_BY_READ 3 /* an outcome is read, without a fresh token in the row */
#define EPOCH_ONLY 4 /* a grant is told by the row's epoch, which a failover gives out a second time */
#define NOT_TOGETHER 5 /* effects are committed before the offset */
#define TRUST_MEMORY 6 /* a refused unit is tried again from the offset in memory */

#define NOBODY 255

/* What is durable: the row of the ledger, and how often each message took effect. */
byte next_offset, row_token;
byte effects[MESSAGES];
/* The same at the standby, which may lag behind as far as it likes. */
byte standby_offset, standby_token;
byte standby_effects[MESSAGES];
/* Which connection's transaction has advanced and not ended: it holds the row's lock. */
byte lock = NOBODY;

byte drawn; /* tokens are drawn by clients and never twice, also across failovers */
byte assigned; /* whom Kafka gives the partition */
bool told[WORKERS]; /* who believes to have it */
bool needs_proof[WORKERS]; /* who was fenced, and must ask Kafka before acquiring again: Ownership.to_prove */

/* Connections: each worker has one, and what an earlier one had sent may still be under way. On each there is at most
 * one statement "advance; COMMIT", on its way to the server or inside of its backend. */
#define CONNECTIONS (2 * WORKERS)
bool in_flight[CONNECTIONS], advanced[CONNECTIONS], refused[CONNECTIONS], answered[CONNECTIONS];
byte sent_token[CONNECTIONS], sent_from[CONNECTIONS], sent_to[CONNECTIONS];
bool cut[CONNECTIONS]; /* nobody listens for the answer any more */
bool given_up[CONNECTIONS]; /* its worker has found out that it will never be committed */

byte faults = FAULTS, failovers = FAILOVERS, rebalances = REBALANCES;

inline check_effects() {
    m = 0;
    do
    :: m < MESSAGES ->
        assert(effects[m] == (m < next_offset)); /* once, never behind an offset, never ahead of one */
        m++
    :: else -> break
    od
}

inline apply_effects(c) {
    m = sent_from[c];
    do
    :: m < sent_to[c] -> effects[m]++; m++
    :: else -> break
    od
}

inline draw() {
    if
    :: MUTANT == EPOCH_ONLY -> row_token++
    :: else -> drawn++; row_token = drawn
    fi;
    token = row_token; other_token = 0
}

inline lose_connection() {
    cut[c] = true;
    if
    :: in_flight[c] && !advanced[c] -> in_flight[c] = false /* it never reaches the server */
    :: true /* or it does, late */
    fi
}

inline reconnect() {
    if
    :: c == w -> c = w + WORKERS
    :: else -> c = w
    fi;
    in_flight[c] = false; advanced[c] = false; cut[c] = false; given_up[c] = false /* no third one is looked at */
}

/* The server's side of one connection: executes what the worker has sent. sql/queries.sql, advance; then COMMIT. */
proctype backend(byte c) {
    byte m;
end:
    do
    :: atomic { in_flight[c] && !advanced[c] && lock == NOBODY ->
        if
        :: ((row_token == sent_token[c] || MUTANT == NO_TOKEN) &&
            (next_offset == sent_from[c] || MUTANT == NO_OFFSET)) -> lock = c; advanced[c] = true
        :: else -> in_flight[c] = false; refused[c] = true; answered[c] = true
        fi }
    :: atomic { in_flight[c] && advanced[c] ->
        assert(!given_up[c]); /* nobody was told that it had failed */
        apply_effects(c);
        if
        :: MUTANT != NOT_TOGETHER -> next_offset = sent_to[c]
        :: else
        fi;
        check_effects();
        advanced[c] = false; in_flight[c] = false; lock = NOBODY; answered[c] = true; m = 0 }
    od
}

/* One member: Maintenance, CommitProtocol and Ledger. */
proctype worker(byte w) {
    byte token, other_token; /* the grant; a second one while nobody knows whether the row has it */
    byte from, to; /* the unit in hand */
    byte c = w; /* the connection */

acquire: /* Maintenance._acquire, Ledger.acquire */
    do
    :: next_offset == MESSAGES -> goto over
    :: atomic { told[w] && !needs_proof[w] && lock == NOBODY -> draw(); from = next_offset; goto loop }
    :: atomic { needs_proof[w] && (assigned == w || !told[w]) -> needs_proof[w] = false } /* Maintenance._prove */
    od;

loop: /* the consumer's loop, ExactlyOnceConsumer._next */
    do
    :: next_offset == MESSAGES -> goto over
    :: !told[w] -> goto acquire /* revoked: Ledger.release is late or lost, and harmless */
    :: from < MESSAGES -> /* Ownership.hand_out: a unit of one message, or of all that are left */
        if
        :: to = from + 1
        :: to = MESSAGES
        fi;
        goto unit
    od;

unit: /* the handler has had its effects in the open transaction; CommitProtocol.finish sends advance and COMMIT */
    if
    :: atomic { true ->
        sent_token[c] = token; sent_from[c] = from; sent_to[c] = to;
        refused[c] = false; answered[c] = false; cut[c] = false; given_up[c] = false; in_flight[c] = true }
    :: atomic { faults > 0 -> faults--; goto acquire } /* killed inside the handler: the transaction is gone */
    fi;

    if
    :: atomic { answered[c] && !refused[c] && !cut[c] -> from = to; goto loop }
    :: atomic { answered[c] && refused[c] && !cut[c] && lock == NOBODY -> /* CommitProtocol._classify, under lock */
        if
        :: MUTANT == TRUST_MEMORY -> goto loop
        :: MUTANT != TRUST_MEMORY && row_token != token -> needs_proof[w] = true; goto acquire
        :: MUTANT != TRUST_MEMORY && row_token == token -> from = next_offset; goto loop
        fi }
    :: atomic { faults > 0 -> faults--; lose_connection() } /* the wire is cut: CommitProtocol._after_unknown */
    :: atomic { faults > 0 -> faults--; lose_connection(); reconnect(); goto acquire } /* kill -9 */
    :: cut[c] /* by a failover */
    fi;

in_doubt: /* CommitProtocol._resolve, Ledger.resolve: the rows get a fresh token, or are somebody else's */
    if
    :: atomic { lock == NOBODY && (row_token == token || row_token == other_token) ->
        given_up[c] = (next_offset == from);
        if
        :: MUTANT != RESOLVE_BY_READ -> draw()
        :: else
        fi;
        from = next_offset; reconnect(); goto loop }
    :: atomic { lock == NOBODY && row_token != token && row_token != other_token ->
        needs_proof[w] = true; reconnect(); goto acquire }
    :: atomic { faults > 0 && lock == NOBODY && row_token == token -> /* the answer to the resolution is lost, too */
        faults--; drawn++; row_token = drawn; other_token = drawn; goto in_doubt }
    fi;
over:
    skip
}

/* Kafka: gives the partition to somebody else, and tells its members late. */
proctype kafka(byte w) {
end:
    do
    :: atomic { rebalances > 0 && assigned == w -> rebalances--; assigned = (w + 1) % WORKERS }
    :: atomic { told[w] != (assigned == w) -> told[w] = (assigned == w) }
    od
}

/* The standby, and a failover to it that loses what it had not received: effects and offset go back together. */
active proctype failover() {
    byte c, m;
end:
    do
    :: atomic { failovers > 0 && standby_offset != next_offset || failovers > 0 && standby_token != row_token ->
        standby_offset = next_offset; standby_token = row_token;
        m = 0;
        do
        :: m < MESSAGES -> standby_effects[m] = effects[m]; m++
        :: else -> break
        od; m = 0 }
    :: atomic { failovers > 0 && next_offset < MESSAGES -> failovers--;
        next_offset = standby_offset; row_token = standby_token; lock = NOBODY;
        m = 0;
        do
        :: m < MESSAGES -> effects[m] = standby_effects[m]; m++
        :: else -> break
        od; m = 0;
        c = 0;
        do
        :: c < CONNECTIONS ->
            if
            :: in_flight[c] || answered[c] -> cut[c] = true
            :: else
            fi;
            in_flight[c] = false; advanced[c] = false; c++
        :: else -> break
        od; c = 0 }
    od
}

init {
    byte w;
    atomic {
        told[0] = true;
        do
        :: w < WORKERS -> run backend(w); run backend(w + WORKERS); run kafka(w); run worker(w); w++
        :: else -> break
        od
    }
}

/* Whatever happens, if it stops happening, every message takes effect. */
ltl progress { <> (next_offset == MESSAGES) }
