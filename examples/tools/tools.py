"""A tool in ten lines: type hints and the docstring are all that the policy is told of it."""

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}


def capital(country: str) -> str:
    """Looks up the capital of a country.

    Args:
        country: its English name, such as France
    """
    return CAPITALS[country]  # a KeyError is an observation: "error: capital: KeyError: 'Atlantis'"
