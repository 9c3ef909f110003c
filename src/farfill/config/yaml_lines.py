"""YAML to plain values, remembering the line of every key, so that each complaint can name it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from farfill.config.problems import KeyPath, Problem
from farfill.config.yaml_scalars import PlainLoader

_MERGE_TAG = "tag:yaml.org,2002:merge"
_SCALAR_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "timestamp")}

PlainValue = None | bool | int | float | str | list["PlainValue"] | dict[str, "PlainValue"]


@dataclass
class ParsedYaml:
    """The file's value, the 1-based line of every key path (the root is `()`), and what YAML itself got wrong."""

    value: PlainValue = None
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    problems: list[Problem] = field(default_factory=list[Problem])


def parse_yaml(text: str) -> ParsedYaml:
    """Parse one YAML document. Never raises on bad input: what is wrong is in `problems`."""
    parsed = ParsedYaml(lines={(): 1})
    loader = PlainLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            parsed.value = _Walk(loader, parsed).value(root, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else 1
        parsed.problems.append(Problem((), f"not valid YAML: {what}", "check indentation, quotes and colons", line))
    except yaml.YAMLError as error:
        parsed.problems.append(Problem((), f"not valid YAML: {error}", "save the file as plain UTF-8 text", 1))
    finally:
        loader.dispose()
    return parsed


class _Walk:
    def __init__(self, loader: yaml.SafeLoader, parsed: ParsedYaml) -> None:
        self._loader = loader
        self._lines = parsed.lines
        self._problems = parsed.problems

    def value(self, node: Node, path: KeyPath, above: tuple[Node, ...]) -> PlainValue:
        self._lines.setdefault(path, node.start_mark.line + 1)
        if any(node is other for other in above):
            self._report(path, node, "an alias that contains itself", "write the values out")
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, path, (*above, node))
        if isinstance(node, SequenceNode):
            return [self.value(child, (*path, i), (*above, node)) for i, child in enumerate(node.value)]
        return self._scalar(cast("ScalarNode", node), path)

    def _mapping(self, node: MappingNode, path: KeyPath, above: tuple[Node, ...]) -> dict[str, PlainValue]:
        self._refuse_duplicates(node, path)
        self._loader.flatten_mapping(node)
        result: dict[str, PlainValue] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._report(path, key_node, "a key that is not plain text", "use plain text keys")
                continue
            key = key_node.value
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, (*path, key), above)
        return result

    def _refuse_duplicates(self, node: MappingNode, path: KeyPath) -> None:
        first_lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag == _MERGE_TAG:
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in first_lines:
                what = f"given twice (first in line {first_lines[key_node.value]})"
                self._problems.append(Problem((*path, key_node.value), what, "keep one of them", line))
            first_lines.setdefault(key_node.value, line)

    def _scalar(self, node: ScalarNode, path: KeyPath) -> PlainValue:
        if node.tag not in _SCALAR_TAGS:
            self._report(path, node, f"the YAML tag {node.tag} is not allowed", "remove the tag")
            return None
        try:
            value = self._loader.construct_object(node)
        except (ConstructorError, ValueError) as error:
            self._report(path, node, f"cannot be read: {error}", "write a plain value or quote it")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._report(path, node, f"{node.value} is not a usable number", "give a finite number")
            return None
        # Timestamps are of no use in this file: keep what was written.
        return value if isinstance(value, bool | int | float | str | None) else node.value

    def _report(self, path: KeyPath, node: Node, what: str, fix: str) -> None:
        self._problems.append(Problem(path, what, fix, node.start_mark.line + 1))
