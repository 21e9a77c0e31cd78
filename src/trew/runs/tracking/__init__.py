"""One module for each external tracker, behind the protocol of ``tracker``."""
