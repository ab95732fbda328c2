"""Prints the requirements of the project's extras that are named, for ``make lock``."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(
    *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]), sep="\n"
)
