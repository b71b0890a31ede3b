"""Unroll loops and branches: a program with a node for each run of an operation. Pure Python.

TensorFlow lowers `while` and `cond` to Enter, Merge, Switch, NextIteration and Exit. Here tokens pass between those as
they do in the executor, but only the loop's counters are computed. Each operation that would run becomes a node. It
takes its inputs from the nodes that made them, and waits for those that passed them on. If a branch depends on the
data, the larger one is taken, with a note.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.estimation.graph.program import Node, NotModelled, Program

CONTROL = frozenset({"Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"})
SIZED_BY_DATA = frozenset({"Where", "Unique", "UniqueV2", "ListDiff", "DynamicPartition", "BooleanMask"})
LONGEST = 400_000  # nodes; a longer step is not simulated

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
    """A value on an edge.

    Attributes:
        source: the new node and output that it comes from, or None.
        value: None if unknown.
        dead: whether it comes from a branch that is not taken.
    """

    source: tuple[int, int] | None
    value: Any = None
    dead: bool = False


_DEAD, _ENDED = _Token(None, None, True), _Token(None)


def unroll(program: Program) -> tuple[Program, tuple[str, ...]]:
    """Return the program without control flow, and notes on the branches taken.

    Raises:
        NotModelled: If the number of iterations depends on the data, or is too large.
    """
    if not any(node.type in CONTROL for node in program.nodes):
        return program, ()
    walk = _Walk(_as_lowered(program))
    walk.run()
    return walk.result(), tuple(walk.notes)


def _as_lowered(program: Program) -> Program:
    """Return the program with the nodes of a loop's functions waiting for its first variable alone.

    TensorFlow's runtime lowers loops in this way (lower_while_op.cc). Grappler lets a function wait for all its inputs
    (function_optimizer.cc), so that no iteration would begin before the last one ends.
    """
    nodes = program.nodes

    def controls(node: Node) -> tuple[int, ...]:
        merges = [source for source in node.controls if nodes[source].type == "Merge"]
        # Names end with the variable's number.
        first = min(merges, key=lambda source: (len(nodes[source].name), nodes[source].name), default=None)
        if len(merges) < 2 and not any("/loop_body_control/" in nodes[source].name for source in node.controls):
            return node.controls
        passed_on = ("Merge", "Switch", "Enter")
        return tuple(source for source in node.controls if source == first or nodes[source].type not in passed_on)

    return replace(program, nodes=tuple(replace(node, controls=controls(node)) for node in nodes))


class _Waiting:
    """An operation of one iteration that still waits for tokens."""

    __slots__ = ("controls", "has_run", "inputs", "is_dead", "left")

    def __init__(self, left: int) -> None:
        self.left, self.is_dead, self.has_run = left, False, False
        self.inputs: dict[int, _Token] = {}
        self.controls: list[int] = []  # new nodes that its tokens came through


class _Walk:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._consumers: list[list[tuple[int, int, int]]] = [[] for _ in program.nodes]  # (output, consumer, input)
        self._after: list[list[int]] = [[] for _ in program.nodes]
        for number, node in enumerate(program.nodes):
            for index, (source, output) in enumerate(node.inputs):
                self._consumers[source].append((output, number, index))
            for source in node.controls:
                self._after[source].append(number)
        self._waiting: dict[_Instance, _Waiting] = {}
        self._constants: dict[_Context, list[tuple[int, _Token]]] = defaultdict(list)  # of a frame's first context
        self._iterations: dict[_Context, int] = {}
        self._ready: deque[_Instance] = deque()
        self._branches: dict[tuple[int, int], bool] = {}
        self._new: list[Node] = []
        self._origins: list[int] = []  # of new nodes: their old numbers
        self._number_of: dict[int, int] = {}  # of nodes outside frames: old number → new
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
        arguments = tuple(self._number_of[number] for number in program.arguments if number in self._number_of)
        return Program(tuple(self._new), program.variables, arguments, results, program, tuple(self._origins))

    def _at(self, number: int, context: _Context) -> _Waiting:
        waiting = self._waiting.get((number, context))
        if waiting is None:
            node = self._program.nodes[number]
            data = 1 if node.type == "Merge" else len(node.inputs)
            waiting = self._waiting[number, context] = _Waiting(data + len(node.controls))
        return waiting

    def _arrive(self, number: int, context: _Context, token: _Token, by: int | None, index: int | None = None) -> None:
        """Pass an operation a token for an input (None: a control edge) from a new node."""
        node, waiting = self._program.nodes[number], self._at(number, context)
        if waiting.has_run:
            return
        if index is not None:
            waiting.inputs[index] = token
        if node.type != "Merge":
            waiting.is_dead |= token.dead
        elif index is not None:  # the first live token suffices, or all dead ones
            alive = sum(not received.dead for received in waiting.inputs.values())
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
            alive = next(((index, token) for index, token in tokens.items() if not token.dead), None)
            if alive is None:
                self._send(number, context, [_DEAD, _DEAD], None)
            else:
                by = self._add(number, Node(node.name, node.type, (), _once(waiting), (), {}))
                self._send(number, context, [alive[1], _Token(None, alive[0])], by)
        elif waiting.is_dead:
            if node.type not in ("NextIteration", "Exit"):
                self._send(number, context, [_DEAD] * len(node.outputs), None)
        else:
            inputs = [tokens[index] for index in range(len(node.inputs))]
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
        """Return whether the branch for "true" makes at least as many bytes as the other, and the reason.

        A branch of known sizes is preferred to one whose sizes depend on the data.
        """
        switches = [
            number
            for number, node in enumerate(self._program.nodes)
            if node.type == "Switch" and node.inputs[1] == condition
        ]
        weights, known = [], []
        for branch in (0, 1):
            seen: set[int] = set()
            pending = [
                consumer for switch in switches for output, consumer, _ in self._consumers[switch] if output == branch
            ]
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
        new = self._add(number, replace(node, inputs=sources, controls=controls))
        if not context:
            self._number_of[number] = new
        outputs = [_Token((new, output), value) for output, value in enumerate(self._values(node, inputs))]
        self._send(number, context, outputs, new)

    def _add(self, number: int, node: Node) -> int:
        """Add a new node for one run of an operation, and return its number."""
        self._new.append(node)
        self._origins.append(number)
        return len(self._new) - 1

    def _values(self, node: Node, inputs: Sequence[_Token]) -> list[Any]:
        """Return the known values of a node's outputs. A list's value is (last item, rest)."""
        known = [token.value for token in inputs]
        value = None
        if node.type == "Const":
            constant = node.attributes.get("value")
            value = constant.reshape(()).item() if constant is not None and constant.size == 1 else None
        elif node.type == "TensorListPushBack":
            value = (known[1], known[0])
        elif node.type == "TensorListPopBack" and known[0] is not None:
            return [known[0][1], known[0][0]]
        elif node.type in _EVALUATED and None not in known:
            value = _EVALUATED[node.type](*known)
        return [value, *[None] * (len(node.outputs) - 1)][: len(node.outputs)]

    def _send(self, number: int, context: _Context, outputs: list[_Token], by: int | None) -> None:
        """Pass an operation's outputs to its consumers in an iteration, from a new node (None if it is dead)."""
        for output, consumer, index in self._consumers[number]:
            token = outputs[output]
            self._arrive(consumer, context, token, None if token.dead else by, index)
        for consumer in self._after[number]:
            self._arrive(consumer, context, _DEAD if by is None else _ENDED, by)
        if not context:
            for output, token in enumerate(outputs):
                if (number, output) not in self._tokens or self._tokens[number, output].dead:
                    self._tokens[number, output] = token


def _once(waiting: _Waiting) -> tuple[int, ...]:
    return tuple(dict.fromkeys(waiting.controls))
