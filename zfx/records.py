"""Frozen dataclasses as plain data and back: exact, and strict about form. What schedules and cost tables are written with."""

from __future__ import annotations

import errno
import functools
import json
import math
import operator
import os
import reprlib
import secrets
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

# metadata of a field that came later: where it has its default it is not written, and where it is missing it has its default
LATER = {"later": True}


@dataclass(frozen=True, slots=True)
class Derived:
    """A record that follows from another and is written beside it. When it is read back it must be what follows.

    Attributes:
        name: its key, and what it is called.
        record: its class.
        of: makes it.
    """

    name: str
    record: type
    of: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of document: one record under a name and a version.

    Attributes:
        record: its class.
        what: what it is called, e.g. "schedule"; `format` is "zfx." and that.
        version: of the records in it.
        again: what to do about an older one.
        derived: what is written beside the record's own fields.
    """

    record: type
    what: str
    version: int
    again: str
    derived: Derived | None = None

    @property
    def format(self) -> str:
        return f"zfx.{self.what}"

    def to_dict(self, value: Any) -> dict[str, Any]:
        """The record as plain dicts, lists, strings and numbers.

        Raises:
            ValueError: a value is not of the type that its field declares, or a text is not valid Unicode.
        """
        body = _encode(value, self.record, self.what)
        return {"format": self.format, "version": self.version, **self._derive(value), **body}

    def from_dict(self, data: Any) -> Any:
        """The record that `to_dict` took apart.

        Raises:
            ValueError: not this format, another version, a field is missing, unknown or of a wrong type, the record refuses its
                values, or what is derived differs. The message names the place, e.g. `schedule.program.steps[3].phase`.
        """
        if not isinstance(data, Mapping) or data.get("format") != self.format:
            found = data.get("format") if isinstance(data, Mapping) else data
            raise ValueError(f'not a zfx {self.what}: "format" must be "{self.format}", got {_brief(found)}')
        version = data.get("version")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f'"version" must be a whole number from 1 to {self.version}, got {_brief(version)}')
        if version < self.version:
            raise ValueError(f"the {self.what} has version {version}, this zfx reads version {self.version}: {self.again}")
        if version > self.version:
            raise ValueError(
                f"the {self.what} has version {version}, this zfx reads up to {self.version}: read it with a newer zfx"
            )
        more = (self.derived.name,) if self.derived else ()
        value = _decode({key: data[key] for key in data if key not in ("format", "version", *more)}, self.record, self.what)
        if self.derived:
            self._compare(self.derived, data, self._derive(value)[self.derived.name])
        return value

    def _derive(self, value: Any) -> dict[str, Any]:
        if self.derived is None:
            return {}
        where = f"{self.what}.{self.derived.name}"
        try:
            return {self.derived.name: _encode(self.derived.of(value), self.derived.record, where)}
        except OverflowError:
            raise ValueError(f"{where}: sizes are too large to be reckoned with") from None

    def _compare(self, derived: Derived, data: Mapping[str, Any], expected: dict[str, Any]) -> None:
        where = f"{self.what}.{derived.name}"
        if derived.name not in data:
            raise ValueError(f"{self.what} lacks the fields ['{derived.name}']")
        found = _encode(_decode(data[derived.name], derived.record, where), derived.record, where)
        for name, value in expected.items():
            if found[name] != value:
                raise ValueError(f"{where}.{name} is {_brief(found[name])}, but this {self.what} gives {_brief(value)}")

    def to_json(self, value: Any) -> str:
        """ASCII only; equal records give equal text, and `from_json` gives an equal record back.

        Raises:
            ValueError: as `to_dict`.
        """
        return json.dumps(self.to_dict(value), indent=1, allow_nan=False) + "\n"

    def from_json(self, text: str) -> Any:
        """The record that `to_json` wrote.

        Raises:
            ValueError: the text is not JSON, repeats a key, or as `from_dict`.
        """
        if not isinstance(text, str):
            raise ValueError(f"expected JSON text, got {_brief(text)}")
        try:
            data = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError(f"not a zfx {self.what}: nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"not a zfx {self.what}: {error}") from None
        return self.from_dict(data)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key stands twice in one object with the keys {_brief([key for key, _ in pairs])}")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f'{name} is not JSON: write "inf", "-inf" or "nan"')


def _brief(value: Any) -> str:
    return reprlib.repr(value)  # bounded in length and in depth, whatever the value is


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The fields of a dataclass, in order, with their types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@functools.cache
def _later(cls: type) -> dict[str, Any]:
    """The fields that are written only where they differ from their defaults, with those."""
    return {f.name: f.default for f in fields(cls) if f.metadata.get("later")}


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint)


def _encode(value: Any, hint: Any, where: str) -> Any:
    if get_origin(hint) is types.UnionType:
        return None if value is None else _encode(value, get_args(hint)[0], where)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{where} must be a tuple, got {_brief(value)}")
        return [_encode(item, get_args(hint)[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if _is_record(hint):
        if not isinstance(value, hint):
            raise ValueError(f"{where} must be a {hint.__name__}, got {_brief(value)}")
        later = _later(hint)
        written = {name: kind for name, kind in _hints(hint).items() if name not in later or getattr(value, name) != later[name]}
        return {name: _encode(getattr(value, name), kind, f"{where}.{name}") for name, kind in written.items()}
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return _scalar(value, hint, where)


def _decode(value: Any, hint: Any, where: str) -> Any:
    if get_origin(hint) is types.UnionType:
        return None if value is None else _decode(value, get_args(hint)[0], where)
    if get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, got {_brief(value)}")
        return tuple(_decode(item, get_args(hint)[0], f"{where}[{i}]") for i, item in enumerate(value))
    if _is_record(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {_brief(value)}")
        hints = _hints(hint)
        needed = set(hints) - set(_later(hint))
        for problem, found in (("lacks the", needed - set(value)), ("has unknown", set(value) - set(hints))):
            if found:
                raise ValueError(f"{where} {problem} fields {_brief(sorted(map(str, found)))}; its fields are {', '.join(hints)}")
        values = {name: _decode(value[name], kind, f"{where}.{name}") for name, kind in hints.items() if name in value}
        try:
            return hint(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if hint is float and isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    return _scalar(value, hint, where)


def _scalar(value: Any, hint: Any, where: str) -> Any:
    """The value as the plain bool, int, float or str that the hint declares."""
    if get_origin(hint) is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
        raise ValueError(f"{where} must be one of {', '.join(get_args(hint))}, got {_brief(value)}")
    try:
        if hint is bool and isinstance(value, bool):
            return value
        if hint is str and isinstance(value, str):
            return value.encode("utf-8").decode("utf-8")
        if hint is int and not isinstance(value, bool):
            return operator.index(value)
        if hint is float and not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    expected = {bool: "true or false", str: "Unicode text", int: "a whole number", float: "a number"}[hint]
    raise ValueError(f"{where} must be {expected}, got {_brief(value)}")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    target = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write to", os.path.dirname(target))
    part = os.path.join(os.path.dirname(target), f".zfx-{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
        os.replace(part, target)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise
