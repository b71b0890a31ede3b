"""Unroll loops and branches to one node per run of an operation.

TensorFlow lowers `while` and `cond` to Enter, Merge, Switch, NextIteration and Exit. Here tokens pass between those as
in the executor, but only loop counters are computed. Each other operation that would run becomes a node. It waits for
the nodes that made its inputs, and for the condition of its iteration or branch. An iteration also waits for the end of
an earlier one (`parallel_iterations`). If a branch depends on the data, the step is unrolled with each of them.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.estimation.graph.program import Node, NotModelled, Program

CONTROL = frozenset({"Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"})
SIZED_BY_DATA = frozenset({"Where", "Unique", "UniqueV2", "ListDiff", "DynamicPartition", "BooleanMask"})
LONGEST = 400_000  # nodes; a longer step is not simulated
MOST_ALTERNATIVES = 7  # combinations of branches beside the first

_Nodes = tuple[int, ...]
_Branches = dict[tuple[int, int], bool]  # by the condition's output: whether the branch for "true" runs
_Context = tuple[tuple[str, int], ...]  # (frame, iteration) of the loops that an operation runs in

_EVALUATED: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "AddV2": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
    "Maximum": max,
    "Minimum": min,
    "LogicalAnd": lambda a, b: bool(a) and bool(b),
    "LogicalOr": lambda a, b: bool(a) or bool(b),
    "LogicalNot": operator.not_,
    "Identity": lambda a: a,
    "Cast": lambda a: a,
}

# Operations that pass the usual value of conditions on.
_PASSED_ON = frozenset({"Identity", "Reshape", "All", "Any", "LogicalNot", "Pack", "LogicalAnd", "LogicalOr"})


@dataclass(frozen=True, slots=True)
class _Token:
    """A value on an edge, or the signal of a control edge.

    Attributes:
        source: new node and output that it comes from, or None.
        value: its value, or None if unknown.
        awaited: further new nodes that its receiver waits for.
        is_dead: whether it comes from a branch that does not run.
    """

    source: tuple[int, int] | None = None
    value: Any = None
    awaited: tuple[int, ...] = ()
    is_dead: bool = False


_DEAD = _Token(is_dead=True)


@dataclass(slots=True)
class _Waiting:
    """An operation in one iteration: its tokens, and the number of missing ones."""

    left: int
    is_dead: bool = False
    has_run: bool = False
    inputs: dict[int, _Token] = field(default_factory=dict)
    awaited: list[int] = field(default_factory=list)


def unroll(program: Program) -> tuple[Program, tuple[str, ...]]:
    """Return the program without control flow, and notes on its branches.

    If branches depend on the data, the program has those of most steps, or else the larger ones. Its alternatives have
    the others.

    Raises:
        NotModelled: If the number of iterations depends on the data, or is too large.
    """
    if not any(node.type in CONTROL for node in program.nodes):
        return program, ()
    lowered = _as_lowered(program)
    pending: deque[_Branches] = deque([{}])
    programs: list[Program] = []
    notes: dict[str, None] = {}
    while pending and len(programs) <= MOST_ALTERNATIVES:
        chosen = pending.popleft()
        walk = _Walk(lowered, chosen)
        walk.run()
        programs.append(walk.result())
        notes.update(dict.fromkeys(walk.notes))
        branches = list(walk.branches.items())
        for number in range(len(chosen), len(branches)):
            condition, value = branches[number]
            pending.append({**dict(branches[:number]), condition: not value})
    if pending:
        notes[f"only {len(programs)} combinations of the branches are in the interval"] = None
    return replace(programs[0], alternatives=tuple(programs[1:])), tuple(notes)


def _as_lowered(program: Program) -> Program:
    """Let the nodes of a loop's functions wait for its first variable only.

    TensorFlow's runtime lowers loops in this way (lower_while_op.cc). In Grappler's graph they wait for all inputs
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


