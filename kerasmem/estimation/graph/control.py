"""Loops and branches unrolled: the program with every iteration spelled out. Pure Python.

TensorFlow lowers `while` and `cond` to Enter, Merge, Switch, NextIteration and Exit. Here the tokens that the executor
would pass between them are passed without computing anything but the loop's counters, and each operation that would
run becomes a node of its own. Where a branch depends on the data, the one that makes more is taken, and it is said.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


_DEAD = _Token(None, None, True)


def unroll(program: Program) -> tuple[Program, tuple[str, ...]]:
    """Return the program without control flow, and notes on the branches that were chosen.

    Raises:
        NotModelled: how often a loop runs depends on the data, or it runs too long.
    """
    if not any(node.type in CONTROL for node in program.nodes):
        return program, ()
    walk = _Walk(program)
    walk.run()
    return walk.result(), tuple(walk.notes)


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
        self._inputs: dict[_Instance, dict[int, _Token]] = defaultdict(dict)
        self._waits: dict[_Instance, int] = {}
        self._controls: dict[_Instance, list[int]] = defaultdict(list)
        self._killed: set[_Instance] = set()
        self._fired: set[_Instance] = set()
        self._constants: dict[_Context, list[tuple[int, _Token]]] = defaultdict(
            list
        )  # of a frame, by its first context
        self._iterations: dict[_Context, int] = {}
        self._ready: deque[_Instance] = deque()
        self._branches: dict[tuple[int, int], bool] = {}
        self._reasons: dict[tuple[int, int], str] = {}
        self._new: list[Node] = []
        self._place: dict[int, int] = {}  # nodes outside frames: old number → new
        self._tokens: dict[tuple[int, int], _Token] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        """Pass tokens until none is left."""
        for number, node in enumerate(self._program.nodes):
            if not node.inputs and not node.controls:
                self._ready.append((number, ()))
        while self._ready:
            self._fire(self._ready.popleft())
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
        return Program(tuple(self._new), program.variables, arguments, results)

    def _needed(self, number: int) -> int:
        node = self._program.nodes[number]
        data = 1 if node.type == "Merge" else len(node.inputs)
        return data + len(node.controls)

    def _deliver(self, number: int, context: _Context, place: int, token: _Token) -> None:
        instance = (number, context)
        node = self._program.nodes[number]
        if instance in self._fired:
            return
        waits = self._waits.setdefault(instance, self._needed(number))
        if node.type == "Merge":
            inputs = self._inputs[instance]
            inputs[place] = token
            alive = [each for each in inputs.values() if not each.dead]
            arrived = len(inputs) == len(node.inputs)
            if (not token.dead and len(alive) == 1) or (arrived and not alive):
                self._lower(instance, waits)
            return
        self._inputs[instance][place] = token
        if token.dead:
            self._killed.add(instance)
        self._lower(instance, waits)

    def _lower(self, instance: _Instance, waits: int) -> None:
        self._waits[instance] = waits - 1
        if waits == 1:
            self._ready.append(instance)

    def _signal(self, number: int, context: _Context, source: int | None, dead: bool) -> None:
        """Deliver a control edge."""
        instance = (number, context)
        if instance in self._fired:
            return
        waits = self._waits.setdefault(instance, self._needed(number))
        if dead and self._program.nodes[number].type != "Merge":
            self._killed.add(instance)
        if source is not None:
            self._controls[instance].append(source)
        self._lower(instance, waits)

    def _fire(self, instance: _Instance) -> None:
        if instance in self._fired:
            return
        self._fired.add(instance)
        number, context = instance
        node = self._program.nodes[number]
        tokens = self._inputs.pop(instance, {})
        controls = self._controls.pop(instance, [])
        self._waits.pop(instance, None)
        dead = instance in self._killed
        if node.type == "Merge":
            alive = next(((place, each) for place, each in tokens.items() if not each.dead), None)
            if alive is None:
                self._send(number, context, [_DEAD, _DEAD], True, None)
            else:
                self._send(number, context, [alive[1], _Token(None, alive[0])], False, None)
            return
        if dead:
            if node.type not in ("NextIteration", "Exit"):
                self._send(number, context, [_DEAD] * len(node.outputs), True, None)
            return
        inputs = [tokens[place] for place in range(len(node.inputs))]
        if node.type in CONTROL:
            self._control(number, node, context, inputs)
        else:
            self._emit(number, node, context, inputs, controls)

    def _control(self, number: int, node: Node, context: _Context, inputs: list[_Token]) -> None:
        token = inputs[0]
        if node.type == "Enter":
            frame = str(node.attributes.get("frame_name"))
            inner = (*context, (frame, 0))
            if node.attributes.get("is_constant"):
                self._constants[inner].append((number, token))
                for iteration in range(self._iterations.get(inner, 0) + 1):
                    self._send(number, (*context, (frame, iteration)), [token], False, None)
            else:
                self._send(number, inner, [token], False, None)
        elif node.type == "Exit":
            self._send(number, context[:-1], [token], False, None)
        elif node.type == "NextIteration":
            (frame, iteration) = context[-1]
            following, first = (*context[:-1], (frame, iteration + 1)), (*context[:-1], (frame, 0))
            if self._iterations.get(first, 0) < iteration + 1:
                self._iterations[first] = iteration + 1
                for constant, value in self._constants[first]:
                    self._send(constant, following, [value], False, None)
            self._send(number, following, [token], False, None)
        elif node.type == "Switch":
            taken = self._taken(node, inputs[1])
            self._send(number, context, [_DEAD, token] if taken else [token, _DEAD], False, None)
        else:  # LoopCond
            if token.value is None:
                raise NotModelled(f"how often the loop of {node.name} runs depends on the data")
            self._send(number, context, [token], False, None)

    def _taken(self, node: Node, condition: _Token) -> bool:
        if condition.value is not None:
            return bool(condition.value)
        key = node.inputs[1]
        if key not in self._branches:
            self._branches[key] = self._heavier(key)
            name = self._program.nodes[key[0]].name
            self.notes.append(f"a branch of the step depends on the data ({name}): {self._reasons[key]}")
        return self._branches[key]

    def _heavier(self, condition: tuple[int, int]) -> bool:
        """Return whether what hangs on the branch for "true" makes at least as many bytes as the other.

        A branch whose sizes depend on the data too, as of places that are looked for, gives way to one whose do not.
        """
        weights = []
        known = []
        for branch in (0, 1):
            seen: set[int] = set()
            pending = [
                consumer
                for number, node in enumerate(self._program.nodes)
                if node.type == "Switch" and node.inputs[1] == condition
                for output, consumer, _ in self._consumers[number]
                if output == branch
            ]
            while pending:
                number = pending.pop()
                node = self._program.nodes[number]
                if number in seen or node.type == "Merge":
                    continue
                seen.add(number)
                pending += [consumer for _, consumer, _ in self._consumers[number]] + self._after[number]
            nodes = [self._program.nodes[number] for number in seen]
            weights.append((sum(out.bytes or 0 for node in nodes for out in node.outputs), len(nodes)))
            known.append(not any(node.type in SIZED_BY_DATA for node in nodes))
        if known[0] != known[1]:
            self._reasons[condition] = "the one whose sizes are known is counted"
            return known[1]
        self._reasons[condition] = "the one that makes more is counted"
        return weights[1] >= weights[0]

    def _emit(self, number: int, node: Node, context: _Context, inputs: Sequence[_Token], controls: list[int]) -> None:
        place = len(self._new)
        # Which input a Merge took is a number without memory of its own, and has no source.
        sources = tuple(token.source for token in inputs if token.source is not None)
        self._new.append(
            Node(node.name, node.type, sources, tuple(dict.fromkeys(controls)), node.outputs, node.attributes,
                 node.variable)
        )  # fmt: skip
        if not context:
            self._place[number] = place
        value = self._value(node, inputs)
        outputs = [_Token((place, output), value if output == 0 else None) for output in range(len(node.outputs))]
        self._send(number, context, outputs, False, place)

    def _value(self, node: Node, inputs: Sequence[_Token]) -> Any:
        if node.type == "Const":
            value = node.attributes.get("value")
            return None if value is None or getattr(value, "size", 2) != 1 else value.reshape(()).item()
        evaluate = _EVALUATED.get(node.type)
        if evaluate is None or any(token.value is None for token in inputs):
            return None
        return evaluate(*(token.value for token in inputs))

    def _send(self, number: int, context: _Context, outputs: list[_Token], dead: bool, place: int | None) -> None:
        for output, consumer, input_place in self._consumers[number]:
            self._deliver(consumer, context, input_place, outputs[output])
        if place is None and not dead:
            place = next((token.source[0] for token in outputs if token.source is not None), None)
        for consumer in self._after[number]:
            self._signal(consumer, context, place, dead)
        if not context:
            for output, token in enumerate(outputs):
                if (number, output) not in self._tokens or self._tokens[number, output].dead:
                    self._tokens[number, output] = token
