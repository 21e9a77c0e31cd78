"""The built-in environments, by name: small enough for a model of 135 million parameters on two cores."""
