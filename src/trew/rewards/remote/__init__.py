"""Rewards on other machines: a host grades what runs send it (`host`), a run deals its work out to hosts (`hosts`)."""
