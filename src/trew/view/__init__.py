"""`trew view`: a server on this machine, and its web page, over run folders. Reads them and never writes.

``trew.view(...)`` shows the page in a notebook. This package has the same name, and Python puts it in the place of a
function once anything imports it; so the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *runs: Any, **options: Any) -> Any:
        from .notebook import view

        return view(*runs, **options)


# The class of a loaded module may be changed, which is the one way to make a package callable.
sys.modules[__name__].__class__ = _Room
