"""From a config's plain values to frozen dataclasses: unknown, missing and misshapen fields are refused."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from ml_collections import ConfigDict

from evisrag_jax.runtime.json_files import plain

T = TypeVar("T")
_MISSING = dataclasses.MISSING


class ConfigError(ValueError):
    """A flag, config file or field that is wrong; names it. Exit status 2."""

    exit_code = 2


def to_dataclass(config: Mapping[str, Any] | ConfigDict, cls: type[T], path: str = "config") -> T:
    """Turn a config into a dataclass, nested ones included.

    Sequences become tuples and ints become floats where the field says so; nothing else is
    converted. Fields without a value here keep the dataclass's default.

    Raises:
        ConfigError: an unknown field (with the nearest name), a missing one, a value of a wrong
            type, or one that the dataclass itself refuses; named by its dotted path.
    """
    given = dict(config.items())
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"fields: {', '.join(fields)}"
            raise ConfigError(f"{path}.{name}: unknown field of {cls.__name__}; {hint}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in given:
            values[name] = _convert(given[name], hints[name], f"{path}.{name}")
        elif field.default is _MISSING and field.default_factory is _MISSING:
            raise ConfigError(f"{path}.{name}: is missing; {cls.__name__} needs it")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _wrong(value: Any, kind: Any, path: str) -> ConfigError:
    name = getattr(kind, "__name__", None) if isinstance(kind, type) else None
    return ConfigError(f"{path}: {value!r} is not {name or kind}")


def _convert(value: Any, kind: Any, path: str) -> Any:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return plain(value) if isinstance(value, ConfigDict) else value
    if origin in (Union, types.UnionType):
        return _convert_union(value, inside, kind, path)
    if origin is Literal:
        if value in inside and type(value) in [type(word) for word in inside]:
            return value
        raise ConfigError(f"{path}: {value!r} is none of {', '.join(map(repr, inside))}")
    if dataclasses.is_dataclass(kind):
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping | ConfigDict):
            return to_dataclass(value, kind, path)
        raise _wrong(value, kind, path)
    if origin is tuple or kind is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(value, kind, path)
        if not inside:
            return tuple(value)
        if len(inside) == 2 and inside[1] is Ellipsis:
            inside = (inside[0],) * len(value)
        if len(inside) != len(value):
            raise ConfigError(f"{path}: {value!r} needs {len(inside)} values")
        parts = zip(value, inside, strict=True)
        return tuple(_convert(part, one, f"{path}[{i}]") for i, (part, one) in enumerate(parts))
    if origin in (dict, Mapping) or kind is dict:
        if not isinstance(value, Mapping | ConfigDict):
            raise _wrong(value, kind, path)
        one = inside[1] if inside else Any
        return {key: _convert(part, one, f"{path}.{key}") for key, part in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is None or kind is type(None):
        if value is None:
            return None
        raise _wrong(value, "None", path)
    # bool is a subclass of int, but True is no number of layers.
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    raise _wrong(value, kind, path)


def _convert_union(value: Any, choices: tuple[Any, ...], kind: Any, path: str) -> Any:
    if value is None and type(None) in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not type(None))
    if len(choices) == 1:
        return _convert(value, choices[0], path)
    for choice in choices:
        if isinstance(choice, type) and type(value) is choice:
            return value
    for choice in choices:
        try:
            return _convert(value, choice, path)
        except ConfigError:
            continue
    raise _wrong(value, kind, path)
