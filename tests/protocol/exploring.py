"""Breadth-first search through every state that a modelled world can come to.

A world says which steps it may take next. The search takes each of them in a copy of its own,
forgets states that it knows, and stops at the first step that breaks a promise: since it goes
breadth first, the steps that it names are a shortest way there.

Some steps are *faults*: a crash, a loss, a peer that is slow. They may happen and must not be
needed. So a world has ended when nothing but faults could still happen; it must then be in order,
and from every state such an end must be within reach without another fault.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, Protocol


class BrokenPromise(Exception):
    """A step did what the protocol rules out."""


class Step(NamedTuple):
    """One thing that may happen next."""

    act: Callable[..., None]
    """Changes the world; called with the world and ``args``."""
    args: tuple[Any, ...] = ()
    is_fault: bool = False

    def __str__(self) -> str:
        return " ".join([self.act.__name__.replace("_", " "), *map(str, self.args)])


class World(Protocol):
    """What can be explored: attributes, lists, dicts and sets; what a tuple holds never changes."""

    def steps(self) -> Iterator[Step]:
        """Yield what may happen next; a step that changes nothing is none."""
        ...

    def check(self) -> None:
        """Raise BrokenPromise if something is wrong now."""
        ...

    def check_end(self) -> None:
        """Raise BrokenPromise if this must not be the end."""
        ...


@dataclass
class Explored:
    """What a search saw."""

    num_states: int = 0
    num_ends: int = 0
    ends: set[Hashable] = field(default_factory=set)
    """The ends, as the search's ``Numbers`` number them."""
    taken: Counter[str] = field(default_factory=Counter)
    """How often each step led somewhere."""
    is_complete: bool = True
    """Whether no state was left aside for its depth."""


_CONSTANT: set[type] = {int, float, str, bool, tuple, type(None)}
"""Kinds of things that never change; the search adds those that it meets."""


@cache
def _parts(kind: type) -> tuple[str, ...] | None:
    """Return the slots of a kind of thing, or None if such things never change."""
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    if frozen or issubclass(kind, tuple | Enum):
        _CONSTANT.add(kind)
        return None
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


def twin(value: Any, made: dict[int, Any]) -> Any:
    """Return a copy that shares nothing that can change; ``made`` keeps one thing one thing.

    It does what ``copy.deepcopy`` does for the few kinds of things here, many times as fast.
    """
    if (known := made.get(id(value))) is not None:
        return known
    kind: Any = type(value)
    copy: Any
    # what is constant is passed by without a call: that is most
    if kind is list:
        copy = [p if type(p) in _CONSTANT else twin(p, made) for p in value]
    elif kind is dict:
        copy = {n: p if type(p) in _CONSTANT else twin(p, made) for n, p in value.items()}
    elif kind is set:
        copy = set(value)
    elif (slots := _parts(kind)) is None:
        return value
    else:
        copy = kind.__new__(kind)
        for name in slots:
            part = getattr(value, name)
            setattr(copy, name, part if type(part) in _CONSTANT else twin(part, made))
        if not slots:
            for name, part in value.__dict__.items():
                copy.__dict__[name] = part if type(part) in _CONSTANT else twin(part, made)
    made[id(value)] = copy
    return copy


