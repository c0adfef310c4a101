"""The ``hyper-parallel`` program: what it prints, for people and for programs, and how it ends."""

import json
import sys
import textwrap

import pytest

from hyper_parallel.cli.reporting import print_table

TABLE = """
    acme_double:
      distributed_op_class: Double
      distributed_op_module: acme.rules
      params: {factor: 2}
    torch.add:
      distributed_op_class: Add
      distributed_op_module: acme.rules
      override: [ops-basic]
"""


def lines(done):
    return {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}


def test_plugins_shows_state_and_reason(site):
    site.install("acme", ops=TABLE)
    site.install("old", api=2)
    site.install("bad", "raise OSError('no licence')")
    done = site.run("-m", "hyper_parallel", "plugins", check=False)
    shown = lines(done)
    assert done.returncode == 1
    assert shown["PLUGIN"].split() == ["PLUGIN", "DISTRIBUTION", "VERSION", "API", "STATUS", "OPS", "OVERRIDES"]
    assert shown["acme"].split() == ["acme", "hp-acme", "1.2", "1", "ok", "2", "1"]
    assert shown["old"].split() == ["old", "hp-old", "1.2", "2", "incompatible", "-", "-"]
    assert "built for plugin API 2, this core speaks 1" in done.stdout
    assert shown["bad"].split()[:5] == ["bad", "hp-bad", "1.2", "-", "broken"]
    assert "Traceback (most recent call last)" in done.stdout
    assert "OSError: no licence" in done.stdout
    assert done.stderr == ""


def test_plugins_reports_also_when_faults_are_errors(site):
    site.install("bad", "raise OSError('no licence')")
    done = site.run("-m", "hyper_parallel", "plugins", check=False, HYPER_PARALLEL_STRICT_PLUGINS="1")
    assert "OSError: no licence" in done.stdout


def test_plugins_as_json(site):
    site.install("acme", ops=TABLE)
    content = json.loads(site.run("-m", "hyper_parallel", "plugins", "--json").stdout)
    assert content["schema"] == 1
    (acme,) = [plugin for plugin in content["plugins"] if plugin["name"] == "acme"]
    assert acme == {
        "name": "acme",
        "distribution": "hp-acme",
        "version": "1.2",
        "module": "hp_acme._plugin",
        "api": 1,
        "status": "ok",
        "reason": None,
        "remedy": None,
        "traceback": None,
        "ops": 2,
        "overrides": 1,
    }


def test_ops_lists_the_names_by_provider_and_file_in_80_columns(site):
    rule = "{distributed_op_class: Double, distributed_op_module: acme.rules}"
    many = "".join(f"    acme_op_{i}: {rule}\n" for i in range(9))
    site.install("acme", ops=TABLE + many)
    text = site.run("-m", "hyper_parallel", "ops").stdout
    assert "\nacme  hp_acme/ops.yaml\n  acme_double  acme_op_0  acme_op_1  " in f"\n{text}"
    assert max(map(len, text.splitlines())) <= 80


def test_ops_shows_one_op(site):
    site.install("acme", ops=TABLE)
    site.install("rival", ops="acme_double: {distributed_op_class: Twice, distributed_op_module: rival}")
    done = site.run("-m", "hyper_parallel", "ops", "acme_double", check=False)
    output = done.stdout
    assert done.returncode == 1
    assert "provider  acme 1.2" in output
    assert "params    factor=2" in output
    assert "provider  rival 1.2" in output
    assert output.count("in use    conflict") == 2
    pinned = site.run(
        "-m", "hyper_parallel", "ops", "acme_double", "--json", HYPER_PARALLEL_PREFER="acme_double=rival"
    ).stdout
    assert {op["provider"]: op["in_use"] for op in json.loads(pinned)["ops"]} == {"acme": "no", "rival": "yes"}


def test_ops_says_that_both_providers_of_one_implementation_are_in_use(site):
    site.install("acme", ops=TABLE)
    site.install("beta", ops=TABLE)
    output = site.run("-m", "hyper_parallel", "ops", "acme_double").stdout
    assert output.count("in use    yes") == 2