class _Walk:
    def __init__(self, program: Program, chosen: _Branches) -> None:
        self._program = program
        self._consumers: list[list[tuple[int, int, int]]] = [[] for _ in program.nodes]  # (output, consumer, input)
        self._after: list[list[int]] = [[] for _ in program.nodes]
        for number, node in enumerate(program.nodes):
            for index, (source, output) in enumerate(node.inputs):
                self._consumers[source].append((output, number, index))
            for source in node.controls:
                self._after[source].append(number)
        self._waiting: dict[tuple[int, _Context], _Waiting] = {}
        # By a frame's first context: its constants, and its last iteration.
        self._constants: dict[_Context, list[tuple[int, _Token]]] = defaultdict(list)
        self._iterations: dict[_Context, int] = defaultdict(int)
        self._most: dict[_Context, int] = {}  # number of iterations that run at once
        self._inputs = Counter(_frame(node) for node in program.nodes if node.type == "Enter")
        self._missing: dict[_Context, int] = {}  # number of a loop's inputs that have not arrived
        self._made: dict[_Context, list[int]] = defaultdict(list)  # new nodes of each iteration, with inner loops
        self._held: dict[_Context, list[tuple[int, _Token]]] = defaultdict(list)  # by the iteration that has to wait
        self._passes = 0
        self._ready: deque[tuple[int, _Context]] = deque()
        self.branches = dict(chosen)
        self._new: list[Node] = []
        self._tokens: dict[tuple[int, int], _Token] = {}  # of outputs outside frames
        self.notes: list[str] = []

    def run(self) -> None:
        """Pass tokens until no operation is ready."""
        for number, node in enumerate(self._program.nodes):
            if not node.inputs and not node.controls:
                self._ready.append((number, ()))
        while self._ready:
            self._fire(*self._ready.popleft())
            if len(self._new) > LONGEST:
                raise NotModelled(f"the unrolled step must have at most {LONGEST:,} operations; it has more")
            if not self._ready:
                self._release()

    def _release(self) -> None:
        """Begin the iterations that wait for the end of an earlier one.

        When no operation is ready, the earlier one has ended, unless the loop lacks inputs or an inner loop waits.
        """
        whole = [context for context in self._held if not self._missing[_first(context)]]
        deepest = max(map(len, whole), default=0)
        for context in [context for context in whole if len(context) == deepest]:
            *outer, (frame, iteration) = context
            ended = (*outer, (frame, iteration - self._most[_first(context)]))
            barrier = len(self._new)
            self._new.append(Node(f"{frame}/ended", "NoOp", (), tuple(self._made[ended]), (), {}))
            for number, token in self._held.pop(context):
                self._begin(number, context, replace(token, awaited=(*token.awaited, barrier)))

    def result(self) -> Program:
        """Return the unrolled program."""
        program = self._program
        ends = [self._tokens.get(end, _DEAD).source for end in program.results]
        batch = [self._tokens.get((number, 0), _DEAD).source for number in program.arguments]
        return replace(
            program,
            nodes=tuple(self._new),
            arguments=tuple(source[0] for source in batch if source is not None),
            results=tuple(source for source in ends if source is not None),
            has_loops=any(self._iterations.values()),
            passes=self._passes,
            is_usual=all(_usual_value(program, key) in (None, value) for key, value in self.branches.items()),
        )

    def _state(self, number: int, context: _Context) -> _Waiting:
        waiting = self._waiting.get((number, context))
        if waiting is None:
            node = self._program.nodes[number]
            data = 1 if node.type == "Merge" else len(node.inputs)
            waiting = self._waiting[number, context] = _Waiting(data + len(node.controls))
        return waiting

    def _arrive(self, number: int, context: _Context, token: _Token, index: int | None = None) -> None:
        """Pass an operation a token for an input, or None for a control edge."""
        node, waiting = self._program.nodes[number], self._state(number, context)
        if waiting.has_run:
            return
        if index is not None:
            waiting.inputs[index] = token
        if node.type != "Merge":
            waiting.is_dead |= token.is_dead
        elif index is not None:  # the first live token suffices, or all dead ones
            alive = sum(not received.is_dead for received in waiting.inputs.values())
            if (token.is_dead or alive != 1) and (alive or len(waiting.inputs) < len(node.inputs)):
                return
        waiting.awaited += token.awaited
        waiting.left -= 1
        if not waiting.left:
            self._ready.append((number, context))

    def _fire(self, number: int, context: _Context) -> None:
        node, waiting = self._program.nodes[number], self._state(number, context)
        if waiting.has_run:
            return
        waiting.has_run = True
        self._passes += node.type in CONTROL
        tokens, waiting.inputs = waiting.inputs, {}
        awaited = tuple(dict.fromkeys(waiting.awaited))
        if node.type == "Merge":
            index = next((index for index, token in tokens.items() if not token.is_dead), None)
            live = _DEAD if index is None else replace(tokens[index], awaited=awaited)
            outputs = [live, _DEAD if index is None else _Token(value=index)]
            self._pass_on(number, context, outputs)
        elif waiting.is_dead:
            if node.type not in ("NextIteration", "Exit"):
                self._send(number, context, [_DEAD] * len(node.outputs), None)
        else:
            inputs = [tokens[index] for index in range(len(node.inputs))]
            if node.type in CONTROL:
                self._control(number, node, context, inputs, awaited)
            else:
                self._emit(number, node, context, inputs, awaited)

    def _control(self, number: int, node: Node, context: _Context, inputs: list[_Token], awaited: _Nodes) -> None:
        """Pass on a control-flow node's token, within its iteration or to another."""
        token, outer = replace(inputs[0], awaited=awaited), context[:-1]
        if node.type == "Enter":
            self._enter(number, node, context, token)
        elif node.type == "Exit":
            self._pass_on(number, outer, [token])
        elif node.type == "NextIteration":
            (frame, iteration) = context[-1]
            following = (*outer, (frame, iteration + 1))
            if iteration + 1 < self._most[_first(context)]:
                self._begin(number, following, token)
            else:
                self._held[following].append((number, token))
        elif node.type == "Switch":
            condition = inputs[1]
            if condition.source is not None:
                token = replace(token, awaited=(condition.source[0],))
            self._pass_on(number, context, [_DEAD, token] if self._choose(node, condition) else [token, _DEAD])
        elif token.value is None:
            raise NotModelled(f"the number of iterations of {node.name} depends on the data")
        else:
            self._pass_on(number, context, [token])

    def _enter(self, number: int, node: Node, context: _Context, token: _Token) -> None:
        """Pass a token to a loop's first iteration, or to all if constant."""
        frame = _frame(node)
        first, last = (*context, (frame, 0)), 0
        self._most[first] = node.attributes["parallel_iterations"]
        self._missing[first] = self._missing.get(first, self._inputs[frame]) - 1
        if node.attributes.get("is_constant"):
            self._constants[first].append((number, token))
            last = self._iterations[first]
        for iteration in range(last + 1):
            self._pass_on(number, (*context, (frame, iteration)), [token])

    def _begin(self, number: int, context: _Context, token: _Token) -> None:
        """Pass a token to an iteration after the first. An iteration's first token comes with the loop's constants."""
        first, iteration = _first(context), context[-1][1]
        if self._iterations[first] < iteration:
            self._iterations[first] = iteration
            for constant, value in self._constants[first]:
                self._pass_on(constant, context, [value])
        self._pass_on(number, context, [token])

    def _choose(self, node: Node, condition: _Token) -> bool:
        """Return whether the branch for "true" runs."""
        if condition.value is not None:
            return bool(condition.value)
        key = node.inputs[1]
        if key not in self.branches:
            usual = _usual_value(self._program, key)
            self.branches[key] = self._is_larger(key) if usual is None else usual
            counted = "the larger one" if usual is None else "the one of most steps"
            name = self._program.nodes[key[0]].name
            self.notes.append(
                f"a branch of the step depends on the data ({name}): {counted} is counted, and the interval covers both"
            )
        return self.branches[key]

    def _is_larger(self, condition: tuple[int, int]) -> bool:
        """Return whether the branch for "true" is the larger one.

        If only one branch has known sizes, it counts as the larger.
        """
        nodes, weights = self._program.nodes, []
        for branch in (0, 1):
            seen: set[int] = set()
            pending: list[int] = []
            for number, node in enumerate(nodes):
                if node.type == "Switch" and node.inputs[1] == condition:
                    pending += [consumer for output, consumer, _ in self._consumers[number] if output == branch]
            while pending:
                number = pending.pop()
                if number not in seen and nodes[number].type != "Merge":
                    seen.add(number)
                    pending += [consumer for _, consumer, _ in self._consumers[number]] + self._after[number]
            is_known = not any(nodes[number].type in SIZED_BY_DATA for number in seen)
            size = sum(tensor.bytes or 0 for number in seen for tensor in nodes[number].outputs)
            weights.append((is_known, size, len(seen)))
        return weights[1] >= weights[0]

    def _emit(self, number: int, node: Node, context: _Context, inputs: Sequence[_Token], awaited: _Nodes) -> None:
        """Add a node for one run of an operation, and pass on its outputs."""
        # The index of the input that a Merge forwards has no memory, and no source.
        sources = tuple(token.source for token in inputs if token.source is not None)
        new = len(self._new)
        self._new.append(replace(node, inputs=sources, controls=awaited))
        for depth in range(1, len(context) + 1):
            self._made[context[:depth]].append(new)
        outputs = [_Token((new, output), value) for output, value in enumerate(_values(node, inputs))]
        self._send(number, context, outputs, (new,))

    def _pass_on(self, number: int, context: _Context, outputs: list[_Token]) -> None:
        """Pass on the live token among the outputs of a control-flow node."""
        live = next((token for token in outputs if not token.is_dead), None)
        if live is None:
            self._send(number, context, outputs, None)
        else:
            self._send(number, context, outputs, live.awaited + (() if live.source is None else live.source[:1]))

    def _send(self, number: int, context: _Context, outputs: list[_Token], done: _Nodes | None) -> None:
        """Pass an operation's outputs to its consumers in an iteration.

        Args:
            number: the operation.
            context: the iteration.
            outputs: its outputs.
            done: new nodes that its control edges wait for, or None if it is dead.
        """
        for output, consumer, index in self._consumers[number]:
            self._arrive(consumer, context, outputs[output], index)
        for consumer in self._after[number]:
            self._arrive(consumer, context, _DEAD if done is None else _Token(awaited=done))
        if not context:
            for output, token in enumerate(outputs):
                if self._tokens.get((number, output), _DEAD).is_dead:
                    self._tokens[number, output] = token


