"""Answers in JSON, and the errors that become one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ..errors import TrewError


class NotHere(TrewError):
    """A run, a step or a completion that a request names and that is not there."""

    status = 404


class BadRequest(TrewError):
    """A parameter of a request that is not accepted."""

    status = 400


class Refused(TrewError):
    """Something that cannot be computed for these runs, and why."""

    status = 409


def answer(found: Any, status: int = 200) -> Response:
    """Everything is data in JSON, whatever a model wrote; numbers that are not finite are null."""
    how: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":"), "default": str}
    # Looks for such numbers only where json has met one: a copy of a large answer takes longer than writing it.
    try:
        text = json.dumps(found, **how)
    except ValueError:
        text = json.dumps(finite(found), **how)
    # A lone surrogate, which JSON can write and UTF-8 cannot, becomes a question mark.
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def failed(error: TrewError) -> Response:
    return answer({"error": {"message": str(error)}}, getattr(error, "status", 400))


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite by None.

    >>> finite({"a": [1.0, float("nan")], "b": float("inf")})
    {'a': [1.0, None], 'b': None}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
