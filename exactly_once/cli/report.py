"""Report: what a plan to move offsets does or did, for people and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import output
from .plan import Move, Plan


def tell(plan: Plan, args: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Print a plan; ``more`` are lines for people between title and table.

    Messages that come again or are left out are counted where offsets before and after are of one topic.
    """
    if args.json:
        output.print_json(_document(plan, executed=args.execute))
        return
    print(f"group {plan.group_id}, topic {plan.topic}, to {plan.target}", *more, sep="\n")
    header, rows = _table(plan)
    output.print_table(header, rows, give=(header.index("NOTE"),))
    if _is_one_topic(plan):
        output.print_lines(_effect(plan, executed=args.execute))
    print("done" if args.execute else "dry run: nothing was changed; --execute does it")


def _is_one_topic(plan: Plan) -> bool:
    """Tell whether the offsets before are of the topic that Kafka has now."""
    ids = {move.stored.topic_id for move in plan.moves if move.stored} | {plan.topic_id}
    clusters = {move.stored.cluster_id for move in plan.moves if move.stored} | {plan.cluster_id}
    return len(ids - {None}) <= 1 and len(clusters - {None}) <= 1


def _effect(plan: Plan, *, executed: bool) -> str:
    """Say what becomes of messages; an owner that lives goes on meanwhile, so a dry run shows this moment."""
    again, left_out = sum(m.again for m in plan.moves), sum(m.left_out for m in plan.moves)
    if not again and not left_out:
        return "no message comes again, none is left out"
    verb, other = ("come", "are left out") if executed else ("would come", "would be left out")
    said = [f"{again} {verb} again, their effects a second time"] if again else []
    said += [f"{left_out} {other}, without effects"] if left_out else []
    return f"messages: {'; '.join(said)} (counted in offsets, so gaps of compaction and transactions count)"


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
                "again": m.again if _is_one_topic(plan) else None,
                "left_out": m.left_out if _is_one_topic(plan) else None,
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