def _frame(node: Node) -> str:
    """Return the name of the loop that an Enter node begins."""
    return str(node.attributes.get("frame_name"))


def _first(context: _Context) -> _Context:
    """Return the first iteration of a context's innermost loop."""
    return (*context[:-1], (context[-1][0], 0))


def _usual_value(program: Program, condition: tuple[int, int]) -> bool | None:
    """Return a condition's value in most steps, or None if unknown.

    Numbers are usually finite, and one step in n is the n-th, as for weights that are averaged every n steps.
    """
    node = program.nodes[condition[0]]
    values = [_usual_value(program, source) for source in node.inputs] if node.type in _PASSED_ON else []
    match node.type:
        case "Identity" | "Reshape" | "All" | "Any":
            return values[0]
        case "LogicalNot":
            return None if values[0] is None else not values[0]
        case "Pack" | "LogicalAnd" | "LogicalOr":
            return values[0] if len(set(values)) == 1 else None
        case "Equal" | "NotEqual":
            return node.type == "NotEqual" if any(_has_period(program, source) for source in node.inputs) else None
        case "IsFinite" | "IsNan" | "IsInf":
            return node.type == "IsFinite"
    return None


def _has_period(program: Program, source: tuple[int, int]) -> bool:
    """Return whether a value is the remainder of a division by 3 or more."""
    node = program.nodes[source[0]]
    if node.type != "FloorMod":
        return False
    divisor = program.nodes[node.inputs[1][0]].attributes.get("value")
    return divisor is not None and divisor.size == 1 and divisor.item() > 2


def _values(node: Node, inputs: Sequence[_Token]) -> list[Any]:
    """Return the known values of a node's outputs. A list's value is (last item, rest)."""
    values = [token.value for token in inputs]
    value = None
    if node.type == "Const":
        constant = node.attributes.get("value")
        value = constant.reshape(()).item() if constant is not None and constant.size == 1 else None
    elif node.type == "TensorListPushBack":
        value = (values[1], values[0])
    elif node.type == "TensorListPopBack" and values[0] is not None:
        return [values[0][1], values[0][0]]
    elif node.type in _EVALUATED and None not in values:
        value = _EVALUATED[node.type](*values)
    return [value, *[None] * (len(node.outputs) - 1)][: len(node.outputs)]
