"""The options of all commands, each described once, in `data/vocabulary.json`: panel → name → what it means.

`short` and `off` are its other spellings, `name` what Python calls it where that differs, `type` one of `_TYPES`, and
`former` a name that goes on working, with a warning. All else is as for `click.Option`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from kerasmem.checks import Color, Method, Mode, SplitAs, nearest
from kerasmem.files import package_data

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FIRST = "Options"  # the panel of what is a command's own
QUIET = "kerasmem.quiet"
_UNSAID = ("x>=0", "x>=1", "x>0")  # ranges that go without saying


class Choice(click.Choice[str]):
    """One of some words; the message about another names the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return what is said of a word that is none of them."""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + (nearest(value, self.choices) or ".")


class Count(click.IntRange):
    """A whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that a text says."""
        try:
            int(value)
        except ValueError:
            is_list = "," in value and ctx is not None and any(each.name == "grid" for each in ctx.command.params)
            several = f" Several: --grid {param.name}={value}" if is_list and param is not None else ""
            self.fail(f"{value!r} is not a whole number.{several}", param, ctx)
        return super().convert(value, param, ctx)


class Suggested(StringParamType):
    """A text for which the shell offers some words.

    Args:
        name: what it is.
        words: returns the words; called when they are asked for.
    """

    def __init__(self, name: str, words: Callable[[], Iterable[str]]) -> None:
        self.name, self._words = name, words

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin with what was typed."""
        return [CompletionItem(word) for word in self._words() if word.startswith(incomplete.lower())]


def _card_keys() -> list[str]:
    from kerasmem.devices.cards import all_cards

    return [card.key for card in all_cards()]


def _optimizers() -> list[str]:
    from kerasmem.models.names import optimizer_names

    return sorted(optimizer_names())


_TYPES: dict[str, Any] = {
    "count": Count(min=1),
    "whole": Count(min=0),
    "seconds": click.FloatRange(min=0, min_open=True),
    "seconds or 0": click.FloatRange(min=0),
    "share": click.FloatRange(0, 1, max_open=True),
    "file": click.Path(),
    "output": click.Path(dir_okay=False),
    "folder": click.Path(file_okay=False),
    "card": Suggested("card", _card_keys),
    "optimizer": Suggested("name", _optimizers),
    "order": Choice(["order", "size"]),
    "method": Choice(get_args(Method)),
    "mode": Choice(get_args(Mode)),
    "parts": Choice(get_args(SplitAs)),
    "backend": Choice(["tensorflow", "jax"]),
    "color": Choice(get_args(Color)),
}
_METAVARS = {"count": "N", "whole": "N", "seconds": "SECONDS", "output": "FILE", "folder": "FOLDER"}
_VOCABULARY: dict[str, tuple[str, dict[str, Any]]] = {
    name: (panel, meaning)
    for panel, options in package_data(__package__, "vocabulary").items()
    for name, meaning in options.items()
}


class Option(click.Option):
    """An option in a panel of the help, which may have had another name.

    Args:
        *names: as for `click.Option`.
        panel: the heading under which help lists it.
        former: a name that goes on working, with a warning: "--every", or "--xla/--no-xla".
        **options: as for `click.Option`.
    """

    def __init__(self, *names: Any, panel: str = FIRST, former: str = "", **options: Any) -> None:
        super().__init__(*names, **options)
        self.panel = panel
        self._former: Option | None = None
        if former:
            on, _, off = former.partition("/")
            self._former = copy.copy(self)
            self._former.name = f"{self.name}, formerly"
            self._former.opts, self._former.secondary_opts = [on], [off] if off else []

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what help adds in brackets: a default in plain words, and no range that goes without saying."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        if extra.get("range") in _UNSAID:
            del extra["range"]
        return extra

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the parser know the former name too."""
        super().add_to_parser(parser, ctx)
        if self._former is not None:
            self._former.add_to_parser(parser, ctx)

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> Any:
        """Take the value that was given under the former name."""
        former = self._former
        if former is not None and former.name in opts:
            value = opts[former.name]
            opts = {str(self.name): value, **opts}
            if not (ctx.resilient_parsing or ctx.meta.get(QUIET)):
                old, new = (each.secondary_opts[0] if value is False else each.opts[-1] for each in (former, self))
                click.echo(f"Warning: {old} is called {new} now", err=True)
        return super().handle_parse_result(ctx, opts, args)


def make_option(name: str, **more: Any) -> Option:
    """Return an option of the vocabulary.

    Args:
        name: its long name.
        **more: what is a command's own, such as its default.
    """
    panel, meaning = _VOCABULARY[name]
    words = {**meaning, **more}
    kind, off = words.pop("type", None), words.pop("off", None)
    spelled = [words.pop("short", None), f"{name}/{off}" if off else name, words.pop("name", None)]
    if not (words.get("is_flag") or off or words.get("required") or words.get("default") is not None):
        words.setdefault("show_default", "none")
    if kind is not None:
        words.update(type=_TYPES[kind], metavar=words.get("metavar", _METAVARS.get(kind)))
    if off:
        words.setdefault("default", None)
    return Option([each for each in spelled if each], panel=panel, **words)


def option(name: str, **more: Any) -> Decorator:
    """Return a decorator that adds an option of the vocabulary; the arguments are as for `make_option`."""
    return click.option(name, cls=lambda names, **words: make_option(*names, **words), **more)  # type: ignore[arg-type]


def all_of(*options: Decorator | str) -> Decorator:
    """Return a decorator that adds several options, which help shows in this order; a name stands for its option."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(options):
            function = (option(each) if isinstance(each, str) else each)(function)
        return function

    return decorate


def is_quiet() -> bool:
    """Return whether the command that runs was asked to show neither progress nor warnings."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))
