"""Errors: one tree, one class per decision that a caller can take.

ExactlyOnceError
├── ConfigurationError (ValueError)     an option or a client setting is refused
├── WrongThreadOrProcess                the consumer was used in a forked child or another thread
├── UnitNotFinished                     the next unit was asked for too early
├── Unreachable
│   ├── BrokerUnreachable               no broker answered in time
│   └── DatabaseUnreachable             Postgres did not answer in time
├── UnknownTopic                        the cluster has no such topic
├── SchemaTooOld                        `exactly-once migrate` is needed
├── SchemaTooNew                        this release is older than the schema
├── StartError                          a partition cannot be started; nothing was read
│   ├── OffsetsNotAdopted                    Kafka holds offsets of the group, the ledger none
│   ├── NoCommittedOffset               start="committed", and there is none
│   ├── ClusterChanged                  the ledger belongs to another cluster
│   ├── TopicRecreated                  same name, other topic
│   ├── OffsetOutOfRange
│   │   ├── OffsetBelowLogStart         retention passed the stored offset
│   │   ├── OffsetBeyondLogEnd          the log is shorter than the stored offset
│   │   └── LogTruncated                the log was rewritten below the stored offset
│   ├── BatchUnreadable                 the client cannot make messages of what is in the log
│   ├── LedgerRowMissing                a row of the ledger was deleted
│   ├── ReadOnly                        the database server is a standby, or takes no writes
│   ├── PartitionHalted                 a handler committed by itself; an operator must decide
│   ├── OwnedBySpark                    the row belongs to a Spark job
│   └── OwnedByConsumer                 the row belongs to a plain consumer
├── HandlerError                        the handler broke the contract of the unit
│   ├── TransactionAborted              a SQL error was swallowed
│   ├── TransactionEnded                the handler rolled the transaction back
│   ├── TransactionBusy                 a COPY or a pipeline was left open
│   ├── TransactionNotYours             commit(), rollback() or close() was called inside a unit
│   ├── UnitNotUsed                     a test's handler did not use the unit
│   ├── HandlerCommitted                the handler committed: fatal
│   ├── UnitTooSlow                     a unit of one message was lost to its own duration
│   ├── PoisonMessage                   one message cannot be applied, and it became no dead letter
│   └── TooManyDeadLetters              it is hardly the messages' fault any more
├── NoProgress                          the same messages have failed for too long
├── TransactionOutcomeUnknown           the outcome of a transaction cannot be found out any more
├── InstanceFenced                      another process uses the same group.instance.id
├── ClientFailed                        librdkafka reported an error that does not pass
└── Redelivered (psycopg.OperationalError)   nobody's fault; the same messages come again
    ├── Fenced                          another owner acquired the partition
    ├── AlreadyApplied                  an earlier attempt had committed
    ├── LedgerRewound                   the database went back (a failover that lost commits)
    └── OutcomePending                  COMMIT got no answer; the next iteration finds out
"""

from __future__ import annotations

import psycopg


class ExactlyOnceError(Exception):
    """Base of every error that this library raises by itself."""


class ConfigurationError(ExactlyOnceError, ValueError):
    """An option or a Kafka client setting is refused; the message names the key."""


class WrongThreadOrProcess(ExactlyOnceError):
    """The consumer was used outside the process that made it, or outside the thread that subscribed it."""


class UnitNotFinished(ExactlyOnceError):
    """The next unit was asked for while the last one was not entered, or is still open."""


class Unreachable(ExactlyOnceError):
    """A server did not answer within the time given; the message names host and port."""


class BrokerUnreachable(Unreachable):
    """No Kafka broker answered within the time given."""


class DatabaseUnreachable(Unreachable):
    """Postgres did not accept a connection within the time given."""


class UnknownTopic(ExactlyOnceError):
    """The cluster has no topic of this name."""


class SchemaTooOld(ExactlyOnceError):
    """The database lacks the schema, or has an older one than this release needs."""


class SchemaTooNew(ExactlyOnceError):
    """The database has a schema that this release cannot work with."""


class StartError(ExactlyOnceError):
    """A partition cannot be started. Nothing was read from it."""


class OffsetsNotAdopted(StartError):
    """Kafka holds committed offsets of this group and the ledger holds none: choose ``start=``."""


class NoCommittedOffset(StartError):
    """``start="committed"`` was asked for, and Kafka holds no offset for a log that is not empty."""


