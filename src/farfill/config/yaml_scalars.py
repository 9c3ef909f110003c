"""Plain YAML scalars as YAML 1.2 reads them, so that nothing turns into something else behind the writer's back.

YAML 1.1, which PyYAML reads by itself, takes `yes`, `no`, `on` and `off` for booleans, `12:30:45` for a number in base
60, `010` for eight and `1_000` for a thousand. Here they are text, and a field that wants something else says so.
"""

from __future__ import annotations

import re

import yaml

_PLAIN = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.?)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


class PlainLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` with the scalars of YAML 1.2, and merge keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- as PyYAML has it


for _kind, _pattern, _first in _PLAIN:
    PlainLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )
