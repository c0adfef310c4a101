"""YAML op tables: what they say, and how every mistake is reported."""

import sys
import textwrap

import pytest

from hyper_parallel.errors import OpTableError
from hyper_parallel.plugins.op_table import OpTable


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "ops.yaml"
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return OpTable.from_path(path).entries()

    return read


@pytest.fixture
def problems(read):
    def problems(text):
        with pytest.raises(OpTableError) as caught:
            read(text)
        assert str(caught.value) == "\n".join(caught.value.problems)
        # Without the folder, which differs from run to run.
        return [problem[problem.index("ops.yaml") :] for problem in caught.value.problems]

    return problems


def test_entry_with_all_fields(read):
    (entry,) = read(
        """
        torch.ops.acme.swiglu:
          distributed_op_class: SwigluOp
          distributed_op_module: acme.rules
          dist_op_name: acme_swiglu
          params: {activation: silu, dims: [0, 1], nested: {scale: 2.5}}
          override: [ops-basic]
        """
    )
    assert entry.name == "torch.ops.acme.swiglu"
    assert (entry.class_name, entry.module, entry.file) == ("SwigluOp", "acme.rules", None)
    assert entry.instance_name == "acme_swiglu"
    assert entry.params == {"activation": "silu", "dims": [0, 1], "nested": {"scale": 2.5}}
    assert entry.override == {"ops-basic"}
    assert entry.source.endswith("ops.yaml:1")


def test_optional_fields_have_plain_defaults(read):
    (entry,) = read("add: {distributed_op_class: A, distributed_op_module: m}")
    assert (entry.instance_name, entry.params, entry.override) == ("add", {}, frozenset())


def test_override_true_means_every_plugin(read):
    (entry,) = read("add: {distributed_op_class: A, distributed_op_module: m, override: true}")
    assert entry.override is True


def test_default_block_gives_what_an_entry_lacks(read):
    add, mul, sub = read(
        """
        __default__:
          distributed_op_class: A
          distributed_op_module: m
          params: {linear: true}
        add: {}
        mul: {distributed_op_class: B, params: {}}
        sub: {distributed_op_file: rules}
        """
    )
    assert (add.class_name, add.module, add.params) == ("A", "m", {"linear": True})
    assert (mul.class_name, mul.module, mul.params) == ("B", "m", {})
    assert sub.module is None, "an entry's file replaces the default's module"


def test_group_gives_one_entry_per_op(read):
    entries = read(
        """
        __default__: {distributed_op_module: m}
        __groups__:
          - distributed_op_class: A
            params: {linear: true}
            ops: [add, sub,
                  neg]
          - {distributed_op_class: B, ops: [relu]}
        mul: {distributed_op_class: C}
        """
    )
    assert {entry.name: entry.class_name for entry in entries} == {
        "add": "A", "sub": "A", "neg": "A", "relu": "B", "mul": "C",
    }  # fmt: skip
    assert [entry.source.rpartition(":")[2] for entry in entries] == ["5", "5", "6", "7", "8"]


def test_file_is_relative_to_the_table_and_its_suffix_may_be_left_out(read, tmp_path):
    with_suffix, without = read(
        """
        a: {distributed_op_class: A, distributed_op_file: rules/a.py}
        b: {distributed_op_class: A, distributed_op_file: rules/a}
        """
    )
    assert with_suffix.file == without.file == tmp_path / "rules" / "a.py"


def test_empty_table_is_no_mistake(read):
    assert read("") == []


