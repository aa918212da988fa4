"""The checkout's pytest options: a candidate judged by the goldens, shards, evidence, and what some tests need."""

pytest_plugins = ["tests.needs", "tools.pytest_plugin", "tools.record"]