RULES = """
    from hyper_parallel import DistributedOp, Strategy, StrategyOp
    from hyper_parallel._rules.op import FunctionOp
    from hyper_parallel.sharding.placements import is_shard
    from hyper_parallel._rules.call import Solution
    from hyper_parallel._rules.strategy import LayoutOp, P, S

    class Rows(StrategyOp):
        signature = "input, other"
        def strategies(self, call):
            yield Strategy({"input": S(0), "other": S(0)}, S(0))
            yield Strategy({"input": P}, P)

    class InCode(LayoutOp):
        def solve(self, call):
            layout = call.inputs[0].layout
            if layout.is_partial(): raise ValueError("no")
            return Solution([layout], [layout])

    class Whole(FunctionOp): pass
    class Phases(DistributedOp): pass
"""


def test_ops_shows_strategies_as_a_table_and_says_when_there_are_none(site):
    package = site.install(
        "acme",
        ops="""
            __default__: {distributed_op_module: hp_acme.rules, override: true}
            ldexp: {distributed_op_class: Rows}
            i0: {distributed_op_class: InCode}
            sinc: {distributed_op_class: Whole}
            torch.gcd: {distributed_op_class: Phases}
            no_such_function: {distributed_op_class: Rows}
        """,
    )
    (package / "rules.py").write_text(textwrap.dedent(RULES))

    names = ["ldexp", "i0", "sinc", "torch.gcd", "no_such_function"]
    code = f"from hyper_parallel.cli import main\nfor name in {names}: main(['ops', name]); print('END')"
    shown = dict(zip(names, site.python(code).stdout.split("END\n"), strict=False))  # one import of torch for all
    text = shown["ldexp"]
    assert "source    hp_acme/ops.yaml:2" in text
    assert (
        textwrap.indent(
            textwrap.dedent(
                """
            ldexp(input[4], other[4])
              input   other      result
              S(0)    S(0)   ->  S(0)
              P(sum)  R      ->  P(sum)
            """
            ),
            "    ",
        )
        in text
    )
    assert max(map(len, text.splitlines())) <= 80
    text = shown["i0"]
    assert "decides in code; these are the ones it took" in text
    assert "S(1)   ->  S(1)" in text
    assert "P(sum)" not in text
    assert "is a function of other operators" in shown["sinc"]
    assert "uses the three phases itself" in shown["torch.gcd"]
    assert "nobody has defined no_such_function: --import the module that does" in shown["no_such_function"]
    assert "  comm  " not in shown["no_such_function"]  # it has no summary


def test_ops_says_what_is_communicated_as_the_table_of_operators_does(site):
    package = site.install(
        "acme", ops="ldexp: {distributed_op_module: hp_acme.rules, distributed_op_class: Costly, override: true}"
    )
    summary = """
        from hyper_parallel._rules.op import OpSummary
        class Costly(Rows):
            summary = OpSummary(
                "every dim",
                communicates="sharded keys: 2 all-reduces of one number per row and a pending sum | `none`",
            )
    """
    (package / "rules.py").write_text(textwrap.dedent(RULES) + textwrap.dedent(summary))
    code = "from hyper_parallel.cli import main\nmain(['ops', 'ldexp']); print('END'); main(['ops', 'ldexp', '--json'])"
    text, _, as_json = site.python(code).stdout.partition("END\n")
    expected = """
          sharded   every dim
          pending   reduced first
          comm      sharded keys: 2 all-reduces of one number per row and a pending sum
                    | none
          rule      strategies"""
    assert textwrap.indent(textwrap.dedent(expected), "  ").strip() in text
    (op,) = (op for op in json.loads(as_json)["ops"] if op["provider"] == "acme")
    assert op["rule"]["summary"]["communicates"].startswith("sharded keys: 2 all-reduces")


NO_NUMPY = """raise ModuleNotFoundError("No module named 'numpy'", name="numpy")"""


def test_commands_say_nothing_about_a_missing_numpy(site):
    (site.folder / "numpy.py").write_text(NO_NUMPY)
    site.install(
        "acme", ops="ldexp: {distributed_op_module: hp_acme.rules, distributed_op_class: Rows, override: true}"
    )
    (site.folder / "hp_acme" / "rules.py").write_text(textwrap.dedent(RULES))
    done = site.run("-m", "hyper_parallel", "ops", "ldexp")
    assert "S(0)   ->  S(0)" in done.stdout  # torch was imported
    assert "numpy" not in done.stderr.lower()


