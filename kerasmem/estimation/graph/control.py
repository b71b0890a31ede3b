"""Loops and branches unrolled: the program with every iteration spelled out. Pure Python.

TensorFlow lowers `while` and `cond` to Enter, Merge, Switch, NextIteration and Exit. Here the tokens that the executor
would pass between them are passed without computing anything but the loop's counters, and each operation that would
run becomes a node of its own, which takes its inputs from where they were made and waits for what hands them on. Where
a branch depends on the data, the one that makes more is taken, and it is said.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.estimation.graph.program import Node, NotModelled, Program

CONTROL = frozenset({"Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"})
SIZED_BY_DATA = frozenset({"Where", "Unique", "UniqueV2", "ListDiff", "DynamicPartition", "BooleanMask"})
LONGEST = 400_000  # nodes; a longer step is not worth simulating

_Context = tuple[tuple[str, int], ...]
_Instance = tuple[int, _Context]

_EVALUATED: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "AddV2": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Less": lambda a, b: a < b,
    "LessEqual": lambda a, b: a <= b,
    "Greater": lambda a, b: a > b,
    "GreaterEqual": lambda a, b: a >= b,
    "Equal": lambda a, b: a == b,
    "NotEqual": lambda a, b: a != b,
    "Maximum": max,
    "Minimum": min,
    "LogicalAnd": lambda a, b: bool(a) and bool(b),
    "LogicalOr": lambda a, b: bool(a) or bool(b),
    "LogicalNot": lambda a: not a,
    "Identity": lambda a: a,
    "Cast": lambda a: a,
}


@dataclass(frozen=True, slots=True)
class _Token:
    """What an edge carries: the new node and output behind it (None: nothing), its value if known; or it is dead."""

    source: tuple[int, int] | None
    value: Any = None
    dead: bool = False


_DEAD, _ENDED = _Token(None, None, True), _Token(None)


def unroll(program: Program) -> tuple[Program, tuple[str, ...]]:
    """Return the program without control flow, and notes on the branches that were chosen.

    Raises:
        NotModelled: how often a loop runs depends on the data, or it runs too long.
    """
    if not any(node.type in CONTROL for node in program.nodes):
        return program, ()
    walk = _Walk(_as_lowered(program))
    walk.run()
    return walk.result(), tuple(walk.notes)


def _as_lowered(program: Program) -> Program:
    """Return the program with what is in a loop's functions waiting for its first variable alone, not for all of them.

    So TensorFlow's runtime lowers it (lower_while_op.cc). Grappler, which is asked here, has a function wait for all
    that it is given (function_optimizer.cc), so that no iteration would begin before the last is done.
    """
    nodes = program.nodes

    def controls(node: Node) -> tuple[int, ...]:
        merges = [each for each in node.controls if nodes[each].type == "Merge"]
        first = min(merges, key=lambda each: (len(nodes[each].name), nodes[each].name), default=None)  # by its number
        if len(merges) < 2 and not any("/loop_body_control/" in nodes[each].name for each in node.controls):
            return node.controls
        handed = ("Merge", "Switch", "Enter")
        return tuple(each for each in node.controls if each == first or nodes[each].type not in handed)

    return replace(program, nodes=tuple(replace(node, controls=controls(node)) for node in nodes))


class _Waiting:
    """An operation of one iteration: what has arrived, and how much it still waits for."""

    __slots__ = ("controls", "has_run", "inputs", "is_dead", "left")

    def __init__(self, left: int) -> None:
        self.left, self.is_dead, self.has_run = left, False, False
        self.inputs: dict[int, _Token] = {}
        self.controls: list[int] = []  # new nodes that have handed on to it


class _Walk:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._consumers: list[list[tuple[int, int, int]]] = [[] for _ in program.nodes]  # (output, consumer, input)
        self._after: list[list[int]] = [[] for _ in program.nodes]
        for number, node in enumerate(program.nodes):
            for place, (source, output) in enumerate(node.inputs):
                self._consumers[source].append((output, number, place))
            for source in node.controls:
                self._after[source].append(number)
        self._waiting: dict[_Instance, _Waiting] = {}
        self._constants: dict[_Context, list[tuple[int, _Token]]] = defaultdict(list)  # of a frame's first context
        self._iterations: dict[_Context, int] = {}
        self._ready: deque[_Instance] = deque()
        self._branches: dict[tuple[int, int], bool] = {}
        self._new: list[Node] = []
        self._origins: list[int] = []  # of new nodes: their old numbers
        self._place: dict[int, int] = {}  # nodes outside frames: old number → new
        self._tokens: dict[tuple[int, int], _Token] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        """Pass tokens until none is left."""
        for number, node in enumerate(self._program.nodes):
            if not node.inputs and not node.controls:
                self._ready.append((number, ()))
        while self._ready:
            self._fire(*self._ready.popleft())
            if len(self._new) > LONGEST:
                raise NotModelled(f"the step's loops run for more than {LONGEST:,} operations")

    def result(self) -> Program:
        """Return the unrolled program."""
        program = self._program
        results = tuple(
            token.source
            for end in program.results
            if (token := self._tokens.get(end)) is not None and token.source is not None
        )
        arguments = tuple(self._place[number] for number in program.arguments if number in self._place)
        return Program(tuple(self._new), program.variables, arguments, results, program, tuple(self._origins))

    def _at(self, number: int, context: _Context) -> _Waiting:
        waiting = self._waiting.get((number, context))
        if waiting is None:
            node = self._program.nodes[number]
            data = 1 if node.type == "Merge" else len(node.inputs)
            waiting = self._waiting[number, context] = _Waiting(data + len(node.controls))
        return waiting

    def _arrive(self, number: int, context: _Context, token: _Token, by: int | None, place: int | None = None) -> None:
        """Hand an operation a token, by a new node: the input of this place; None for a control edge."""
        node, waiting = self._program.nodes[number], self._at(number, context)
        if waiting.has_run:
            return
        if place is not None:
            waiting.inputs[place] = token
        if node.type != "Merge":
            waiting.is_dead |= token.dead
        elif place is not None:  # the first that is alive will do, or all of them dead
            alive = sum(not each.dead for each in waiting.inputs.values())
            if (token.dead or alive != 1) and (alive or len(waiting.inputs) < len(node.inputs)):
                return
        if by is not None:
            waiting.controls.append(by)
        waiting.left -= 1
        if not waiting.left:
            self._ready.append((number, context))

    def _fire(self, number: int, context: _Context) -> None:
        node, waiting = self._program.nodes[number], self._at(number, context)
        if waiting.has_run:
            return
        waiting.has_run = True
        tokens, waiting.inputs = waiting.inputs, {}
        if node.type == "Merge":
            alive = next(((place, each) for place, each in tokens.items() if not each.dead), None)
            if alive is None:
                self._send(number, context, [_DEAD, _DEAD], None)
            else:
                by = self._add(number, Node(node.name, node.type, (), _once(waiting), (), {}))
                self._send(number, context, [alive[1], _Token(None, alive[0])], by)
        elif waiting.is_dead:
            if node.type not in ("NextIteration", "Exit"):
                self._send(number, context, [_DEAD] * len(node.outputs), None)
        else:
            inputs = [tokens[place] for place in range(len(node.inputs))]
            if node.type in CONTROL:
                by = self._add(number, Node(node.name, node.type, (), _once(waiting), (), {}))
                self._control(number, node, context, inputs, by)
            else:
                self._emit(number, node, context, inputs, _once(waiting))

    def _control(self, number: int, node: Node, context: _Context, inputs: list[_Token], by: int) -> None:
        token = inputs[0]
        if node.type == "Enter":
            frame = str(node.attributes.get("frame_name"))
            inner = (*context, (frame, 0))
            if node.attributes.get("is_constant"):
                self._constants[inner].append((number, token))
                for iteration in range(self._iterations.get(inner, 0) + 1):
                    self._send(number, (*context, (frame, iteration)), [token], by)
            else:
                self._send(number, inner, [token], by)
        elif node.type == "Exit":
            self._send(number, context[:-1], [token], by)
        elif node.type == "NextIteration":
            (frame, iteration) = context[-1]
            following, first = (*context[:-1], (frame, iteration + 1)), (*context[:-1], (frame, 0))
            if self._iterations.get(first, 0) < iteration + 1:
                self._iterations[first] = iteration + 1
                for constant, value in self._constants[first]:
                    self._send(constant, following, [value], by)
            self._send(number, following, [token], by)
        elif node.type == "Switch":
            taken = self._taken(node, inputs[1])
            self._send(number, context, [_DEAD, token] if taken else [token, _DEAD], by)
        else:  # LoopCond
            if token.value is None:
                raise NotModelled(f"how often the loop of {node.name} runs depends on the data")
            self._send(number, context, [token], by)

    def _taken(self, node: Node, condition: _Token) -> bool:
        if condition.value is not None:
            return bool(condition.value)
        key = node.inputs[1]
        if key not in self._branches:
            self._branches[key], why = self._heavier(key)
            name = self._program.nodes[key[0]].name
            self.notes.append(f"a branch of the step depends on the data ({name}): the one {why} is counted")
        return self._branches[key]

    def _heavier(self, condition: tuple[int, int]) -> tuple[bool, str]:
        """Return whether what hangs on the branch for "true" makes at least as many bytes as the other, and why.

        A branch whose sizes depend on the data too, as of places that are looked for, gives way to one whose do not.
        """
        switches = [
            number
            for number, node in enumerate(self._program.nodes)
            if node.type == "Switch" and node.inputs[1] == condition
        ]
        weights, known = [], []
        for branch in (0, 1):
            seen: set[int] = set()
            pending = [each for switch in switches for output, each, _ in self._consumers[switch] if output == branch]
            while pending:
                number = pending.pop()
                if number not in seen and self._program.nodes[number].type != "Merge":
                    seen.add(number)
                    pending += [consumer for _, consumer, _ in self._consumers[number]] + self._after[number]
            nodes = [self._program.nodes[number] for number in seen]
            weights.append((sum(out.bytes or 0 for node in nodes for out in node.outputs), len(nodes)))
            known.append(not any(node.type in SIZED_BY_DATA for node in nodes))
        if known[0] != known[1]:
            return known[1], "whose sizes are known"
        return weights[1] >= weights[0], "that makes more"

    def _emit(
        self, number: int, node: Node, context: _Context, inputs: Sequence[_Token], controls: tuple[int, ...]
    ) -> None:
        # Which input a Merge took is a number without memory of its own, and has no source.
        sources = tuple(token.source for token in inputs if token.source is not None)
        made = Node(node.name, node.type, sources, controls, node.outputs, node.attributes, node.variable)
        place = self._add(number, made)
        if not context:
            self._place[number] = place
        values = self._values(node, inputs)
        outputs = [_Token((place, output), value) for output, value in enumerate(values)]
        self._send(number, context, outputs, place)

    def _add(self, number: int, node: Node) -> int:
        """Add a new node for one run of an operation, and return its number."""
        self._new.append(node)
        self._origins.append(number)
        return len(self._new) - 1

    def _values(self, node: Node, inputs: Sequence[_Token]) -> list[Any]:
        """Return what is known of the values of a node's outputs; a list's is (what was pushed last, the rest)."""
        known = [token.value for token in inputs]
        value = None
        if node.type == "Const":
            constant = node.attributes.get("value")
            value = constant.reshape(()).item() if constant is not None and constant.size == 1 else None
        elif node.type == "TensorListPushBack":
            value = (known[1], known[0])
        elif node.type == "TensorListPopBack" and known[0] is not None:
            return [known[0][1], known[0][0]]
        elif node.type in _EVALUATED and not any(each is None for each in known):
            value = _EVALUATED[node.type](*known)
        return [value, *[None] * (len(node.outputs) - 1)][: len(node.outputs)]

    def _send(self, number: int, context: _Context, outputs: list[_Token], by: int | None) -> None:
        """Hand on what an operation puts out to those in an iteration, by the new node; None where it is dead."""
        for output, consumer, place in self._consumers[number]:
            token = outputs[output]
            self._arrive(consumer, context, token, None if token.dead else by, place)
        for consumer in self._after[number]:
            self._arrive(consumer, context, _DEAD if by is None else _ENDED, by)
        if not context:
            for output, token in enumerate(outputs):
                if (number, output) not in self._tokens or self._tokens[number, output].dead:
                    self._tokens[number, output] = token


def _once(waiting: _Waiting) -> tuple[int, ...]:
    return tuple(dict.fromkeys(waiting.controls))
