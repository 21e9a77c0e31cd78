"""Collected only when a file is named, as ``make test-peers`` does: TRL and verl live in environments of their own."""

collect_ignore_glob = ["*"]