def test_ops_as_json_holds_the_rule(site):
    package = site.install("acme", ops="ldexp: {distributed_op_class: Rows, distributed_op_module: hp_acme.rules}")
    (package / "rules.py").write_text(textwrap.dedent(RULES))
    ops = json.loads(site.run("-m", "hyper_parallel", "ops", "ldexp", "--json", check=False).stdout)["ops"]
    (op,) = (op for op in ops if op["provider"] == "acme")  # installed packs may have a rule for it too
    assert op["rule"]["kind"] == "strategies"
    assert op["rule"]["samples"][0] == {
        "call": "ldexp(input[4], other[4])",
        "rows": [
            {"inputs": {"input": "S(0)", "other": "S(0)"}, "outputs": ["S(0)"]},
            {"inputs": {"input": "P(sum)", "other": "R"}, "outputs": ["P(sum)"]},
        ],
    }


def test_ops_works_without_torch_and_with_a_class_that_cannot_be_imported(site):
    site.install("acme", ops=TABLE)
    assert "No module named 'acme'" in site.run("-m", "hyper_parallel", "ops", "acme_double").stdout
    (site.folder / "torch.py").write_text("raise ImportError('torch is broken')")
    text = site.run("-m", "hyper_parallel", "ops", "acme_double").stdout
    assert "source    hp_acme/ops.yaml:1" in text
    assert "rule      cannot be shown: ImportError: torch is broken; see hyper-parallel doctor" in text


