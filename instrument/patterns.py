r"""Match regular expressions from a config or a capture; the time is linear in the text's length.

Python's `re` backtracks: `(a+)+$` takes exponential time, too long for a name of forty characters.
The matcher here follows all alternatives at once, one character at a time (Thompson, 1968).

The matcher supports characters, classes, `.`, groups, `|`, the repetitions `* + ? {m,n}` and the
assertions `^ $ \A \Z \b \B`. Lookarounds, backreferences and flags are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from instrument.errors import ConfigError

# The maximum numbers of states and of cached steps. A pattern has about one state per character. A
# full cache is cleared.
_MOST_STATES, _MOST_STEPS = 1000, 100_000
_TOKEN = re.compile(
    r"""(?P<single>\[\^?\]?(?:\\.|[^\]\\])*\]
        |\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfva]|[^0-9A-Za-z]))
    |(?P<edge>\^|\$|\\[AZbB])
    |(?P<open>\((?:\?:|\?P<\w+>|(?!\?)))
    |(?P<close>\))|(?P<or>\|)
    |(?P<repeat>(?:[*+?]|\{(?P<least>\d*)(?P<comma>,)?(?P<most>\d*)\}(?<!\{\}))\??)
    |(?P<plain>[^\\(])""",
    re.VERBOSE | re.DOTALL,
)
_EDGES: dict[str, Callable[[str, str], bool]] = {
    "^": lambda before, _: not before,
    "$": lambda _, after: not after,
    r"\b": lambda before, after: _is_word(before) != _is_word(after),
    r"\B": lambda before, after: _is_word(before) == _is_word(after),
}
_EDGES |= {r"\A": _EDGES["^"], r"\Z": _EDGES["$"]}

# A function that adds the states of a part of a pattern. Its argument is the state that follows
# this part; its result is the first state of this part.
_Part = Callable[[int], int]
_States = frozenset[int]


class Pattern:
    """A set of regular expressions; a search finds a match of any of them, ignoring case.

    Raises:
        ValueError: an expression is invalid or not supported. The message gives the reason.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._characters: dict[int, re.Pattern[str]] = {}
        self._edges: dict[int, tuple[Callable[[str, str], bool], int]] = {}
        self._next: list[list[int]] = [[]]  # state 0 is the end
        self._steps: dict[tuple[_States, str, str], tuple[_States, str, bool]] = {}
        self._start = [self._compiled(pattern) for pattern in patterns]

    def search(self, text: str) -> bool:
        """Whether at least one of the expressions matches anywhere in the text."""
        states, before = _States(), ""
        for after in (*text, ""):
            key = states, before, after
            states, before, matches = self._steps.get(key) or self._step(key)
            if matches:
                return True
        return False

    def _step(self, key: tuple[_States, str, str]) -> tuple[_States, str, bool]:
        """Move the matcher forward by one character.

        Returns:
            Three values. The first is the states of the matcher after the character. The second
                is the kind of this character: "a" for a letter, a digit or an underscore, else " ".
                It becomes the second part of the next `key`. The third is whether a match ends
                before the character.
        """
        states, before, after = key
        reached: set[int] = set()
        waiting = [*self._start, *states]
        while waiting:
            state = waiting.pop()
            if state in reached:
                continue
            reached.add(state)
            if state in self._edges:
                holds, following = self._edges[state]
                waiting += [following] if holds(before, after) else []
            elif state not in self._characters:
                waiting += self._next[state]
        found = _States(
            self._next[state][0]
            for state in reached
            if after and state in self._characters and self._characters[state].fullmatch(after)
        )
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        step = self._steps[key] = found, "a" if _is_word(after) else " ", 0 in reached
        return step

    def _compiled(self, pattern: str) -> int:
        """Parse a pattern, and return its first state.

        Raises:
            ValueError: the pattern is not a regular expression, or this module cannot parse it.
        """
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        tokens, at = [], 0
        while at < len(pattern):
            token = _TOKEN.match(pattern, at)
            if token is None:
                raise ValueError(f"{pattern!r} cannot be parsed at {pattern[at : at + 5]!r}")
            tokens.append(token)
            at = token.end()
        tokens.reverse()
        try:
            return self._alternatives(tokens)(0)
        except RecursionError:
            raise ValueError(f"{pattern[:20]!r}… has too many brackets") from None

    def _alternatives(self, tokens: list[re.Match[str]]) -> _Part:
        options = [self._sequence(tokens)]
        while tokens and tokens[-1]["or"]:
            tokens.pop()
            options.append(self._sequence(tokens))
        return lambda after: self._add([option(after) for option in options])

    def _sequence(self, tokens: list[re.Match[str]]) -> _Part:
        parts = []
        while tokens and not (tokens[-1]["or"] or tokens[-1]["close"]):
            parts.append(self._repeated(tokens))

        def build(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return build

    def _repeated(self, tokens: list[re.Match[str]]) -> _Part:
        part = self._single(tokens)
        if not tokens or not tokens[-1]["repeat"]:
            return part
        repeat = tokens.pop()
        if tokens and tokens[-1]["repeat"]:
            raise ValueError(f"{repeat.string!r} cannot be parsed at {tokens[-1][0]!r}")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(
            repeat[0][0], _bounds(repeat)
        )
        return lambda after: self._repeat(part, least, most, after)

    def _single(self, tokens: list[re.Match[str]]) -> _Part:
        token = tokens.pop()
        if token["open"]:
            inner = self._alternatives(tokens)
            tokens.pop()
            return inner
        if token["edge"]:
            return lambda after: self._add_edge(_EDGES[token[0]], after)
        character = re.compile(token[0], re.IGNORECASE)
        return lambda after: self._add_character(character, after)

    def _repeat(self, part: _Part, least: int, most: int | None, after: int) -> int:
        last = after
        if most is None:
            loop = self._add([])
            self._next[loop] += [part(loop), after]
            last = loop
        else:
            for _ in range(most - least):
                last = self._add([part(last), after])
        for _ in range(least):
            last = part(last)
        return last

    def _add(self, following: list[int]) -> int:
        if len(self._next) >= _MOST_STATES:
            raise ValueError(
                "the patterns are too long: with repetitions such as a{9} written out, they have "
                f"more than {_MOST_STATES} parts in total"
            )
        self._next.append(following)
        return len(self._next) - 1

    def _add_character(self, character: re.Pattern[str], after: int) -> int:
        state = self._add([after])
        self._characters[state] = character
        return state

    def _add_edge(self, holds: Callable[[str, str], bool], after: int) -> int:
        state = self._add([])
        self._edges[state] = holds, after
        return state


def _bounds(repeat: re.Match[str]) -> tuple[int, int | None]:
    least = int(repeat["least"] or 0)
    return least, (int(repeat["most"]) if repeat["most"] else None) if repeat["comma"] else least


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def check_pattern(names: str) -> None:
    """Check a pattern of `profiler.communication`.

    Raises:
        ConfigError: the pattern is not a regular expression, is not supported, or matches every
            name.
    """
    option = f"profiler.communication holds {names!r}, which"
    try:
        matches_all = re.compile(f"(?:{names})").search("")  # readers join the patterns with |
    except re.error as error:
        raise ConfigError(
            f"{option} is no regular expression ({error.msg}); give a list of regular expressions "
            "for kernel names, such as [my_all_reduce]."
        ) from None
    try:
        Pattern([names])
    except ValueError as error:
        raise ConfigError(
            f"{option} uses a regular expression that is not supported ({error}); give a simpler "
            "pattern, such as my_all_reduce."
        ) from None
    if matches_all:
        raise ConfigError(
            f"{option} matches the name of every kernel; give a part of the names of communication "
            "kernels, such as my_all_reduce."
        )