PARAMS = "add:\n  distributed_op_class: A\n  distributed_op_module: m\n  params:\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add:\n  distributed_op_clas: A\n  distributed_op_module: m\n", "ops.yaml:2:3: unknown field"),
        ("add: {distributed_op_module: m}\n", "ops.yaml:1:1: op 'add' lacks 'distributed_op_class'"),
        ("add: {distributed_op_class: A}\n", "ops.yaml:1:1: op 'add' lacks 'distributed_op_module' (or 'distr"),
        ("add: {distributed_op_class: A, distributed_op_module: m, distributed_op_file: f}\n", "gives both"),
        ("add: {distributed_op_class: 3, distributed_op_module: m}\n", "'distributed_op_class' is text, not a number"),
        ("add: A\n", "ops.yaml:1:6: op 'add' is a mapping (name: value), not text"),
        ("- add\n", "ops.yaml:1:1: an op table is a mapping (name: value), not a list"),
        ("true: {distributed_op_class: A, distributed_op_module: m}\n", "a key is text, not a yes/no value true"),
        ("a b: {distributed_op_class: A, distributed_op_module: m}\n", "'a b' is no function name"),
        ("add: {distributed_op_class: A, distributed_op_module: m, params: [1]}\n", "'params' is a mapping"),
        ("add: {distributed_op_class: A, distributed_op_module: m, params: {a-b: 1}}\n", "cannot be an argument's"),
        ("add: {distributed_op_class: A, distributed_op_module: m, params: {a: {b: 1, b: 2}}}\n", "duplicate key 'b'"),
        (
            "add: {distributed_op_class: A, distributed_op_module: m, params: {a: !!python/name:os.system ''}}\n",
            "plain",
        ),
        ("add: {distributed_op_class: A, distributed_op_module: m, override: false}\n", "'override' is a list of"),
        ("add: {distributed_op_class: A, distributed_op_module: m, override: ops-basic}\n", "'override' is a list of"),
        ("__groups__:\n  - {distributed_op_class: A, distributed_op_module: m}\n", "ops.yaml:2:5: a group needs 'ops'"),
        ("__groups__: {ops: [add]}\n", "__groups__ is a list of groups, not a mapping"),
        ("__groups__:\n  - {dist_op_name: x, ops: [add]}\n", "unknown field 'dist_op_name' in a group"),
        ("add: {distributed_op_class: A, distributed_op_module: m}\n  sub: 3\n", "ops.yaml:2:"),
        ("add:\n\tdistributed_op_class: A\n", "ops.yaml:2:1: not YAML: found character"),
        ("__default__: {}\n__default__: {}\n", "duplicate key '__default__'"),
        ("? [add, sub]\n: {distributed_op_class: A}\n", "ops.yaml:1:3: a key is text, not a list"),
        ("add:\n  ? {a: b}\n  : A\n", "ops.yaml:2:5: a key is text, not a mapping"),
        (f"{PARAMS}    x:\n      ? [1]\n      : 2\n", "ops.yaml:6:9: 'params' holds a value that is no plain data"),
        (f"{PARAMS}    ok: 1\n    x: 2020-99-99\n", "ops.yaml:6:8: '2020-99-99' is not a date: month must be in"),
        (f"{PARAMS}    x: [1, 2020-01-01T99:00:00]\n", "ops.yaml:5:12: '2020-01-01T99:00:00' is not a date"),
        (f"{PARAMS}    x: {'9' * 5000}\n", "is not a number: Exceeds the limit"),
        (f"{PARAMS}    x: !!int two\n", "ops.yaml:5:8: 'two' is not a number"),
        (f"{PARAMS}    x: !!binary é\n", "ops.yaml:5:8: 'params' holds a value that is no plain data"),
        (f"{PARAMS}    x: !!timestamp soon\n", "ops.yaml:5:8: 'soon' is not a date"),
        (f"{PARAMS}    x: &a [1, *a]\n", "ops.yaml:5:8: an alias stands for a value that it is a part of"),
        (f"{PARAMS}    x: &a {{y: {{z: *a}}}}\n", "ops.yaml:5:8: an alias stands for a value that it is a part of"),
        ("add: &a\n  params: *a\n", "ops.yaml:1:6: an alias stands for a value that it is a part of"),
        (f"{PARAMS}    x: *b\n", "ops.yaml:5:8: not YAML: found undefined alias"),
        (f"{PARAMS}    x: {'[' * 60}{']' * 60}\n", "nested deeper than 50 levels"),
        (f"{PARAMS}    x: {'[' * 9999}{']' * 9999}\n", "ops.yaml:5:"),
        (f"{PARAMS}    x: a\x01\n", "ops.yaml:5:9: not YAML: control characters are not allowed: #x0001"),
    ],
)
def test_mistake_is_reported_with_line_and_column(problems, text, expected):
    assert expected in problems(text)[0]


