"""Built-in rewards: one module with a ``grade`` per kind; ``kinds`` holds their table."""
