"""The ``hyper-parallel`` program: what it prints, for people and for programs, and how it ends."""

import json
import time

TABLE = """
    double:
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
    done = site.run("-m", "hyper_parallel", "plugins")
    shown = lines(done)
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
    assert (
        "OSError: no licence" in site.run("-m", "hyper_parallel", "plugins", HYPER_PARALLEL_STRICT_PLUGINS="1").stdout
    )


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
        "traceback": None,
        "ops": 2,
        "overrides": 1,
    }


def test_ops_lists_provider_class_and_place(site):
    site.install("acme", ops=TABLE)
    shown = lines(site.run("-m", "hyper_parallel", "ops"))
    assert shown["double"].split() == ["double", "acme", "acme.rules:Double", "hp_acme/ops.yaml:1"]


def test_ops_shows_one_op(site):
    site.install("acme", ops=TABLE)
    site.install("rival", ops="double: {distributed_op_class: Twice, distributed_op_module: rival}")
    output = site.run("-m", "hyper_parallel", "ops", "double").stdout
    assert "provider  acme 1.2" in output
    assert "params    factor=2" in output
    assert "provider  rival 1.2" in output
    assert output.count("in use    conflict") == 2
    pinned = site.run("-m", "hyper_parallel", "ops", "double", "--json", HYPER_PARALLEL_PREFER="double=rival").stdout
    assert {op["provider"]: op["in_use"] for op in json.loads(pinned)["ops"]} == {"acme": "no", "rival": "yes"}


def test_unknown_op_ends_with_one_and_the_near_misses(site):
    site.install("acme", ops=TABLE)
    done = site.run("-m", "hyper_parallel", "ops", "doubel", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "hyper-parallel: no op named 'doubel' has a rule; similar: double\n"


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
    output = site.run("-m", "hyper_parallel", "plugins").stdout
    assert "its command 'ops' is taken already" in output


def test_wrong_usage_ends_with_two(site):
    assert site.run("-m", "hyper_parallel", "no-such-command", check=False).returncode == 2
    assert site.run("-m", "hyper_parallel", check=False).returncode == 2


def test_program_is_fast_and_needs_no_torch(site):
    (site.folder / "torch.py").write_text("raise ImportError('torch is broken')")
    site.install("acme", ops=TABLE)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert "acme" in site.run("-m", "hyper_parallel", "plugins").stdout
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5  # 0.1 s on a quiet machine
