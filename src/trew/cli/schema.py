"""``trew schema``: the JSON schema of recipes, for editors."""

from __future__ import annotations

import json
from pathlib import Path


def schema(*, out: str = "") -> None:
    """Print the JSON schema of recipes: an editor then completes keys, shows what they mean, and marks mistakes.

    For Taplo, or Even Better TOML in VS Code: write it to a file next to the recipe, and begin the recipe with the line
    #:schema recipe.schema.json

    Args:
        out: The file to write; empty = print it.
    """
    from ..errors import output_file

    text = text_of_schema()
    if not out:
        print(text, end="")
        return
    with output_file(out):
        Path(out).write_text(text, encoding="utf-8")
    print(f"{out}: written; begin a recipe beside it with the line #:schema {Path(out).name}")


def text_of_schema() -> str:
    """The schema as it is printed, and kept at docs/recipe.schema.json."""
    from .json_schema import recipe_schema

    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"