class Numbers:
    """Gives equal things equal numbers, so that a state is one number and not a tree."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, value: Any) -> Hashable:
        """Return what is equal for equal values; for what can change it is a number."""
        kind: Any = type(value)
        of = self.of
        parts: Any
        if kind is list:
            parts = (kind, *[p if type(p) in _CONSTANT else of(p) for p in value])
        elif kind is dict:
            # whatever order the names came in
            parts = frozenset([(n, p if type(p) in _CONSTANT else of(p)) for n, p in value.items()])
        elif kind is set:
            parts = frozenset(value)
        elif (slots := _parts(kind)) is None:
            hashable: Hashable = value
            return hashable
        else:
            inner = [getattr(value, name) for name in slots] or value.__dict__.values()
            parts = (kind, *[p if type(p) in _CONSTANT else of(p) for p in inner])
        return self._numbers.setdefault(parts, len(self._numbers))


class _Search:
    """One search under way: how each state was reached, and what reaches it without a fault."""

    def __init__(self, max_depth: int | None, numbers: Numbers) -> None:
        self.max_depth = max_depth
        self.found = Explored()
        self.numbers = numbers
        self.states: dict[Hashable, int] = {}
        self.came: list[tuple[int, Step | None]] = []
        self.depth: list[int] = []
        self.before: list[list[int]] = []
        self.safe: list[int] = []
        """States from which an end is within reach: the ends, and where the search stopped."""

    def path(self, at: int) -> str:
        """Return the steps that led to a state."""
        steps: list[str] = []
        while (came := self.came[at])[1] is not None:
            at = came[0]
            steps.append(str(came[1]))
        return ", ".join(reversed(steps))

    def note(self, world: World, came_from: int, step: Step | None) -> tuple[int, bool]:
        """Return a world's number and whether it is new."""
        key, at = self.numbers.of(world), len(self.states)
        if (known := self.states.setdefault(key, at)) != at:
            return known, False
        self.came.append((came_from, step))
        self.depth.append(self.depth[came_from] + 1 if step is not None else 0)
        self.before.append([])
        return at, True

    def expand(self, at: int, world: World) -> Iterator[tuple[int, World]]:
        """Take every step that a world has; yield the worlds that are new."""
        is_end = True
        for step in world.steps():
            after = twin(world, {})
            try:
                step.act(after, *step.args)
                after.check()
            except BrokenPromise as error:
                path = ", ".join(filter(None, [self.path(at), str(step)]))
                raise BrokenPromise(f"{error}; after {path}") from error
            to, is_new = self.note(after, at, step)
            if to == at:
                continue
            self.found.taken[step.act.__name__] += 1
            if not step.is_fault:
                is_end = False
                self.before[to].append(at)
            if is_new:
                yield to, after
        if is_end:
            self.safe.append(at)
            self.found.num_ends += 1
            self.found.ends.add(self.numbers.of(world))
            try:
                world.check_end()
            except BrokenPromise as error:
                raise BrokenPromise(f"{error}, for ever; after {self.path(at)}") from error

    def check_that_all_end(self) -> None:
        """Raise BrokenPromise if from some state no end is within reach."""
        todo, safe = list(self.safe), set(self.safe)
        while todo:
            for earlier in self.before[todo.pop()]:
                if earlier not in safe:
                    safe.add(earlier)
                    todo.append(earlier)
        stuck = [at for at in range(len(self.came)) if at not in safe]
        if stuck:
            raise BrokenPromise(f"it goes round and never ends; after {self.path(stuck[0])}")


def explore(start: World, max_depth: int | None = None, numbers: Numbers | None = None) -> Explored:
    """Try every interleaving, or every one of at most ``max_depth`` steps.

    Args:
        start: The world at first.
        max_depth: Where to stop; nowhere if it is None.
        numbers: Numbers the states; two searches that share it can be compared.

    Raises:
        BrokenPromise: The text ends with the steps that led there.
    """
    collects = gc.isenabled()
    # hundreds of thousands of things, none of them in a ring
    gc.disable()
    try:
        return _explore(start, _Search(max_depth, numbers or Numbers()))
    finally:
        if collects:
            gc.enable()


def _explore(start: World, search: _Search) -> Explored:
    at, _ = search.note(start, 0, None)
    todo: deque[tuple[int, World]] = deque([(at, start)])
    while todo:
        at, world = todo.popleft()
        if search.depth[at] == search.max_depth:
            search.safe.append(at)
            search.found.is_complete = False
            continue
        todo.extend(search.expand(at, world))
    search.check_that_all_end()
    search.found.num_states = len(search.states)
    return search.found