class ClusterChanged(StartError):
    """The ledger's offsets belong to another Kafka cluster."""


class TopicRecreated(StartError):
    """The topic was deleted and made again: the ledger's offsets belong to the old one."""


class OffsetOutOfRange(StartError):
    """The stored offset is not in the log."""


class OffsetBelowLogStart(OffsetOutOfRange):
    """Retention removed messages that were never applied."""


class OffsetBeyondLogEnd(OffsetOutOfRange):
    """The log ends before the stored offset: truncated, recreated or another cluster."""


class LogTruncated(OffsetOutOfRange):
    """The log diverged below the stored offset after an unclean leader election."""


class BatchUnreadable(StartError):
    """The client cannot check, decompress or parse a batch of the log: nothing behind it can be read."""


class LedgerRowMissing(StartError):
    """A partition of a known topic has no row: it was deleted, or a failover lost it."""


class ReadOnly(StartError):
    """The database server takes no writes: a standby, most likely."""


class PartitionHalted(StartError):
    """The partition was halted, because effects are durable without their offset."""


class OwnedBySpark(StartError):
    """The row was last acquired by a Spark job and not released."""


class OwnedByConsumer(StartError):
    """The row was last acquired by a plain consumer and not released."""


class HandlerError(ExactlyOnceError):
    """The handler broke the contract of the unit of work."""


class TransactionAborted(HandlerError):
    """The handler swallowed a SQL error; Postgres would have rolled everything back silently."""


class TransactionEnded(HandlerError):
    """The handler rolled the transaction back. Nothing was stored."""


class TransactionBusy(HandlerError):
    """The handler left a COPY, a pipeline or a block of ``connection.transaction()`` open, or threads at work.

    A thread that has used a unit behind its COMMIT is told of by the next iteration: what it was to store is lost.
    """


class TransactionNotYours(HandlerError):
    """``commit()``, ``rollback()``, ``close()`` or ``autocommit`` was used on the connection of an open unit.

    The call had no effect.
    """


class UnitNotUsed(HandlerError):
    """A handler under test did not use the unit, so its effects, if it has any, are not in the unit's transaction."""


class HandlerCommitted(HandlerError):
    """The handler committed: its effects are durable, the offset is not.

    Redelivery would double the effects, so the partitions are halted until an operator decides
    with ``exactly-once reset``; the message names those that could not be.
    """


class UnitTooSlow(HandlerError):
    """A unit of one message was ended by a server time-out, or several were fenced, for their duration."""


class PoisonMessage(HandlerError):
    """One message cannot be applied: what the handler raised is the ``__cause__``.

    Everything before it in the log was committed. ``topic``, ``partition`` and ``offset`` say which it is.
    """

    def __init__(
        self, text: str, *, topic: str | None = None, partition: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(text)
        self.topic = topic
        self.partition = partition
        self.offset = offset


class TooManyDeadLetters(HandlerError):
    """More messages failed than the limit allows: nothing of the last one was stored, it comes again."""


class NoProgress(ExactlyOnceError):
    """The same messages have failed for too long by what is nobody's fault; the ``__cause__`` is the last error.

    Nothing of them was stored: conflicts that do not end, a database that is there and refuses, or transactions that
    a unit joined and that their owner has rolled back each time.
    """


class TransactionOutcomeUnknown(ExactlyOnceError):
    """The server no longer reports whether a transaction committed; an operator must look."""


class InstanceFenced(ExactlyOnceError):
    """Another process runs with the same ``group.instance.id``."""


class ClientFailed(ExactlyOnceError):
    """librdkafka reported a fatal error; make a new consumer or producer."""


class Redelivered(ExactlyOnceError, psycopg.OperationalError):
    """Nothing was stored, it is nobody's fault, and the same messages come again.

    ``except Redelivered: continue`` is a correct loop: the consumer has already arranged what
    the next iteration must do.
    """


class Fenced(Redelivered):
    """Another owner acquired a partition of the unit, so its effects were rolled back."""


class AlreadyApplied(Redelivered):
    """An earlier attempt of this owner had committed; the consumer goes on from the ledger."""


class LedgerRewound(Redelivered):
    """The ledger is behind what this owner committed: the database lost commits in a failover."""


class OutcomePending(Redelivered):
    """COMMIT got no answer and could not be resolved yet; the next iteration resolves it."""
