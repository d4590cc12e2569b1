"""Report: what a plan to move offsets does or did, for people and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import output
from .plan import Move, Plan


def tell(plan: Plan, args: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Print a plan; ``more`` are lines for people between title and table."""
    if args.json:
        output.print_json(_document(plan, executed=args.execute))
        return
    print(f"group {plan.group_id}, topic {plan.topic}, to {plan.target}", *more, sep="\n")
    output.print_table(*_table(plan))
    print("done" if args.execute else "dry run: nothing was changed; --execute does it")


def _document(plan: Plan, *, executed: bool) -> dict[str, Any]:
    return {
        "executed": executed,
        "group_id": plan.group_id,
        "topic": plan.topic,
        "to": str(plan.target),
        "topic_id": plan.topic_id,
        "cluster_id": plan.cluster_id,
        "partitions": [
            {
                "partition": m.partition.number,
                "old_offset": m.old_offset,
                "new_offset": m.result,
                "log_start": m.log.start if m.log else None,
                "log_end": m.log.end if m.log else None,
                "is_new": m.stored is None,
                "owner": m.stored.owner if m.stored else None,
                "halted": m.stored.halted if m.stored else None,
                "old_topic_id": m.stored.topic_id if m.stored else None,
                "old_cluster_id": m.stored.cluster_id if m.stored else None,
            }
            for m in plan.moves
        ],
    }


def _table(plan: Plan) -> tuple[list[str], list[list[object]]]:
    header = ["PARTITION", "OLD OFFSET", "", "NEW OFFSET", "LOG START", "LOG END", "NOTE"]
    return header, [
        [m.partition.number, m.old_offset, "->", m.result, *(m.log or (None, None)), _note(m)] for m in plan.moves
    ]


def _note(move: Move) -> str | None:
    row = move.stored
    if row is None:
        return "new row"
    notes = []
    if row.owned:
        notes.append(f"fences {row.owner_kind} {row.owner}")
    if row.halted:
        notes.append(f"no longer halted: {row.halted}")
    return "; ".join(notes) or None