def test_unknown_op_ends_with_one_and_the_near_misses(site):
    site.install("acme", ops=TABLE)
    done = site.run("-m", "hyper_parallel", "ops", "acme_doubel", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hyper-parallel: no op named 'acme_doubel' has a rule; similar: acme_double")


def test_unknown_op_of_a_pack_of_ours_ends_with_one_and_the_way_to_get_the_pack(site):
    done = site.run("-m", "hyper_parallel", "ops", "npu_swiglu", check=False, HYPER_PARALLEL_PLUGINS="")
    assert done.returncode == 1
    assert done.stderr.startswith("hyper-parallel: no op named 'npu_swiglu' has a rule here; hyper-parallel-ops-")
    assert " has one, but is " in done.stderr


def test_part_of_a_name_finds_all_that_have_it(site):
    table = "kernels.Gate.apply: {distributed_op_module: acme.rules, distributed_op_class: Gate}"
    site.install("acme", ops=table)
    done = site.run("-m", "hyper_parallel", "ops", "Gate", check=False)
    assert done.stderr.startswith("hyper-parallel: no op named 'Gate' has a rule; similar: kernels.Gate.apply")


@pytest.mark.parametrize("name", ["ldexp_", "torch.ldexp", "Tensor.ldexp_"])
def test_an_op_is_found_by_the_name_of_a_function_that_it_serves(site, name):
    site.install("acme", ops="ldexp: {distributed_op_class: Rows, distributed_op_module: hp_acme.rules}")
    assert site.run("-m", "hyper_parallel", "ops", name, check=False).stdout.splitlines()[0] == "ldexp"


def test_plugin_adds_a_command(site):
    site.install(
        "acme",
        """
        def add_arguments(parser): parser.add_argument("word")
        def run(arguments): print("saw", arguments.word); return 3
        @hookimpl
        def hyper_parallel_cli_commands(): return [Command("acme-say", "say a word", run, add_arguments)]
        """,
    )
    assert "acme-say" in site.run("-m", "hyper_parallel", "--help").stdout
    done = site.run("-m", "hyper_parallel", "acme-say", "hello", check=False)
    assert (done.returncode, done.stdout) == (3, "saw hello\n")


def test_plugin_cannot_take_the_name_of_a_command(site):
    site.install("acme", "@hookimpl\ndef hyper_parallel_cli_commands(): return [Command('ops', 'mine', print)]")
    done = site.run("-m", "hyper_parallel", "plugins", check=False)
    assert done.returncode == 1
    assert "its command 'ops' is taken already" in done.stdout


@pytest.mark.parametrize("command", ["plugins", "doctor"])
def test_plugins_that_exit_or_whose_command_cannot_be_declared_are_shown(site, command):
    site.install("exits", "raise SystemExit('no licence')")
    site.install(
        "undeclared",
        """
        def add_arguments(parser): raise SystemExit("no licence")
        @hookimpl
        def hyper_parallel_cli_commands(): return [Command("one", "", print), Command("two", "", print, add_arguments)]
        """,
    )
    done = site.run("-m", "hyper_parallel", command, check=False)
    assert done.returncode == 1
    assert done.stdout.count("SystemExit: no licence") >= 2
    assert "exits" in done.stdout
    assert "undeclared" in done.stdout
    assert site.run("-m", "hyper_parallel", "one", check=False).returncode == 2


@pytest.mark.parametrize("command", ["plugins", "ops", "doctor"])
def test_all_commands_agree_about_what_is_broken_or_in_conflict(site, command):
    """Each ends with 1, and names both."""
    site.install("acme", ops=TABLE)
    site.install("rival", ops="acme_double: {distributed_op_class: Twice, distributed_op_module: rival}")
    only = {"HYPER_PARALLEL_PLUGINS": "acme,rival"}
    done = site.run("-m", "hyper_parallel", command, check=False, **only)
    assert done.returncode == 1
    assert "acme_double" in done.stdout
    settled = site.run("-m", "hyper_parallel", command, check=False, HYPER_PARALLEL_PREFER="acme_double=acme", **only)
    assert settled.returncode == 0, settled.stdout
    site.install("bad", "raise OSError('no licence')")
    only = {"HYPER_PARALLEL_PLUGINS": "acme,bad"}
    done = site.run("-m", "hyper_parallel", command, check=False, **only)
    assert done.returncode == 1
    assert "OSError: no licence" in done.stdout


def test_version(site):
    assert site.run("-m", "hyper_parallel", "--version").stdout.startswith("hyper-parallel-core 0.")


def test_wrong_usage_ends_with_two(site):
    done = site.run("-m", "hyper_parallel", "explian", check=False)
    assert done.returncode == 2
    assert done.stderr == "hyper-parallel: there is no command 'explian'; did you mean explain?\n"
    done = site.run("-m", "hyper_parallel", "no-such-command", check=False)
    assert done.returncode == 2
    assert "commands are plugins, ops, " in done.stderr
    assert site.run("-m", "hyper_parallel", check=False).returncode == 2


@pytest.mark.parametrize(
    ("terminal", "no_color", "status"),
    [(True, "", "\033[32mok\033[0m"), (True, "1", "ok"), (False, "", "ok")],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, capsys, terminal, no_color, status):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_table(["PLUGIN", "STATUS"], [["acme", "ok"]])
    assert capsys.readouterr().out == f"PLUGIN  STATUS\nacme    {status}\n"


def test_program_needs_no_torch_and_imports_little(site):
    """How long it takes is what benchmarks/bench_import.py measures; what makes it slow is what it imports."""
    (site.folder / "torch.py").write_text("raise ImportError('torch is broken')")
    site.install("acme", ops=TABLE)
    code = """
        import sys
        before = set(sys.modules)
        from hyper_parallel.cli import main
        status = main(["plugins"])
        new = set(sys.modules) - before
        print("IMPORTED", len(new), sorted(new & {"numpy", "hp_acme.rules", "hyper_parallel.tensor"}))
        raise SystemExit(status)
    """
    *report, imported = site.python(code).stdout.splitlines()
    assert any(line.startswith("acme") for line in report)
    word, count, heavy = imported.split(maxsplit=2)
    assert (word, heavy) == ("IMPORTED", "[]")
    assert int(count) < 250


def test_random_numbers_need_no_numpy(site):
    """The comparison of the ranks' generators reads their states."""
    (site.folder / "numpy.py").write_text(NO_NUMPY)
    code = """
        import torch
        from torch.distributed import HashStore, init_process_group
        from hyper_parallel import Replicate, init_device_mesh, randn
        init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        x = randn(3, device_mesh=init_device_mesh("cpu", (1,)), placements=[Replicate()])
        try:
            torch.ones(1).numpy()
        except RuntimeError as error:
            print(tuple(x.shape), error)
    """
    assert site.python(code).stdout.strip() == "(3,) Numpy is not available"
