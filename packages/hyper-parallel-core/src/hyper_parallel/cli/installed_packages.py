"""The installed packages that concern us, core and those that bring a plugin, and whether each is what it says."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

from hyper_parallel.plugins import ENTRY_POINT_GROUP


@dataclass(frozen=True)
class Package:
    """An installed pip package.

    Attributes:
        name: normalised name.
        version: its version.
        folder: where it is installed.
        project: source folder of an editable installation, else None.
        plugins: its entry points of our group, name to module, as they were when it was installed.
        copies: ``version in folder`` of every installation that is found, the one that counts first.
    """

    name: str
    version: str
    folder: str
    project: Path | None
    plugins: Mapping[str, str]
    copies: tuple[str, ...]
    requires: tuple[str, ...] = field(repr=False, default=())

    def unmet_requirements(self) -> tuple[str, ...]:
        """What it requires and is not there in that version; nothing when ``packaging`` is not installed."""
        try:
            from packaging.requirements import Requirement
        except ImportError:
            return ()
        unmet = []
        for text in self.requires:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                found = version(requirement.name)
            except PackageNotFoundError:
                unmet.append(f"{text} (is not installed)")
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                unmet.append(f"{text} (installed is {found})")
        return tuple(unmet)


def packages_of_interest() -> list[Package]:
    """Core, our meta-package and every package that brings a plugin, by name."""
    found: dict[str, list[Distribution]] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(_normalised(name), []).append(distribution)
    return [
        _package(name, copies)
        for name, copies in sorted(found.items())
        if name in ("hyper-parallel", "hyper-parallel-core") or any(_plugins(copy) for copy in copies)
    ]


def entry_points_of_project(project: Path) -> dict[str, str] | None:
    """The plugins that a source folder's pyproject.toml declares; None when this cannot be told."""
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError:  # Python 3.10
        return None
    try:
        content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    points = content.get("project", {}).get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
    return {str(name): str(target) for name, target in points.items()}


def _package(name: str, copies: list[Distribution]) -> Package:
    first = copies[0]
    # The same folder can be on sys.path twice, under two names.
    places = {str(Path(str(copy.locate_file(""))).resolve()): copy.version for copy in copies}
    return Package(
        name=name,
        version=first.version,
        folder=str(first.locate_file("")),
        project=_project(first),
        plugins=_plugins(first),
        copies=tuple(f"{found} in {place}" for place, found in places.items()),
        requires=tuple(first.requires or ()),
    )


def _plugins(distribution: Distribution) -> dict[str, str]:
    return {entry.name: entry.value for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP}


def _project(distribution: Distribution) -> Path | None:
    """The source folder of an editable installation (PEP 610)."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(unquote(urlparse(origin["url"]).path)))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
