"""One vocabulary: an option means the same in every command, and has its Python name."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import click

import kerasmem
from kerasmem.cli import cli as whole
from kerasmem.cli.options import EXIT_CODES, Option
from kerasmem.estimation.methods import METHODS

# command → what it is in Python
FUNCTIONS = {
    "estimate": kerasmem.estimate_many, "max-batch": kerasmem.max_batch_size, "cards": kerasmem.rank_cards,
    "measure": kerasmem.measure, "advise": kerasmem.advise, "data inspect": kerasmem.data.inspect,
    "data convert": kerasmem.data.convert, "data repack": kerasmem.data.repack, "data stats": kerasmem.data.stats,
    "data index": kerasmem.data.index,
}  # fmt: skip
# of the process or of what is printed, not of the call
OWN = {
    "as_csv", "as_json", "backend", "code", "dask", "debug", "memory_limit", "output", "time_limit", "top",
    "verbose", "workers",
}  # fmt: skip


def walk(group, path=""):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from walk(command, f"{path}{name} ")


COMMANDS = dict(walk(whole))
ABOVE = click.Context(whole, **{**whole.context_settings, "terminal_width": 80, "color": True})
OPTIONS = [
    (name, option)
    for name, command in [("", whole), *COMMANDS.items()]
    for option in command.params
    if isinstance(option, click.Option)
]


def type_of(option):
    kind = option.type.to_info_dict()
    return {key: kind[key] for key in ("param_type", "choices", "min", "max") if key in kind}


def test_an_option_means_one_thing():
    meanings, names = defaultdict(set), defaultdict(set)
    for _, option in OPTIONS:
        spelled = (*option.opts, *option.secondary_opts)
        for name in spelled:
            meanings[name].add((option.help, str(type_of(option)), option.is_flag, option.name))
            names[name].add(spelled)  # a short form belongs to one long form, which always has it
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}
    assert {name: found for name, found in names.items() if len(found) > 1} == {}


def test_short_forms():
    short = {name: option.opts[-1] for _, option in OPTIONS for name in option.opts if re.fullmatch("-[a-z]", name)}
    assert short == {
        "-b": "--batch-size", "-d": "--device", "-m": "--method", "-o": "--output", "-v": "--verbose", "-q": "--quiet",
    }  # fmt: skip
    assert all(
        any(option.name == "quiet" for option in command.params)
        for command in COMMANDS.values()
        if not isinstance(command, click.Group)
    )


def test_help_of_options_shows_the_default():
    for command, option in OPTIONS:
        assert option.help and option.help.endswith("."), option.name
        with click.Context(COMMANDS.get(command, whole), parent=ABOVE) as context:
            shown = option.get_help_record(context)[1]
        assert option.is_flag or option.required or "[default: " in shown, shown


def test_every_command_shows_two_examples_of_its_own():
    for name, command in [("", whole), *COMMANDS.items()]:
        epilog = inspect.cleandoc(command.epilog)
        lines = [line for line in epilog.splitlines() if f"kerasmem {name}".rstrip() in line]
        assert "Examples:" in epilog and len(lines) >= 2, name
        assert command.help.strip().split("\n\n")[0].rstrip().endswith("."), name


def test_examples_parse():
    """What the examples give is known to their commands."""
    known = {name: {word for each in command.params for word in (*each.opts, *each.secondary_opts)}
             for name, command in COMMANDS.items()}  # fmt: skip
    for name, command in COMMANDS.items():
        examples = command.epilog.partition("Examples:")[2].partition("\n\n")[0]
        for line in () if isinstance(command, click.Group) else examples.splitlines():
            _, found, rest = line.partition(f"kerasmem {name} ")
            own = re.split(r">|train\.py|package\.train", rest)[0]  # what follows a script is the script's
            words = re.findall(r"(?<=\s)--?[a-z][a-z0-9-]*", f" {own}")
            assert not found or set(words) <= known[name], line


def test_the_command_line_and_python_have_the_same_names():
    for name, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters
        passed_on_to = kerasmem.data.convert if name == "data repack" else kerasmem.estimate
        shared = set(inspect.signature(passed_on_to).parameters)
        takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        python = set(parameters) | (shared if takes_more else set())
        if name in ("data convert", "data repack"):
            from kerasmem.datatools.conversion_settings import ReadOptions

            python |= set(ReadOptions.__annotations__)
        options = {each.name for each in COMMANDS[name].params if isinstance(each, Option)} - OWN - {"quiet", "device"}
        assert options <= python, (name, options - python)


def test_choices_of_the_command_line_are_those_of_python():
    (method,) = {tuple(each.type.choices) for _, each in OPTIONS if each.name == "method"}
    assert set(method) == {"auto", *METHODS}
    assert set(EXIT_CODES.values()) == {0, 3, 4}


def test_a_script_keeps_its_own_options():
    own = ["--every", "3", "-m", "-q", "--debug"]
    with COMMANDS["run"].make_context("run", ["train.py", *own], parent=ABOVE) as context:
        assert context.params["arguments"] == tuple(own)
        assert (context.params["save_freq"], context.params["is_module"]) == (100, False)
