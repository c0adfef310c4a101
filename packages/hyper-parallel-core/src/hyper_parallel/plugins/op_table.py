"""YAML op tables: which class implements which torch function, without Python code.

A table is a mapping from op names to entries::

    __default__:                                     # optional: keys for every entry that does not give them itself
      distributed_op_module: acme_ops.rules

    torch.ops.acme.swiglu:
      distributed_op_class: SwigluOp
      params: {activation: silu}

    cumsum:
      distributed_op_class: CumulativeOp
      override: [ops-basic]

    __groups__:                                      # optional: many ops that share one entry
      - distributed_op_class: Elementwise
        params: {linear: true}
        ops: [add, sub, neg]

Keys of an entry:

``distributed_op_class``
    name of a :class:`hyper_parallel.DistributedOp` subclass. Required (here or in ``__default__``).
``distributed_op_module`` or ``distributed_op_file``
    where the class is: an importable module, or a Python file relative to the table. One of them is required. It is
    imported when the op is first used.
``dist_op_name``
    the op object's own name, when it is not the entry's.
``params``
    keyword arguments for the class.
``override``
    plugins whose implementation of this op the entry replaces, or ``true`` for every plugin's.

An op name is bare (``add``: every torch function of that name, with its in-place and operator forms) or dotted
(``torch.nn.functional.linear``, ``torch.ops.acme.swiglu``: exactly this function), or names a Python function of a
module (``acme.modeling:delta_rule``), which is then replaced there by one that knows DTensors; see
:mod:`hyper_parallel.utils.function_names`. An entry of ``__groups__`` has ``ops``, a list of such names, and no
``dist_op_name``.

Every problem of a file is reported at once, as ``file:line:column``, with the near miss of a misspelt key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TableEntry:
    """One op of a table, checked, its class not imported.

    Attributes:
        name: bare or dotted function name.
        class_name: the class's name.
        module: importable module of the class, or None when it is in ``file``.
        file: Python file of the class, or None.
        instance_name: name that the op object gets.
        params: keyword arguments for the class.
        override: plugins that the entry replaces; True for all.
        source: ``file:line`` of the entry, for messages.
    """

    name: str
    class_name: str
    module: str | None
    file: Path | None
    instance_name: str
    params: Mapping[str, Any]
    override: bool | frozenset[str]
    source: str


@dataclass(frozen=True)
class OpTable:
    """A YAML op table, read when its entries are first asked for.

    Attributes:
        name: how messages call the table.
        read: gives its text.
        folder: where a relative ``distributed_op_file`` starts.
    """

    name: str
    read: Callable[[], str]
    folder: Path

    @classmethod
    def from_package(cls, package: str | None, filename: str) -> OpTable:
        """The table ``filename`` that lies in the import package ``package`` (usually ``__package__``)."""
        from importlib.resources import files

        assert package, "use __package__ of a module inside a package"
        resource = files(package).joinpath(filename)
        name = f"{package.replace('.', '/')}/{filename}"
        return cls(name, lambda: resource.read_text(encoding="utf-8"), Path(str(resource)).parent)

    @classmethod
    def all_in_package(cls, package: str | None, folder: str) -> list[OpTable]:
        """The tables in a folder of the import package ``package``: its ``.yaml`` files, by name."""
        from importlib.resources import files

        assert package, "use __package__ of a module inside a package"
        names = sorted(item.name for item in files(package).joinpath(folder).iterdir() if item.name.endswith(".yaml"))
        return [cls.from_package(package, f"{folder}/{name}") for name in names]

    @classmethod
    def from_path(cls, path: str | Path) -> OpTable:
        """The table in the file ``path``."""
        path = Path(path)
        return cls(str(path), lambda: path.read_text(encoding="utf-8"), path.parent)

    def entries(self) -> list[TableEntry]:
        """Read and check the table.

        Raises:
            OpTableError: the table is malformed; the message lists every problem.
            OSError: the file cannot be read.
        """
        from hyper_parallel.plugins.op_table_reader import TableReader

        return TableReader(self).entries()
