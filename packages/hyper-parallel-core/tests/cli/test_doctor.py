"""``hyper-parallel doctor``: it finds what is wrong with an installation, also one without a working torch."""

import json
import sys

import pytest


@pytest.fixture
def doctor(site):
    """Run the doctor; torch fails to import unless told otherwise, which also saves the time to import it."""

    def doctor(*arguments, torch="raise ImportError('libtorch.so: wrong ELF class')", check=False, **environ):
        if torch is not None:
            (site.folder / "torch.py").write_text(torch)
        done = site.run("-m", "hyper_parallel", "doctor", *arguments, "--json", check=check, **environ)
        content = json.loads(done.stdout)
        assert content["schema"] == 1
        assert content["ok"] is (done.returncode == 0)
        return {found["name"]: found for found in content["checks"]}

    return doctor


def test_healthy_installation_is_in_order(site):
    site.install("acme", ops="acme_double: {distributed_op_class: Double, distributed_op_module: acme.rules}")
    done = site.run("-m", "hyper_parallel", "doctor", "--ranks", "2")
    lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert lines["CHECK"].split() == ["CHECK", "STATUS", "FOUND"]
    assert sys.executable in lines["python"]
    assert "gloo" in lines["backends"]
    assert "2 gloo ranks summed their numbers to [1]" in lines["ranks"]
    assert done.stdout.endswith("everything is in order\n")
    assert done.stderr == ""


def test_broken_torch_is_one_failed_check_and_the_rest_is_reported(doctor, site):
    site.install("acme", ops="double: {distributed_op_class: Double, distributed_op_module: acme.rules}")
    checks = doctor()
    assert checks["torch"]["status"] == "fail"
    assert checks["torch"]["more"][-1] == "ImportError: libtorch.so: wrong ELF class"
    assert "--force-reinstall torch" in checks["torch"]["fix"]
    assert checks["plugin acme"]["status"] == checks["hp-acme"]["status"] == checks["ops"]["status"] == "ok"


def test_absent_torch_is_told_apart_and_a_crash_too(doctor):
    checks = doctor(torch="raise ModuleNotFoundError(\"No module named 'torch'\")")
    assert (checks["torch"]["detail"], checks["torch"]["more"]) == ("is not installed", [])
    assert checks["torch"]["fix"].endswith("-m pip install torch")
    assert "exit code -6" in doctor(torch="import os; os.abort()")["torch"]["detail"]


def test_plugin_at_fault_has_the_end_of_its_traceback_and_a_way_out(doctor, site):
    site.install("bad", "raise OSError('no licence')")
    site.install("old", api=2)
    site.install("away", "raise OSError")
    checks = doctor(HYPER_PARALLEL_DISABLE_PLUGINS="away")
    assert checks["plugin bad"]["status"] == "fail"
    assert checks["plugin bad"]["more"][-1] == "OSError: no licence"
    assert checks["plugin bad"]["fix"] == "update hp-bad, or leave the plugin out: HYPER_PARALLEL_DISABLE_PLUGINS=bad"
    assert "built for plugin API 2, this core speaks 1" in checks["plugin old"]["detail"]
    assert checks["plugin away"] | {"detail": ""} == {
        "name": "plugin away", "status": "ok", "detail": "", "more": [], "fix": "",
    }  # fmt: skip


def test_strict_mode_does_not_stop_the_report(doctor, site):
    site.install("bad", "raise OSError('no licence')")
    assert doctor(HYPER_PARALLEL_STRICT_PLUGINS="1")["plugin bad"]["status"] == "fail"


def test_settings_that_make_no_sense_are_reported_not_raised(doctor):
    checks = doctor(HYPER_PARALLEL_PLUGINS="no-such-plugin", HYPER_PARALLEL_DISABLE="x")
    assert "names plugins that are not installed: no-such-plugin" in checks["plugins"]["detail"]
    assert checks["HYPER_PARALLEL_DISABLE"]["fix"] == "did you mean HYPER_PARALLEL_DISABLE_PLUGINS?"
    assert checks["HYPER_PARALLEL_PLUGINS"]["detail"] == "'no-such-plugin'"


def test_no_rule_at_all_is_a_warning_with_the_package_to_install(doctor, site):
    site.install("helper")  # a plugin, but no op pack
    ops = doctor(HYPER_PARALLEL_PLUGINS="helper")["ops"]
    assert (ops["status"], ops["detail"]) == ("warn", "no operator has a rule: no op pack is in use")
    assert ops["fix"].startswith("hyper-parallel-ops-basic is ")  # not installed, or blocked by this very setting
    text = site.run("-m", "hyper_parallel", "doctor", HYPER_PARALLEL_PLUGINS="helper", check=False).stdout
    assert "everything is in order" not in text


def test_ops_that_two_plugins_claim_are_a_failure_with_both_places(doctor, site):
    for plugin in ("acme", "rival"):
        site.install(
            plugin, ops=f"acme_double: {{distributed_op_class: Double, distributed_op_module: {plugin}.rules}}"
        )
    check = doctor()["op acme_double"]
    assert check["status"] == "fail"
    assert "2 implementations" in check["detail"]
    text = "\n".join(check["more"])
    assert "hp_acme/ops.yaml:1" in text
    assert "hp_rival/ops.yaml:1" in text


def editable(site, plugin, declared):
    """An editable installation whose project declares these entry points today."""
    site.install(plugin)
    project = site.folder / "project"
    project.mkdir()
    points = "\n".join(f'{name} = "{target}"' for name, target in declared.items())
    text = f'[project]\nname = "hp-{plugin}"\n[project.entry-points."hyper_parallel.plugins"]\n{points}\n'
    (project / "pyproject.toml").write_text(text)
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (site.folder / f"hp_{plugin}-1.2.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    return project


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_entry_point_added_to_an_editable_package_is_stale_until_it_is_installed_again(doctor, site):
    project = editable(site, "acme", {"acme": "hp_acme._plugin", "more": "hp_acme.more"})
    check = doctor()["hp-acme"]
    assert check["status"] == "fail"
    assert check["more"] == ["more: pyproject.toml says hp_acme.more, installed is nothing"]
    assert check["fix"].endswith(f"-m pip install -e {project}")


def test_editable_package_that_is_up_to_date_is_ok_and_one_whose_folder_is_gone_fails(doctor, site):
    project = editable(site, "acme", {"acme": "hp_acme._plugin"})
    assert doctor()["hp-acme"]["status"] == "ok"
    (project / "pyproject.toml").unlink()
    project.rmdir()
    assert "which is gone" in doctor()["hp-acme"]["detail"]


def test_package_found_twice_with_two_versions_is_told(doctor, site, tmp_path):
    site.install("acme")
    info = tmp_path / "other" / "hp_acme-0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hp-acme\nVersion: 0.9\n")
    checks = doctor(PYTHONPATH=f"{site.folder}:{info.parent}")
    assert "is installed 2 times" in checks["hp-acme"]["detail"]
    assert checks["hp-acme"]["more"][1].startswith("0.9 in ")


def test_unmet_requirement_is_told(doctor, site):
    pytest.importorskip("packaging")
    site.install("acme")
    metadata = site.folder / "hp_acme-1.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: hyper-parallel-core>=99\n")
    assert doctor()["hp-acme"]["more"][0].startswith("hyper-parallel-core>=99 (installed is ")


def test_our_packages_with_different_versions_are_told(doctor, site):
    site.install("hyper-parallel-tp-of-a-test", dist="hyper-parallel-tp")
    check = doctor()["versions"]
    assert "one version for all" in check["detail"]
    assert "hyper-parallel-tp 1.2" in check["more"]
