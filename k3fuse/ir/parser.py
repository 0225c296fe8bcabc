"""Text -> graph: the inverse of `ir.printer`, line by line, with line numbers in errors."""

from __future__ import annotations

import json
import re
from typing import cast, get_args

from k3fuse.errors import ParseError
from k3fuse.ir.graph import FUSED, Attr, Graph, Node, Origin, Value, ValueKind
from k3fuse.tensor_type import parse_type

_NAME = r"[\w.\-]+"
_HEAD = re.compile(rf"graph ({_NAME})(?: (\{{.*\}}))? \{{$")
_KINDS = "|".join(kind for kind in get_args(ValueKind) if kind != "result")
_INPUT = re.compile(rf"({_KINDS}) %({_NAME}): (\S+)(?: = (\".*\"))?$")
_DROPPED = re.compile(r'dropped (".*"): (".*")$')
_GROUP = re.compile(rf"fused @({_NAME})(?: (\{{.*\}}))? \{{$")
_CALL = re.compile(rf"(?:(.*?) = )?({_NAME})\(([^)]*)\)(.*)$")
_RESULT = re.compile(rf"%({_NAME}): (\S+)$")
_ORIGIN = re.compile(r"([^\s\[(]+)(?:\[([^\]]+)\])?(?: \(([^)]*)\))?$")


def parse_graph(text: str, where: str = "text") -> Graph:
    """Read a graph; ParseError names `where` and the line."""
    return _Parser(text, where).parse()


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.lines = text.split("\n")
        self.where = where
        self.number = 0
        self.values: dict[str, Value] = {}

    def fail(self, message: str) -> ParseError:
        return ParseError(f"{self.where}, line {self.number}: {message}")

    def parse(self) -> Graph:
        graph: Graph | None = None
        group: Node | None = None
        closed = False
        for number, raw in enumerate(self.lines, start=1):
            self.number = number
            line = raw.split("  //", 1)[0].strip()
            if not line or line.startswith("//"):
                continue
            if graph is None:
                graph = self._head(line)
            elif group is not None:
                if line == "}":
                    group = None
                else:
                    leaf = self._node(line)
                    leaf.parent = group
                    group.body.append(leaf)
            elif closed:
                raise self.fail(f"text behind the graph: '{line[:60]}'")
            elif line == "}":
                closed = True
            elif line == "return" or line.startswith("return "):
                graph.outputs = self._operands(line[6:])
            elif match := _INPUT.match(line):
                value = self._define(match[2], match[3])
                value.kind = cast(ValueKind, match[1])
                value.binding = json.loads(match[4]) if match[4] else ""
                graph.inputs.append(value)
            elif match := _DROPPED.match(line):
                graph.dropped[json.loads(match[1])] = json.loads(match[2])
            elif match := _GROUP.match(line):
                group = Node(FUSED, [], self._attrs(match[2] or ""), [], name=match[1])
                graph.nodes.append(group)
            else:
                graph.nodes.append(self._node(line))
        if graph is None or not closed:
            raise self.fail("the graph is not closed by '}'" if graph else "no 'graph NAME {' line")
        return graph

    def _head(self, line: str) -> Graph:
        match = _HEAD.match(line)
        if match is None:
            raise self.fail(f"expected 'graph NAME {{', found '{line[:60]}'")
        return Graph(match[1], self._attrs(match[2] or ""))

    def _define(self, name: str, type_text: str) -> Value:
        if name in self.values:
            raise self.fail(f"%{name} is defined twice")
        try:
            value = Value(name, parse_type(type_text))
        except ParseError as error:
            raise self.fail(str(error)) from None
        self.values[name] = value
        return value

    def _operands(self, text: str) -> list[Value]:
        names = [part.strip() for part in text.split(",") if part.strip()]
        found: list[Value] = []
        for name in names:
            value = self.values.get(name.removeprefix("%"))
            if value is None or not name.startswith("%"):
                raise self.fail(f"{name} is read before it is defined")
            found.append(value)
        return found

    def _node(self, line: str) -> Node:
        match = _CALL.match(line)
        if match is None:
            raise self.fail(f"not a node: '{line[:60]}'")
        results, op, operands, rest = match.groups()
        head, _, origins = rest.partition(" from ")
        node = Node(
            op,
            self._operands(operands),
            self._attrs(head.strip()),
            [],
            tuple(self._origin(o) for o in origins.split(" + ") if o),
        )
        for index, value in enumerate(node.operands):
            value.uses.append((node, index))
        for part in re.split(r", (?=%)", results) if results else []:
            result = _RESULT.match(part)
            if result is None:
                raise self.fail(f"not a result: '{part}'")
            value = self._define(result[1], result[2])
            value.producer = node
            node.results.append(value)
        return node

    def _origin(self, text: str) -> Origin:
        match = _ORIGIN.match(text.strip())
        if match is None:
            raise self.fail(f"not an origin: '{text}'")
        passes = tuple(match[3].split(", ")) if match[3] else ()
        return Origin(match[1], passes, match[2] or "op")

    def _attrs(self, text: str) -> dict[str, Attr]:
        attrs: dict[str, Attr] = {}
        text = text.strip()
        if not text:
            return attrs
        if not (text.startswith("{") and text.endswith("}")):
            raise self.fail(f"not attributes: '{text[:60]}'")
        rest, decoder = text[1:-1], json.JSONDecoder()
        while rest:
            key, _, rest = rest.partition("=")
            try:
                value, end = decoder.raw_decode(rest)
            except json.JSONDecodeError:
                raise self.fail(f"attribute '{key.strip()}' has no JSON value") from None
            attrs[key.strip()] = self._frozen(value)
            rest = rest[end:].lstrip(", ")
        return attrs

    def _frozen(self, value: object) -> Attr:
        if isinstance(value, list):
            return tuple(self._frozen(v) for v in cast("list[object]", value))
        if value is None or isinstance(value, int | float | str | bool):
            return value
        raise self.fail(f"attribute value {value} is no number, string, list, true, false or null")
