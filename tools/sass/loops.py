"""Natural loops of machine code: what dominates the branch back and reaches it (Aho, Lam, Sethi and Ullman, 9.6).

A wait that is kept out of line, which branches back into the code that it belongs to, is none: the place it returns to
does not dominate it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from sass.code import Instruction


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """By place: where an instruction may go on, the one behind it first."""
    places = {instruction.address: place for place, instruction in enumerate(code)}
    joins: dict[str, int] = {}  # of convergence barriers
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
            # A predicate stands before the instruction or, uniform, among the operands; DIV: where threads have parted.
            is_conditional = i.predicate not in ("", "@PT") or re.match(r"!?U?P\d", i.operands) or ".DIV" in i.opcode
            found.append([*behind, target] if is_conditional else [target])
        elif i.base == "CALL" and target is not None:  # which may be a branch
            found.append([*behind, target])
        else:
            found.append(behind)
    return found


def natural_loops(follow: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Bodies by head, of a graph whose entry is 0."""
    order = _postorder(follow)
    rank = {node: number for number, node in enumerate(order)}
    before = defaultdict(list)
    for node in order:
        for next_ in follow[node]:
            before[next_].append(node)
    parent = _dominators(order, rank, before)

    def dominates(node: int, other: int) -> bool:
        while rank[other] < rank[node]:
            other = parent[other]
        return node == other

    bodies: dict[int, set[int]] = {}
    for node in order:
        for head in follow[node]:
            if dominates(head, node):
                body, work = bodies.setdefault(head, {head}), [node]
                while work:
                    inside = work.pop()
                    if inside not in body:
                        body.add(inside)
                        work += before[inside]
    return bodies


def _postorder(follow: Sequence[Sequence[int]]) -> list[int]:
    order, seen, stack = [], {0}, [(0, iter(follow[0]))]
    while stack:
        node, rest = stack[-1]
        for next_ in rest:
            if next_ not in seen:
                seen.add(next_)
                stack.append((next_, iter(follow[next_])))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _dominators(order: list[int], rank: dict[int, int], before: dict[int, list[int]]) -> dict[int, int]:
    """The immediate dominator of every node (Cooper, Harvey and Kennedy 2001)."""
    parent = {0: 0}
    is_changed = True
    while is_changed:
        is_changed = False
        for node in reversed(order[:-1]):
            known = [one for one in before[node] if one in parent]
            nearest = known[0]
            for one in known[1:]:
                while one != nearest:
                    if rank[one] < rank[nearest]:
                        one = parent[one]
                    else:
                        nearest = parent[nearest]
            if parent.get(node) != nearest:
                parent[node], is_changed = nearest, True
    return parent


def innermost(code: Sequence[Instruction], pipes: Sequence[str]) -> list[list[Instruction]]:
    """One iteration of each loop that has instructions of these pipes and no other such loop within it.

    An iteration is the path that falls through where it can, which is how compilers lay out what is likely.
    """
    follow = successors(code)
    bodies = {
        head: body for head, body in natural_loops(follow).items() if any(code[place].pipe in pipes for place in body)
    }
    return [
        [code[place] for place in _path(head, follow, body)]
        for head, body in sorted(bodies.items())
        if not any(inner < body for inner in bodies.values())
    ]


def inside(code: Sequence[Instruction]) -> list[Instruction]:
    """What is in any loop."""
    places = set().union(*natural_loops(successors(code)).values())
    return [code[place] for place in sorted(places)]


def whole(code: Sequence[Instruction]) -> list[Instruction]:
    """From the entry to the end, by the path that falls through where it can."""
    return [code[place] for place in _path(0, successors(code), set(range(len(code))))]


def _path(start: int, follow: Sequence[Sequence[int]], body: set[int]) -> list[int]:
    path: dict[int, None] = {start: None}  # in order
    at = start
    while fresh := [place for place in follow[at] if place in body and place not in path]:
        at = fresh[0]
        path[at] = None
    return list(path)
