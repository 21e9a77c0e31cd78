"""Health rules over a run's metrics, and monitors of its rewards."""
