"""Names of ``hyper_parallel``: lazy, complete, and helpful when a provider is missing."""

import ast
import importlib.util
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel._public_names import CORE_MODULE_OF, FIRST_PARTY_DIST_OF
from hyper_parallel.plugins import PluginManager, available, use_manager


def test_static_imports_and_table_agree():
    """Type checkers read the imports, the interpreter the table."""
    tree = ast.parse(Path(hyper_parallel.__file__).read_text())
    imports = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert imports == CORE_MODULE_OF
    (listed,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert sorted(ast.literal_eval(listed)) == sorted(CORE_MODULE_OF)


def test_star_import_and_completion_have_the_names_of_plugins_too(site):
    site.install(
        "acme",
        """
        @hookimpl
        def hyper_parallel_public_names(): return {"acme_gate": "hp_acme._plugin:HYPER_PARALLEL_API"}
        """,
    )
    site.python(
        """
        from hyper_parallel import *
        import hyper_parallel
        assert acme_gate == 1 and DTensor.__name__ == "DTensor"
        assert {"acme_gate", "DTensor"} <= set(dir(hyper_parallel))
        """,
        HYPER_PARALLEL_PLUGINS="acme",
    )


@pytest.mark.parametrize("name", sorted(CORE_MODULE_OF))
def test_every_core_name_resolves(name):
    assert getattr(hyper_parallel, name) is not None
    assert name in vars(hyper_parallel), "resolved once, then an ordinary global"


def test_no_export_has_the_name_of_a_submodule():
    """Importing the submodule would replace the export."""
    names = [*CORE_MODULE_OF, *FIRST_PARTY_DIST_OF]
    assert [name for name in names if importlib.util.find_spec(f"hyper_parallel.{name}")] == []


def test_version():
    assert hyper_parallel.__version__.count(".") == 2


def test_plugin_provides_a_name(site):
    package = site.install(
        "acme", "@hookimpl\ndef hyper_parallel_public_names(): return {'acme_shard': 'hp_acme', 'B': 'hp_acme:inner'}"
    )
    (package / "__init__.py").write_text("acme_shard = 'shard'\ninner = 'B'\n")
    code = """
        import hyper_parallel, sys
        from hyper_parallel import acme_shard, B
        from hyper_parallel.plugins import available
        print(acme_shard, B, "acme_shard" in dir(hyper_parallel), available("acme_shard"), "torch" in sys.modules)
    """
    assert site.python(code).stdout.strip() == "shard B True True False"


def test_two_plugins_for_one_name_are_an_error_when_it_is_used(site):
    for plugin in ("one", "two"):
        site.install(plugin, f"@hookimpl\ndef hyper_parallel_public_names(): return {{'thing': 'hp_{plugin}'}}")
    done = site.python("from hyper_parallel import thing", check=False)
    assert (
        "hyper_parallel.thing is provided by several plugins: 'one' (hp_one:thing), 'two' (hp_two:thing)" in done.stderr
    )
    assert site.python("import hyper_parallel; hyper_parallel.MissingOpError").returncode == 0


def test_missing_package_is_named_with_the_command_to_install_it(site):
    code = """
        from hyper_parallel.plugins import PluginManager, use_manager
        with use_manager(PluginManager([], {})):
            try:
                from hyper_parallel import fully_shard
            except ImportError as error:
                print(type(error).__name__, error.dist, error.public_name, error)
    """
    output = site.python(code).stdout
    assert output.startswith(
        "MissingPluginError hyper-parallel-fsdp fully_shard hyper_parallel.fully_shard is provided by"
    )
    assert "which is not installed" in output
    assert "-m pip install hyper-parallel-fsdp" in output


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "is installed as version 1.2, which does not have it yet"),
        ("raise OSError('no licence')", "is installed but left out: OSError: no licence"),
    ],
)
def test_package_that_is_there_but_of_no_help_is_told_apart(site, source, reason):
    site.install("other-fsdp", source, dist="hyper-parallel-fsdp-of-a-test")
    code = """
        import warnings
        warnings.simplefilter("ignore")
        from hyper_parallel.plugins import default_manager
        print(default_manager().missing_name_error("fully_shard", "hyper-parallel-fsdp-of-a-test"))
    """
    assert reason in site.python(code).stdout


def test_misspelt_name_is_an_attribute_error_with_the_near_miss():
    with use_manager(PluginManager([], {})):
        with pytest.raises(AttributeError, match="no attribute 'DTenso'; did you mean 'DTensor'"):
            hyper_parallel.DTenso  # noqa: B018
        assert not hasattr(hyper_parallel, "_private")


def test_listing_names_meets_no_error(monkeypatch):
    monkeypatch.delitem(vars(hyper_parallel), "fully_shard", raising=False)  # kept there once it was asked for
    with use_manager(PluginManager([], {})):
        assert "fully_shard" not in dir(hyper_parallel)
        assert {"DTensor", "__version__"} <= set(dir(hyper_parallel))
        assert available("DTensor")
        assert not available("fully_shard")


def test_import_paths_of_the_rfc_are_the_same_objects():
    from hyper_parallel.core.shard.ops.parallel_ops import DistributedOp
    from hyper_parallel.core.shard.ops.parallel_ops_register import get_distributed_op, register_distributed_op

    assert DistributedOp is hyper_parallel.DistributedOp
    assert get_distributed_op is hyper_parallel.get_distributed_op
    assert register_distributed_op is hyper_parallel.register_distributed_op


def test_tensor_parallel_path_asks_for_the_tp_package(site):
    code = """
        from hyper_parallel.plugins import PluginManager, use_manager
        import hyper_parallel.core.tensor_parallel as tp
        with use_manager(PluginManager([], {})):
            try:
                from hyper_parallel.core.tensor_parallel import ColwiseParallel
            except ImportError as error:
                print(error)
            print(dir(tp), hasattr(tp, "fully_shard"))
    """
    output = site.python(code).stdout
    assert "ColwiseParallel is provided by hyper-parallel-tp" in output
    assert "[] False" in output
