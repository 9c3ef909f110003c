"""What is asked of a running cluster: parity of far and near prefill, and its metrics."""