def test_aliases_that_stand_for_more_than_memory_holds_are_reported_at_once(problems):
    layers = [f"    x{i + 1}: &x{i + 1} [{', '.join([f'*x{i}'] * 10)}]" for i in range(40)]
    (problem,) = problems("\n".join([f"{PARAMS}    x0: &x0 [a]", *layers, ""]))
    assert problem.startswith("ops.yaml:10:9: stands for more than 100000 values")


def test_an_alias_that_stands_for_little_is_read(read):
    (entry,) = read(f"{PARAMS}    x: &a [1, {{b: 2}}]\n    y: [*a, *a]\n")
    assert entry.params == {"x": [1, {"b": 2}], "y": [[1, {"b": 2}]] * 2}


@pytest.mark.parametrize("text", [b"add: 1\n# caf\xe9\n", "# ï\nadd: 1\n".encode("utf-16")])
def test_file_that_is_not_utf_8_is_reported_with_line_and_column(tmp_path, text):
    (tmp_path / "ops.yaml").write_bytes(text)
    with pytest.raises(OpTableError, match=r"ops\.yaml:(2:6|1:1): not UTF-8: .*\n.*hint: save the file as UTF-8"):
        OpTable.from_path(tmp_path / "ops.yaml").entries()


def test_near_miss_is_suggested(problems):
    (problem,) = problems("add: {distributed_op_class: A, distributed_op_module: m, overide: true}\n")
    assert problem.endswith("hint: did you mean 'override'?")


def test_message_shows_the_line(problems):
    (problem,) = problems("add:\n  distributed_op_class: A\n  distributed_op_module: m\n  param: {}\n")
    assert problem == (
        "ops.yaml:4:3: unknown field 'param' in op 'add'\n"
        "       4 |   param: {}\n"
        "         |   ^\n"
        "    hint: did you mean 'params'?"
    )


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(problems):
    found = problems(
        """
        add: {distributed_op_class: A, distributed_op_module: m}
        sub: {distributed_op_clas: A, distributed_op_module: m}
        add: {distributed_op_class: A, distributed_op_module: m}
        __groups__:
          - {distributed_op_class: A, distributed_op_module: m, ops: [sub]}
        """
    )
    assert [problem.split("\n")[0] for problem in found] == [
        "ops.yaml:2:7: unknown field 'distributed_op_clas' in op 'sub'",
        "ops.yaml:3:1: duplicate op 'add' (first defined at line 1)",
        "ops.yaml:5:63: duplicate op 'sub' (first defined at line 2)",
    ]


def test_duplicate_fields_are_rejected(problems):
    (problem,) = problems("add:\n  distributed_op_class: A\n  distributed_op_module: m\n  distributed_op_class: B\n")
    assert "ops.yaml:4:3: duplicate key 'distributed_op_class' in op 'add' (first given at line 2)" in problem


def test_the_work_for_a_table_grows_with_its_size_and_no_faster(read):
    assert calls_for(read, 2000) < 2.5 * calls_for(read, 1000)


def calls_for(read, ops):
    """Number of Python functions that reading a table of so many ops calls."""
    text = "__groups__:\n  - {distributed_op_class: A, distributed_op_module: m, ops: [%s]}\n"
    table = text % ", ".join(f"op{i}" for i in range(ops))
    counted = []
    sys.setprofile(lambda frame, event, arg: counted.append(1) if event == "call" else None)
    try:
        entries = read(table)
    finally:
        sys.setprofile(None)
    assert len(entries) == ops
    return len(counted)
