"""Settings of several data sets, where something takes only one."""

from __future__ import annotations

from ..errors import ConfigError
from .schema import Config, DataConfig


def one_set(config: Config, what: str) -> DataConfig:
    """The settings of the only data set; raises ConfigError if there are several, which ``what`` does not take."""
    if isinstance(config.data, tuple):
        raise ConfigError(
            f"data: got {len(config.data)} data sets ({', '.join(config.set_names)}), but {what} takes one; give a "
            "recipe with one [data] table"
        )
    return config.data
