"""What an installed package needs beside its modules."""

from importlib.resources import files
from pathlib import Path

import tomli

from torchtitan.components.tokenizer import PACKAGED_TOKENIZER

_ROOT = Path(__file__).parents[2]


def test_configs_and_tokenizer_belong_to_the_package() -> None:
    """Breaks when a new kind of file is added without being packaged: the patterns must match every such file."""
    project = tomli.loads((_ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["torchtitan"]
    package = _ROOT / "torchtitan"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == packaged
    assert PACKAGED_TOKENIZER in packaged
    assert (Path(str(files("torchtitan"))) / "models/llama3/train_configs/debug_model.toml").is_file()


def test_constraints_lie_within_the_stated_ranges() -> None:
    from packaging.requirements import Requirement

    project = tomli.loads((_ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pins = [line for line in (_ROOT / "scripts/constraints.txt").read_text().splitlines() if line[:1] not in ("#", "")]
    pinned = {requirement.name: requirement for requirement in map(Requirement, pins)}
    assert next(iter(pinned)) == "torch"
    for requirement in map(Requirement, stated):
        if requirement.name in pinned:
            (pin,) = pinned[requirement.name].specifier
            assert requirement.specifier.contains(pin.version), requirement
