"""Reads and checks a YAML op table (:mod:`hyper_parallel.plugins.op_table`), and reports all mistakes in it at once."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.errors import OpTableError
from hyper_parallel.plugins.op_table import OpTable, TableEntry

if TYPE_CHECKING:
    import yaml

DEFAULT = "__default__"
GROUPS = "__groups__"

MAX_DEPTH = 50
MAX_VALUES = 100_000
"""How deep the values of a table nest, and how many they are where each alias counts as what it stands for: a few lines
of aliases of aliases stand for more than any memory holds."""

_FIELDS = (
    "distributed_op_class",
    "distributed_op_module",
    "distributed_op_file",
    "dist_op_name",
    "params",
    "override",
)


class TableReader:
    """Checks one table on PyYAML's node tree, which knows the line and column of everything."""

    def __init__(self, table: OpTable) -> None:
        self._table = table
        self._problems: list[_TableProblem] = []
        self._first_line: dict[str, int] = {}
        try:
            self._text = table.read()
        except UnicodeDecodeError as error:
            self._text = ""
            line, column = _position(error.object, error.start)
            text = f"not UTF-8: {error.reason}, {error.object[error.start : error.start + 1]!r}"
            self._problems.append(_TableProblem(line, column, text, "save the file as UTF-8"))
        self._lines = self._text.splitlines()

    def entries(self) -> list[TableEntry]:
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            root = yaml.compose(self._text, Loader=loader)
        except yaml.MarkedYAMLError as error:
            self._report_syntax(error)
            root = None
        except yaml.reader.ReaderError as error:  # characters that no YAML file may hold
            line, column = _position(self._text.encode(), error.position)
            self._problems.append(_TableProblem(line, column, f"not YAML: {error.reason}: #x{error.character:04x}"))
            root = None
        except RecursionError:  # of the loader without C
            self._problems.append(_TableProblem(0, 0, f"nested deeper than {MAX_DEPTH} levels"))
            root = None
        found = self._table_entries(root) if root is not None and self._is_finite(root) else []
        if self._problems:
            messages = [self._message(problem) for problem in sorted(self._problems)]
            raise OpTableError("\n".join(messages), problems=messages)
        return found

    def _is_finite(self, root: yaml.Node) -> bool:
        """Whether the table can be read to its end; else it is a problem."""
        try:
            _count(root, {}, ())
        except _EndlessError as error:
            self._problem(error.node, str(error))
        return not self._problems

    # ------------------------------------------------------------------ structure

    def _table_entries(self, root: yaml.Node) -> list[TableEntry]:
        # Duplicate ops have a message of their own, as they can also repeat between an entry and a group.
        top = self._mapping(root, "an op table", unique=(DEFAULT, GROUPS))
        default: dict[str, Any] = {}
        for _, name, value in top:
            if name == DEFAULT:
                default = self._fields(value, DEFAULT, _FIELDS)
        found = []
        for key, name, value in top:
            if name == DEFAULT:
                continue
            if name == GROUPS:
                found += self._groups(value, default)
                continue
            self._claim(key, name)
            reported = len(self._problems)
            own = self._fields(value, f"op {name!r}", _FIELDS)
            found += self._entry(key, name, own, default, reported)
        return found

    def _groups(self, node: yaml.Node, default: dict[str, Any]) -> list[TableEntry]:
        found = []
        for group in self._sequence(node, f"{GROUPS} is a list of groups"):
            fields = tuple(field for field in _FIELDS if field != "dist_op_name")
            reported = len(self._problems)
            own = self._fields(group, "a group", (*fields, "ops"))
            members = own.pop("ops", None)
            if members is None:
                self._problem(group, "a group needs 'ops', the list of its op names")
                continue
            for member in members:
                name = self._text_of(member, "an op name")
                if name is not None:
                    self._claim(member, name)
                    found += self._entry(member, name, own, default, reported)
        return found

    def _entry(
        self, key: yaml.Node, name: str, own: dict[str, Any], default: dict[str, Any], reported: int
    ) -> list[TableEntry]:
        """The entry, or nothing; ``reported`` is the number of problems before its fields were read."""
        module, colon, function = name.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *([function] if colon else [])]):
            self._problem(
                key,
                f"{name!r} is no function name; write a bare or a dotted name, such as add or torch.add, or "
                "module:function for one in plain Python",
            )
        # Where the class is counts as one field: an entry's file replaces the default's module.
        places = ("distributed_op_module", "distributed_op_file")
        inherited = {k: v for k, v in default.items() if not (k in places and any(place in own for place in places))}
        fields = {**inherited, **own}
        if all(place in fields for place in places):
            self._problem(key, f"op {name!r} gives both {places[0]} and {places[1]}; give one")
        missing = [] if "distributed_op_class" in fields else ["'distributed_op_class'"]
        if not any(place in fields for place in places):
            missing.append(f"'{places[0]}' (or '{places[1]}')")
        if missing:
            if len(self._problems) == reported:  # else the field may be there, and be what was reported
                self._problem(key, f"op {name!r} lacks {' and '.join(missing)}")
            return []
        file = fields.get("distributed_op_file")
        return [
            TableEntry(
                name=name,
                class_name=fields["distributed_op_class"],
                module=fields.get("distributed_op_module"),
                file=self._python_file(file) if file else None,
                instance_name=fields.get("dist_op_name", name),
                params=fields.get("params", {}),
                override=fields.get("override", frozenset()),
                source=f"{self._table.name}:{key.start_mark.line + 1}",
            )
        ]

    def _python_file(self, name: str) -> Path:
        path = self._table.folder / name
        return path if path.suffix == ".py" else path.with_name(path.name + ".py")

    def _claim(self, key: yaml.Node, name: str) -> None:
        line = key.start_mark.line + 1
        if name in self._first_line:
            self._problem(key, f"duplicate op {name!r} (first defined at line {self._first_line[name]})")
        self._first_line.setdefault(name, line)

    # ------------------------------------------------------------------ fields

    def _fields(self, node: yaml.Node, owner: str, allowed: tuple[str, ...]) -> dict[str, Any]:
        fields = {}
        for key, name, value in self._mapping(node, owner):
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(allowed)}"
                self._problem(key, f"unknown field {name!r} in {owner}", hint)
            elif (read := self._field(name, value)) is not None:
                fields[name] = read
        return fields

    def _field(self, name: str, node: yaml.Node) -> Any:
        if name == "ops":
            return self._sequence(node, "'ops' is a list of op names")
        if name == "params":
            return self._params(node)
        if name == "override":
            return self._override(node)
        return self._text_of(node, repr(name))

    def _params(self, node: yaml.Node) -> dict[str, Any] | None:
        from yaml.constructor import ConstructorError, SafeConstructor

        for key, name, _ in self._mapping(node, "'params'"):
            if not name.isidentifier():
                self._problem(key, f"{name!r} in 'params' cannot be an argument's name")
        before = len(self._problems)
        self._check_values(node, set())
        if len(self._problems) > before:
            return None
        try:
            values = SafeConstructor().construct_object(node, deep=True)
        except ConstructorError as error:
            mark = error.problem_mark or node.start_mark
            text = f"'params' holds a value that is no plain data: {error.problem}"
            self._problems.append(_TableProblem(mark.line, mark.column, text))
            return None
        return values if isinstance(values, dict) else None

    def _check_values(self, node: yaml.Node, seen: set[int]) -> None:
        """Report equal keys, and what is no value of its type, such as a 40th of March, where it stands."""
        import yaml
        from yaml.constructor import SafeConstructor

        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            try:
                SafeConstructor().construct_object(node)
            except yaml.MarkedYAMLError as error:
                self._problem(node, f"'params' holds a value that is no plain data: {error.problem}")
            except Exception as error:  # whatever int(), float() or date() say to it
                self._problem(node, f"{node.value!r} is not {_kind(node)}: {error}", "quote it, if the text is meant")
        elif isinstance(node, yaml.MappingNode):
            self._reject_duplicates(node, "'params'")
        for child in _children(node):
            self._check_values(child, seen)

    def _override(self, node: yaml.Node) -> bool | frozenset[str] | None:
        import yaml

        if isinstance(node, yaml.SequenceNode):
            names = [self._text_of(item, "a plugin name") for item in node.value]
            return frozenset(name for name in names if name is not None)
        if node.tag == "tag:yaml.org,2002:bool" and node.value.lower() in ("true", "yes", "on"):
            return True
        self._problem(node, "'override' is a list of plugin names, or true for every plugin")
        return None

    # ------------------------------------------------------------------ nodes

    def _mapping(
        self, node: yaml.Node, what: str, unique: tuple[str, ...] | None = None
    ) -> list[tuple[yaml.Node, str, yaml.Node]]:
        """The items of a mapping; ``unique`` are the keys of which there may be only one, None: all."""
        import yaml

        if not isinstance(node, yaml.MappingNode):
            self._problem(node, f"{what} is a mapping (name: value), not {_kind(node)}")
            return []
        items = []
        for key, value in node.value:
            name = self._text_of(key, "a key")
            if name is not None:
                items.append((key, name, value))
        self._reject_duplicates(node, what, unique)
        return items

    def _reject_duplicates(self, node: yaml.MappingNode, what: str, unique: tuple[str, ...] | None = None) -> None:
        """PyYAML keeps the last of two equal keys without a word."""
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key.value, str):  # a list or a mapping, which is reported elsewhere
                continue
            if key.value in first and (unique is None or key.value in unique):
                self._problem(key, f"duplicate key {key.value!r} in {what} (first given at line {first[key.value]})")
            first.setdefault(key.value, key.start_mark.line + 1)

    def _sequence(self, node: yaml.Node, rule: str) -> list[yaml.Node]:
        import yaml

        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        self._problem(node, f"{rule}, not {_kind(node)}")
        return []

    def _text_of(self, node: yaml.Node, what: str) -> str | None:
        if node.tag == "tag:yaml.org,2002:str" and node.value:
            return str(node.value)
        shown = f" {node.value}" if isinstance(node.value, str) else ""
        self._problem(node, f"{what} is text, not {_kind(node)}{shown}", "quote it, if the text is meant")
        return None

    # ------------------------------------------------------------------ messages

    def _problem(self, node: yaml.Node, text: str, hint: str = "") -> None:
        mark = node.start_mark
        self._problems.append(_TableProblem(mark.line, mark.column, text, hint))

    def _report_syntax(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        text = " ".join(filter(None, ("not YAML:", error.problem, error.context)))
        self._problems.append(_TableProblem(line, column, text, "check the indentation, here and above"))

    def _message(self, problem: _TableProblem) -> str:
        line, column = problem.line, problem.column
        message = f"{self._table.name}:{line + 1}:{column + 1}: {problem.text}"
        if line < len(self._lines):
            message += f"\n  {line + 1:>6} | {self._lines[line]}\n         | {' ' * column}^"
        return f"{message}\n    hint: {problem.hint}" if problem.hint else message


class _TableProblem(NamedTuple):
    """One mistake in a table; line and column count from 0."""

    line: int
    column: int
    text: str
    hint: str = ""


class _EndlessError(Exception):
    """A node that stands for more values than can be read."""

    def __init__(self, node: yaml.Node, text: str) -> None:
        super().__init__(text)
        self.node = node


def _count(node: yaml.Node, counts: dict[int, int], path: tuple[int, ...]) -> int:
    """The number of values that a node stands for; ``counts`` has those of the nodes that were seen, ``path`` those
    that it lies in.

    Raises:
        _EndlessError: it holds itself, or there are too many.
    """
    if id(node) in path:
        raise _EndlessError(node, "an alias stands for a value that it is a part of")
    if id(node) not in counts:
        if len(path) > MAX_DEPTH:
            raise _EndlessError(node, f"nested deeper than {MAX_DEPTH} levels")
        total = 1 + sum(_count(child, counts, (*path, id(node))) for child in _children(node))
        if total > MAX_VALUES:
            raise _EndlessError(
                node, f"stands for more than {MAX_VALUES} values, each alias counted as what it stands for"
            )
        counts[id(node)] = total
    return counts[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    """The keys and values of a mapping, the items of a list."""
    if isinstance(node.value, str):
        return []
    return [child for item in node.value for child in (item if isinstance(item, tuple) else (item,))]


def _position(text: bytes, index: int) -> tuple[int, int]:
    """Line and column of a byte, from 0."""
    start = text.rfind(b"\n", 0, index) + 1
    return text.count(b"\n", 0, index), len(text[start:index].decode(errors="replace"))


def _kind(node: yaml.Node) -> str:
    tag = node.tag.rpartition(":")[2]
    return _KINDS.get(tag, f"a {tag}")


_KINDS = {
    "map": "a mapping",
    "seq": "a list",
    "str": "text",
    "null": "nothing",
    "int": "a number",
    "float": "a number",
    "bool": "a yes/no value",
    "timestamp": "a date",
    "binary": "binary data",
}
