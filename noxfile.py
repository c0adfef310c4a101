"""Everything that is automated: ``nox`` runs the checks, ``nox -s train`` the main job, ``nox -l`` lists all.

Only nox has to be installed beforehand. The sessions that work on the source tree share one environment, made once
from requirements-dev.txt; those that judge the packages as users get them make a fresh one from built wheels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
PACKAGES = ("core", "ops-basic", "ops-qwen", "ops-deepseek", "fsdp", "tp")
# What each package needs of the others, as its pyproject.toml says it; the tests of tp compute with rules of ops-basic.
NEEDS = {"core": (), "ops-basic": ("core",)}
NEEDS |= dict.fromkeys(("ops-qwen", "ops-deepseek", "fsdp", "tp"), ("core", "ops-basic"))
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy")

nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests", "wheels", "third_party", "isolated"]
nox.options.stop_on_first_error = False


def folder(package: str) -> Path:
    return ROOT / "packages" / f"hyper-parallel-{package}"


# Compiling torch's sources takes as long as unpacking them; Python does so for the few that are imported. Torch comes
# first and pinned, so that nothing else can choose another one.
INSTALL_TORCH = ("--no-compile", "-c", "constraints.txt", "torch")


def run(session: nox.Session, program: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a program of the development environment, which is made first where it is missing or out of date."""
    # A nox session has an environment of its own; this one is shared, so that torch is installed once.
    environment = Path(session.cache_dir) / "dev"
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    inputs = [ROOT / "requirements-dev.txt", ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    inputs += [folder(package) / "pyproject.toml" for package in PACKAGES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    done = environment / "requirements.sha256"
    if not done.is_file() or done.read_text() != digest:
        install = (str(programs / "python"), "-m", "pip", "install", "--quiet")
        steps = {
            f"an empty environment in {environment}": (sys.executable, "-m", "venv", str(environment)),
            "torch, the largest download": (*install, *INSTALL_TORCH),
            # With the build backend at hand, pip need not make an environment for it seven times.
            "what wheels are built with": (*install, "hatchling", "editables"),
            "our packages, transformers and the tools": (
                *install,
                "--no-build-isolation",
                "-r",
                "requirements-dev.txt",
            ),
        }
        session.log("making the development environment, which takes some minutes")
        for number, (what, command) in enumerate(steps.items(), 1):
            session.log("step %d of %d: %s", number, len(steps), what)
            session.run(*command, external=True)
        done.write_text(digest)
    session.run(str(programs / program), *arguments, env=env, external=True)


_wheels: dict[str, str] = {}  # by package, those that this run of nox has built


def build_wheels(session: nox.Session, packages: tuple[str, ...]) -> list[str]:
    """Build the wheels of these packages, where no earlier session of this run did, and return their paths.

    Paths, and no index: an installer that looks names up may serve an older wheel of the same version.
    """
    missing = [package for package in packages if package not in _wheels]
    if missing:
        for path in build(session, [folder(p) for p in missing], Path(session.cache_dir) / "wheels" / missing[0]):
            _wheels[package_of(path)] = path
    return [_wheels[package] for package in packages]


def build(session: nox.Session, sources: list[Path], target: Path) -> list[str]:
    """Build wheels of source folders into the folder ``target``, which is emptied first."""
    session.install("hatchling")
    shutil.rmtree(target, ignore_errors=True)
    arguments = ("--no-deps", "--no-build-isolation", "-w", str(target), *map(str, sources))
    session.run("python", "-m", "pip", "wheel", "-q", *arguments)
    return sorted(str(path) for path in target.glob("*.whl"))


def package_of(wheel: str) -> str:
    """Which of our packages a wheel holds."""
    return next(p for p in PACKAGES if Path(wheel).name.startswith(f"hyper_parallel_{p.replace('-', '_')}-"))


def expect(session: nox.Session, text: str, *command: str, **options: Any) -> None:
    """Run a command that must print ``text``."""
    printed = session.run(*command, silent=True, **options) or ""
    session.log(printed)
    if text not in printed:
        session.error(f"{' '.join(command)} did not print {text!r}")


@nox.session(venv_backend="none")
def train(session: nox.Session) -> None:
    """Train the example model on 4 local ranks: the main job."""
    run(
        session,
        "torchrun",
        "--nproc-per-node",
        "4",
        "examples/train.py",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run all tests on the source tree; arguments after -- go to pytest.

    All strategies of an operator are tried, and some of the layouts that are brought to one; `sweep` tries them all.
    """
    run(session, "python", "-m", "pytest", *(session.posargs or ("-q", "--max-layouts=6")))


@nox.session(venv_backend="none")
def sweep(session: nox.Session) -> None:
    """Run the operators' tests on all layouts that they name; arguments after -- go to pytest."""
    packs = [str(folder(package) / "tests") for package in PACKAGES if package.startswith("ops-")]
    run(session, "python", "-m", "pytest", *(session.posargs or ("-q", *packs)))


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """Test one package from its wheel, in a fresh environment with only what it declares, outside the tree.

    What it imports is in question here. That its rules are right on all layouts and meshes, and that the conformance
    kit with its worker processes finds what is wrong, `tests` shows.
    """
    # The command line starts a process for each of its tests, which `tests` does.
    thin = "not 2x2 and not test_conformance and not test_worker_pool and not test_cli and not test_doctor"
    session.install(*INSTALL_TORCH)
    temporary = Path(session.create_tmp())
    wheels = build_wheels(session, (*NEEDS[package], package))
    session.install("-c", "constraints.txt", *wheels, *TEST_TOOLS)
    copy = temporary / "tests"  # a folder below the root: `random/test_random.py` must not become the module `random`
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder(package) / "tests", copy)
    with session.chdir(temporary):
        session.run(
            "python", "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(temporary), "--import-mode=importlib",
            "--timeout=600", "--max-layouts=1", "-k", thin, *session.posargs, str(copy),
        )  # fmt: skip


@nox.session
@nox.parametrize(
    ("model", "pack"), [("qwen3_5", "qwen"), ("deepseek_v32", "deepseek")], ids=("qwen3_5", "deepseek_v32")
)
def extras(session: nox.Session, model: str, pack: str) -> None:
    """Train a model from wheels, in a fresh environment with the extras that its family needs and no others.

    ``examples/train.py`` compares with one rank. Third parties' packages come first, so that ours need no index.
    """
    session.install(*INSTALL_TORCH)
    session.install("-c", "constraints.txt", "transformers>=5.24", "matplotlib", "pluggy", "pyyaml")
    temporary = Path(session.create_tmp())
    wheels = temporary / "wheels"
    build(session, [ROOT], wheels)
    for path in build_wheels(session, PACKAGES):
        shutil.copy(path, wheels)
    session.install("--no-index", "--find-links", str(wheels), f"hyper-parallel[{pack},tp,fsdp]")
    expected = {"core", "ops-basic", f"ops-{pack}", "fsdp", "tp"}
    listed = session.run("python", "-m", "pip", "list", "--format=freeze", silent=True) or ""
    found = {package for package in PACKAGES if f"hyper-parallel-{package}==" in listed}
    if found != expected:
        session.error(f"the extras {pack}, tp and fsdp installed {sorted(found)}, and not {sorted(expected)}")
    copy = temporary / "examples"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "examples", copy)
    with session.chdir(temporary):
        session.run(
            "torchrun", "--nproc-per-node", "4", "examples/train.py", "--model", model, "--steps", "2",
            "--length", "32", *session.posargs, env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


@nox.session
def third_party(session: nox.Session) -> None:
    """Build a third party's op pack, install it beside our wheels, use it in training, remove it again."""
    session.install(*INSTALL_TORCH)
    temporary = Path(session.create_tmp())
    ours = build_wheels(session, ("core", "ops-basic"))
    (theirs,) = build(session, [ROOT / "examples" / "plugins" / "hyper-parallel-swiglu"], temporary / "their-wheel")
    session.install("-c", "constraints.txt", *ours, *TEST_TOOLS)
    session.install("--no-deps", theirs)  # its requirement, core in this version, is in no index yet
    session.run("python", "-m", "pip", "check")

    # Away from the sources: only what is installed counts.
    copy = temporary / "pack"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "examples" / "plugins" / "hyper-parallel-swiglu", copy, ignore=shutil.ignore_patterns("src"))
    one_thread = {"OMP_NUM_THREADS": "1"}
    op = "torch.ops.hyper_parallel_swiglu.swiglu"
    with session.chdir(copy):
        expect(session, "swiglu     hyper-parallel-swiglu     1.0.0    1    ok", "hyper-parallel", "plugins")
        expect(
            session,
            "PS(1, (2, 2))  ->  S(1)",
            "hyper-parallel",
            "ops",
            op,
            "--import",
            "hyper_parallel_swiglu.operators",
        )
        expect(session, "everything is in order", "hyper-parallel", "doctor")
        session.run("python", "-m", "pytest", "-q", "--timeout=600", *session.posargs)
        expect(session, "trained on 2 ranks", "torchrun", "--nproc-per-node", "2", "training_step.py", env=one_thread)
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", "hyper-parallel-swiglu")
        gone = session.run("hyper-parallel", "plugins", silent=True) or ""
        if "swiglu" in gone:
            session.error(f"the pack is removed, yet it is still listed:\n{gone}")
        session.run("hyper-parallel", "ops", op, success_codes=[1])


@nox.session
def wheels(session: nox.Session) -> None:
    """Check that each wheel holds every file of its package, and nothing else."""
    built = build_wheels(session, PACKAGES)
    problems = []
    for path in built:
        package = package_of(path)
        source = folder(package) / "src"
        wanted = {
            file.relative_to(source).as_posix()
            for file in source.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        names = set(zipfile.ZipFile(path).namelist())
        packed = {name for name in names if ".dist-info/" not in name}
        problems += [f"{package}: {name} is missing in the wheel" for name in sorted(wanted - packed)]
        problems += [f"{package}: {name} does not belong into the wheel" for name in sorted(packed - wanted)]
        if not any(name.endswith("/py.typed") for name in packed):
            problems.append(f"{package}: no py.typed")
        if not any(name.endswith("/licenses/LICENSE") for name in names):
            problems.append(f"{package}: no licence")
    if problems:
        session.error("\n".join(problems))
    session.log("%d wheels hold what they should", len(built))


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of all packages with mypy."""
    run(session, "mypy", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("packages/*/src/*"))))


@nox.session(venv_backend="none")
def hints(session: nox.Session) -> None:
    """Write anew which of our op packs has which op, for the message about a missing one."""
    run(session, "python", "tools/write_pack_hints.py")
    run(session, "ruff", "format", "packages/hyper-parallel-core/src/hyper_parallel/registry/pack_hints.py")


@nox.session(venv_backend="none")
def hooks(session: nox.Session) -> None:
    """Write the reference of the plugin hooks anew."""
    run(session, "python", "tools/write_hook_reference.py")


@nox.session(venv_backend="none")
def rules_reference(session: nox.Session) -> None:
    """Write the page of the plugin authors' API anew."""
    run(session, "python", "tools/write_rules_reference.py")


@nox.session(venv_backend="none")
def torch_parity(session: nox.Session) -> None:
    """Write the page of what is as in PyTorch anew."""
    run(session, "python", "tools/write_torch_parity.py")


@nox.session(venv_backend="none")
def ops(session: nox.Session) -> None:
    """Write the table of all operators anew."""
    run(session, "python", "tools/write_op_table.py")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Check the documentation: the examples in it run, its links lead somewhere, generated pages are up to date."""
    run(
        session,
        "pytest",
        "-q",
        "tests/repository/test_docs.py",
        "tests/repository/test_hook_reference.py",
        "tests/repository/test_rules_reference.py",
        "tests/repository/test_op_table.py",
        "tests/repository/test_torch_parity_page.py",
        *session.posargs,
    )


@nox.session(venv_backend="none")
def battery(session: nox.Session) -> None:
    """Compare the operators with plain PyTorch on PyTorch's own samples: half an hour; arguments after -- choose."""
    run(session, "python", "-m", "tools.operator_battery", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def random_programs(session: nox.Session) -> None:
    """Compare 10,000 random programs with plain PyTorch: about an hour; arguments after -- choose."""
    run(session, "python", "-m", "tools.random_programs", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def models(session: nox.Session) -> None:
    """Train every model over meshes and options, compare with one device, and write docs/models.md; -- chooses."""
    run(session, "python", "-m", "tools.model_cells", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run the benchmarks and print their tables."""
    for script in sorted(ROOT.glob("benchmarks/bench_*.py")):
        run(session, "python", str(script.relative_to(ROOT)), *session.posargs)
