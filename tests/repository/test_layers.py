"""Folders are layers: imports go down, and nobody reaches into core but by its declared API."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/hyper-parallel-core/src"
PACKS = [path for path in sorted(ROOT.glob("packages/*/src")) if path != CORE]

# Of core, from the bottom. A module may import what stands in its own line and in those above it.
LAYERS = (
    "errors torch_compat context _public_names",
    "_wiring",  # the one exception: lower layers reach higher ones by it (see WIRED)
    "utils",
    "sharding",
    "comm",
    "_rules",
    "tensor",
    "plugins",
    "registry",
    "dispatch",
    "api",
    "rules",
    "checkpoint",
    "analysis",
    "testing",
    "cli",
    "_old_paths _lazy",
    "core __init__ __main__",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}

# What our packages may import of core.
DECLARED = {
    "hyper_parallel",
    "hyper_parallel.checkpoint",
    "hyper_parallel.errors",
    "hyper_parallel.plugins",
    "hyper_parallel.rules",
    "hyper_parallel.testing",
}

# The folders and modules whose functions may import, and why.
INSIDE_FUNCTIONS = {
    "_wiring": "that is what it is for",
    "_lazy": "start-up: plugins are asked only for names that core does not have",
    "analysis.fake_world": "start-up: torch.distributed.checkpoint is loaded only to be replaced",
    "checkpoint.safetensors_file": "optional: safetensors",
    "checkpoint.stored_names": "optional: transformers",
    "cli": "start-up: commands that need no torch do not load it",
    "plugins": "start-up: yaml and importlib.resources, which only tables need",
    "registry": "start-up: op tables are read without torch",
    "testing": "optional: pytest and hypothesis; start-up: a worker process joins before it loads torch",
    "torch_compat": "optional: torch.testing, which has the fake backend and groups of threads",
    "utils.function_names": "start-up: names are compared without torch",
}
PACKS_INSIDE_FUNCTIONS: dict[str, str] = {}


@dataclass(frozen=True)
class Import:
    """One import statement: who imports what, and whether a function does."""

    importer: str
    imported: str
    line: int
    in_function: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_in(source: Path) -> dict[str, Path]:
    return {module_of(path, source): path for path in sorted(source.rglob("*.py"))}


def imports_of(name: str, path: Path, known: set[str]) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    in_functions = {id(node) for function in functions for node in ast.walk(function)}
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", None) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [full if full in known else str(node.module) for full in whole]
        else:
            continue
        for imported in found:
            yield Import(name, imported, node.lineno, id(node) in in_functions, id(node) in for_types)


def all_imports(*sources: Path) -> list[Import]:
    modules = {name: path for source in sources for name, path in modules_in(source).items()}
    known = set(modules)
    return [found for name, path in modules.items() for found in imports_of(name, path, known)]


def layer(module: str) -> str:
    return module.removeprefix("hyper_parallel").removeprefix(".").partition(".")[0] or "__init__"


def is_core(module: str) -> bool:
    return module.partition(".")[0] == "hyper_parallel"


def test_every_module_of_core_is_in_a_layer():
    assert {layer(name) for name in modules_in(CORE)} == set(LEVEL)


def test_imports_go_down_the_layers_those_inside_functions_too():
    upward = [
        str(found)
        for found in all_imports(CORE)
        if is_core(found.imported)
        and LEVEL[layer(found.imported)] > LEVEL[layer(found.importer)]
        and found.importer != "hyper_parallel._wiring"
    ]
    assert upward == []


def test_there_is_no_import_circle_beyond_one_folder():
    edges: dict[str, set[str]] = {}
    for found in all_imports(CORE):
        if is_core(found.imported) and not found.for_types and found.importer != "hyper_parallel._wiring":
            edges.setdefault(folder(found.importer), set()).add(folder(found.imported))
    order = dict.fromkeys(edges, 0)

    def reaches(start: str, goal: str) -> bool:
        seen, waiting = set(), [*edges.get(start, ())]
        while waiting:
            name = waiting.pop()
            if name == goal:
                return True
            if name not in seen:
                seen.add(name)
                waiting += edges.get(name, ())
        return False

    circles = [(a, b) for a in order for b in edges[a] if a != b and reaches(b, a)]
    assert circles == []


def folder(module: str) -> str:
    """The folder of a module of core; modules at the top stand for themselves."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@pytest.mark.parametrize("family", sorted(path.stem for path in CORE.glob("hyper_parallel/_rules/**/*.py")))
def test_rules_decide_on_specs_and_never_see_the_tensor_class(family):
    """Layouts, planner, matching and rules could serve another front end than DTensor."""
    modules = modules_in(CORE)
    waiting = [name for name in modules if name.startswith("hyper_parallel._rules") and name.endswith(f".{family}")]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name == "hyper_parallel._wiring":
            continue
        seen.add(name)
        waiting += [
            found.imported
            for found in imports_of(name, modules[name], set(modules))
            if found.imported in modules and not found.for_types
        ]
    assert not [name for name in seen if layer(name) in ("tensor", "dispatch", "registry", "api")]


def test_functions_import_only_where_start_up_or_an_optional_package_asks_for_it():
    listed = set(INSIDE_FUNCTIONS)
    found = {
        found.importer.removeprefix("hyper_parallel.")
        for found in all_imports(CORE)
        if found.in_function and found.importer != "hyper_parallel"
    }
    assert {name for name in found if not {name, name.partition(".")[0]} & listed} == set()
    assert {name for name in listed if not any(f == name or f.startswith(f"{name}.") for f in found)} == set()
    in_packs = {found.importer for found in all_imports(*PACKS) if found.in_function}
    assert in_packs == set(PACKS_INSIDE_FUNCTIONS)


def test_our_packages_import_only_what_core_declares():
    outside = [found for found in all_imports(*PACKS) if is_core(found.imported) and found.imported not in DECLARED]
    assert list(map(str, outside)) == []


def test_a_class_name_means_one_thing():
    """Private or not: a reader who meets ``Move`` need not ask which."""
    defined: dict[str, list[str]] = {}
    for source in (CORE, *PACKS):
        for module, path in modules_in(source).items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    defined.setdefault(node.name.lstrip("_"), []).append(module)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_private_names_of_torch_stand_in_one_file():
    """Operators do not count: op tables name them."""
    operators = ("_foreach_", "_grouped_mm", "_scaled_", "_fused_", "_nested_", "_weight_norm", "_standard_gamma")
    found = []
    for source in (CORE, *PACKS):
        for name, path in modules_in(source).items():
            if name in ("hyper_parallel.torch_compat", "hyper_parallel.registry.pack_hints"):
                continue
            for line, used in private_names(ast.parse(path.read_text())):
                if not used.rpartition(".")[2].startswith(operators):
                    found.append(f"{name}:{line} {used}")
    assert found == []


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of torch with a part that begins with an underscore: attributes of torch's modules, and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"(torch|dist)(\.\w+)+", ast.unparse(node)):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if re.search(r"\._(?!_)", name) and not name.startswith("torch.ops."):
                yield node.lineno, name
