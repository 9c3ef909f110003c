"""The only place that declares metrics and shapes log lines."""
