"""Find the natural loops of machine code (Aho, Lam, Sethi and Ullman, 9.6).

A branch back forms a loop only if its target dominates it. Waits that ptxas moves out of line also branch back, but
their target does not dominate them, so they form no loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from sass.code import Instruction


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Return by place the places that may execute next, the following instruction first."""
    places = {instruction.address: place for place, instruction in enumerate(code)}
    joins: dict[str, int] = {}  # where threads meet again, by convergence barrier
    found: list[list[int]] = []
    for place, i in enumerate(code):
        behind = [place + 1] if place + 1 < len(code) else []
        target = places.get(i.count) if i.base in ("BRA", "JMP", "CALL", "BSSY") and i.count is not None else None
        barrier = i.operands.partition(",")[0].strip()
        if i.base == "BSSY" and target is not None:
            joins[barrier] = target
        if i.base in ("EXIT", "RET", "BRX", "KILL") and i.predicate in ("", "@PT"):
            found.append([])
        elif i.base == "BSYNC" and barrier in joins:
            found.append([joins[barrier]])
        elif i.base in ("BRA", "JMP") and target is not None:
            # The predicate precedes the instruction or, if uniform, is an operand. DIV branches for diverged threads.
            is_conditional = i.predicate not in ("", "@PT") or re.match(r"!?U?P\d", i.operands) or ".DIV" in i.opcode
            found.append([*behind, target] if is_conditional else [target])
        elif i.base == "CALL" and target is not None:  # it may never return
            found.append([*behind, target])
        else:
            found.append(behind)
    return found


def natural_loops(follow: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Return the body of each loop by its head, in a graph whose entry is 0 and whose loops branch to lower places."""
    places = _reached(follow)
    before = defaultdict(list)
    for place in places:
        for next_ in follow[place]:
            before[next_].append(place)
    bodies: dict[int, set[int]] = {}
    for head in sorted(places):
        ends = [place for place in before[head] if place >= head]
        if not ends:
            continue
        elsewhere = _reached(follow, without=head)
        work = [place for place in ends if place not in elsewhere]  # the head dominates these
        if work:
            body = bodies[head] = {head}
        while work:
            place = work.pop()
            if place not in body:
                body.add(place)
                work += before[place]
    return bodies


def _reached(follow: Sequence[Sequence[int]], without: int | None = None) -> set[int]:
    """Return the places that the entry reaches by paths that avoid the place ``without``."""
    seen: set[int] = set()
    work = [0]
    while work:
        place = work.pop()
        if place != without and place not in seen:
            seen.add(place)
            work += follow[place]
    return seen


def innermost(code: Sequence[Instruction], pipe: str) -> list[list[Instruction]]:
    """Return one iteration of each loop that uses ``pipe`` and has no inner loop that does.

    An iteration follows the path that falls through wherever it can, because compilers lay out the likely path so.
    """
    follow = successors(code)
    bodies = {
        head: body for head, body in natural_loops(follow).items() if any(code[place].pipe == pipe for place in body)
    }
    return [
        [code[place] for place in _path(head, follow, body)]
        for head, body in sorted(bodies.items())
        if not any(inner < body for inner in bodies.values())
    ]


def inside(code: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions that are in any loop."""
    places = set().union(*natural_loops(successors(code)).values())
    return [code[place] for place in sorted(places)]


def _path(start: int, follow: Sequence[Sequence[int]], body: set[int]) -> list[int]:
    path: dict[int, None] = {start: None}  # in order
    at = start
    while fresh := [place for place in follow[at] if place in body and place not in path]:
        at = fresh[0]
        path[at] = None
    return list(path)
